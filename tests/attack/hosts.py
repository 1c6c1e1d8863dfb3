"""Strangers on the overlay: hosts with identities that were made a moment ago."""

import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from node.overlay.host import Host
from node.overlay.settings import OverlaySettings
from protos.identity import Identity


@asynccontextmanager
async def strangers(count: int, addresses: Iterable[str]) -> AsyncIterator[list[Host]]:
    """So many, each connected to the peers at these addresses."""
    hosts: list[Host] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(count):
                path = Path(folder) / f"{number}.key"
                hosts.append(Host(Identity.load_or_create(path), path, OverlaySettings("127.0.0.1")))
                await hosts[-1].start(tuple(addresses))
            yield hosts
        finally:
            for host in hosts:
                await host.stop()
