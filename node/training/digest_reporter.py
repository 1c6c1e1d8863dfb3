"""A state that the log reached: its digest is hashed while the training computes its next gradient, and then it is told.

The swarm tells the coordinator as soon as the digest is there; what only the training thread may do waits until that thread
asks (`settle`). The replica waits for the digest before it changes the state. Two states are hashed at once: a small one, for
which a thread would cost more, and that of a peer of several devices, whose ranks take part in each digest in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from node.swarm.api import Swarm
from node.training.recovery import Recovery
from node.training.replica import Replica

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
