"""What may be wrong: an agreed snapshot that does not hold what the log says, or a state that the peer computed."""

from __future__ import annotations

from dataclasses import dataclass

from protos.errors import Reason, Refusal


class BadSnapshotError(Refusal):
    """An agreed snapshot does not hold what the log says."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.HASH_MISMATCH, detail)


@dataclass(frozen=True)
class Divergence:
    """A state that the peer computes again: the step before it, its digest, and the contradiction."""

    step: int
    digest: bytes
    claimed: bytes
    reason: str
    entry: bytes = b""
