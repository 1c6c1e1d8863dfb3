"""Where the run of a peer ends: after its last planned step, or earlier, where the coordinator signed its end. ADR 44.

Refuses an entry after a signed end, and an end of another log: a coordinator that signs both breaks its word.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from node.swarm.events import Ended
from node.training.keeper import Keeper
from node.training.recording import StepRecorder
from node.training.replica import Replica
from protos.end import End
from protos.errors import DivergedError


@dataclass
class LastStep:
    """One run's. `planned`: the steps of its configuration."""

    planned: int
    end: End | None = None

    @property
    def step(self) -> int:
        """The last step of the run, as far as this peer knows."""
        return self.planned if self.end is None else self.end.step

    def told(self, end: End, step: int, head: bytes) -> bool:
        """The run has this end; the replica is after `step`, whose entry has the hash `head`. Whether the end is new.

        Raises DivergedError if the end does not fit the log that this peer has applied.
        """
        if self.end is not None and self.end.step == end.step and self.end.entry_hash == end.entry_hash:
            return False
        if self.end is not None:
            raise DivergedError(f"the coordinator signed two ends of the run: at step {self.end.step}, and {end.step}")
        self.end = end
        self.reached(step, head)
        return True

    def reached(self, step: int, head: bytes) -> None:
        """The replica is after `step`. Raises DivergedError for a step after the end, or an end of another log."""
        end = self.end
        if end is None or step < end.step:
            return
        if step > end.step:
            raise DivergedError(
                f"the coordinator signed that the run ended at step {end.step}, and an entry of step {step}: it has two logs. "
                "Tell the run's operator, and keep this folder as the evidence"
            )
        if head != end.entry_hash:
            raise DivergedError(
                f"the coordinator signed that the run ended at step {end.step} with entry {end.entry_hash.hex()[:16]}, and "
                f"this peer has applied entry {head.hex()[:16]} of that step: it has two logs"
            )


def apply_end(event: Ended, last: LastStep, replica: Replica, keeper: Keeper, archive: StepRecorder | None) -> None:
    """The operator ended the run. A state that is there already is stored for late joiners, as after the last planned step."""
    if not last.told(event.end, replica.step, replica.head):
        return
    structlog.get_logger("peer").info(str(event.end), step=replica.step)
    if archive is not None:
        archive.end(event.envelope)
    if replica.step == last.step:
        keeper.snapshot(kept=True)
        keeper.flush()
