"""A peer as an aggregator, and where all others get the sum: real votes, without a network."""

import asyncio
import hashlib
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from node.building import LateDoor
from node.optim.votes import sums
from node.swarm.collector import COPIES_EACH, Collector, sources_of
from node.swarm.facts import Resync
from node.swarm.outbox import Outbox
from node.swarm.runtime import View
from node.swarm.vote_sums import Addends, Aggregator
from node.wire import UpdateDoor, encode, longest_sums
from protos.assignment import Range, SampleShare
from protos.checks import drawn
from protos.errors import Refusal
from protos.log import Contribution, Entry, SignedEntry, contributions_body, summed_entry
from protos.slices import Aggregate, Slice, Update, digest_of, hash_of, list_bytes, split, sum_in, with_slices
from protos.tick import Tick
from protos.v1 import coordinator_pb2 as pb

RUN, LAYOUT, STEP, CHUNKS = b"r" * 32, b"l" * 32, 7, 6
KEYS = [bytes([n]) * 32 for n in range(1, 10)]


def payload(number: int, ranges: int = 1) -> bytes:
    votes = np.random.default_rng(number).bytes(CHUNKS * 32)
    return encode(RUN, LAYOUT, Update(STEP, 16, votes), CHUNKS, ranges)


def named(key: bytes, data: bytes, ranges: int = 1, **more: Any) -> Contribution:
    return Contribution(key, hash_of(data, ranges), len(data), 4, 400, 1.5, **more)


def tick(rows: tuple[bytes, ...] = ()) -> Tick:
    """The open step of KEYS; `rows`: of each range, which of KEYS[1:] adds it up."""
    roster = tuple(SampleShare(key, 1) for key in KEYS)
    return Tick(STEP, RUN, 1, roster, (Range(0, 9),), 0, tuple(KEYS[1:]) if rows else (), rows)


class Shelves:
    """What peers hold: stands for `Pulls`."""

    def __init__(self, *held: bytes, ranges: int = 1) -> None:
        self.held = {hash_of(data, ranges): data for data in held}
        self.asked, self.ranges, self.synced = list[bytes](), ranges, set[bytes]()

    async def accepted(
        self, contribution: Contribution, step: int, bytes_max: int, first: Any = (), which: Any = None
    ) -> bytes | None:
        self.asked.append(contribution.public_key)
        data = self.held.get(contribution.payload_sha256)
        if data is None or which is None or len(data) != contribution.payload_bytes:
            return data
        return with_slices(data, self.ranges, which)

    async def aggregate(self, part: Slice, step: int, holders: Any) -> bytes | None:
        return self.held.get(part.sha256)

    async def hashes(self, sha256: bytes, size: int, step: int, holders: Any) -> bytes | None:
        return self.held.get(sha256)

    def keep_own(self, step: int, sha256: bytes, data: bytes) -> None:
        self.held[sha256] = data

    def sync(self, names: Any) -> None:
        self.synced |= {*names}


def parts(
    *held: bytes, ranges: int = 1, rows: tuple[bytes, ...] = ()
) -> tuple[Aggregator, Shelves, Outbox, LateDoor, Any]:
    shelves, outbox, door, view = Shelves(*held, ranges=ranges), Outbox(), LateDoor(), View(RUN, b"")
    door.door = UpdateDoor(RUN, LAYOUT, CHUNKS, sums.SUMMED, ranges=ranges)
    view.ranges, view.tick = ranges, tick(rows or (b"\0",))

    async def emit(event: Any) -> None:
        said.append(event)

    async def beside(function: Any, *given: Any) -> Any:
        return function(*given)

    said: list[Any] = []
    quiet = SimpleNamespace(warning=lambda *_, **__: None, error=lambda *_, **__: None, info=lambda *_, **__: None)
    runtime: Any = SimpleNamespace(
        spawn=lambda work: asyncio.get_running_loop().create_task(work),
        log=quiet, refused=said.append, emit=emit, said=said,
    )  # fmt: skip
    pulls: Any = shelves
    addends = Addends(pulls, door, view, runtime)
    made = mock.Mock()
    return (
        Aggregator(KEYS[1], pulls, door, addends, outbox, made, view, runtime, beside),
        shelves,
        outbox,
        door,
        runtime,
    )


def request(*contributions: Contribution) -> pb.SumRequest:
    return pb.SumRequest(step=STEP, attempt=2, contributions=contributions_body(contributions))


