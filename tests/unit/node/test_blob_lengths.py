"""Blobs whose length somebody lies about: honest holders' bytes get through, over plain TCP streams on loopback."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from node.swarm import blobs, settings
from node.swarm.blobs import BlobFetcher, BlobServer, WireBytes
from node.swarm.blobs import _read_frame as read_frame
from node.swarm.blobs import _write_frame as write_frame
from protos.errors import NetworkError, Refusal
from protos.identity import Identity
from protos.v1 import update_pb2

BLOB = bytes(range(256)) * 4
SHA256 = hashlib.sha256(BLOB).digest()
MANY = 5 * len(BLOB)
ME, LIAR, ONE, OTHER = (Identity.from_seed(bytes([n]) * 32).public_key for n in range(1, 5))
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def honest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    server = BlobServer({SHA256: BLOB}.get, WireBytes(), [].append)
    await server.handle("somebody", reader, writer)


def liar(total: int, sent: int) -> Handler:
    """Offers `total` bytes, sends some junk, and hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = update_pb2.BlobRequest.FromString(await read_frame(reader))
        response = update_pb2.BlobResponse(found=True, total_bytes=total, remaining_bytes=total - request.offset)
        await write_frame(writer, response.SerializeToString())
        writer.write(b"j" * sent)
        await writer.drain()

    return handle


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


@pytest.mark.parametrize("named", [1, len(BLOB) - 1, len(BLOB), len(BLOB) + 1, MANY])
@pytest.mark.parametrize("sent", [0, 1, len(BLOB), len(BLOB) + 1])
async def test_who_begins_with_another_length_keeps_nobody_from_the_honest(named: int, sent: int) -> None:
    async with fetching({LIAR: liar(MANY, sent), ONE: honest, OTHER: honest}) as fetcher:
        for _ in range(2):
            assert await fetcher.fetch(SHA256, named, [LIAR, ONE, OTHER], MANY) == BLOB


@pytest.mark.parametrize("named", [len(BLOB) - 1, len(BLOB) + 1])
async def test_without_a_limit_only_the_named_length_is_taken(named: int) -> None:
    async with fetching({ONE: honest}) as fetcher:
        with pytest.raises(NetworkError, match=f"offers {len(BLOB)} bytes, expected {named}"):
            await fetcher.fetch(SHA256, named, [ONE])
        with pytest.raises(NetworkError, match="offers"):
            await fetcher.fetch(SHA256, 1, [ONE], len(BLOB) - 1)


async def test_holders_that_contradict_each_other_come_to_an_end() -> None:
    liars: Sequence[int] = (MANY, MANY - 1, MANY - 2)
    holders = {key: liar(total, 10) for key, total in zip((LIAR, ONE, OTHER), liars, strict=True)}
    async with fetching(holders) as fetcher, asyncio.timeout(20):
        with pytest.raises(NetworkError, match="no holder gave blob"):
            await fetcher.fetch(SHA256, len(BLOB), list(holders), MANY)


async def test_a_slow_holder_has_the_time_for_what_it_offers_and_not_for_what_was_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "IMPATIENT_SECONDS", 0.5)
    monkeypatch.setattr(settings, "IMPATIENT_BYTES_A_SECOND", len(BLOB) / 5)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = update_pb2.BlobRequest.FromString(await read_frame(reader))
        rest = BLOB[request.offset :]
        response = update_pb2.BlobResponse(found=True, total_bytes=len(BLOB), remaining_bytes=len(rest))
        await write_frame(writer, response.SerializeToString())
        for start in range(0, len(rest), 100):
            writer.write(rest[start : start + 100])
            await writer.drain()
            await asyncio.sleep(0.1)

    assert blobs.limits is settings
    async with fetching({ONE: slow, OTHER: liar(MANY, 0)}) as fetcher:
        assert await fetcher.fetch(SHA256, 1, [ONE, OTHER], MANY) == BLOB
