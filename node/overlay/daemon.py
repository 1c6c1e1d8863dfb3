"""The libp2p daemon (p2pd, through hivemind): its start, its watch, and its next start if it dies.

hivemind does not notice when p2pd dies (docs/overlay.md), so this module waits for the process. The new daemon has the same
identity. Refuses to know streams and topics; `Host` registers them after each start.

`Tasks` starts the tasks of one host, logs their failures, and ends them together.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2

from node.overlay.p2pd import Process, bounded, environment, memory_bytes_max
from node.overlay.settings import BOOTSTRAP_MAX, OverlaySettings, check_port_free, free_port, hosts_of, socket_folder
from node.overlay.tunnels import Tunnels
from protos.address import usable
from protos.clocks import RETRY_SECONDS_MIN, Waits
from protos.errors import NetworkError, SwarmentumError


class Tasks:
    """One host's. `log` takes a failure with its traceback: a failure is a mistake of this program."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Cancel every task, and wait for it."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("the overlay failed", exc_info=error)


# A peer behind a router tries BOOTSTRAP_TRIES times to reach its first relay, about 20 s, before it gives up.
BOOTSTRAP_TRIES = 8
CHANGE_SECONDS_MAX = 60.0
# A daemon that ends sooner is started again later and later: up to RESTART_SECONDS_MAX.
STEADY_SECONDS = 60.0
RESTART_SECONDS_MAX = 30.0
# A daemon is asked so often, and may take so long to answer: far longer than on a busy machine.
ASKED_EVERY_SECONDS = 30.0
STANDING_SECONDS = 60.0
FAILURES = (P2PDaemonError, OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, TimeoutError)
"""Exceptions of a call to p2pd that has failed, or that did not end in time."""

Ready = Callable[[], Awaitable[None]]