async def settle(aggregator: Aggregator) -> None:
    assert aggregator._working is not None
    await aggregator._working


async def test_it_adds_up_what_it_is_asked_for_keeps_it_and_says_so() -> None:
    data = [payload(n) for n in range(3)]
    aggregator, shelves, outbox, door, _ = parts(*data)
    contributions = [named(key, it) for key, it in zip(KEYS, data, strict=False)]
    aggregator.asked(request(*contributions))
    await settle(aggregator)
    said = outbox.summed
    assert (said.step, said.attempt, said.payloads) == (STEP, 2, digest_of(c.payload_sha256 for c in contributions))
    total = shelves.held[said.aggregate.sha256]
    assert {said.aggregate.sha256, said.payloads} == shelves.synced
    assert len(total) == said.aggregate.total_bytes
    added = sums.add_up([sums.SUMMED.read(it[-CHUNKS * 32 :], 16, CHUNKS) for it in data], CHUNKS)[1]
    opened = door.open_aggregate(total, STEP, len(total))
    again = sums.add_up([sums.SUMMED.read(it.votes, 16, CHUNKS) for it in opened], CHUNKS)[1]
    assert np.array_equal(again, np.clip(added, -2, 2))
    body, facts = outbox.next_report() or (None, [])
    assert body.summed.aggregate.sha256 == said.aggregate.sha256
    assert not body.summed.aggregate.slices
    outbox.sent(facts)
    assert outbox.next_report() is None
    aggregator.asked(request(*contributions))
    await settle(aggregator)
    assert outbox.next_report() is not None, "the coordinator asks again because it has forgotten"


async def test_votes_of_another_length_than_the_log_names_count_as_nothing() -> None:
    data = [payload(n) for n in range(2)]
    aggregator, shelves, outbox, door, _ = parts(*data)
    wrong = Contribution(KEYS[1], hash_of(data[1]), len(data[1]) + 1, 4, 400, 1.5)
    aggregator.asked(request(named(KEYS[0], data[0]), wrong))
    await settle(aggregator)
    alone = door.aggregate([door.open(data[0], STEP)], STEP)
    assert shelves.held[outbox.summed.aggregate.sha256] == alone


async def test_without_a_payload_it_says_nothing() -> None:
    data = [payload(n) for n in range(2)]
    aggregator, _, outbox, _, _ = parts(data[0])
    aggregator.asked(request(*(named(key, it) for key, it in zip(KEYS, data, strict=False))))
    await settle(aggregator)
    assert outbox.summed is None


async def test_a_request_that_is_none_is_refused() -> None:
    aggregator, *_ = parts()
    with pytest.raises(Refusal):
        aggregator.asked(pb.SumRequest(step=STEP, contributions=[{"public_key": b"short"}]))  # type: ignore[list-item]


@pytest.mark.parametrize("peers", [7, 16, 100, 1000])
def test_nobody_serves_more_than_a_few_sums_and_everybody_gets_one(peers: int) -> None:
    roster = [hashlib.sha256(b"%d" % n).digest() for n in range(peers)]
    entry = Entry(STEP, RUN, (), 0, b"", (), 0, aggregate=Aggregate(b"s" * 32, 9))
    for turn in (b"\0" * 32, b"\x07" * 32, hashlib.sha256(b"entry").digest()):
        signed = SignedEntry(entry, turn, b"")
        aggregators = tuple(roster[:3])
        sources = {key: sources_of(signed, key, aggregators, roster) for key in roster}
        assert not [key for key, asked in sources.items() if key in asked]
        first = {key: sources[key][0] for key in roster[3:]}
        served = Counter(first.values())
        assert max(served.values()) <= COPIES_EACH
        for source in first.values():  # whom one waits for has it from somebody who has it, and so on
            hops, at = 1, source
            while at in first:
                at, hops = first[at], hops + 1
            assert hops <= 6


