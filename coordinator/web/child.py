"""The process that speaks HTTP with the operator's browser: started here, without a key. Two pipes connect it. ADR 43.

Its first line says that it is ready, and where. Each further line of its stdout is a request: a number, a space, and JSON. A
line of its stdin is the answer to one. Nothing else of it reaches this side.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from coordinator.serving.page import ended
from coordinator.serving.throttled_log import ThrottledLog
from coordinator.web.requests import OperatorReply, Requests
from protos.json_line import as_line
from protos.safe_path import python_command

MODULE: Final = "node.operator_page"
REQUEST_BYTES_MAX: Final = 1 << 20
"""A request with a run.toml of 64 Ki characters, each escaped in JSON as 12 bytes."""
NUMBER_DIGITS_MAX: Final = 15
REQUESTS_MAX: Final = 64
"""Requests that wait for their answers. The process itself sends fewer."""
READY_SECONDS_MAX: Final = 120.0
WRITE_SECONDS_MAX: Final = 10.0


class _EndedError(Exception):
    """The process has closed its stdout."""


class Child:
    """One life of that process."""

    def __init__(self, listen: str, hosts: tuple[str, ...], requests: Requests) -> None:
        named = [word for host in hosts for word in ("--host", host)]
        self._command = python_command("-m", MODULE, "--json", "--listen", listen, *named)
        self._requests = requests
        self._log = structlog.get_logger("operator-page")
        self._caused = ThrottledLog(self._log)

    async def run(self, ready: Callable[[str], None]) -> int:
        """Serve until the process ends; its exit code. `ready` gets the page's URL."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SWARMENTUM_")}
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, env=own, limit=REQUEST_BYTES_MAX
        )
        try:
            await self._serve(child, ready)
        except* _EndedError:
            pass  # the requests that were under way have nobody who waits for them
        except* (TimeoutError, ConnectionError, ValueError) as group:
            self._log.warning("the operator's page gets no answers any more", why=repr(group.exceptions[0]))
        finally:
            await ended(child)
        return -1 if child.returncode is None else child.returncode

    async def _serve(self, child: asyncio.subprocess.Process, ready: Callable[[str], None]) -> None:
        assert child.stdout is not None
        async with asyncio.timeout(READY_SECONDS_MAX):
            first = await child.stdout.readline()
        if not first:
            raise _EndedError
        ready(str(json.loads(first)["url"]))
        places = asyncio.Semaphore(REQUESTS_MAX)
        async with asyncio.TaskGroup() as tasks:
            while line := await child.stdout.readline():  # ValueError for a line that is too long
                await places.acquire()
                task = tasks.create_task(self._one(child, line))
                task.add_done_callback(lambda _: places.release())
            raise _EndedError

    async def _one(self, child: asyncio.subprocess.Process, line: bytes) -> None:
        number, _, data = line.partition(b" ")
        if not number.isdigit() or len(number) > NUMBER_DIGITS_MAX:
            self._caused.warning("the operator's page sent a line that is no request", "lines", bytes=len(line))
            return
        answer = await self._requests.answer(data)
        assert child.stdin is not None
        with suppress(ConnectionError):  # the process is gone, and with it everybody who could be told
            child.stdin.write(line_of(int(number), answer))
            async with asyncio.timeout(WRITE_SECONDS_MAX):
                await child.stdin.drain()


def line_of(number: int, answer: OperatorReply) -> bytes:
    """An answer as a line."""
    values = {"id": number, "status": answer.status, "body": answer.body, "cookie": answer.cookie}
    return as_line(values).encode("ascii") + b"\n"
