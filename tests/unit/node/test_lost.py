"""Votes of the log that nobody gives: how often they are looked for, what does instead, and what a peer makes of it."""

import asyncio
import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.blobs import turns
from node.swarm import pulls as module
from node.swarm.collector import Collector
from node.swarm.facts import Resync, Snapshot
from node.swarm.inbox import Announced
from node.swarm.pulls import ACCEPTED_ROUNDS_MIN, Pulls
from node.swarm.runtime import View
from protos import slices
from protos.errors import NetworkError
from protos.identity import short
from protos.log import Contribution
from tests.unit.node.holders import BLOB, LIAR, ONE, SHA256, fetching, honest

STEP = 45
NAMED = Contribution(b"a" * 32, b"h" * 32, 10, 4, 400, 1.5)


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, b"r" * 32, 10, (b"k" * 32,))


def looked_for(answers: list[bytes | None], newest: Snapshot | None) -> tuple[Pulls, Any]:
    """Pulls from holders that answer so, one after the other."""

    class Fetcher:
        asked = 0

        async def fetch(self, sha256: bytes, size: int, holders: object, size_max: int | None, *, hasty: bool) -> bytes:
            self.asked += 1
            answer = answers.pop(0)
            if answer is None:
                raise NetworkError("nobody has it now")
            return answer

    return pulls_from(Fetcher(), newest)


def pulls_from(fetcher: Any, newest: Snapshot | None, *roster: bytes) -> tuple[Pulls, Any]:
    """With what there is to see: its fetcher, its runtime, its payloads."""
    held: dict[bytes, bytes] = {}

    def put(step: int, sha256: bytes, data: bytes) -> bool:
        held[sha256] = data
        return True

    async def emit(event: object) -> None:
        said.append(event)

    said: list[object] = []
    warned: list[dict[str, object]] = []

    def warn(event: str, **values: object) -> None:
        warned.append({"event": event, **values})

    payloads: Any = SimpleNamespace(get=held.get, put=put)
    runtime: Any = SimpleNamespace(
        log=SimpleNamespace(info=lambda *words, **values: None, warning=warn),
        counters=SimpleNamespace(payload_bytes_received=0),
        emit=emit,
        spawn=asyncio.ensure_future,
        said=said,
        warned=warned,
    )
    view: Any = SimpleNamespace(roster=roster, step=STEP, ranges=1, by_range=lambda step: ())
    agreed: Any = SimpleNamespace(newest=newest)
    seen = SimpleNamespace(
        fetcher=fetcher, runtime=runtime, payloads=payloads, view=view, told=None, questions=0, silent=False
    )

    async def ask() -> None:
        seen.questions += 1
        if seen.silent:
            await asyncio.Event().wait()
        agreed.newest = seen.told or agreed.newest

    return Pulls(fetcher, payloads, view, agreed, runtime, 1e9, ask), seen


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = asyncio.sleep

    async def sleep(seconds: float) -> None:
        await pause(0)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)


@pytest.mark.usefixtures("no_pauses")
async def test_a_snapshot_does_instead_only_after_a_few_rounds() -> None:
    """One unlucky moment must not cost a peer its place in the log."""
    pulls, seen = looked_for([None] * 2 + [b"votes"], snapshot(STEP + 5))
    assert await pulls.accepted(NAMED, STEP, 100) == b"votes"
    pulls, seen = looked_for([None] * 9, snapshot(STEP + 5))
    assert await pulls.accepted(NAMED, STEP, 100) is None
    assert seen.fetcher.asked == ACCEPTED_ROUNDS_MIN


@pytest.mark.usefixtures("no_pauses")
async def test_a_snapshot_whose_notice_waits_behind_entries_is_asked_for() -> None:
    """A laptop that slept for 75 s: so many entries came that the stream stood still, with the notices behind them. It looked
    for votes that nobody keeps so long, for ever."""
    pulls, seen = looked_for([None] * 9, snapshot(STEP - 40))
    seen.told = snapshot(STEP + 500)
    assert await pulls.accepted(NAMED, STEP, 100) is None
    assert (seen.fetcher.asked, seen.questions) == (ACCEPTED_ROUNDS_MIN + 1, 1)
    pulls, seen = looked_for([None] * 9 + [b"votes"], None)
    assert await pulls.accepted(NAMED, STEP, 100) == b"votes"
    assert seen.questions == 1, "a question in each round"