async def test_a_peer_gets_the_sum_and_the_payloads_that_it_checks() -> None:
    data = [payload(n) for n in range(9)]
    aggregator, shelves, outbox, door, runtime = parts(*data)
    contributions = tuple(named(key, it, check_permille=1000) for key, it in zip(KEYS, data, strict=True))
    aggregator.asked(request(*contributions))
    await settle(aggregator)
    said = outbox.summed
    full = Entry(STEP, RUN, contributions, 0, b"", (), 0)
    entry = summed_entry(full, said.aggregate, said.payloads)
    signed = SignedEntry(entry, hashlib.sha256(b"entry").digest(), b"")
    view, newest, cleared = View(RUN, b""), SimpleNamespace(newest=None), list[tuple[int, set[bytes]]]()
    shelf = SimpleNamespace(whole=lambda *_: None, keep_only=lambda step, names: cleared.append((step, {*names})))
    view.tick = tick()
    pulls, payloads, snapshots = shelves, shelf, newest
    collector = Collector(KEYS[0], pulls, payloads, door, snapshots, view, runtime, whole=True)  # type: ignore[arg-type]
    shelves.asked.clear()
    found = await collector.collect(signed, {}, ((KEYS[3],),))
    assert not shelves.asked, "the run has no checks"
    assert (found.updates, found.authors) == (
        door.open_aggregate(shelves.held[said.aggregate.sha256], STEP, said.aggregate.total_bytes),
        (),
    )
    assert found.payloads == (shelves.held[said.aggregate.sha256],)
    view.checkers = 2
    mine = {subject for subject, who in drawn(signed.hash, entry, 2).items() if KEYS[0] in who}
    assert mine
    found = await collector.collect(signed, {}, ((KEYS[3],),))
    assert found.by_author.keys() == mine == {*shelves.asked}
    assert found.signed.entry.contributions == contributions, "a verdict names the payload"
    hashes = shelves.held.pop(said.payloads)
    for lost in (None, hashes[:-1]):
        if lost is not None:
            shelves.held[said.payloads] = lost
        found = await collector.collect(signed, {}, ((KEYS[3],),))
        assert not found.by_author, "it says nothing about votes whose names it could not get"

    later = Entry(STEP + 2, RUN, (), 0, b"", (), 0, aggregate=entry.aggregate)
    await collector.collect(SignedEntry(later, b"h" * 32, b""), {})
    assert cleared == [(STEP, {said.aggregate.sha256})], "two steps later nobody checks its payloads"

    del shelves.held[said.aggregate.sha256]
    assert await collector.collect(signed, {}) is None
    assert isinstance(runtime.said[-1], Resync)
    shelves.held.clear()
    long = Entry(STEP, RUN, contributions, 0, b"", (), 0, aggregate=Aggregate(said.aggregate.sha256, 1 << 28))
    found = await collector.collect(SignedEntry(long, signed.hash, b""), {})
    assert found is not None, "nobody is asked for what can be no sum"
    assert (found.updates, found.payloads) == ((), (b"",))
    shelves.held[said.aggregate.sha256] = b"no sum"
    found = await collector.collect(signed, {})
    assert found.updates == (), "the same nothing on every replica"


