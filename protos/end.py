"""The end of a run before its last planned step, signed by its coordinator. `open_end` is its door.

With the end and a later entry of the same log, anybody can prove that the coordinator broke its word. ADR 44.
"""

from __future__ import annotations

from dataclasses import dataclass

from protos import limits
from protos.admission_config import OperatorsConfig
from protos.envelope import Kind, open_envelope, parse, seal
from protos.errors import Reason, Refusal
from protos.identity import Identity
from protos.orders import SignedOrder, check_end, signed_order_body, signed_order_from_body
from protos.v1 import envelope_pb2, log_pb2


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
