"""Orders of a run's operators: what they sign, whether enough of their keys did, and whether a log obeyed nothing else.

A run with keys in `operators` excludes a peer, changes a setting or ends only by an order. Every signer signs the same bytes.
`order_from_body`, `check_signed` and `open_end` are the doors. Refuses to know the time: the
coordinator's clock says what has expired.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

from protos import limits
from protos.changes import Settings, merged, settings_body, settings_from_body, words
from protos.envelope import Kind, open_envelope, parse, seal, signed_bytes
from protos.errors import Reason, Refusal
from protos.identity import Identity, peer_id, short, verify
from protos.run_sections import OperatorsConfig
from protos.v1 import envelope_pb2, log_pb2

if TYPE_CHECKING:
    from protos.log import Entry

_DOMAIN = b"swarmentum/v1/order\0"
ID_DIGITS_SHOWN = 12
EXCLUDED = "excluded by the operator of this run: "
"""What the log says of an exclusion, before the operator's words."""
NO_OPERATORS = "the run names no operators who could have signed it"


@dataclass(frozen=True)
class OperatorOrder:
    """An exclusion (`excludes`: the peer's public key), a change of `settings`, or the run's end (`finishes`)."""

    nonce: bytes
    expires_unix_ms: int
    reason: str = ""
    excludes: bytes = b""
    settings: Settings = ()
    finishes: bool = False

    @property
    def what(self) -> str:
        """One word for programs."""
        return "exclude" if self.excludes else "finish" if self.finishes else "change"

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        if self.excludes:
            return f"exclude the peer {peer_id(self.excludes)}{why}"
        return f"finish the run{why}" if self.finishes else f"change {words(self.settings)}"


@dataclass(frozen=True)
class SignedOrder:
    """The bytes of an order, and (public key, signature) of each operator that signed them, in the order in which they came."""

    body: bytes
    signatures: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def order(self) -> OperatorOrder:
        """What the bytes say. Raises Refusal."""
        return order_from_body(self.body)

    @property
    def signers(self) -> tuple[bytes, ...]:
        """The public keys of those that signed."""
        return tuple(key for key, _ in self.signatures)


def order_id(run_id: bytes, body: bytes) -> bytes:
    """The name of an order: the hash of its bytes, so that nobody can change an order under its name."""
    return hashlib.sha256(_DOMAIN + run_id + body).digest()


def order_body(order: OperatorOrder) -> bytes:
    """The bytes that operators sign."""
    return log_pb2.OrderBody(
        nonce=order.nonce,
        expires_unix_ms=order.expires_unix_ms,
        reason=order.reason,
        excludes=order.excludes,
        settings=settings_body(order.settings),
        finishes=order.finishes,
    ).SerializeToString(deterministic=True)


@lru_cache(maxsize=256)
def order_from_body(data: bytes) -> OperatorOrder:
    """Inverse of `order_body`, checking sizes and ranges; raises `Refusal`, also for bytes that say more than is shown."""
    if len(data) > limits.ORDER_BYTES_MAX:
        raise Refusal(Reason.TOO_LARGE, f"an order of {len(data)} bytes, at most {limits.ORDER_BYTES_MAX}")
    body = parse(log_pb2.OrderBody, data)
    order = OperatorOrder(
        body.nonce,
        body.expires_unix_ms,
        body.reason,
        body.excludes,
        settings_from_body(body.settings),
        body.finishes,
    )
    if len(order.nonce) != limits.NONCE_BYTES or len(order.excludes) not in (0, limits.PUBLIC_KEY_BYTES):
        raise Refusal(Reason.MALFORMED, "the nonce or the public key of an order has the wrong length")
    if order.expires_unix_ms > limits.UNIX_MS_MAX:
        raise Refusal(Reason.OUT_OF_RANGE, f"an order until {order.expires_unix_ms} ms, at most {limits.UNIX_MS_MAX}")
    if len(order.reason.encode()) > limits.EXCLUSION_REASON_BYTES_MAX or not order.reason.isprintable():
        text = f"the reason takes at most {limits.EXCLUSION_REASON_BYTES_MAX} bytes, printable and on one line"
        raise Refusal(Reason.OUT_OF_RANGE, text)
    if bool(order.excludes) + bool(order.settings) + order.finishes != 1:
        raise Refusal(
            Reason.MALFORMED, "an order excludes one peer, changes settings or finishes the run: one of these"
        )
    if order.excludes and not order.reason.strip():
        raise Refusal(Reason.OUT_OF_RANGE, "an order to exclude a peer needs a reason")
    if order_body(order) != data:
        raise Refusal(Reason.MALFORMED, "the order has fields that this version does not know: install a newer one")
    return order


