"""A peer that adds a range up again: which sums it finds false, what it asks for, and when it looks."""

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from node.building import LateDoor
from node.optim.votes import sums
from node.swarm.facts import FoundFalse
from node.swarm.runtime import View
from node.swarm.vote_sums import Addends, Auditor
from node.wire import UpdateDoor, aggregate, is_sum
from protos.checks import AUDIT_EVERY, AUDIT_STEPS, audited
from protos.log import Contribution, Entry, SignedEntry, summed_entry
from protos.slices import Aggregate, Update, digest_of, slice_of, split, sum_in
from tests.unit.node.test_aggregator import KEYS, LAYOUT, RUN, STEP, named, parts, payload, tick

DOOR = UpdateDoor(RUN, LAYOUT, 6, sums.SUMMED)
RANGES, ROWS = 3, (b"\0\1\2", b"\1\2\3", b"\2\3\4")


def votes(number: int, size: int = 16) -> Update:
    return Update(STEP, size, np.random.default_rng(number).bytes(6 * sums.SUMMED.votes_a_chunk(size) // 8))


def test_of_all_votes_one_sum_is_right_and_every_other_byte_is_found() -> None:
    several = [votes(n) for n in range(5)]
    right = aggregate(DOOR, several, STEP)
    assert is_sum(DOOR, right, several, STEP)
    assert is_sum(DOOR, right, several[::-1], STEP)
    for at in range(0, len(right), 7):
        assert not is_sum(DOOR, right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :], several, STEP)
    for wrong in (aggregate(DOOR, several[:4], STEP), aggregate(DOOR, [], STEP), right + b"\0", b""):
        assert not is_sum(DOOR, wrong, several, STEP)


@pytest.mark.parametrize("hidden", [1, 2])
@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16)])
def test_who_hides_votes_gains_no_more_than_any_votes_of_its_own(hidden: int, sizes: tuple[int, int]) -> None:
    """Whatever the hidden ones voted, the sum may be right; a sum that they cannot have made is false."""
    shown = [votes(n, sizes[0]) for n in range(3)]
    for seed in range(20):
        unseen = [votes(100 + 9 * seed + n, sizes[1]) for n in range(hidden)]
        assert is_sum(DOOR, aggregate(DOOR, [*shown, *unseen], STEP), shown, STEP, hidden)
    against = [Update(it.step, it.size, bytes(byte ^ 0xFF for byte in it.votes)) for it in shown]
    assert not is_sum(DOOR, aggregate(DOOR, against, STEP), shown, STEP, hidden)
    assert not is_sum(DOOR, aggregate(DOOR, [], STEP), shown, STEP, hidden), "as if nobody had voted"
    assert not is_sum(DOOR, b"no sum", shown, STEP, hidden)
    alone = Update(STEP, 32, votes(7, 32).votes)
    assert is_sum(DOOR, aggregate(DOOR, [alone], STEP), [], STEP, hidden)
    assert is_sum(DOOR, aggregate(DOOR, [], STEP), [], STEP, hidden), "hidden votes may be invalid"


def signed_of(entry: Entry, number: int = 0) -> SignedEntry:
    return SignedEntry(entry, b"e" * 32, b"signed %d" % number)


def test_the_draw_is_one_peer_for_a_range_in_a_part_of_the_steps_and_the_signature_decides() -> None:
    """Who makes a sum can compute the entry with it, and so could try until no honest peer is drawn; it cannot sign."""
    contributions = tuple(Contribution(key, b"", 9, 1, 1, 0.0) for key in sorted(KEYS))
    whole = sum_in([slice_of(bytes([n])) for n in range(8)])
    entry = Entry(STEP, RUN, contributions, 0, b"", (), 0, aggregate=whole)
    drawn: Counter[bytes] = Counter()
    for number in range(1000):
        signed = signed_of(entry, number)
        mine = {key: audited(signed, key) for key in KEYS}
        several = [n for found in mine.values() for n in found]
        assert len(several) == len({*several}), "one auditor for a range"
        drawn.update({key: len(found) for key, found in mine.items()})
    assert 0.8 < sum(drawn.values()) * AUDIT_EVERY / 8000 < 1.2
    assert min(drawn.values()) > 0
    assert not audited(signed_of(Entry(STEP, RUN, contributions, 0, b"", (), 0)), KEYS[0]), "an entry without a sum"


