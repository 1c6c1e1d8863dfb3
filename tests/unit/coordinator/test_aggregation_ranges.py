"""Who adds up which range, when a payload in slices is held, and what the aggregators of one range cost that fail."""

from __future__ import annotations

from unittest import mock

import pytest

from coordinator.clock import aggregation, holder_counts, machine
from coordinator.clock.effects import SendSumRequest
from coordinator.clock.events import Disconnected, HeldPlaces, Reported, TimerFired
from coordinator.clock.holder_counts import ANCHORS_HELD_MAX
from coordinator.clock.state import OpenStep, Quorum
from coordinator.clock.value_copy import replace
from protos.limits import AGGREGATORS_MAX, PAYLOAD_BYTES_MAX, RANGES_MAX
from protos.slices import Aggregate, Slice, list_bytes, list_of, open_aggregate, slice_bytes_max, sum_in
from protos.tick import Tick, tick_body, tick_from_body
from protos.v1 import log_pb2
from tests.unit.coordinator.driver import Harness, claim_of, key, sha
from tests.unit.coordinator.test_aggregation import ANCHOR, answer, opened, sums_of_liars, vote

RANGES = 4


def sums(tick: Tick, who: bytes, *wrong: int) -> Aggregate:
    """What `who` makes of its ranges; another sum of those in `wrong`."""
    return sum_in([Slice(sha("sum", number, who if number in wrong else ""), 64) for number in tick.ranges_of(who)])


def opened_step(harness: Harness) -> OpenStep:
    assert harness.run.step is not None
    return harness.run.step


def answer_all(harness: Harness, requests: list[SendSumRequest], liars: dict[bytes, int] | None = None) -> None:
    """Every aggregator sends its sums, before or after the step is decided."""
    tick = harness.ticks[-1]
    for request in requests:
        answer(harness, request, sums(tick, request.to, *([liars[request.to]] if request.to in (liars or {}) else [])))


@pytest.mark.parametrize("anchors", range(6))
@pytest.mark.parametrize("able", [0, 1, 3, 40])
def test_every_range_has_its_aggregators_and_an_anchor_if_there_is_one(anchors: int, able: int) -> None:
    some, others = [b"a%d" % it for it in range(anchors)], [b"p%d" % it for it in range(able)]
    for ranges in (1, 2, 4, 16):
        rows = aggregation.dealt(some, others, ranges, 3)
        assert len(rows) == ranges
        for row in rows:
            assert len(row) == len({*row}) <= 3
            assert len(row) >= min(3, able), "as many as there are"
            assert not anchors or row[0] in some
        loads = [sum(who in row for row in rows) for who in others]
        assert max(loads, default=0) - min(loads, default=0) <= 1, "they share the work"
    assert aggregation.dealt(some, others, 1, 3) == [[*some, *others][:3]], "one range is as before"


def test_a_tick_names_them_and_its_door_refuses_places_that_are_none() -> None:
    tick = opened(8, ranges=RANGES).ticks[-1]
    assert len(tick.by_range) == RANGES
    assert {who for row in tick.by_range for who in row} == {*tick.aggregators}
    assert tick_from_body(tick_body(tick)) == tick
    assert not tick_body(opened(8).ticks[-1]).ranges
    for row in (b"", b"\0\0", bytes([len(tick.aggregators)])):
        body = tick_body(tick)
        body.ranges[0] = row
        with pytest.raises(Exception, match="aggregators of a range"):
            tick_from_body(body)
    assert RANGES_MAX * AGGREGATORS_MAX <= 256, "a place is one byte"


def test_a_payload_is_held_once_each_range_holds_its_slice() -> None:
    harness = opened(8, ranges=RANGES)
    tick = harness.ticks[-1]
    claim = claim_of(tick, 0)
    harness.feed(Reported(key(0), claim=claim))
    held = ((tick.step, key(0), claim.payload_sha256),)
    row = tick.by_range[0]
    mine = [who for who in tick.aggregators if who not in row]
    for who in mine:
        harness.feed(Reported(who, holdings=held, held=HeldPlaces(tick.step, tick.attempt, 0, b"")))
    counted = harness.run.step.counted if harness.run.step is not None else -1
    assert counted == 0, "nobody of the first range holds it, whoever else does"
    for who in row[:2]:
        harness.feed(Reported(who, holdings=held, held=HeldPlaces(tick.step, tick.attempt, 0, b"")))
    assert harness.run.step is not None
    assert harness.run.step.counted == 1


def test_names_of_an_earlier_attempt_hold_nothing() -> None:
    """A peer that had one slice may have to have others now."""
    harness = opened(8, ranges=RANGES)
    tick = harness.ticks[-1]
    claim = claim_of(tick, 0)
    harness.feed(Reported(key(0), claim=claim))
    for said in (None, HeldPlaces(tick.step, tick.attempt + 1, 0, b"")):
        for who in tick.aggregators:
            harness.feed(Reported(who, holdings=((tick.step, key(0), claim.payload_sha256),), held=said))
    assert harness.run.step is not None
    assert harness.run.step.counted == 0


