"""What several tests wait for, or take for a moment: a fact that comes true on an event loop, a port of this machine."""

import asyncio
import socket
from collections.abc import Callable

SECONDS_MAX = 240.0
"""For what comes at all; a busy machine is no failure."""


async def until(what: Callable[[], object]) -> None:
    """Until it is true; other tasks of the loop run meanwhile."""
    async with asyncio.timeout(SECONDS_MAX):
        while not what():
            await asyncio.sleep(0)


def free_port() -> int:
    """A port of this machine that nobody has now: a program that starts at once may take it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
