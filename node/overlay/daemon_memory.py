"""The memory of p2pd, watched from outside: one that takes more than it may is ended, and `daemon` starts the next. ADR 50.

The release of p2pd is old, and a remote peer can make it take memory without end (docs/security.md). Refuses to guess: a system
that does not tell the memory of a process is not watched.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import psutil

LOOK_SECONDS = 0.5
GO_PART = 0.8
"""Go's collector works harder from this part of the limit on (GOMEMLIMIT): p2pd comes to the limit only with memory in use."""
MIB = 1 << 20


def taken(pid: int) -> int | None:
    """Bytes in memory of a process (and of its children, where the guard stays: see `guard`); None: not known."""
    try:
        return sum(int(one.memory_info().rss) for one in _family(pid))
    except psutil.Error:
        return None


def _family(pid: int) -> list[psutil.Process]:
    """The process last, so that its children end before it. Raises psutil.Error."""
    process = psutil.Process(pid)
    return [process] if sys.platform == "linux" else [*process.children(recursive=True), process]


def environment(bytes_max: int | None) -> list[str]:
    """The command before p2pd's own that tells Go the limit; empty without one."""
    return [] if bytes_max is None else ["env", f"GOMEMLIMIT={int(bytes_max * GO_PART) // MIB}MiB"]


async def bounded(child: Any, limit: Callable[[], int | None], log: Any) -> None:
    """Wait for the end of a process, and end it if it takes more bytes than `limit` gives (None: no limit)."""
    ended = asyncio.ensure_future(child.wait())
    try:
        while not (await asyncio.wait({ended}, timeout=LOOK_SECONDS))[0]:
            most = limit()
            size = taken(child.pid) if most is not None else None
            if most is not None and size is not None and size > most:
                log.warning(
                    "the libp2p daemon takes too much memory; ending it",
                    mb=size // 10**6,
                    mb_max=most // 10**6,
                    setting="overlay_memory_gb",
                )
                for process in _family(child.pid):
                    process.kill()  # it may be too busy to end by itself
                await ended
                return
    except psutil.NoSuchProcess:
        await ended
    finally:
        ended.cancel()
