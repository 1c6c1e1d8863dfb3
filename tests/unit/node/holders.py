"""Holders of a blob, good and bad, behind plain TCP streams on loopback; and a fetcher that asks them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

from node.blobs.blobs import BlobServer, WireBytes, read_frame, write_frame
from node.blobs.fetcher import BlobFetcher
from protos.errors import Refusal
from protos.identity import Identity
from protos.v1 import update_pb2

BLOB = bytes(range(256)) * 4
SHA256 = hashlib.sha256(BLOB).digest()
MANY = 5 * len(BLOB)
ME, LIAR, ONE, OTHER = (Identity.from_seed(bytes([n]) * 32).public_key for n in range(1, 5))
LAST_TURNS = 5
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def honest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    server = BlobServer({SHA256: BLOB}.get, WireBytes(), [].append)
    await server.handle("somebody", reader, writer)


async def offered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, after: float = 0.0) -> bytes:
    """Read a request and say, so many seconds later, that the blob is here; returns what is to be sent of it."""
    request = update_pb2.BlobRequest.FromString(await read_frame(reader))
    await asyncio.sleep(after)
    rest = BLOB[request.offset :]
    response = update_pb2.BlobResponse(found=True, total_bytes=len(BLOB), remaining_bytes=len(rest))
    await write_frame(writer, response.SerializeToString())
    return rest


async def send_slowly(
    writer: asyncio.StreamWriter, rest: bytes, piece: int, pause: float, sent: Callable[[int], None] = lambda size: None
) -> None:
    """So many bytes at a time, with a pause after each; `sent` is told."""
    for start in range(0, len(rest), piece):
        writer.write(rest[start : start + piece])
        await writer.drain()
        sent(piece)
        await asyncio.sleep(pause)


@asynccontextmanager
async def fetching(
    holders: dict[bytes, Handler], refused: Callable[[Refusal], None] = lambda refusal: None
) -> AsyncIterator[BlobFetcher]:
    running: set[asyncio.Task[Any]] = set()
    writers: set[asyncio.StreamWriter] = set()

    def closing(handle: Handler) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        async def whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, asyncio.IncompleteReadError):  # the fetcher hung up
                await handle(reader, writer)

        def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(whole(reader, writer))
            writers.add(writer)
            running.add(task)  # at once: a task that is cancelled before its first turn closes nothing itself
            task.add_done_callback(lambda _: writer.close())

        return met

    servers = {key: await asyncio.start_server(closing(handle), "127.0.0.1", 0) for key, handle in holders.items()}

    async def dial(holder: bytes, _: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", servers[holder].sockets[0].getsockname()[1])

    host: Any = SimpleNamespace(identity=SimpleNamespace(public_key=ME), open=dial, relayed=frozenset())
    fetcher = BlobFetcher(host, WireBytes(), refused)
    try:
        yield fetcher
    finally:
        fetcher.close()
        for server in servers.values():
            server.close()
        for _ in range(LAST_TURNS):  # a connection that was accepted is met in one of the next turns of the loop
            await asyncio.sleep(0)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()  # one with bytes that nobody takes any more would stay open past the loop's end
        await asyncio.sleep(0)  # transports close in the loop's next turn