@pytest.mark.usefixtures("no_pauses")
async def test_a_silent_coordinator_keeps_no_peer_from_votes_that_others_have() -> None:
    """Each round waited 15 s for its answer."""
    pulls, seen = looked_for([None] * 9 + [b"votes"], None)
    seen.silent = True
    assert await asyncio.wait_for(pulls.accepted(NAMED, STEP, 100), 60) == b"votes"
    assert seen.questions == 1


@pytest.mark.usefixtures("no_pauses")
async def test_a_person_hears_once_that_a_step_waits_for_peers_that_are_away() -> None:
    """With `min_peers` of 1, the only peer that has an entry's votes may leave before anybody had them."""
    pulls, seen = looked_for([None] * 20 + [b"votes"] + [None] * 5 + [b"votes"] + [None] * 20 + [b"votes"], None)
    await pulls.accepted(NAMED, STEP, 100)
    [said] = seen.runtime.warned
    assert (said["step"], said["authors"]) == (STEP, short(NAMED.public_key))
    assert "run fork" in said["event"]
    await pulls.accepted(replace(NAMED, payload_sha256=b"2" * 32), STEP, 100)  # a moment is no matter
    assert len(seen.runtime.warned) == 1
    await pulls.accepted(replace(NAMED, payload_sha256=b"3" * 32), STEP, 100)
    assert len(seen.runtime.warned) == 2


@pytest.mark.parametrize("newest", [None, snapshot(STEP - 1)])
@pytest.mark.usefixtures("no_pauses")
async def test_where_no_snapshot_has_the_step_it_is_looked_for_on_and_on(newest: Snapshot | None) -> None:
    pulls, _ = looked_for([None] * 20 + [b"votes"], newest)
    assert await pulls.accepted(NAMED, STEP, 100) == b"votes"


class Shelf:
    """Everybody has these blobs, and no others."""

    def __init__(self, *data: bytes) -> None:
        self.blobs, self.asked = {hashlib.sha256(it).digest(): it for it in data}, list[int]()
        self.holders = dict[bytes, list[bytes]]()

    async def fetch(
        self, sha256: bytes, size: int, holders: list[bytes], size_max: int | None = None, *, hasty: bool = False
    ) -> bytes:
        self.asked.append(size)
        self.holders[sha256] = holders
        data = self.blobs.get(sha256, b"")
        if len(data) != size and (size_max is None or not 0 < len(data) <= size_max):
            raise NetworkError("nobody has it with this length")
        return data


@pytest.mark.usefixtures("no_pauses")
async def test_of_a_payload_in_slices_a_peer_takes_those_of_its_ranges() -> None:
    parts = [b"one", b"second", b"3"]
    whole = slices.joined(parts)
    head = whole[: slices.list_bytes(3)]
    pulls, seen = pulls_from(Shelf(head, *parts), None)
    seen.view.ranges = 3
    said = Announced(LIAR, STEP, hashlib.sha256(head).digest(), len(whole), b"", b"")
    assert await pulls.announced(said, (0, 2)) == head + b"one3"
    assert seen.fetcher.asked == [len(head), 3, 1]
    named = Contribution(LIAR, said.payload_sha256, len(whole), 4, 400, 1.5)
    assert await pulls.accepted(named, STEP, 1000) == whole
    assert seen.fetcher.asked[3:] == [6], "the others are here"


async def test_who_adds_up_other_ranges_is_asked_last_for_a_slice() -> None:
    """It has none: with 64 ranges most aggregators would be asked in vain, and a check has five seconds."""
    parts = [b"one", b"second", b"3"]
    whole = slices.joined(parts)
    head, rows = whole[: slices.list_bytes(3)], ((b"a", b"b"), (b"b", b"c"), (b"d",))
    pulls, seen = pulls_from(Shelf(head, *parts), None, b"a", b"c", b"x")
    seen.view.ranges = 3
    named = Contribution(LIAR, hashlib.sha256(head).digest(), len(whole), 4, 400, 1.5)
    assert await pulls.accepted(named, STEP, 1000, rows) == whole
    asked = [seen.fetcher.holders[hashlib.sha256(it).digest()] for it in (head, *parts)]
    assert asked == [
        [b"a", b"b", b"c", b"d", LIAR, b"x"],
        [b"a", b"b", LIAR, b"x", b"c", b"d"],
        [b"b", b"c", LIAR, b"x", b"a", b"d"],
        [b"d", LIAR, b"x", b"a", b"b", b"c"],
    ]


