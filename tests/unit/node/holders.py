"""Holders of a blob, good and bad, behind plain TCP streams on loopback; and a fetcher that asks them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from node.swarm.blobs import BlobServer, WireBytes
from node.swarm.fetcher import BlobFetcher
from protos.errors import Refusal
from protos.identity import Identity

BLOB = bytes(range(256)) * 4
SHA256 = hashlib.sha256(BLOB).digest()
MANY = 5 * len(BLOB)
ME, LIAR, ONE, OTHER = (Identity.from_seed(bytes([n]) * 32).public_key for n in range(1, 5))
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def honest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    server = BlobServer({SHA256: BLOB}.get, WireBytes(), [].append)
    await server.handle("somebody", reader, writer)


@asynccontextmanager
async def fetching(holders: dict[bytes, Handler]) -> AsyncIterator[BlobFetcher]:
    running: set[asyncio.Task[Any]] = set()

    def closing(handle: Handler) -> Handler:
        async def whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            running.add(task)
            try:
                await handle(reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                pass  # the fetcher hung up
            finally:
                writer.close()

        return whole

    servers = {key: await asyncio.start_server(closing(handle), "127.0.0.1", 0) for key, handle in holders.items()}

    async def dial(holder: bytes, _: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", servers[holder].sockets[0].getsockname()[1])

    host: Any = SimpleNamespace(identity=SimpleNamespace(public_key=ME), open=dial)
    refused: list[Refusal] = []
    fetcher = BlobFetcher(host, WireBytes(), refused.append)
    try:
        yield fetcher
    finally:
        fetcher.close()
        for server in servers.values():
            server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the loop's next turn