def signed_order_body(signed: SignedOrder) -> log_pb2.SignedOrder:
    """As protobuf."""
    signatures = [log_pb2.OrderSignature(public_key=key, signature=signature) for key, signature in signed.signatures]
    return log_pb2.SignedOrder(body=signed.body, signatures=signatures)


def signed_order_from_body(body: log_pb2.SignedOrder) -> SignedOrder:
    """Inverse of `signed_order_body`, checking what the order says, not its signatures; raises `Refusal`."""
    if len(body.signatures) > limits.OPERATORS_MAX:
        raise Refusal(
            Reason.TOO_LARGE, f"{len(body.signatures)} signatures of an order, at most {limits.OPERATORS_MAX}"
        )
    order_from_body(body.body)
    return SignedOrder(body.body, tuple((it.public_key, it.signature) for it in body.signatures))


def signed_orders_from(parts: Iterable[log_pb2.SignedOrder]) -> tuple[SignedOrder, ...]:
    """The orders of an entry; raises `Refusal`."""
    found = tuple(map(signed_order_from_body, parts))
    if len(found) > limits.ORDERS_MAX:
        raise Refusal(Reason.TOO_LARGE, f"{len(found)} orders in an entry, at most {limits.ORDERS_MAX}")
    return found


def check_signed(operators: OperatorsConfig, run_id: bytes, signed: SignedOrder) -> OperatorOrder:
    """The order, if enough different operators of the run signed these very bytes; else raises `Refusal`."""
    known, signers = operators.public_keys, signed.signers
    for key, signature in signed.signatures:
        if key not in known:
            raise Refusal(Reason.UNKNOWN_SIGNER, f"{short(key)} signed an order, and is no operator of this run")
        if not verify(key, signature, signed_bytes(Kind.KIND_ORDER, run_id, key, signed.body)):
            raise Refusal(Reason.BAD_SIGNATURE, f"the signature of the operator {short(key)} does not verify")
    if len(set(signers)) < max(len(signers), operators.needed):
        count = len(set(signers))
        raise Refusal(Reason.UNKNOWN_SIGNER, f"{count} operators signed an order, and {operators.needed} have to")
    return signed.order


def check_end(operators: OperatorsConfig, run_id: bytes, end: End) -> None:
    """Raises `Refusal` for an end that the operators did not order, in a run where they have to, and for an order elsewhere."""
    if not operators.keys:
        if end.order is not None:
            raise Refusal(Reason.UNKNOWN_SIGNER, f"the end has an order, and {NO_OPERATORS}")
        return
    if end.order is None:
        raise Refusal(
            Reason.UNKNOWN_SIGNER, f"{operators.needed} operators have to order the end, and no order is there"
        )
    order = check_signed(operators, run_id, end.order)
    if not order.finishes or order.reason != end.reason:
        raise Refusal(Reason.UNKNOWN_SIGNER, f"the operators did not order this end; their order is: {order}")


