"""Writes an update payload: exactly the packed votes and a header of at most UPDATE_HEADER_BYTES_MAX bytes."""

from __future__ import annotations

from dataclasses import dataclass

from protos import slices
from protos.limits import UPDATE_HEADER_BYTES_MAX
from protos.v1 import update_pb2


@dataclass(frozen=True)
class Update:
    """One peer's votes of one step, as the optimizer takes them."""

    step: int
    size: int
    """Group size, or k of top-k."""
    votes: bytes


def encode_update(run_id: bytes, layout_digest: bytes, update: Update) -> bytes:
    """The payload bytes; their sha256 names them everywhere."""
    data = update_pb2.UpdatePayload(
        run_id=run_id,
        step=update.step,
        layout_digest=layout_digest,
        size=update.size,
        votes=update.votes,
    ).SerializeToString(deterministic=True)
    assert len(data) - len(update.votes) <= UPDATE_HEADER_BYTES_MAX, "the header outgrew its bound"
    return data


def payload_hash(data: bytes, ranges: int = 1) -> bytes:
    """The name of a payload that this peer made, in a run with so many ranges: 32 bytes."""
    return slices.hash_of(data, ranges)
