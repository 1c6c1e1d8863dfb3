"""Blobs whose length somebody lies about: honest holders' bytes get through, over plain TCP streams on loopback."""

import asyncio
from collections.abc import Sequence

import pytest

from node.blobs import blobs
from node.blobs.blobs import read_frame, write_frame
from protos.errors import NetworkError
from protos.v1 import update_pb2
from tests.unit.node.holders import (
    BLOB,
    LIAR,
    MANY,
    ONE,
    OTHER,
    SHA256,
    Handler,
    fetching,
    honest,
    offered,
    send_slowly,
)


def liar(total: int, sent: int) -> Handler:
    """Offers `total` bytes, sends some junk, and hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = update_pb2.BlobRequest.FromString(await read_frame(reader))
        response = update_pb2.BlobResponse(found=True, total_bytes=total, remaining_bytes=total - request.offset)
        await write_frame(writer, response.SerializeToString())
        writer.write(b"j" * sent)
        await writer.drain()

    return handle


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
    async with fetching(holders) as fetcher, asyncio.timeout(240):
        with pytest.raises(NetworkError, match="no holder gave blob"):
            await fetcher.fetch(SHA256, len(BLOB), list(holders), MANY)


async def test_a_slow_holder_has_the_time_for_what_it_offers_and_not_for_what_was_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blobs, "STREAM_IDLE_SECONDS_MAX", 0.5)
    monkeypatch.setattr(blobs, "PATIENT_BYTES_A_SECOND", len(BLOB) / 5)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send_slowly(writer, await offered(reader, writer), 100, 0.1)

    async with fetching({ONE: slow, OTHER: liar(MANY, 0)}) as fetcher:
        assert await fetcher.fetch(SHA256, 1, [ONE, OTHER], MANY) == BLOB