def test_an_entry_has_the_sums_of_all_ranges() -> None:
    harness = opened(8, ranges=RANGES)
    tick, requests = harness.ticks[-1], vote(harness, *range(8))
    assert {request.to for request in requests} == {*tick.aggregators}
    answer_all(harness, requests)
    found = harness.entries[0].aggregate
    assert found is not None
    assert found.parts == tuple(Slice(sha("sum", number, ""), 64) for number in range(RANGES))
    assert found.slices == list_of(found.parts)
    assert not harness.run.resting


def test_a_liar_of_one_range_rests_and_costs_nothing() -> None:
    harness = opened(9, ranges=3)
    tick, requests = harness.ticks[-1], vote(harness, *range(9))
    liar = tick.by_range[1][0]
    answer_all(harness, sorted(requests, key=lambda it: it.to != liar), {liar: 1})
    assert harness.entries[0].aggregate is not None
    assert {*harness.run.resting} == {liar}
    assert harness.ticks[-1].step == 2


def test_a_range_without_a_sum_costs_an_attempt_and_its_own_aggregators_rest() -> None:
    harness = opened(9, ranges=3)
    tick, requests = harness.ticks[-1], vote(harness, *range(9))
    row = tick.by_range[2]
    answer_all(harness, requests, dict.fromkeys(row, 2))
    assert not harness.entries
    again = harness.ticks[-1]
    assert again.attempt == 2
    assert {*harness.run.resting} == {*row}, "the others did their work"
    assert not {*again.aggregators} & {*row}
    assert harness.run.step is not None
    assert len(harness.run.step.claims) == 9
    assert not harness.run.step.held, "what they held may be other slices than they hold now"
    answer_all(harness, vote(harness, *range(9)))
    assert harness.entries[0].aggregate is not None


def test_two_of_a_range_that_leave_are_replaced_at_once() -> None:
    harness = opened(9, ranges=3)
    tick = harness.ticks[-1]
    for who in tick.by_range[0][:2]:
        harness.feed(Disconnected(who))
    assert harness.ticks[-1].attempt == 2
    assert {*harness.run.resting} == {*tick.by_range[0][:2]}, "the third did nothing wrong"


def at_the_deadline(harness: Harness) -> set[bytes]:
    """Who rests once the time of the step is over, and it is open again."""
    assert harness.timer is not None
    harness.now = harness.timer
    harness.feed(TimerFired())
    assert harness.ticks[-1].attempt == 2
    return {*harness.run.resting}


@pytest.mark.parametrize("ranges", [1, 3])
def test_a_payload_that_its_author_alone_has_blames_nobody(ranges: int) -> None:
    """It was announced, and given to nobody: all aggregators of all ranges had a rest."""
    harness = opened(9, ranges=ranges)
    tick = harness.ticks[-1]
    for number in range(2):  # one may be an aggregator, and holds its own
        claim = claim_of(tick, number)
        held = ((tick.step, key(number), claim.payload_sha256),)
        said = HeldPlaces(tick.step, tick.attempt, 0, b"")
        harness.feed(Reported(key(number), claim=claim, holdings=held, held=said))
    assert not at_the_deadline(harness)
    assert harness.ticks[-1].aggregators, "others are asked"


@pytest.mark.parametrize("ranges", [1, 3])
def test_if_most_authors_say_that_nobody_has_their_votes_the_aggregators_took_none(ranges: int) -> None:
    harness = opened(9, ranges=ranges)
    tick = harness.ticks[-1]
    for number in range(5):
        harness.feed(Reported(key(number), claim=claim_of(tick, number)))
    assert at_the_deadline(harness) == {*tick.aggregators}


def test_who_holds_a_slice_that_the_others_of_its_range_lack_does_not_rest() -> None:
    harness = opened(9, ranges=3)
    tick, claim = harness.ticks[-1], claim_of(harness.ticks[-1], 0)
    harness.feed(Reported(key(0), claim=claim))
    row = [who for who in tick.by_range[1] if who != key(0)]
    holders = {*tick.aggregators}.difference(row[1:])
    for who in holders - {key(0)}:
        held = ((tick.step, key(0), claim.payload_sha256),)
        harness.feed(Reported(who, holdings=held, held=HeldPlaces(tick.step, tick.attempt, 0, b"")))
    assert at_the_deadline(harness) == {*row[1:]}


def test_of_a_range_with_one_sum_only_those_rest_that_sent_none() -> None:
    harness = opened(9, ranges=3)
    tick, requests = harness.ticks[-1], vote(harness, *range(9))
    row = tick.by_range[2]
    answer_all(harness, [request for request in requests if request.to not in row[1:]])
    assert not harness.entries
    assert at_the_deadline(harness) == {*row[1:]}


