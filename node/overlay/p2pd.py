"""One process of p2pd, and its memory, watched from outside: one that takes more than it may is ended, and `daemon` starts the
next (ADR 50).

The release of p2pd is old, and a remote peer can make it take memory without end (docs/security.md). Refuses to guess: a
system that does not tell the memory of a process is not watched.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import structlog
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from protos.process import guarded
from protos.text import printable

P2PD_CHARACTERS_MAX = 500
LAST_WORDS = ("runtime: ", "fatal error: ", "panic: ")
LAST_WORDS_SECONDS_MAX = 1.0
END_SECONDS_MAX = 10.0


class Process(P2P):  # type: ignore[misc]
    """p2pd with GossipSub, without a search for relays in strangers' tables; it never outlives this process."""

    _UNIX_SOCKET_PREFIX: str
    flags: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    @classmethod
    def _make_process_args(cls, *args: Any, **kwargs: Any) -> list[str]:
        made: list[str] = P2P._make_process_args(*args, pubsub=1, relayDiscovery=0, **kwargs)
        return [*guarded(*cls.before, *made, *cls.flags)]

    fault: str = ""
    """What Go said as it ended; the goroutines that follow say nothing to people."""

    async def end(self) -> str:
        """Why it ended, in words; empty while it runs, or if the system did not start it."""
        if self._child is None:
            return ""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS_MAX):
                await self._child.wait()
                await asyncio.wait({self._reader_task})
        code = self._child.returncode
        killed = "it was killed, by this peer or by the system, which does so when memory runs out"
        why = killed if code == -signal.SIGKILL else f"it ended with exit code {code}"
        return "" if code is None else self.fault or why

    def _log_p2pd_message(self, line: str) -> None:
        """What p2pd prints, for `--verbose`: it calls errors what is none, such as a connection that another side closed.

        A p2pd that does not start is told with its last line, or with Go's last words.
        """
        said = printable(line, P2PD_CHARACTERS_MAX)
        if line.startswith(LAST_WORDS) and len(self.fault) < P2PD_CHARACTERS_MAX:
            self.fault += ("; " if self.fault else "") + said
        structlog.get_logger("p2pd").debug("p2pd says", line=said)

    def listening(self, protocol: str, handler: Any) -> bytes:
        """Hand the streams of a protocol that p2pd passes on to `handler`; the address that p2pd has to know."""
        if self._listen_task is None:
            self._start_listening()
        control = self._client.control
        control.handlers[protocol] = handler
        return bytes(control.listen_maddr.to_bytes())

    async def shutdown(self) -> None:
        """As hivemind's, but a process that stands still is killed."""
        try:
            async with asyncio.timeout(END_SECONDS_MAX):
                await super().shutdown()
        except TimeoutError:
            self.kill()
            await super().shutdown()

    def kill(self) -> None:
        """At once, also if it stands still."""
        with suppress(psutil.NoSuchProcess):
            for process in _family(self._child.pid):
                process.kill()

    def _terminate(self) -> None:
        # its last work: the sockets, whose disk may have become read-only, or which a failed start has not named yet
        with suppress(OSError, AttributeError):
            super()._terminate()

    @classmethod
    async def started(cls, *more: str, folder: Path, prefix: Sequence[str] = (), **options: Any) -> Process:
        """As `create`, with `more` of p2pd's flags, its sockets in `folder`, and `prefix` before its command; a cancelled start
        leaves no p2pd running: hivemind forgets its child."""
        made: list[Process] = []

        class Remembered(cls):  # type: ignore[misc, valid-type]
            _UNIX_SOCKET_PREFIX = f"/unix{folder}/"
            flags, before = more, tuple(prefix)

            def __init__(self) -> None:
                super().__init__()
                made.append(self)

        try:
            await Remembered.create(**options)
        except BaseException as error:
            failed = bool(made) and isinstance(error, Exception)  # and was not cancelled
            try:
                if failed:
                    await made[-1].end()  # its last words may still be on their way
            finally:
                for process in made:
                    await process.shutdown()
            if failed and made[-1].fault:
                raise P2PDaemonError(made[-1].fault) from error
            raise
        return made[-1]


LOOK_SECONDS = 0.5
USUAL_BYTES = 2 * 10**9
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


def memory_bytes_max() -> int:
    """What p2pd may take here. A circuit can take 32 MB, so a large machine gives a relay more."""
    total = int(psutil.virtual_memory().total)
    return max(min(USUAL_BYTES, total // 2), total // 8)


def environment(bytes_max: int) -> list[str]:
    """The command before p2pd's own that tells Go the limit."""
    return ["env", f"GOMEMLIMIT={int(bytes_max * GO_PART) // MIB}MiB"]


async def bounded(child: Any, log: Any, cut_off: Callable[[], bool] = lambda: False) -> None:
    """Wait for the end of a process; end it if it takes more memory than `memory_bytes_max`, or if nobody can speak with it."""
    ended = asyncio.ensure_future(child.wait())
    try:
        while not (await asyncio.wait({ended}, timeout=LOOK_SECONDS))[0]:
            most, size = memory_bytes_max(), taken(child.pid)
            large = size if size is not None and size > most else None
            if large is not None:
                log.warning(
                    "the libp2p daemon takes too much memory; ending it", mb=large // 10**6, mb_max=most // 10**6
                )
            if large is not None or cut_off():
                for process in _family(child.pid):
                    process.kill()  # it may be too busy to end by itself
                await ended
                return
    except psutil.NoSuchProcess:
        await ended
    finally:
        ended.cancel()