class Daemon:
    """One peer's p2pd, over all its starts. `restarts` counts the starts after it had died."""

    def __init__(self, peer_id: str, identity_path: Path, settings: OverlaySettings, tasks: Tasks, log: Any) -> None:
        self._peer_id, self._path, self._settings = peer_id, identity_path, settings
        self._tasks, self._log = tasks, log
        self._p2p: Process | None = None
        self._folder: Path | None = None
        self._seen: set[str] = set()
        self._closing = False
        self._restart_waits = Waits(RETRY_SECONDS_MIN, RESTART_SECONDS_MAX)
        self._changed: asyncio.Event | None = None
        self._changing = asyncio.Lock()
        self.figures_port: int | None = None
        """Of the loopback address, where the present p2pd tells its figures; None if it does not relay for others."""
        self.tunnels = Tunnels(log)
        self.named: tuple[str, ...] = ()
        """Multiaddresses of peers that the invite, the coordinator or a person named at the start."""
        self.restarts = 0

    @property
    def settings(self) -> OverlaySettings:
        """Those of the present start: this peer may have found out that it needs relays."""
        return self._settings

    @property
    def p2p(self) -> Process:
        """The live daemon's handle."""
        assert self._p2p is not None, "the host is not started"
        return self._p2p

    async def open(
        self, request: p2pd_pb2.Request
    ) -> tuple[p2pd_pb2.Response, asyncio.StreamReader, asyncio.StreamWriter]:
        """p2pd's answer, on a connection of its own that the caller closes. hivemind's calls leave theirs open if their wait is
        cancelled."""
        reader, writer = await DaemonConnector(self.p2p.daemon_listen_maddr).open_connection()
        try:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
        except BaseException:
            writer.close()
            raise
        return response, reader, writer

    async def ask(self, kind: int, seconds_max: float, **parts: Any) -> p2pd_pb2.Response:
        """p2pd's whole answer. Raises one of FAILURES."""
        async with asyncio.timeout(seconds_max):
            response, _, writer = await self.open(p2pd_pb2.Request(type=kind, **parts))
        writer.close()
        raise_if_failed(response)
        return response

    async def start(self, bootstrap: tuple[str, ...], ready: Ready, restarted: Ready) -> None:
        """Start p2pd and connect to the bootstrap peers that answer. Raises NetworkError or OperatorError.

        `bootstrap` comes from other peers. p2pd ends over text that is not an address, so such text is left out. `ready` runs
        after each start, `restarted` after each start but the first.
        """
        host, port = self._settings.listen_host, self._settings.listen_port
        check_port_free(host, port, quic=self._settings.quic)
        self._settings = replace(self._settings, listen_port=port or free_port(host))
        told = [address.text for address in usable(bootstrap, most=BOOTSTRAP_MAX)]
        if len(told) < len(set(bootstrap)):
            self._log.warning(
                "left out bootstrap addresses that are not multiaddresses", count=len(set(bootstrap)) - len(told)
            )
        known = dict.fromkeys([*self._settings.bootstrap, *told])
        self.named = tuple(known)
        await self._launch([address for address in known if not address.endswith(self._peer_id)], ready, restarted)

    async def _launch(self, initial: list[str], ready: Ready, restarted: Ready) -> None:
        private = self._settings.reachability == "private"
        if self._settings.reachability == "public" and self._settings.relay_for_others:
            # With one Go thread p2pd keeps its large relay limit in every run. With more threads it often falls back to 128 KiB
            # a circuit (docs/overlay.md). p2pd inherits this process's environment.
            os.environ.setdefault("GOMAXPROCS", "1")
        initial = list(dict.fromkeys([*initial, *self._settings.relays]))
        dialled = dict(zip(initial, await self.tunnels.ways(initial), strict=True))
        options: dict[str, Any] = {
            "host_maddrs": self._settings.listen(hosts_of(self._settings.listen_host)),
            "announce_maddrs": list(self._settings.announce) or None,
            "identity_path": str(self._path),
            "check_if_identity_free": False,  # hivemind's check reads RSA keys only
            "nat_port_map": not self._settings.loopback,
            "use_auto_relay": bool(self._settings.relays),
            "trusted_relays": [dialled[relay] for relay in self._settings.relays] or None,
            "force_reachability": None if self._settings.reachability == "auto" else self._settings.reachability,
        }
        try:
            # A dial can fail once for a lost packet or a busy relay, and a private peer cannot be reached without a relay.
            self._p2p = await self._process(options, list(dialled.values()), BOOTSTRAP_TRIES if private else 1)
        except NetworkError:
            if not initial or private:
                raise
            # Every bootstrap peer is dead: start alone. Peers that come later find this one through the coordinator.
            self._log.warning("no bootstrap peer answers; starting without one", bootstrap=initial)
            self._p2p = await self._process(options)
        try:
            await ready()
        except BaseException:
            await self._p2p.shutdown()  # a next start needs its port
            raise
        self._tasks.spawn(self._watch(self._p2p, initial, ready, restarted))

    async def _process(self, options: dict[str, Any], initial: Sequence[str] = (), tries: int = 1) -> Process:
        """A running p2pd that is connected to one of `initial`. Raises NetworkError after so many tries."""
        waits = Waits()
        for left in reversed(range(tries)):
            try:
                flags = self._relaying()
                prefix = environment(memory_bytes_max())
                return await Process.started(
                    *flags, folder=self._sockets(), prefix=prefix, initial_peers=list(initial) or None, **options
                )
            except P2PDaemonError as error:
                if not left:
                    raise NetworkError(f"the libp2p daemon did not start: {error}") from error
                self._log.info("the libp2p daemon did not start; trying again", tries_left=left, error=str(error))
            await asyncio.sleep(waits.next())
        raise AssertionError("no try was allowed")

    def _sockets(self) -> Path:
        """The folder of this daemon's sockets; another one if somebody has deleted it, or its disk takes none any more."""
        if self._folder is None or not os.access(self._folder, os.W_OK | os.X_OK):
            self._folder = socket_folder(self._path.absolute().parent)
        return self._folder

    def _cut_off(self) -> bool:
        """Whether a socket of the present p2pd is gone, though it works on: something cleans up among temporary files."""
        try:
            names = {path.name for path in self._folder.iterdir()} if self._folder else set()
        except OSError:
            names = set()
        gone = self._seen - names
        self._seen |= names
        if not gone or self._closing or self._changed is not None:
            return False
        self._log.warning("the sockets of the libp2p daemon were deleted; ending it", folder=str(self._folder))
        return True

    def _relaying(self) -> tuple[str, ...]:
        """The flags of a p2pd that relays for others, or not."""
        self.figures_port = free_port("127.0.0.1") if self._settings.relay_for_others else None
        return ("-relayService=0",) if self.figures_port is None else (f"-metricsAddr=127.0.0.1:{self.figures_port}",)

    async def _watch(self, p2p: Process, initial: list[str], ready: Ready, restarted: Ready) -> None:
        """Wait for the end of this p2pd, and start the next, for ever; hivemind's own handle stays "alive"."""
        began = time.monotonic()
        self._seen = set()
        self._cut_off()  # sees the sockets
        asked = asyncio.ensure_future(self._ask_now_and_then(p2p))
        try:
            await bounded(p2p._child, self._log, self._cut_off)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        if self._closing or p2p is not self._p2p:
            return
        delay = 0.0
        if self._changed is None:
            self.restarts += 1
            steady = time.monotonic() - began >= STEADY_SECONDS
            if steady:
                self._restart_waits.reset()
            delay = 0.0 if steady else self._restart_waits.next()
            facts = {"restarts": self.restarts, "seconds": round(delay, 3), "why": await p2p.end()}
            self._log.warning("the libp2p daemon died; starting it again", **facts)
        with suppress(*FAILURES):
            await p2p.shutdown()  # closes the files of the dead daemon
        if self._changed is None:
            await asyncio.sleep(delay)
        waits = Waits()
        while not self._closing:
            try:
                await self._launch(initial, ready, restarted)
            except (SwarmentumError, *FAILURES) as error:
                self._log.warning("the libp2p daemon does not start", error=str(error))
                await asyncio.sleep(waits.next())
                continue
            await restarted()
            if self._changed is not None:
                self._changed.set()
            return

    async def _ask_now_and_then(self, p2p: Process) -> None:
        """Kill this p2pd once it stands still: it holds the port, and nobody reaches this peer."""
        while True:
            await asyncio.sleep(ASKED_EVERY_SECONDS)
            try:
                await self.ask(p2pd_pb2.Request.IDENTIFY, STANDING_SECONDS)
            except TimeoutError:
                seconds = round(STANDING_SECONDS)
                self._log.warning("the libp2p daemon stands still; ending it", seconds=seconds)
                p2p.kill()
                return
            except FAILURES:
                continue  # it ended

    def prefer(self, **settings: Any) -> None:
        """Start p2pd with these settings the next time that it starts."""
        self._settings = replace(self._settings, **settings)

    async def change(self, **settings: Any) -> None:
        """Start p2pd again with other settings (fields of `OverlaySettings`); all connections end. NetworkError if the new p2pd
        is not there after CHANGE_SECONDS_MAX; this peer goes on trying."""
        async with self._changing:  # the finder of relays and the owner's limit both change settings
            self._settings = replace(self._settings, **settings)
            self._changed = asyncio.Event()
            try:
                with suppress(ProcessLookupError):
                    self.p2p._child.terminate()
                async with asyncio.timeout(CHANGE_SECONDS_MAX):
                    await self._changed.wait()
            except TimeoutError:
                raise NetworkError(
                    "the libp2p daemon did not start again with its new settings; still trying"
                ) from None
            finally:
                self._changed = None

    @property
    def changes(self) -> bool:
        """Whether p2pd starts again because this peer wants it, after its connections were ended."""
        return self._changed is not None

    def closing(self) -> None:
        """From now on the daemon's end is wanted: this peer does not start it again."""
        self._closing = True

    async def stop(self) -> None:
        """Stop p2pd."""
        if self._p2p is not None:
            await self._p2p.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        await self.tunnels.close()