def test_a_range_that_holds_nothing_at_the_deadline_is_replaced() -> None:
    harness = opened(9, ranges=3)
    tick = harness.ticks[-1]
    row, claims = tick.by_range[1], [claim_of(tick, number) for number in range(9)]
    held = tuple((tick.step, key(n), claim.payload_sha256) for n, claim in enumerate(claims))
    for number, claim in enumerate(claims):
        harness.feed(Reported(key(number), claim=claim))
    for who in tick.aggregators:
        if who not in row:
            harness.feed(Reported(who, holdings=held, held=HeldPlaces(tick.step, tick.attempt, 0, b"")))
    assert harness.timer is not None
    harness.now = harness.timer
    harness.feed(TimerFired())
    assert harness.ticks[-1].attempt == 2
    assert {*harness.run.resting} == {*row}


def test_an_anchors_sums_count_alone() -> None:
    harness = opened(8, anchored=True, ranges=RANGES)
    tick, requests = harness.ticks[-1], {request.to: request for request in vote(harness, *range(8))}
    assert tick.ranges_of(ANCHOR) == tuple(range(RANGES))
    answer(harness, requests[ANCHOR], sums(tick, ANCHOR))
    assert harness.entries[0].aggregate is not None


def test_sums_in_other_slices_than_the_peers_own_are_refused() -> None:
    harness = opened(8, ranges=RANGES)
    tick, request = harness.ticks[-1], vote(harness, *range(8))[0]
    right = sums(tick, request.to)
    for wrong in (Aggregate(sha("one"), 64), sum_in([*right.parts, *right.parts])):
        answer(harness, request, wrong)
        assert "in other slices than yours" in harness.refusals[-1]
    answer(harness, request, right)
    assert harness.run.step is not None
    assert harness.run.step.summing is not None
    assert harness.run.step.summing.sums == {request.to: right}
    one = opened(8)
    answer(one, vote(one, *range(8))[0], right)
    assert "in other slices" in one.refusals[-1]


def test_no_liars_make_a_sum_that_is_too_long_for_an_entry() -> None:
    """Each names a slice that is as long as a whole sum may be: nobody could read the entry with all of them."""
    harness = opened(9, ranges=3)
    tick, requests = harness.ticks[-1], vote(harness, *range(9))
    for request in requests:
        (number,) = tick.ranges_of(request.to)
        answer(harness, request, sum_in([Slice(sha("long", number), PAYLOAD_BYTES_MAX - list_bytes(2))]))
        assert not harness.entries, "its peers, and this coordinator after a restart, would refuse the entry"
        assert "at most" in harness.refusals[-1]
    longest = slice_bytes_max(3)
    for request in requests:
        (number,) = tick.ranges_of(request.to)
        answer(harness, request, sum_in([Slice(sha("fits", number), longest)]))
    found = harness.entries[0].aggregate
    assert found is not None
    assert found.total_bytes <= PAYLOAD_BYTES_MAX
    assert open_aggregate(log_pb2.Aggregate(**vars(found))) == found
    assert slice_bytes_max(1) == PAYLOAD_BYTES_MAX


def test_each_anchor_that_adds_up_is_heard_however_many_anchors_there_are() -> None:
    """More anchors than a step keeps holdings of are ready, each for a range of its own."""
    several = ANCHORS_HELD_MAX + 2
    harness = opened(8, ranges=several)
    tick = harness.ticks[-1]
    anchors = [sha("anchor", number) for number in range(several)]
    row = tuple(bytes([number]) for number in range(several))
    step = replace(opened_step(harness), tick=replace(tick, aggregators=tuple(anchors), ranges=row))
    step = replace(step, counted_by=Quorum(0, 1, True, tuple(Quorum(0, 1, True) for _ in anchors)))
    for anchor in anchors:
        step = holder_counts.hold(step, anchor, 1, anchor=True)
    assert step.counted == 1, "the slice of each range is with the range's anchor"
    for number in range(2 * several):
        step = holder_counts.hold(step, sha("other", number), 1, anchor=True)
    assert len(step.by_anchor) <= several + ANCHORS_HELD_MAX


def test_a_report_costs_its_own_ranges_alone() -> None:
    """All of 64 were counted anew, twice: 0.4 ms a report (ADR 57)."""
    harness = opened(12, ranges=RANGES_MAX)
    tick = harness.ticks[-1]
    claims = [claim_of(tick, number) for number in range(6)]
    for number, claim in enumerate(claims):
        harness.feed(Reported(key(number), claim=claim))
    held = tuple((tick.step, key(n), claim.payload_sha256) for n, claim in enumerate(claims))
    who, said = tick.aggregators[-1], HeldPlaces(tick.step, tick.attempt, 0, b"")
    with mock.patch.object(holder_counts, "reaching", wraps=holder_counts.reaching) as counted:
        machine.step(harness.run, Reported(who, holdings=held, held=said), harness.now)
    assert counted.call_count == len(tick.ranges_of(who)) < RANGES_MAX


@pytest.mark.parametrize("seed", range(8))
def test_a_swarm_with_liars_and_crashes_comes_to_its_end(seed: int) -> None:
    for found in sums_of_liars(12, seed, ranges=RANGES):
        digest = found.payloads_sha256
        assert found.parts == tuple(Slice(sha("sum", number, digest), 64) for number in range(RANGES))