class Audited:
    """Nine payloads in three ranges; `me` audits. `wrong`: a range whose sum leaves votes out."""

    def __init__(self, *, me: bytes = KEYS[8], wrong: int | None = None, anchored: bool = False) -> None:
        self.data = [payload(n, RANGES) for n in range(9)]
        self.contributions = tuple(named(key, it, RANGES) for key, it in zip(KEYS, self.data, strict=True))
        _, self.shelves, self.outbox, door, self.runtime = parts(*self.data, ranges=RANGES, rows=ROWS)
        self.runtime.log.debug = lambda *_, **__: None
        cuts, made = [split(it, RANGES) for it in self.data], list[bytes]()
        for number in range(RANGES):
            part = door.part(number)
            valid = [part.open(it[number], STEP) for it in cuts]
            made.append(part.aggregate(valid[:2] if number == wrong else valid, STEP))
        self.parts = [slice_of(it) for it in made]
        whole, hashes = sum_in(self.parts), b"".join(c.payload_sha256 for c in self.contributions)
        self.digest = digest_of(c.payload_sha256 for c in self.contributions)
        for sha256, blob in (*zip((it.sha256 for it in self.parts), made, strict=True), (self.digest, hashes)):
            self.shelves.keep_own(STEP, sha256, blob)
        full = Entry(STEP, RUN, self.contributions, 0, b"", (), 0)
        self.signed = signed_of(summed_entry(full, whole, self.digest))
        self.view = View(RUN, b"")
        self.view.ranges, self.view.tick = RANGES, tick(ROWS)
        self.by_range = self.view.by_range(STEP)
        if anchored:
            roster = self.view.tick.roster[:1]
            self.view.tick = type(self.view.tick)(STEP, RUN, 1, roster, (), 0, tuple(KEYS[1:]), ROWS)
        self.auditor = self._auditor(me, door)

    def _auditor(self, me: bytes, door: LateDoor) -> Auditor:
        async def beside(function: Any, *given: Any) -> Any:
            return function(*given)

        pulls: Any = self.shelves
        addends = Addends(pulls, door, self.view, self.runtime)
        return Auditor(me, pulls, door, addends, self.outbox, self.view, self.runtime, beside)

    async def found(self) -> set[FoundFalse]:
        """What this peer says once nothing is under way."""
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        return self.outbox.false_sums


async def test_another_peers_word_makes_it_look_and_only_the_truth_makes_it_say_so() -> None:
    for wrong in (None, 1):
        played = Audited(wrong=wrong)
        played.auditor.saw(played.signed, played.by_range)
        assert not await played.found(), "nobody drew it, and it made no sum"
        for number in range(RANGES):
            played.auditor.doubted(STEP, number)
        assert await played.found() == ({FoundFalse(STEP, 1)} if wrong else set())
    body, facts = played.outbox.next_report() or (None, [])
    assert body is not None
    assert [(it.step, it.range) for it in body.false_sums] == [(STEP, 1)]
    played.outbox.sent(facts)
    assert played.outbox.next_report() is None
    played.outbox.everything_again()
    assert played.outbox.next_report() is not None, "a coordinator that forgot hears it again"
    played.outbox.move_head(STEP + AUDIT_STEPS)
    assert not played.outbox.false_sums


async def test_it_asks_for_a_range_once_and_for_none_that_there_is_not() -> None:
    played = Audited()
    played.auditor.saw(played.signed, played.by_range)
    for step, number in ((STEP, RANGES), (STEP + 1, 0), (STEP, 0), (STEP, 0)):
        played.auditor.doubted(step, number)
    await played.found()
    assert Counter(played.shelves.asked) == Counter(KEYS), "each author's slice, once"


async def test_an_aggregator_whose_sum_is_another_looks_at_once() -> None:
    """Two of three that lie alike are found in the same step, by the third, whether its sum is done before the entry or after:
    who lies need not even compute."""
    honest = Audited().parts
    for first in (True, False):
        played = Audited(me=KEYS[2], wrong=0)
        mine = {n: honest[n] for n in played.view.ranges_of(STEP, KEYS[2])}
        for turn in (first, not first):
            if turn:
                played.auditor.made(STEP, played.digest, mine)
            else:
                played.auditor.saw(played.signed, played.by_range)
        assert await played.found() == {FoundFalse(STEP, 0)}
    other = Audited(me=KEYS[2], wrong=0)
    other.auditor.saw(other.signed, other.by_range)
    other.auditor.made(STEP, b"d" * 32, {0: honest[0]})
    assert not await other.found(), "of other votes"


async def test_what_it_cannot_get_is_no_proof() -> None:
    for lost in ("list", "sum", "votes"):
        played = Audited(wrong=1)
        played.auditor.saw(played.signed, played.by_range)
        if lost == "votes":
            for c in played.contributions[2:]:
                del played.shelves.held[c.payload_sha256]
        else:
            del played.shelves.held[played.digest if lost == "list" else played.parts[1].sha256]
        played.auditor.doubted(STEP, 1)
        assert not await played.found(), lost


async def test_where_an_anchor_adds_up_nobody_looks() -> None:
    played = Audited(wrong=1, anchored=True)
    played.auditor.saw(played.signed, played.by_range)
    played.auditor.doubted(STEP, 1)
    assert not await played.found()


async def test_a_sum_that_is_too_long_to_be_one_is_false() -> None:
    played = Audited()
    aggregate_of = played.signed.entry.aggregate
    assert aggregate_of is not None
    long = [played.parts[0], slice_of(bytes(1 << 20)), played.parts[2]]
    whole = Aggregate(**{**vars(sum_in(long)), "payloads_sha256": played.digest})
    entry = Entry(STEP, RUN, played.signed.entry.contributions, 0, b"", (), 0, aggregate=whole)
    played.auditor.saw(signed_of(entry), played.by_range)
    played.auditor.doubted(STEP, 1)
    assert await played.found() == {FoundFalse(STEP, 1)}
