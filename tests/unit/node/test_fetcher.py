"""Who holds a blob and does not send it keeps nobody from it: silent holders, slow ones, and those who get it meanwhile."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.blobs import blobs
from node.blobs import fetcher as fetcher_module
from node.blobs import turns as turns_module
from node.blobs.blobs import TIMES_KEPT, BlobServer, HolderStreams, Times, WireBytes, read_frame, write_frame
from node.blobs.fetcher import Asking, Said
from node.blobs.turns import Attempt, Turns
from protos.errors import NetworkError, Reason, Refusal
from protos.identity import Identity, peer_id
from protos.v1 import update_pb2
from tests.unit.node.holders import BLOB, LIAR, ONE, OTHER, SHA256, Handler, fetching, honest, offered, send_slowly
from tests.waiting import until

SILENT = [Identity.from_seed(bytes([n]) * 32).public_key for n in range(20, 30)]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent holders are waited for longer than a test is: a fetch that comes to its end has not waited for them."""
    monkeypatch.setattr(blobs, "STREAM_IDLE_SECONDS_MAX", 480.0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are asked soon; who is asked alone has all the time that it has outside of tests."""
    monkeypatch.setattr(turns_module, "HEDGE_SECONDS", 0.05)
    monkeypatch.setattr(turns_module, "LACKING_SECONDS", 0.05)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As somebody who was killed, on a connection that does not know it."""
    await reader.read()


def pulling(holds: Callable[[], bool], asked: list[int]) -> Handler:
    """Holds the blob from some time on."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def look(sha256: bytes) -> bytes | None:
            asked.append(1)
            return BLOB if holds() else None

        await BlobServer(look, WireBytes(), [].append).handle("somebody", reader, writer)

    return handle


def begins(junk: bytes | None, sent: int) -> Handler:
    """Offers the blob, sends so much of it, or of junk, and hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = await offered(reader, writer)
        writer.write((rest if junk is None else junk)[:sent])
        await writer.drain()

    return handle


async def test_a_broken_transfer_resumes_from_another_holder() -> None:
    served = WireBytes()

    async def serves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await BlobServer({SHA256: BLOB}.get, served, [].append).handle("somebody", reader, writer)

    async with fetching({LIAR: begins(None, 300), ONE: serves}) as fetcher:
        assert await fetcher.fetch(SHA256, len(BLOB), [LIAR, ONE]) == BLOB
        assert fetcher._wire.blob_received == len(BLOB), "bytes that had arrived were fetched again"
    assert served.blob_sent == len(BLOB) - 300


@pytest.mark.parametrize(("sent", "reasons"), [(len(BLOB), [Reason.HASH_MISMATCH]), (100, [])])
async def test_a_poisoned_blob_is_found_by_its_hash_and_the_honest_is_not_blamed(
    sent: int, reasons: list[Reason]
) -> None:
    """Nor is anybody, where the liar only began it: nobody knows whose bytes are wrong."""
    refused: list[Refusal] = []
    async with fetching({LIAR: begins(bytes(len(BLOB)), sent), ONE: honest}, refused.append) as fetcher:
        assert await fetcher.fetch(SHA256, len(BLOB), [LIAR, ONE]) == BLOB
    assert [refusal.reason for refusal in refused] == reasons
    assert all(peer_id(LIAR)[-8:] in refusal.detail for refusal in refused)


async def test_a_holder_that_trickles_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then breaks no idle limit: another holder is asked soon, and who is alone has to have a pace, too."""
    monkeypatch.setattr(turns_module, "IMPATIENT_BYTES_A_SECOND", 1e12)
    refused: list[Refusal] = []
    async with fetching({LIAR: trickling, ONE: honest}, refused.append) as fetcher:
        assert await fetcher.fetch(SHA256, len(BLOB), [LIAR, ONE]) == BLOB
        assert fetcher._wire.blob_received > len(BLOB), "the slow holder was not asked"
        assert refused == []
        monkeypatch.setattr(blobs, "STREAM_IDLE_SECONDS_MAX", 0.5)
        monkeypatch.setattr(blobs, "PATIENT_BYTES_A_SECOND", 1e12)
        with pytest.raises(NetworkError, match="no holder gave blob"):
            await fetcher.fetch(SHA256, len(BLOB), [LIAR])


@pytest.mark.usefixtures("hasty")
async def test_a_dead_author_does_not_keep_us_from_those_who_got_the_blob_meanwhile() -> None:
    """Announced by its author to all at once: nobody else holds it yet; then the author is killed."""
    asked: list[int] = []
    holders = {LIAR: silent, ONE: pulling(lambda: len(asked) > 3, asked), OTHER: pulling(lambda: False, [])}
    async with fetching(holders) as fetcher, asyncio.timeout(blobs.STREAM_IDLE_SECONDS_MAX / 2):
        assert await fetcher.fetch(SHA256, len(BLOB), [LIAR, ONE, OTHER]) == BLOB
        assert len(asked) == 4
        assert fetcher.streams.kept.keys() == {ONE, OTHER}, "what may be a dead connection is used again"


@pytest.mark.usefixtures("hasty")
async def test_a_holder_whose_connection_broke_is_asked_again_while_another_is_silent() -> None:
    """It started p2pd again, as a peer does once it is a relay; the author could not be dialled for ten seconds."""
    asked: list[int] = []

    async def breaks_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(1)
        if len(asked) > 2:
            await honest(reader, writer)

    async with (
        fetching({LIAR: silent, ONE: breaks_twice}) as fetcher,
        asyncio.timeout(blobs.STREAM_IDLE_SECONDS_MAX / 2),
    ):
        assert await fetcher.fetch(SHA256, len(BLOB), [LIAR, ONE]) == BLOB
    assert len(asked) == 3


async def test_a_transfer_that_ends_after_the_close_leaves_no_stream_open() -> None:
    async def dial(holder: bytes, _: str) -> tuple[asyncio.StreamReader, mock.Mock]:
        return asyncio.StreamReader(), mock.Mock()

    host: Any = SimpleNamespace(open=dial)
    streams = HolderStreams(host)
    kept, late = await streams.acquire(ONE), await streams.acquire(ONE)
    streams.keep(kept)
    streams.close()
    streams.keep(late)
    streams.keep(again := await streams.acquire(ONE))
    closed = [bool(it.writer.close.called) for it in (kept, late, again)]  # type: ignore[attr-defined]
    assert closed == [True, True, False], "after a new start of p2pd streams are kept, as before"


async def test_what_most_hold_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the log accepts the payload of an author that was killed: whoever was silent, or lacked it, in an announced pull."""
    monkeypatch.setattr(turns_module, "HASTE_SECONDS", 0.01)
    for name in ("HEDGE_SECONDS", "LACKING_SECONDS"):
        monkeypatch.setattr(turns_module, name, 1000.0)
    heard, haste = asyncio.Event(), asyncio.Event()

    asked: list[int] = []

    async def dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        heard.set()
        await reader.read()

    async with (
        fetching({LIAR: dead, ONE: pulling(haste.is_set, asked), OTHER: honest}) as fetcher,
        asyncio.timeout(240),
    ):
        for holders in ([ONE, LIAR], [LIAR, OTHER]):
            heard.clear()
            waiting = [asyncio.create_task(fetcher.fetch(SHA256, len(BLOB), holders))]
            await heard.wait()
            assert asked
            haste.set()
            waiting.append(asyncio.create_task(fetcher.fetch(SHA256, len(BLOB), holders, hasty=True)))
            assert await asyncio.gather(*waiting) == [BLOB, BLOB]
        assert await fetcher.fetch(SHA256, len(BLOB), [LIAR, ONE], hasty=True) == BLOB, "from its beginning on"


def test_haste_brings_company_and_cuts_nobody_off() -> None:
    """A holder far away is not stopped for an answer that takes longer than that."""
    turns, running, now = Turns(SILENT, lambda: 1.0), list[Attempt](), 0.0
    turns.hasten(now)
    while len(running) < turns_module.ATTEMPTS_MAX:
        holder = turns.next(now, running)
        assert holder is not None
        running.append(Attempt(holder, 1000, now))
        assert turns.next(now, running) is None
        assert turns.gives_way(now, running) is None
        wakes_at = turns.wakes_at(running)
        assert wakes_at is not None
        now = wakes_at
    patience = turns_module.HASTE_SECONDS + 1000 / turns_module.IMPATIENT_BYTES_A_SECOND
    assert [attempt.began_at for attempt in running] == pytest.approx([patience * n for n in range(len(running))])
    assert now == running[-1].silent_at
    assert turns.gives_way(now, running) is running[0]


def test_haste_leaves_who_needs_longer_alone() -> None:
    """More bytes, which our own link may hold up between two that come; and a holder that is as slow to answer as usual."""
    for attempt in (Attempt(LIAR, 40_000, 0.0), Attempt(LIAR, 1000, 0.0, usual_seconds=0.4)):
        turns = Turns([ONE], lambda: 1.0)
        turns.hasten(0.0)
        assert turns.next(0.75, [attempt]) is None
        assert turns.wakes_at([attempt]) == attempt.quiet_at < attempt.silent_at
        assert turns.next(attempt.quiet_at, [attempt]) == ONE


async def test_who_is_far_away_is_raced_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loser of a race costs a stream, and p2pd opens only so many: how long it was waited for is remembered."""
    monkeypatch.setattr(turns_module, "HASTE_SECONDS", 0.01)
    monkeypatch.setattr(turns_module, "HEDGE_SECONDS", 1000.0)
    hold, usual = asyncio.Event(), list[float]()
    ask = Asking.ask

    async def asking(self: Asking, attempt: Attempt) -> Said:
        if attempt.holder == LIAR:
            usual.append(self.streams.answering.usual(LIAR))
        return await ask(self, attempt)

    async def far(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        await honest(reader, writer)

    monkeypatch.setattr(Asking, "ask", asking)
    async with fetching({LIAR: far, OTHER: honest}) as fetcher, asyncio.timeout(240):
        for _ in range(2):
            assert await fetcher.fetch(SHA256, len(BLOB), [LIAR, OTHER], hasty=True) == BLOB
        hold.set()
        assert await fetcher.fetch(SHA256, len(BLOB), [LIAR], hasty=True) == BLOB
    assert usual[0] == 0.0
    assert usual[2] >= 2 * usual[1] >= 0.02, "it is waited for twice as long each time"


def test_what_was_not_waited_for_to_the_end_does_not_make_a_holder_quick() -> None:
    times = Times()
    times.note(LIAR, 0.4)
    times.note_longer(LIAR, 0.001)
    assert times.usual(LIAR) == 0.4
    times.note_longer(LIAR, 0.8)
    assert times.usual(LIAR) == 0.8
    times.note(LIAR, 0.1)
    assert times.usual(LIAR) == 0.1
    for number in range(TIMES_KEPT):
        times.note(number.to_bytes(32, "big"), 1.0)
    assert times.usual(LIAR) == 0.0


def test_haste_grants_one_more_round_to_those_who_lacked_it() -> None:
    turns, attempt, now, asked = Turns([], lambda: 1.0), Attempt(LIAR, 1000, 0.0), 0.0, 0
    turns.lacks(ONE, now)
    while (wakes_at := turns.wakes_at([attempt])) is not None:
        now = max(now, wakes_at)
        assert turns.next(now, [attempt]) == ONE
        turns.lacks(ONE, now)
        asked += 1
    assert asked == turns_module.LACKING_ROUNDS_MAX
    turns.hasten(now)
    assert turns.next(now, [attempt]) == ONE
    turns.lacks(ONE, now)
    assert turns.wakes_at([attempt]) is None


@pytest.mark.usefixtures("hasty")
async def test_those_who_lack_the_blob_are_asked_again_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: one silent author must not have everybody ask everybody."""
    monkeypatch.setattr(blobs, "STREAM_IDLE_SECONDS_MAX", 1.0)
    monkeypatch.setattr(turns_module, "LACKING_SECONDS", 0.001)
    asked: list[int] = []
    lacking = {key: pulling(lambda: False, asked) for key in SILENT}
    async with fetching({LIAR: silent, **lacking}) as fetcher:
        with pytest.raises(NetworkError, match="does not hold it"):
            await fetcher.fetch(SHA256, len(BLOB), [LIAR, *lacking])
    assert len(asked) == len(SILENT) + turns_module.LACKING_ROUND_MAX * turns_module.LACKING_ROUNDS_MAX


@pytest.mark.usefixtures("hasty")
async def test_a_slow_start_is_waited_for_and_not_begun_anew() -> None:
    """A holder behind a full uplink: the others lack the blob, and it sends it once."""
    asked: list[int] = []
    heard = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(1)
        await asyncio.wait_for(heard.wait(), 240)
        writer.write(await offered(reader, writer))
        await writer.drain()
        await reader.read()

    def lacks() -> bool:
        heard.set()
        return False

    async with fetching({LIAR: late, ONE: pulling(lacks, [])}) as fetcher:
        assert await fetcher.fetch(SHA256, len(BLOB), [LIAR, ONE]) == BLOB
        assert fetcher._in_order([LIAR, ONE]) == [LIAR, ONE], "who answers is not away"
    assert asked == [1]


async def test_no_byte_is_asked_of_two_that_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own link may be what is slow: then all holders are, and more of them at once make it worse."""
    monkeypatch.setattr(turns_module, "IMPATIENT_SECONDS", 0.1)
    monkeypatch.setattr(turns_module, "IMPATIENT_BYTES_A_SECOND", 1e12)
    sent: list[int] = []

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send_slowly(writer, await offered(reader, writer), 16, 0.02, sent.append)

    holders = [LIAR, ONE, OTHER]
    async with fetching(dict.fromkeys(holders, slow)) as fetcher:
        assert await fetcher.fetch(SHA256, len(BLOB), holders) == BLOB
        assert fetcher._wire.blob_received == len(BLOB)
        assert fetcher._in_order(holders) == holders
    assert sum(sent) <= len(BLOB) + 64 * len(holders)


@pytest.mark.usefixtures("hasty")
async def test_of_two_that_begin_to_send_one_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """An author that was silent sends after all, when others have got the blob meanwhile; our link makes all of them slow."""
    monkeypatch.setattr(turns_module, "IMPATIENT_SECONDS", 0.3)
    monkeypatch.setattr(turns_module, "IMPATIENT_BYTES_A_SECOND", 1e12)
    lacked = 0

    def slow(speaks: Callable[[], bool], has: Callable[[], bool]) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal lacked
            await until(speaks)
            while not has():
                await read_frame(reader)
                lacked += 1
                await write_frame(writer, update_pb2.BlobResponse(found=False).SerializeToString())
            await send_slowly(writer, await offered(reader, writer), 16, 0.02)

        return handle

    meanwhile = slow(lambda: True, lambda: lacked >= 2)
    holders = {LIAR: slow(lambda: lacked >= 2, lambda: True), ONE: meanwhile, OTHER: meanwhile}
    async with fetching(holders) as fetcher:
        assert await fetcher.fetch(SHA256, len(BLOB), list(holders)) == BLOB
        assert lacked >= 2
        assert fetcher._wire.blob_received <= 1.4 * len(BLOB)


def test_who_sent_more_is_asked_again_first() -> None:
    turns, now = Turns([LIAR, ONE, OTHER], lambda: 1.0), 0.0
    for sent in (10, 100):
        holder = turns.next(now, [])
        assert holder is not None
        attempt = Attempt(holder, 1000, now)
        now = attempt.late_at
        attempt.buffer, attempt.progress_at = bytearray(sent), now
        assert turns.gives_way(now, [attempt]) is attempt
    assert [turns.next(now, []) for _ in range(4)] == [OTHER, ONE, LIAR, None]


async def test_a_pull_ends_when_nobody_waits_for_it_any_more() -> None:
    """And not before: it goes on for the second one who wants the blob."""
    asked: list[int] = []
    hears = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        asked.append(1)
        hears.set()
        assert await reader.read() == b""
        asked.append(-1)
        hears.set()

    async with fetching({ONE: mute}) as fetcher, asyncio.timeout(blobs.STREAM_IDLE_SECONDS_MAX / 2):
        waiting = [asyncio.create_task(fetcher.fetch(SHA256, len(BLOB), [ONE])) for _ in range(2)]
        await hears.wait()
        hears.clear()
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert (asked, len(fetcher._running)) == ([1], 1)
        waiting[1].cancel()
        await hears.wait()
        assert (asked, len(fetcher._running)) == ([1, -1], 0)
        again = asyncio.create_task(fetcher.fetch(SHA256, len(BLOB), [ONE]))
        hears.clear()
        await hears.wait()
        assert asked == [1, -1, 1]
        again.cancel()
        await asyncio.wait([*waiting, again])


@pytest.mark.usefixtures("hasty")
async def test_more_silent_holders_than_are_asked_side_by_side() -> None:
    assert len(SILENT) > 2 * turns_module.ATTEMPTS_MAX
    holders = dict.fromkeys(SILENT, silent) | {ONE: honest}
    async with fetching(holders) as fetcher, asyncio.timeout(blobs.STREAM_IDLE_SECONDS_MAX / 2):
        assert await fetcher.fetch(SHA256, len(BLOB), [*SILENT, ONE]) == BLOB


@pytest.mark.usefixtures("hasty")
async def test_a_slow_holder_that_made_room_is_asked_again_and_what_it_sent_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blobs, "STREAM_IDLE_SECONDS_MAX", 3.0)
    monkeypatch.setattr(turns_module, "LACKING_ROUNDS_MAX", 0)
    offsets: list[int] = []

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = await offered(reader, writer)
        offsets.append(len(BLOB) - len(rest))
        writer.write(rest[:100] if len(rest) == len(BLOB) else rest)
        await writer.drain()
        await reader.read()

    holders = {ONE: slow, **dict.fromkeys(SILENT, silent)}
    async with fetching(holders) as fetcher, asyncio.timeout(240):
        assert await fetcher.fetch(SHA256, len(BLOB), [ONE, *SILENT]) == BLOB
    assert offsets == [0, 100]


async def trickling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A byte now and then."""
    await offered(reader, writer)
    while not reader.at_eof():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("bad", [silent, trickling])
async def test_authors_that_are_bad_together_do_not_keep_us_from_the_good(
    bad: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "PULL_TURN_SECONDS", 0.1)
    monkeypatch.setattr(turns_module, "IMPATIENT_BYTES_A_SECOND", 1e12)
    holders = dict.fromkeys(SILENT, bad) | {ONE: honest}
    assert len(SILENT) > fetcher_module.PULLS_MAX
    async with fetching(holders) as fetcher, asyncio.timeout(blobs.STREAM_IDLE_SECONDS_MAX / 2):
        dead = [asyncio.create_task(fetcher.fetch(key, len(BLOB), [key, *SILENT])) for key in SILENT]
        await asyncio.sleep(0)
        assert await fetcher.fetch(SHA256, len(BLOB), [ONE]) == BLOB
        assert not any(task.done() for task in dead)
        for task in dead:
            task.cancel()
        await asyncio.gather(*dead, return_exceptions=True)


NAMES = st.lists(st.binary(min_size=1, max_size=1), max_size=12)


@given(holders=NAMES, data=st.data())
def test_turns_come_to_an_end_and_nobody_is_left_out(holders: list[bytes], data: st.DataObject) -> None:
    """Whatever each holder does: all are asked, at most so many at once, and the last answer ends it."""
    turns, running, now, waited = Turns(holders, lambda: 1.0), list[Attempt](), 0.0, False
    begun: dict[bytes, int] = {}
    while True:
        if data.draw(st.integers(0, 9)) == 9:
            turns.hasten(now)
        if (slow := turns.gives_way(now, running)) is not None:
            running.remove(slow)
        if (holder := turns.next(now, running)) is not None:
            assert holder not in [attempt.holder for attempt in running], "asked twice at once"
            running.append(Attempt(holder, 1000, now))
            begun[holder] = begun.get(holder, 0) + 1
            rounds = turns_module.LACKING_ROUNDS_MAX + 1  # one more for haste
            assert begun[holder] <= rounds + 2
            assert sum(begun.values()) <= 2 * len(begun) + rounds * turns_module.LACKING_ROUND_MAX
        assert holder is not None or slow is not None or not waited, "woken for nothing"
        if not running:
            break
        assert len(running) <= turns_module.ATTEMPTS_MAX
        wakes_at = turns.wakes_at(running)
        waited = wakes_at is not None and data.draw(st.booleans())
        if waited:
            assert wakes_at is not None
            now = max(now, wakes_at)
            continue
        attempt = running.pop(data.draw(st.integers(0, len(running) - 1)))
        if data.draw(st.booleans()):
            turns.lacks(attempt.holder, now)
    assert begun.keys() == set(holders)