@pytest.mark.parametrize("wrong", [b"no list at all", slices.joined([b"one", b"two"])[: slices.list_bytes(2)]])
@pytest.mark.usefixtures("no_pauses")
async def test_bytes_that_are_no_list_come_alone_for_everybody_to_refuse(wrong: bytes) -> None:
    """Whatever an author has signed: the log names it, so every peer has to come to the same end, and ask for no slice."""
    pulls, seen = pulls_from(Shelf(wrong), snapshot(STEP + 5))
    seen.view.ranges = 3
    named = Contribution(LIAR, hashlib.sha256(wrong).digest(), len(wrong), 4, 400, 1.5)
    assert await pulls.accepted(named, STEP, 1000) == wrong
    parts = slices.joined([b"one", b"second", b"3"])
    head = parts[: slices.list_bytes(3)]
    pulls, seen = pulls_from(Shelf(head), None)
    seen.view.ranges = 3
    longer = Contribution(LIAR, hashlib.sha256(head).digest(), len(parts) + 1, 4, 400, 1.5)
    assert await pulls.accepted(longer, STEP, 1000) == head, "the log names another length than the list"


@pytest.mark.usefixtures("no_pauses")
async def test_a_slice_that_is_itself_a_payload_has_no_second_name() -> None:
    """A liar's slice is a list with its slices: by the hash of all its bytes some peers would find votes, and others none."""
    within = slices.joined([b"one", b"one"])
    pulls, seen = pulls_from(Shelf(within), snapshot(STEP + 5))
    seen.view.ranges = 2
    name = hashlib.sha256(within).digest()
    seen.payloads.put(STEP, name, within)
    for size in (len(within), len(within) + 7):
        with pytest.raises(NetworkError):
            await pulls.announced(Announced(LIAR, STEP, name, size, b"", b""), (0,))
        assert await pulls.accepted(Contribution(LIAR, name, size, 4, 400, 1.5), STEP, 1000) is None
    assert not any(size == 1000 for size in seen.fetcher.asked)


@pytest.mark.usefixtures("no_pauses")
async def test_a_failed_try_leaves_no_pull_behind() -> None:
    """Its slices are pulled again by the next try."""
    parts = [b"one", b"second", b"3"]
    whole = slices.joined(parts)
    ended = list[int]()

    class Slow(Shelf):
        async def fetch(self, sha256: bytes, size: int, *given: Any, **more: Any) -> bytes:
            data = await super().fetch(sha256, size, *given, **more)
            for _ in range(5 if size == 6 else 0):
                await asyncio.get_running_loop().run_in_executor(None, bool)
            ended.append(size)
            return data

    pulls, seen = pulls_from(Slow(whole[: slices.list_bytes(3)], *parts[1:]), snapshot(STEP + 5))
    seen.view.ranges, seen.view.step = 3, STEP
    said = Announced(LIAR, STEP, hashlib.sha256(whole[: slices.list_bytes(3)]).digest(), len(whole), b"", b"")
    with pytest.raises(NetworkError):
        await pulls.announced(said, (0, 1, 2))
    assert 6 in ended


async def test_what_the_log_accepts_comes_from_others_than_a_dead_author(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when some had its payload: those who still wait for it must not miss the next step."""
    monkeypatch.setattr(turns, "HASTE_SECONDS", 0.01)
    monkeypatch.setattr(turns, "HEDGE_SECONDS", 1000.0)
    heard = asyncio.Event()

    async def dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.set()
        await reader.read()

    async with fetching({LIAR: dead, ONE: honest}) as fetcher, asyncio.timeout(240):
        pulls, _ = pulls_from(fetcher, None, LIAR, ONE)
        announced = asyncio.create_task(pulls.announced(Announced(LIAR, STEP, SHA256, len(BLOB), b"", b""), (0,)))
        await heard.wait()
        named = Contribution(LIAR, SHA256, len(BLOB), 4, 400, 1.5)
        assert await pulls.accepted(named, STEP, len(BLOB)) == BLOB
        assert await announced == BLOB


@pytest.mark.usefixtures("no_pauses")
async def test_an_entry_whose_votes_are_lost_asks_for_a_newer_snapshot() -> None:
    newest = snapshot(STEP + 5)
    pulls, seen = looked_for([None] * ACCEPTED_ROUNDS_MIN, newest)
    door: Any = SimpleNamespace(bytes_max=100)
    agreed: Any = SimpleNamespace(newest=newest)
    collector = Collector(b"me", pulls, seen.payloads, door, agreed, View(b"run", b""), seen.runtime)
    entry: Any = SimpleNamespace(step=STEP, contributions=(NAMED,), trials=(), aggregate=None)
    signed: Any = SimpleNamespace(entry=entry)
    assert await collector.collect(signed, {}) is None
    [event] = seen.runtime.said
    assert isinstance(event, Resync)
    assert (event.lost, event.snapshot) == (True, newest)
