"""Where the run of a peer ends: after its last planned step, or earlier, where the coordinator signed its end. ADR 44.

Refuses an entry after a signed end, and an end of another log: a coordinator that signs both breaks its word.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Final

import structlog

from node.swarm.events import Ended
from node.training.keeper import Keeper
from node.training.recording import StepRecorder
from node.training.replica import Replica
from protos.changes import Settings, with_settings, words
from protos.errors import DivergedError, NetworkError, Reason, Refusal, RefusedError, SwarmentumError
from protos.orders import End
from protos.run_config import ClockConfig, RunConfig


class BadSnapshotError(Refusal):
    """An agreed snapshot does not hold what the log says."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.HASH_MISMATCH, detail)


@dataclass(frozen=True)
class Divergence:
    """What may be wrong: an agreed snapshot that does not hold what the log says, or a state that the peer computed.

    A state that the peer computes again: the step before it, its digest, and the contradiction.
    """

    step: int
    digest: bytes
    claimed: bytes
    reason: str
    entry: bytes = b""


AGREED_SECONDS_MAX: Final = 30.0


@dataclass
class LastStep:
    """One run's. `planned`: the steps of its configuration."""

    planned: int
    end: End | None = None
    finished: bool = False
    """The coordinator says that no step follows."""
    agreed: int = 0
    """The newest step whose state the run agreed on, as far as this peer knows."""
    _give_up: float | None = None

    def is_here(self, step: int) -> bool:
        """Whether the run is finished, and a peer after `step` has its last state."""
        return self.finished and step >= self.step

    def is_over(self, step: int, *, awaits: bool) -> bool:
        """Whether a peer after `step` has nothing to do in a finished run. It may have to wait until the last state is agreed,
        for AGREED_SECONDS_MAX at most: peers store that state while the coordinator says that the run is finished."""
        if not self.is_here(step):
            return False
        self._give_up = self._give_up or time.monotonic() + AGREED_SECONDS_MAX
        return not awaits or self.agreed >= self.step or time.monotonic() > self._give_up

    def failed(self, error: SwarmentumError, step: int) -> None:
        """The network side cannot go on. A peer that has the last state does without, and stops waiting. Raises the error of
        any other."""
        if not self.is_here(step) or not isinstance(error, NetworkError | RefusedError):
            raise error
        structlog.get_logger("peer").warning("the coordinator is away after the finish", step=self.step, why=str(error))
        self._give_up = -math.inf

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


# The settings of a run in its present step: the genesis' own, and the operator's changes, as each entry names them. ADR 44.
#
# Of these, the length of the run, and the period and the mirrors of its snapshots count on a peer. The learning rate and the
# samples are in each tick. Refuses settings that this version does not know, because this peer would then store other states
# than the others.


@dataclass
class EffectiveSettings:
    """One peer's, of one run. `config`: the settings of the genesis."""

    config: RunConfig
    last: LastStep
    settings: Settings = ()
    clock: ClockConfig = field(init=False)
    mirrors: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.clock, self.mirrors = self.config.clock, self.config.snapshots.mirrors

    def told(self, settings: Settings, step: int, *, quiet: bool = False) -> None:
        """The entry of `step` names these settings. Raises RefusedError for settings that this peer cannot follow."""
        if settings == self.settings:
            return
        try:
            config = with_settings(self.config, settings)
        except Refusal as refusal:
            raise RefusedError(
                f"entry {step} has settings that this peer cannot follow: {refusal.detail}; update swarmentum"
            ) from refusal
        if not quiet:
            new = tuple(item for item in settings if item not in self.settings)
            structlog.get_logger("peer").info("the operator changed the run", step=step, settings=words(new))
        self.clock, self.mirrors = config.clock, config.snapshots.mirrors
        self.settings, self.last.planned = settings, self.clock.steps
