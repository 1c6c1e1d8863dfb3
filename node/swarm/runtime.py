"""The runtime of a session's parts: tasks, events for the training thread, lines of the log, counted refusals.

Owns every task that a part starts, and ends them all together. Knows nothing of the work of a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from node.swarm.facts import Event, Failed
from node.swarm.view import Counters, View
from protos.errors import Refusal, SwarmentumError
from protos.identity import short


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
