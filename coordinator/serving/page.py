"""The web pages beside a coordinator: the page of the runs, and the operator's page (ADR 43). Processes of their own.

This module starts them. It writes the invites of the runs to the stdin of the first, which gets no key and no ticket. It
writes nothing to the second, which acts only for a browser that is logged in. The clock waits for nothing of them. A page that
cannot start is a warning. When the coordinator ends, however it ends, stdin ends, and with it the page.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final

import structlog

from coordinator.config import CoordinatorSettings
from protos.invite import Invite
from protos.process import python_command

NO_PAGE: Final = "none"
MODULE: Final = "node.web.serve"
OPERATORS_MODULE: Final = "coordinator.web"
LOOK_SECONDS: Final = 1.0
READY_SECONDS_MAX: Final = 300.0
WRITE_SECONDS_MAX: Final = 10.0
STOP_SECONDS_MAX: Final = 3.0
STARTS_MAX: Final = 5
"""Starts in a row of a page that dies within LIVES_SECONDS_MIN; after that the coordinator goes on without a page."""
LIVES_SECONDS_MIN: Final = 60.0
AGAIN_SECONDS: Final = 5.0
WRONG_USE: Final = 2
"""The exit code of a page whose address cannot be used: another start would not help."""

Lines = Callable[[], Mapping[bytes, Callable[[], str]]]


def line_of(invite: Invite, at: tuple[str, ...]) -> str:
    """What the page's process reads: the link to show, and the addresses at which it reaches the coordinators."""
    return json.dumps({"invite": invite.link(), "at": at}) + "\n"


def gone_line_of(run_id: bytes) -> str:
    """What the page's process reads about a run that was archived or deleted: it shows the run no more."""
    return json.dumps({"gone": run_id.hex()}) + "\n"


def pages_of(settings: CoordinatorSettings, lines: Lines) -> Iterator[PageProcess]:
    """The pages that the settings name. `lines`: the runs, for the page that shows them."""
    if settings.web_listen != NO_PAGE:
        hosts = [word for host in settings.web_hosts for word in ("--host", host)]
        shows = (MODULE, "--json", "--listen", settings.web_listen, *hosts)
        yield PageProcess("web page", "the web page of the runs is ready", settings.web_listen, shows, lines)
    if settings.operator_web_listen != NO_PAGE:
        named = () if settings.operator_web_host is None else ("--host", settings.operator_web_host)
        home, listen = str(settings.home.absolute()), settings.operator_web_listen
        acts = (OPERATORS_MODULE, "--json", "--home", home, "--listen", listen, *named)
        yield PageProcess("operator's page", "the operator's page is ready", listen, acts, dict)


class PageProcess:
    """The process of a page, started again if it dies. `lines` gives the runs: run id -> a function that makes its line.

    `what` and `ready` are its words in the log; `command`: the module, and its options.
    """

    def __init__(self, what: str, ready: str, listen: str, command: tuple[str, ...], lines: Lines) -> None:
        self._what, self._ready, self._listen = what, ready, listen
        self._command = python_command("-m", *command)
        self._lines = lines
        self._log = structlog.get_logger("coordinator")

    async def run(self) -> None:
        """Until it is cancelled, or the page cannot be had."""
        starts = 0
        while starts < STARTS_MAX:
            began = time.monotonic()
            code = await self._once()
            if code in (0, WRONG_USE):
                break
            starts = 1 if time.monotonic() - began > LIVES_SECONDS_MIN else starts + 1
            self._log.warning("the process of a page ended; starting it again", what=self._what, code=code)
            await asyncio.sleep(AGAIN_SECONDS)
        self._log.warning(
            "a page is off, and the runs go on without it",
            what=self._what,
            listen=self._listen,
            hint="choose another address for it, or none",
        )

    async def _once(self) -> int:
        """Start the process and tell it the runs until it ends; its exit code."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SWARMENTUM_")}
        pipe = asyncio.subprocess.PIPE
        try:
            # A group of its own: a terminal's Ctrl-C is for the coordinator alone, which ends the page.
            child = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, env=own, process_group=0
            )
        except OSError as error:
            self._log.warning("the process of a page cannot be started", what=self._what, why=error.strerror)
            return error.errno or -1
        tasks = [asyncio.ensure_future(self._tell(child)), asyncio.ensure_future(child.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await ended(child)
        return -1 if child.returncode is None else child.returncode

    async def _tell(self, child: asyncio.subprocess.Process) -> None:
        """Wait until the page is ready, then write each run once. Raises TimeoutError for a process that does not go on."""
        assert child.stdin is not None
        assert child.stdout is not None
        async with asyncio.timeout(READY_SECONDS_MAX):
            ready = await child.stdout.readline()
        with suppress(ValueError, KeyError, TypeError):
            self._log.info(self._ready, url=str(json.loads(ready)["url"]))
        told: set[bytes] = set()
        while True:
            lines = self._lines()
            for run_id in told - lines.keys():
                told.discard(run_id)
                child.stdin.write(gone_line_of(run_id).encode())
            for run_id, line in lines.items():
                if run_id not in told:
                    told.add(run_id)
                    child.stdin.write(line().encode())
            async with asyncio.timeout(WRITE_SECONDS_MAX):
                await child.stdin.drain()
            await asyncio.sleep(LOOK_SECONDS)


async def ended(child: asyncio.subprocess.Process) -> None:
    """The end of stdin asks the process to stop; it is killed if it does not."""
    if child.stdin is not None:
        child.stdin.close()
    try:
        async with asyncio.timeout(STOP_SECONDS_MAX):
            await child.wait()
    except (TimeoutError, asyncio.CancelledError):
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
