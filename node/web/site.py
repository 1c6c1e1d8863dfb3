"""The runs of one page: a task follows each, and each change goes to the browsers that watch it.

Messages of a run are at least PUBLISH_SECONDS apart, whatever the speed of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import structlog

from node.web import answers, views
from node.web.event_stream import Channels, message
from node.web.followed import Followed
from protos.errors import OperatorError
from protos.invite import Invite

RUNS_MAX: Final = 64
PUBLISH_SECONDS: Final = 1.0
NEW_POINTS_MAX: Final = 256
LIST: Final = ""


class Site:
    """Runs by their id in hex. Used inside one event loop."""

    def __init__(self) -> None:
        self.runs: dict[str, Followed] = {}
        self.channels = Channels()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed: dict[str, asyncio.Event] = {LIST: asyncio.Event()}
        self._publisher = asyncio.ensure_future(self._publish(LIST))

    def add(self, invite: Invite, at: Iterable[str] = ()) -> bool:
        """Follow a run, too. False if the page has it. Raises OperatorError if the page has too many, or no room."""
        name = invite.run_id.hex()
        if name in self.runs:
            return False
        if len(self.runs) >= RUNS_MAX:
            raise OperatorError(f"a page shows at most {RUNS_MAX} runs: start another one with `swarmentum web`")
        run = Followed(invite, at, lambda: self._note(name))
        self._changed[name], self.runs[name] = asyncio.Event(), run
        self._tasks[name] = asyncio.ensure_future(self._both(run))
        self._note(name)
        return True

    async def remove(self, name: str) -> None:
        """Show a run no more, and end its streams: its operator archived or deleted it. Unknown runs are left alone."""
        run = self.runs.pop(name, None)
        if run is None:
            return
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del self._changed[name]
        self.channels.end(name)
        run.close()
        self._changed[LIST].set()

    def _note(self, name: str) -> None:
        self._changed[name].set()
        self._changed[LIST].set()

    async def _both(self, run: Followed) -> None:
        """Follow a run, and tell its browsers."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.run())
            tasks.create_task(self._publish(run.run_hex))

    async def _publish(self, name: str) -> None:
        told = 0
        while True:
            await self._changed[name].wait()
            self._changed[name].clear()
            if name == LIST:
                self.channels.publish(LIST, message("runs", self._list().model_dump()))
            else:
                run = self.runs[name]
                if self.channels.watched(name):
                    self._tell(run, told)
                told = run.book.head
            await asyncio.sleep(PUBLISH_SECONDS)

    def _tell(self, run: Followed, told: int) -> None:
        if run.book.head > told:
            steps = views.steps_of(run, told + 1, run.book.head, NEW_POINTS_MAX)
            self.channels.publish(run.run_hex, message("steps", steps.model_dump()))
        self.channels.publish(run.run_hex, message("run", views.run_of(run).model_dump()))

    def _list(self) -> answers.RunList:
        return answers.RunList(runs=[views.line_of(run) for run in self.runs.values()], total=len(self.runs), offset=0)

    async def close(self) -> None:
        """Follow nothing any more, and end the streams."""
        self.channels.close()
        tasks = [self._publisher, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                structlog.get_logger("web").error("a task of the page failed", why=repr(result))
        for run in self.runs.values():
            run.close()