class OrderRule:
    """Follows the entries of a run: what operators with keys have to order is ordered, each order once. A run without such keys
    has no orders, so nobody shows one there as signed.

    `settings`: before the first entry; None if they are not known. Remembers the id of every order: only the operators
    themselves can make many.
    """

    def __init__(self, run_id: bytes, operators: OperatorsConfig, settings: Settings | None) -> None:
        self._run_id, self._operators = run_id, operators
        self._settings = settings
        self._seen: set[bytes] = set()

    def check(self, entry: Entry) -> None:
        """Raises `Refusal`, nothing changed, for an entry that does what no order says."""
        if not self._operators.keys:
            if entry.orders:
                raise Refusal(Reason.UNKNOWN_SIGNER, f"entry {entry.step} has an order, and {NO_OPERATORS}")
            return
        ids = {order_id(self._run_id, signed.body) for signed in entry.orders}
        if len(ids) < len(entry.orders) or ids & self._seen:
            raise Refusal(Reason.REPLAYED, f"entry {entry.step} repeats an order of the operators")
        orders = [check_signed(self._operators, self._run_id, signed) for signed in entry.orders]
        ordered = {order.excludes: f"{EXCLUDED}{order.reason}" for order in orders if order.excludes}
        done = {it.public_key: it.reason for it in entry.exclusions if it.by_operator}
        for key in sorted(done.keys() | ordered.keys()):
            if done.get(key) != ordered.get(key):
                text = (
                    f"entry {entry.step}: the exclusion of {peer_id(key)} by the operators is not what their order says"
                )
                raise Refusal(Reason.UNKNOWN_SIGNER, text)
        changes = [order.settings for order in orders if order.settings]
        if self._settings is not None and reduce(merged, changes, self._settings) != entry.settings:
            text = (
                f"entry {entry.step} has settings that the operators did not order: {words(entry.settings) or 'none'}"
            )
            raise Refusal(Reason.UNKNOWN_SIGNER, text)
        if any(order.finishes for order in orders):
            raise Refusal(Reason.OUT_OF_RANGE, f"entry {entry.step} follows an order to finish the run")
        self._seen |= ids
        self._settings = entry.settings


def order_values(step: int, signed: SignedOrder) -> dict[str, Any]:
    """A logged order for programs: what it says, and all who signed."""
    order = signed.order
    return {"step": step, "what": order.what, "says": str(order), "signed_by": list(map(peer_id, signed.signers))}


def operators_of(genesis: log_pb2.Genesis) -> OperatorsConfig:
    """The operators that a genesis names, whatever else it says that this version does not know. Raises `Refusal`."""
    try:
        return OperatorsConfig.model_validate(json.loads(genesis.config_json or "{}").get("operators", {}))
    except (ValueError, AttributeError, RecursionError) as error:
        raise Refusal(
            Reason.OUT_OF_RANGE, f"the operators in the run's configuration cannot be read: {error}"
        ) from error


# The end of a run before its last planned step, signed by its coordinator. With the end and a later entry of the same log,
# anybody can prove that the coordinator broke its word. ADR 44.


@dataclass(frozen=True)
class End:
    """The run ended after the entry of `step`, whose hash is `entry_hash` (the run id for step 0). `reason`: the operator's.
    `order`: of the run's operators, where they have keys."""

    step: int
    entry_hash: bytes
    reason: str = ""
    order: SignedOrder | None = None

    def __str__(self) -> str:
        return f"the operator ended the run at step {self.step}" + (f": {self.reason}" if self.reason else "")


def seal_end(identity: Identity, run_id: bytes, end: End) -> envelope_pb2.SignedEnvelope:
    """Sign the end as the run's coordinator. The same end always gives the same bytes."""
    body = log_pb2.RunEnd(step=end.step, entry_hash=end.entry_hash, reason=end.reason)
    if end.order is not None:
        body.order.CopyFrom(signed_order_body(end.order))
    return seal(identity, Kind.KIND_RUN_END, run_id, body)


def open_end(data: bytes, *, run_id: bytes, coordinator: bytes, operators: OperatorsConfig | None = None) -> End:
    """Verify the envelope and its ranges, or raise `Refusal`. Whether it fits the log is the caller's to check.

    `operators`: of the run; their order of the end is checked, too.
    """
    opened = open_envelope(
        data,
        kind=Kind.KIND_RUN_END,
        run_id=run_id,
        bytes_max=limits.END_BYTES_MAX + limits.ENVELOPE_OVERHEAD_BYTES_MAX,
        signer=coordinator,
    )
    body = parse(log_pb2.RunEnd, opened.body)
    if body.step > limits.STEP_MAX or len(body.entry_hash) != limits.HASH_BYTES:
        raise Refusal(Reason.OUT_OF_RANGE, f"end of a run at step {body.step}, hash of {len(body.entry_hash)} bytes")
    if len(body.reason.encode()) > limits.EXCLUSION_REASON_BYTES_MAX or not body.reason.isprintable():
        raise Refusal(Reason.OUT_OF_RANGE, "the reason for the end of a run is too long, or not printable")
    order = signed_order_from_body(body.order) if body.HasField("order") else None
    end = End(body.step, body.entry_hash, body.reason, order)
    if operators is not None:
        check_end(operators, run_id, end)
    return end
