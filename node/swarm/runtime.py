"""What the parts of a session share: the view of the run, figures, and the runtime (tasks, events for the training thread,
lines of the log, counted refusals).

The view is the head of the log that this peer follows, and the step that is open. `entries` and `follower` write it; all others
only read it. The runtime owns every task that a part starts, and ends them all together. It knows nothing of a task's work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import structlog

from node.blobs.blobs import Arrivals, WireBytes
from node.swarm.facts import Event, Failed
from protos.errors import Refusal, SwarmentumError
from protos.identity import short
from protos.log import Chain
from protos.run_sections import OperatorsConfig
from protos.tick import Tick

ByRange: TypeAlias = tuple[tuple[bytes, ...], ...]
"""Public keys of the aggregators of each range."""


class View:
    """One peer's, of one run. `chain` is the log's head; `tick` is the tick of the step after it, if this peer has one."""

    def __init__(self, run_id: bytes, coordinator: bytes) -> None:
        self._run_id, self._coordinator = run_id, coordinator
        self.operators = OperatorsConfig()
        """The keys whose orders the run obeys."""
        self.chain = Chain(run_id, coordinator)
        self.tick: Tick | None = None
        self.committed_step = 0
        """The newest entry that has arrived. The training thread reads it. If an entry excludes this very peer, it is a moment
        behind the head."""
        self.commits_first = False
        """Whether a payload is withheld until the coordinator has its announcement (the run's configuration decides)."""
        self.away = ""
        """Why the coordinator does not answer; empty while it does. The training thread reads it."""
        self.ranges = 1
        """Into how many ranges the model is divided, with aggregators of their own (`clock.ranges`)."""
        self.checkers = 0
        """Peers that check one peer's votes in a step (`trust.checkers`); 0 in a run without checks."""
        self.admitted_at_step = 0
        """The head when the coordinator last admitted this peer."""

    def start(self, step: int, head: bytes) -> None:
        """Follow the log after `step`, whose entry has this hash; no step is open."""
        self.chain = Chain(self._run_id, self._coordinator, step, head, self.operators)
        self.committed_step, self.tick = step, None

    def aggregators(self, step: int) -> tuple[bytes, ...]:
        """Public keys of a step's aggregators, as far as this peer knows: of the step that was opened last."""
        return self.tick.aggregators if self.tick is not None and self.tick.step == step else ()

    def by_range(self, step: int) -> ByRange:
        """The same of each range."""
        return self.tick.by_range if self.tick is not None and self.tick.step == step else ()

    @property
    def is_unanchored(self) -> bool:
        """Whether peers alone add up the votes of the step that was opened last: an anchor is in no roster."""
        tick = self.tick
        return tick is not None and bool(tick.aggregators) and tick.places.keys() >= {*tick.aggregators}

    def ranges_of(self, step: int, public_key: bytes) -> tuple[int, ...]:
        """The ranges of which a peer takes the votes of a step: those that it adds up, or all in a step without aggregators."""
        by_range = self.by_range(step)
        return (
            tuple(n for n, keys in enumerate(by_range) if public_key in keys) if by_range else tuple(range(self.ranges))
        )

    @property
    def step(self) -> int:
        """The head's."""
        return self.chain.step

    @property
    def roster(self) -> tuple[bytes, ...]:
        """Public keys of the members of the step that was opened last; nobody before the first tick."""
        return () if self.tick is None else tuple(share.public_key for share in self.tick.roster)


# Figures of a peer's network side. The network thread writes them, other threads read them; they decide nothing. ADR 6.


@dataclass
class Counters:
    """`refused` is by reason; the bytes of payloads are without framing."""

    refused: dict[str, int] = field(default_factory=dict)
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    announcements: int = 0
    wire: WireBytes = field(default_factory=WireBytes)
    arrivals: Arrivals = field(default_factory=Arrivals)
    doors: dict[str, str] = field(default_factory=dict)
    """Peers that refused this peer's last pushed payload, and why, as they say."""


def aggregators_in(by_range: ByRange) -> list[bytes]:
    """The aggregators of all ranges, each once."""
    return list(dict.fromkeys(key for keys in by_range for key in keys))


class Runtime:
    """One session's. `emit` hands an event to the training thread, and waits while the queue has no room for it."""

    def __init__(
        self, public_key: bytes, emit: Callable[[Event], Awaitable[None]], counters: Counters, view: View
    ) -> None:
        self.emit, self.counters = emit, counters
        self.log = structlog.get_logger("swarm").bind(peer=short(public_key))
        self.tasks: set[asyncio.Task[Any]] = set()
        self._view = view
        self._has_failed = False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task. If the task fails, the session fails."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self) -> None:
        """End every task, and wait for the end."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def refused(self, refusal: Refusal) -> None:
        """Count foreign bytes that their door refused."""
        name = refusal.reason.value
        self.counters.refused[name] = self.counters.refused.get(name, 0) + 1
        self.log.debug("refused", step=self._view.step, why=str(refusal))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """A mistake of this program ends the peer with its traceback, never silently. Only the first failure is logged."""
        self.tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self._has_failed:
            return
        self._has_failed = True
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, SwarmentumError):
            failure = error
            self.log.error("the network side failed", step=self._view.committed_step, why=str(error))
        else:
            failure = SwarmentumError(f"bug in the network side: {error!r}")
            failure.__cause__ = error
            self.log.error("the network side failed", step=self._view.committed_step, exc_info=error)
        self.spawn(self._failed(failure))

    async def _failed(self, failure: SwarmentumError) -> None:
        await self.emit(Failed(failure))