async def test_of_several_ranges_it_adds_up_its_own_and_everybody_takes_all() -> None:
    """KEYS[1] adds ranges 0 and 2 up, KEYS[2] range 1."""
    rows, data = (b"\0", b"\1", b"\0"), [payload(n, 3) for n in range(3)]
    contributions = [named(key, it, 3) for key, it in zip(KEYS, data, strict=False)]
    aggregator, shelves, outbox, door, runtime = parts(*data, ranges=3, rows=rows)
    aggregator.asked(request(*contributions))
    await settle(aggregator)
    said = outbox.summed
    assert said is not None
    made = [it.sha256 for it in said.aggregate.parts]
    assert len(made) == 2, "its own ranges"
    aggregator._public_key = KEYS[2]
    aggregator.asked(request(*contributions))
    await settle(aggregator)
    assert outbox.summed is not None
    whole = sum_in([said.aggregate.parts[0], outbox.summed.aggregate.parts[0], said.aggregate.parts[1]])
    body, _ = outbox.next_report() or (None, [])
    assert body is not None
    assert body.summed.aggregate.slices == outbox.summed.aggregate.slices

    entry = summed_entry(Entry(STEP, RUN, tuple(contributions), 0, b"", (), 0), whole, said.payloads)
    view, newest = View(RUN, b""), SimpleNamespace(newest=None)
    view.ranges, view.tick = 3, tick(rows)
    shelf = SimpleNamespace(whole=lambda *_: None, keep_only=lambda *_: None)
    collector = Collector(KEYS[0], shelves, shelf, door, newest, view, runtime, whole=True)  # type: ignore[arg-type]
    signed = SignedEntry(entry, hashlib.sha256(b"entry").digest(), b"")
    found = await collector.collect(signed, {}, view.by_range(STEP))
    assert found is not None
    _, _, _, single, _ = parts()
    updates = [door.open(it, STEP, len(it)) for it in data]
    total = single.aggregate(updates, STEP)
    assert found.updates == single.open_aggregate(total, STEP, len(total)), "as one range would have it"
    assert hash_of(found.payloads[0], 3) == whole.sha256, "as an archive keeps it"

    shelves.held[made[1]] = b"no sum"  # the hash of a slice was never that of a sum: its range counts as no votes
    wrong = sum_in([whole.parts[0], whole.parts[1], Slice(hashlib.sha256(b"no sum").digest(), 6)])
    shelves.held[wrong.parts[2].sha256] = b"no sum"
    entry = summed_entry(Entry(STEP, RUN, tuple(contributions), 0, b"", (), 0), wrong, said.payloads)
    found = await collector.collect(SignedEntry(entry, signed.hash, b""), {}, view.by_range(STEP))
    assert found is not None
    assert found.updates
    assert isinstance(runtime.said[-1], Refusal)
    void = found.updates

    long = sum_in([whole.parts[0], whole.parts[1], Slice(made[1], 1 << 27)])  # longer than the model's whole sum may be
    entry = summed_entry(Entry(STEP, RUN, tuple(contributions), 0, b"", (), 0), long, said.payloads)
    found = await collector.collect(SignedEntry(entry, signed.hash, b""), {}, view.by_range(STEP))
    assert found is not None
    assert found.updates == void, "that range alone counts as no votes, and nobody pulls its slice"
    assert len(found.payloads[0]) < 1 << 20
    longest = longest_sums(door._known())
    assert hash_of(found.payloads[0], 3, long.total_bytes, longest) == long.sha256, "an archive keeps it so"
    assert not hash_of(found.payloads[0][:-1], 3, long.total_bytes, longest)
    shelves.held.pop(made[0])
    assert await collector.collect(signed, {}, view.by_range(STEP)) is None
    assert isinstance(runtime.said[-1], Resync)


async def test_a_sum_of_the_log_that_nobody_has_is_made_again_in_all_ranges() -> None:
    """Its bytes are those of its aggregators. A request for an earlier attempt at the decided step makes nothing."""
    data = [payload(n, 3) for n in range(3)]
    contributions = [named(key, it, 3) for key, it in zip(KEYS, data, strict=False)]
    aggregator, shelves, outbox, *_ = parts(*data, ranges=3, rows=(b"\0",) * 3)
    aggregator.asked(request(*contributions))
    await settle(aggregator)
    assert outbox.summed is not None
    said, outbox.summed, before = outbox.summed, None, {*shelves.held}
    made = {said.payloads, *(it.sha256 for it in said.aggregate.parts)}
    for name in made:
        del shelves.held[name]
    aggregator._view.chain.step, aggregator._view.tick = STEP, None
    for attempt in (2, 0):
        asked = request(*contributions)
        asked.attempt = attempt
        aggregator.asked(asked)
        await settle(aggregator)
        assert {*shelves.held} == (before if attempt == 0 else before - made)
    assert outbox.summed is None, "nobody waits for its word"


async def test_who_adds_up_nothing_any_more_is_silent() -> None:
    aggregator, _, outbox, *_ = parts(payload(1, 2), ranges=2, rows=(b"\1", b"\1"))
    aggregator.asked(request(named(KEYS[0], payload(1, 2), 2)))
    await settle(aggregator)
    assert outbox.summed is None


async def test_a_payload_that_is_none_adds_nothing_to_any_range() -> None:
    data = [payload(n, 2) for n in range(2)]
    aggregator, shelves, outbox, door, _ = parts(*data, ranges=2, rows=(b"\0", b"\0"))
    wrong = Contribution(KEYS[1], hash_of(data[1], 2), len(data[1]) + 1, 4, 400, 1.5)
    shelves.held[wrong.payload_sha256] = data[1][: list_bytes(2)]  # as `Pulls` gives it: the log names another length
    aggregator.asked(request(named(KEYS[0], data[0], 2), wrong))
    await settle(aggregator)
    assert outbox.summed is not None
    alone = [door.part(n).aggregate([door.part(n).open(it, STEP)], STEP) for n, it in enumerate(split(data[0], 2))]
    assert [shelves.held[it.sha256] for it in outbox.summed.aggregate.parts] == alone
