"""The signed envelope: seal on one side, open on the other. The first half of the door for strangers' bytes.

`open_envelope` checks in this order: size, parse, kind, run, signer, signature. It returns only verified bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from protos.errors import Reason, Refusal
from protos.identity import Identity, verify
from protos.limits import HASH_BYTES, PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from protos.v1 import envelope_pb2

Kind = envelope_pb2.Kind
NO_RUN = bytes(HASH_BYTES)
_DOMAIN = b"swarmentum/v1/envelope\0"

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class VerifiedEnvelope:
    """A verified envelope: its signer and its body. `raw` is the serialised envelope, to be passed on unchanged."""

    kind: int
    run_id: bytes
    public_key: bytes
    body: bytes
    raw: bytes


def signed_bytes(kind: int, run_id: bytes, public_key: bytes, body: bytes) -> bytes:
    """The bytes that the signature covers. Every part before the body has a fixed length, so no two messages share these
    bytes."""
    return _DOMAIN + kind.to_bytes(4, "big") + run_id + public_key + body


def seal(identity: Identity, kind: int, run_id: bytes, body: Message) -> envelope_pb2.SignedEnvelope:
    """Sign `body` as `kind` for the run (32 bytes; NO_RUN for none)."""
    return seal_bytes(identity, kind, run_id, body.SerializeToString(deterministic=True))


def seal_bytes(identity: Identity, kind: int, run_id: bytes, data: bytes) -> envelope_pb2.SignedEnvelope:
    """`seal` for a body that is serialised already and must travel as these very bytes."""
    assert len(run_id) == HASH_BYTES, len(run_id)
    return envelope_pb2.SignedEnvelope(
        kind=kind,  # type: ignore[arg-type]
        run_id=run_id,
        public_key=identity.public_key,
        body=data,
        signature=identity.sign(signed_bytes(kind, run_id, identity.public_key, data)),
    )


def unsigned(public_key: bytes, kind: int, run_id: bytes, data: bytes) -> envelope_pb2.SignedEnvelope:
    """An envelope without a signature, for a stream whose first message has proved the signer."""
    return envelope_pb2.SignedEnvelope(kind=kind, run_id=run_id, public_key=public_key, body=data)  # type: ignore[arg-type]


def open_envelope(
    data: bytes, *, kind: int, run_id: bytes, bytes_max: int, signer: bytes | None = None
) -> VerifiedEnvelope:
    """Verify a serialised envelope, or raise `Refusal` with the reason.

    `bytes_max` bounds the whole envelope; `signer` is the only key that may have signed, if given.
    """
    if len(data) > bytes_max:
        raise Refusal(Reason.TOO_LARGE, f"envelope of {len(data)} bytes, at most {bytes_max}")
    envelope = parse(envelope_pb2.SignedEnvelope, data)
    return check(envelope, kind=kind, run_id=run_id, signer=signer, raw=data)


def check(
    envelope: envelope_pb2.SignedEnvelope,
    *,
    kind: int,
    run_id: bytes,
    signer: bytes | None = None,
    raw: bytes | None = None,
    signed: bool = True,
) -> VerifiedEnvelope:
    """The same for an envelope that is parsed already (a field of a gRPC request, bounded there).

    `signed`: False only on a stream whose first message has proved the signer. Then there is no signature to check.
    """
    if envelope.kind != kind:
        raise Refusal(Reason.WRONG_KIND, f"kind {envelope.kind}, expected {kind}")
    if envelope.run_id != run_id:
        raise Refusal(Reason.WRONG_RUN, f"run {envelope.run_id.hex()[:16] or 'none'}, expected {run_id.hex()[:16]}")
    size = SIGNATURE_BYTES if signed else 0
    if len(envelope.public_key) != PUBLIC_KEY_BYTES or len(envelope.signature) != size:
        raise Refusal(Reason.MALFORMED, "public key or signature has the wrong length")
    if signer is not None and envelope.public_key != signer:
        raise Refusal(
            Reason.UNKNOWN_SIGNER, f"signed by {envelope.public_key.hex()[:16]}, expected {signer.hex()[:16]}"
        )
    if signed:
        message = signed_bytes(envelope.kind, envelope.run_id, envelope.public_key, envelope.body)
        if not verify(envelope.public_key, envelope.signature, message):
            raise Refusal(Reason.BAD_SIGNATURE, "the signature does not verify")
    serialised = raw if raw is not None else envelope.SerializeToString(deterministic=True)
    return VerifiedEnvelope(envelope.kind, envelope.run_id, envelope.public_key, envelope.body, serialised)


def parse(message_type: type[M], data: bytes) -> M:
    """Parse protobuf bytes, or raise `Refusal` MALFORMED."""
    message = message_type()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Refusal(Reason.MALFORMED, f"not a {message_type.__name__}: {error}") from error
    return message
