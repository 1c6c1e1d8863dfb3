"""The signed envelope: what is changed anywhere does not open, and nothing can be taken for something else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.envelope import Kind, check, open_envelope, parse, seal, seal_bytes, signed_bytes
from protos.errors import Reason, Refusal
from protos.identity import Identity
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2

RUN, OTHER = bytes([1]) * 32, bytes([2]) * 32
SIGNER, STRANGER = Identity.from_seed(bytes([3]) * 32), Identity.from_seed(bytes([4]) * 32)
KINDS = [value for value in Kind.values() if value]
deterministic = settings(derandomize=True, deadline=None)


def sealed(body: bytes = b"body", kind: int = Kind.KIND_TICK, run: bytes = RUN) -> bytes:
    return seal_bytes(SIGNER, kind, run, body).SerializeToString(deterministic=True)


def refusal(data: bytes, **changed: object) -> Reason:
    asked: dict[str, object] = {
        "kind": Kind.KIND_TICK,
        "run_id": RUN,
        "bytes_max": 1 << 20,
        "signer": SIGNER.public_key,
    }
    with pytest.raises(Refusal) as error:
        open_envelope(data, **(asked | changed))  # type: ignore[arg-type]
    assert str(error.value).startswith(error.value.reason.value)
    return error.value.reason


@given(body=st.binary(max_size=200), kind=st.sampled_from(KINDS), run=st.binary(min_size=32, max_size=32))
@deterministic
def test_round_trip(body: bytes, kind: int, run: bytes) -> None:
    data = sealed(body, kind, run)
    opened = open_envelope(data, kind=kind, run_id=run, bytes_max=len(data), signer=SIGNER.public_key)
    assert (opened.kind, opened.run_id, opened.public_key, opened.body) == (kind, run, SIGNER.public_key, body)
    assert opened.raw == data
    assert check(envelope_pb2.SignedEnvelope.FromString(data), kind=kind, run_id=run).raw == data


def test_every_flipped_bit_is_refused() -> None:
    data = sealed(b"some body")
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        refusal(bytes(flipped))


@given(length=st.integers(0, 180))
@deterministic
def test_every_truncation_is_refused(length: int) -> None:
    data = sealed()
    refusal(data[: min(length, len(data) - 1)])


@given(data=st.binary(max_size=400))
@deterministic
def test_random_bytes_are_refused(data: bytes) -> None:
    refusal(data)


def test_each_reason() -> None:
    assert refusal(sealed(), bytes_max=len(sealed()) - 1) is Reason.TOO_LARGE
    assert refusal(b"\xff" * 50) is Reason.MALFORMED
    assert refusal(sealed(kind=Kind.KIND_JOIN)) is Reason.WRONG_KIND
    assert refusal(sealed(run=OTHER)) is Reason.WRONG_RUN
    assert refusal(sealed(), signer=STRANGER.public_key) is Reason.UNKNOWN_SIGNER
    envelope = envelope_pb2.SignedEnvelope.FromString(sealed())
    envelope.signature = STRANGER.sign(b"x")
    assert refusal(envelope.SerializeToString()) is Reason.BAD_SIGNATURE
    envelope.signature = b"short"
    assert refusal(envelope.SerializeToString()) is Reason.MALFORMED
    assert refusal(b"") is Reason.WRONG_KIND


@pytest.mark.parametrize("field", ["kind", "run_id", "public_key"])
def test_a_signature_stands_for_one_kind_one_run_one_signer(field: str) -> None:
    """The signature of one message under another name: valid bytes, another meaning."""
    envelope = envelope_pb2.SignedEnvelope.FromString(sealed())
    changed = {"kind": Kind.KIND_LOG_ENTRY, "run_id": OTHER, "public_key": STRANGER.public_key}
    setattr(envelope, field, changed[field])
    asked = {"kind": envelope.kind, "run_id": envelope.run_id, "signer": envelope.public_key}
    assert refusal(envelope.SerializeToString(), **asked) is Reason.BAD_SIGNATURE


messages = st.tuples(
    st.sampled_from(KINDS), st.sampled_from([RUN, OTHER]), st.sampled_from([SIGNER.public_key]), st.binary(max_size=80)
)


@given(one=messages, other=messages)
@deterministic
def test_no_two_messages_share_their_signed_bytes(
    one: tuple[int, bytes, bytes, bytes], other: tuple[int, bytes, bytes, bytes]
) -> None:
    assert (signed_bytes(*one) == signed_bytes(*other)) == (one == other)


def test_parse_refuses_what_is_not_the_message() -> None:
    with pytest.raises(Refusal, match="not a JoinBody"):
        parse(pb.JoinBody, b"\xff\xff")
    body = pb.JoinBody(device="cpu")
    assert parse(pb.JoinBody, seal(SIGNER, Kind.KIND_JOIN, RUN, body).body) == body
