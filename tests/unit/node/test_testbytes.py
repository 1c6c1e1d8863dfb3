"""Test bytes for `swarmentum doctor`: measured between real daemons, and bounded for a taker that owes nobody anything."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from node.blobs import testbytes
from node.blobs.blobs import FlowDirection, WireBytes
from node.blobs.testbytes import BYTES_MAX, CHUNK_BYTES, NO, PROTOCOL, YES, Taker, measure
from node.overlay.host import Host
from tests.unit.node.test_overlay import hosts

BOTH_ENDS = 2


@asynccontextmanager
async def taking(folder: Path, wire: WireBytes, *, willing: bool = True) -> AsyncIterator[tuple[Host, Host]]:
    """The taker, and a host that is connected to it."""
    async with hosts(folder, BOTH_ENDS) as (ada, bob):
        ada._daemon.prefer(relay_for_others=willing)
        await ada.serve(PROTOCOL, Taker(ada, wire).handle)
        async with asyncio.timeout(240):
            while await ada.seen_at(bob.peer_id) is None:
                await asyncio.sleep(0.02)
        yield ada, bob


async def test_the_rate_is_measured_and_a_network_address_is_served_only_now_and_then(tmp_path: Path) -> None:
    wire = WireBytes()
    async with taking(tmp_path, wire) as (ada, bob):
        key = ada.identity.public_key
        found = await measure(bob.open, key)
        assert found.size == BYTES_MAX - CHUNK_BYTES, "the first chunk starts the watch"
        assert 0 < found.seconds < testbytes.TAKE_SECONDS_MAX
        assert wire.received == BYTES_MAX, "the owner's month counts them"
        assert await measure(bob.open, key) is not None
        assert await measure(bob.open, key) is None, "the third within five minutes"
        assert wire.received == 2 * BYTES_MAX


@pytest.mark.parametrize(
    ("wire", "willing"),
    [(WireBytes(), False), (WireBytes(down=FlowDirection(lambda: 1e6)), True)],
    ids=["carries nothing for others", "has a limit"],
)
async def test_an_owner_who_gives_no_bytes_takes_none(tmp_path: Path, wire: WireBytes, willing: bool) -> None:
    async with taking(tmp_path, wire, willing=willing) as (ada, bob):
        assert await measure(bob.open, ada.identity.public_key) is None
        assert await measure(ada.open, bob.identity.public_key) is None, "it does not know the protocol"
        assert wire.received == 0


async def test_a_used_up_month_takes_none(tmp_path: Path) -> None:
    wire = WireBytes()
    wire.down.shut = True
    async with taking(tmp_path, wire) as (ada, bob):
        assert await measure(bob.open, ada.identity.public_key) is None


async def test_a_sender_that_stalls_or_sends_without_end_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = WireBytes()
    async with taking(tmp_path, wire) as (ada, bob):
        key = ada.identity.public_key
        reader, writer = await bob.open(key, PROTOCOL)
        assert await reader.readexactly(1) == YES
        second, other = await bob.open(key, PROTOCOL)
        assert await second.readexactly(1) == NO, "one at a time"
        other.close()
        writer.write(bytes(2 * BYTES_MAX))
        with suppress(OSError):  # the taker closes while bytes are under way
            async with asyncio.timeout(240):
                await reader.read(-1)
        assert wire.received <= BYTES_MAX
        writer.close()
        monkeypatch.setattr(testbytes, "TAKE_SECONDS_MAX", 1.0)
        reader, writer = await bob.open(key, PROTOCOL)
        assert await reader.readexactly(1) == YES
        async with asyncio.timeout(240):
            assert await reader.read() == b"", "a silent sender has a second"
        writer.close()


async def test_a_taker_that_answers_without_end_or_not_at_all_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testbytes, "TAKE_SECONDS_MAX", 1.0)
    monkeypatch.setattr(testbytes, "ANSWER_SECONDS_MAX", 1.0)

    async def liar(remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(YES * 100_000)
        await writer.drain()
        await asyncio.sleep(3)

    async def mute(remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3)

    async with hosts(tmp_path, BOTH_ENDS) as (ada, bob):
        await ada.serve(PROTOCOL, liar)
        async with asyncio.timeout(240):
            found = await measure(bob.open, ada.identity.public_key)
        assert found.size < BYTES_MAX
        await bob.serve(PROTOCOL, mute)
        async with asyncio.timeout(240):
            assert await measure(ada.open, bob.identity.public_key) is None
