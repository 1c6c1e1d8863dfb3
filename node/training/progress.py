"""How far a peer is in its run: what it does, the states that it reached, the settings of now, and where the run ends. ADR 44.

That is after the last planned step, or earlier, where the coordinator signed its end.

Refuses an entry after a signed end, and an end of another log: a coordinator that signs both breaks its word.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

import structlog

from node.swarm.api import Swarm
from node.swarm.facts import Ended
from node.training.keeper import Keeper, StepRecorder
from node.training.replica import Replica
from protos.changes import Settings, with_settings, words
from protos.errors import DivergedError, NetworkError, Reason, Refusal, RefusedError, SwarmentumError
from protos.orders import End
from protos.run_config import ClockConfig, RunConfig

if TYPE_CHECKING:
    from node.training.recovery import Recovery


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
    structlog.get_logger("peer").info("the operator ended the run", step=replica.step, why=str(event.end))
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


# What a peer does in its run, as one state, and the table of legal moves. Pure.


class Activity(Enum):
    """What a peer does in its run now."""

    LOADING = "loading"
    """Its momentum is not here yet, and may not be saved."""
    FOLLOWING = "following"
    """It applies the log, and has not voted since it came, went on after a pause, or jumped to another state."""
    VOTING = "voting"
    PAUSED = "paused"
    """By its owner or a condition, and the coordinator knows."""


MOVES: Final = {
    Activity.LOADING: {Activity.FOLLOWING},
    Activity.FOLLOWING: {Activity.VOTING, Activity.PAUSED},
    Activity.VOTING: {Activity.FOLLOWING, Activity.PAUSED},
    Activity.PAUSED: {Activity.FOLLOWING},
}


def move(now: Activity, then: Activity) -> Activity:
    """The next state. An illegal move is our own mistake."""
    assert then in MOVES[now], f"a peer that is {now.value} cannot be {then.value} next"
    return then


# A state that the log reached: its digest is hashed while the training computes its next gradient, and then it is told.
#
# The swarm tells the coordinator as soon as the digest is there; what only the training thread may do waits until that thread
# asks (`settle`). The replica waits for the digest before it changes the state. Two states are hashed at once: a small one, for
# which a thread would cost more, and that of a peer of several devices, whose ranks take part in each digest in their order.

BEHIND_BYTES_MIN: Final = 8 << 20
"""States of fewer bytes are hashed at once: that takes 5 to 10 ms."""


@dataclass(frozen=True)
class _Waiting:
    step: int
    digest: Future[bytes]
    told: Future[None]
    then: Callable[[bytes], None]


class DigestReporter:
    """One trainer's. All methods are for the training thread."""

    def __init__(self, replica: Replica, swarm: Swarm, recovery: Recovery) -> None:
        self._replica, self._swarm, self._recovery = replica, swarm, recovery
        self._waiting: _Waiting | None = None
        self._pool: ThreadPoolExecutor | None = None

    def state(self, then: Callable[[bytes], None], *, behind: bool) -> None:
        """The replica is at a new state. `then` gets its digest, now or in `settle`; with `behind` there is a gradient to
        compute meanwhile. Raises DivergedError if a state in doubt stands."""
        self.settle()
        replica = self._replica
        if not behind or self._recovery.doubts or not replica.hashes_behind(BEHIND_BYTES_MIN):
            self._recovery.reached(replica.step, replica.digest())
            self._swarm.applied(replica.step, replica.digest())
            then(replica.digest())
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="digest")
        digest = replica.hash_in(self._pool)
        self._waiting = _Waiting(replica.step, digest, self._pool.submit(self._tell, replica.step, digest), then)

    def _tell(self, step: int, digest: Future[bytes]) -> None:
        self._swarm.applied(step, digest.result())

    def settle(self) -> None:
        """Have the digest of the last state, and do with it what waits."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        self._recovery.reached(waiting.step, waiting.digest.result())
        waiting.told.result()
        waiting.then(waiting.digest.result())

    def close(self) -> None:
        """End the thread. What it tells the swarm has its own deadline."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
