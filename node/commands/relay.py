"""`swarmentum relay`: a public bootstrap and relay peer. The relay trains nothing, reads nothing, and needs no GPU.

Peers find each other through its DHT, and reach peers behind routers through its circuits.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import structlog

from node.blobs import testbytes
from node.blobs.blobs import WireBytes
from node.overlay.dht import Discovery
from node.overlay.host import Host
from node.overlay.settings import OverlaySettings
from protos.console import lock_home
from protos.identity import Identity
from protos.process import heeded, let_go, terminals_of_this_process
from protos.text import print_json


@dataclass(frozen=True)
class RelayReady:
    """The output of a relay: the addresses for `overlay.bootstrap`, or the settings `bootstrap` and `reachability`."""

    peer_id: str
    addresses: tuple[str, ...]


async def serve(home: Path, overlay: OverlaySettings, as_json: bool) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP."""
    # With one Go thread p2pd keeps its large relay limit in every run. With more threads it often falls back to 128 KiB a
    # circuit (docs/overlay.md). p2pd inherits this process's environment.
    os.environ.setdefault("GOMAXPROCS", "1")
    with lock_home(home, "relay"):
        stop, terminals = asyncio.Event(), terminals_of_this_process()

        def ask(number: int) -> None:
            if number == signal.SIGHUP:
                let_go(terminals)
            stop.set()

        for number in heeded():
            asyncio.get_running_loop().add_signal_handler(number, ask, number)
        serving, stopped = asyncio.ensure_future(_serve(home, overlay, as_json)), asyncio.ensure_future(stop.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # serving ends only with an error
        for task in (serving, stopped):
            task.cancel()
        await asyncio.gather(serving, stopped, return_exceptions=True)


async def _serve(home: Path, overlay: OverlaySettings, as_json: bool) -> None:
    """Serve until cancelled."""
    path = home / "identity.key"
    identity = Identity.load_or_create(path)
    host = Host(identity, path, overlay)
    discovery = Discovery(host, run_id=None)
    try:
        await host.start()
        await host.serve(testbytes.PROTOCOL, testbytes.Taker(host, WireBytes()).handle)
        await discovery.start(list(overlay.bootstrap))
        ready = RelayReady(identity.peer_id, tuple(await host.addresses()))
        _announce(ready, as_json)
        structlog.get_logger("relay").info(
            "serving", peer=identity.peer_id[-8:], step="-", addresses=len(ready.addresses)
        )
        await asyncio.Event().wait()
    finally:
        await discovery.stop()
        await host.stop()


def _announce(ready: RelayReady, as_json: bool) -> None:
    if as_json:
        print_json({"event": "serving", "peer_id": ready.peer_id, "addresses": ready.addresses})
        return
    print(
        "Relay serves. Peers start from any of these (run.toml: [overlay] bootstrap; swarmentum join --set bootstrap=ADDRESS):"
    )
    for address in ready.addresses:
        print(f"  {address}", flush=True)
