"""How much a peer relays: the bucket, what p2pd says, and when it stops and begins again. Virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from node.overlay import daemon
from node.overlay.relays import BUCKET_SECONDS, SILENT_SECONDS, Bucket, Relaying, relayed_bytes
from protos.identity import peer_id
from tests.unit.node.holders import BLOB, LIAR, ONE, OTHER, SHA256, fetching, honest
from tests.unit.node.test_overlay import hosts


@given(st.lists(st.tuples(st.floats(0, 60), st.integers(0, 10_000)), max_size=60))
def test_over_any_time_no_more_than_the_rate_the_bucket_and_one_look(looks: list[tuple[float, int]]) -> None:
    bucket, now, total, last = Bucket(100.0, 0.0), 0.0, 0, 0
    for wait, size in looks:
        now += wait
        last = size if bucket.is_open else 0
        total += last
        bucket.take(last, now)
    assert total <= 100.0 * (now + BUCKET_SECONDS) + 10_000


def test_a_bucket_that_is_empty_opens_when_it_is_full_again() -> None:
    bucket = Bucket(10.0, 0.0)
    assert bucket.take(2999, 0.0)
    assert not bucket.take(1, 0.0)
    assert not bucket.take(0, BUCKET_SECONDS - 1)
    assert bucket.take(0, BUCKET_SECONDS)
    assert not Bucket(0.0, 0.0).take(0, 1.0)


def answering(told: Mapping[int, int | None]) -> Callable[[int], Awaitable[int | None]]:
    async def read(port: int) -> int | None:
        return told[port]

    return read


async def test_a_new_daemon_counts_from_nothing_and_the_limit_changes_while_it_runs() -> None:
    told, turns, at = {1: 0, 2: 0}, [], [1]

    async def turn(on: bool) -> None:
        turns.append(on)

    relaying = Relaying(lambda: at[0], turn, structlog.get_logger(), None, answering(told))
    await relaying.look(0.0)
    told[1] = 5000
    await relaying.look(1.0)
    assert (relaying.total, turns) == (5000, [])
    relaying.limit(10.0)
    told[1] = 9000
    await relaying.look(2.0)
    assert (relaying.total, turns) == (9000, [False])
    at[0], told[2] = 2, 100
    await relaying.look(3.0)
    assert relaying.total == 9100
    relaying.limit(None)
    await relaying.look(4.0)
    assert turns == [False, True]
    relaying.limit(0.0)
    await relaying.look(5.0)
    assert turns == [False, True, False]


async def test_where_bytes_are_bounded_a_silent_daemon_relays_no_more_until_a_new_one_has_a_full_bucket() -> None:
    """p2pd goes on without its figures if another program has taken their port."""
    told: dict[int, int | None] = {1: None, 2: 0}
    turns: list[bool] = []
    at = [1]

    async def turn(on: bool) -> None:
        turns.append(on)
        at[0] = 2

    relaying = Relaying(lambda: at[0], turn, structlog.get_logger(), None, answering(told))
    for now in (0.0, SILENT_SECONDS, 2 * SILENT_SECONDS):
        await relaying.look(now)
    assert turns == []  # without a limit there is none to keep
    relaying.limit(10.0)
    await relaying.look(now := now + 1)
    assert turns == [False]
    await relaying.look(now + BUCKET_SECONDS - 1)
    assert turns == [False]
    await relaying.look(now + BUCKET_SECONDS)
    assert turns == [False, True]


async def test_a_daemon_that_answers_within_the_bound_is_not_silent() -> None:
    answers = iter([0, None, 0, None, 0])
    turns: list[bool] = []

    async def turn(on: bool) -> None:
        turns.append(on)

    async def read(port: int) -> int | None:
        return next(answers)

    relaying = Relaying(lambda: 1, turn, structlog.get_logger(), 10.0, read)
    for look in range(5):
        await relaying.look(look * (SILENT_SECONDS - 1))
    assert turns == []


async def test_a_program_that_never_ends_its_answer_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.overlay.relays.ANSWER_SECONDS_MAX", 0.3)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            while True:
                writer.write(b"libp2p_relaysvc_data_transferred_bytes_total 0\n")
                await writer.drain()
                await asyncio.sleep(0.1)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server, asyncio.timeout(240):
        assert await relayed_bytes(server.sockets[0].getsockname()[1]) is None


async def test_a_real_daemon_whose_port_another_program_has_ends_its_relaying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        monkeypatch.setattr(daemon, "free_port", lambda host: server.sockets[0].getsockname()[1])
        async with hosts(tmp_path, 1) as (ada,):
            ada._daemon.prefer(reachability="public")
            before = ada.p2p._child.pid
            ada.relaying.limit(1000.0)
            await ada.relaying.look(0.0)
            await ada.relaying.look(SILENT_SECONDS)
            assert not ada.finder.relays_for_others
            assert ada.p2p._child.pid != before
            assert b"-relayService=0" in Path(f"/proc/{ada.p2p._child.pid}/cmdline").read_bytes()


async def first_figures(port: int) -> int | None:
    """p2pd says that it is ready, and opens the port of its figures then."""
    for _ in range(200):
        if (told := await relayed_bytes(port)) is not None:
            return told
        await asyncio.sleep(0.1)
    return None


async def test_a_real_daemon_tells_what_it_relays(tmp_path: Path) -> None:
    async with hosts(tmp_path, 1) as (ada,):
        port = ada._daemon.figures_port
        assert port is not None
        assert await first_figures(port) == 0
        ada._daemon.prefer(reachability="public")
        assert ada.finder.relays_for_others
        before = ada.p2p._child.pid
        await ada._relay(False)
        assert ada._daemon.figures_port is None
        assert not ada.finder.relays_for_others
        assert ada.p2p._child.pid != before
        assert ada.restarts == 0


@pytest.mark.parametrize("relayed", [ONE, OTHER])
async def test_a_holder_that_can_be_dialled_is_asked_before_one_behind_a_relay(relayed: bytes) -> None:
    async with fetching(dict.fromkeys((ONE, OTHER), honest)) as fetcher:
        fetcher._host.relayed = frozenset({peer_id(relayed)})
        assert await fetcher.fetch(SHA256, len(BLOB), [ONE, OTHER]) == BLOB
        direct = OTHER if relayed == ONE else ONE
        assert fetcher._in_order([ONE, OTHER]) == [direct, relayed]
        fetcher._away[direct] = float("inf")
        assert fetcher._in_order([ONE, OTHER, LIAR]) == [LIAR, relayed, direct]
