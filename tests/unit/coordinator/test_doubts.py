"""Sums that peers doubt: one word makes all look, most of them stop the run, and nobody else is blamed."""

from __future__ import annotations

import pytest

from coordinator.clock.effects import NoticeKind, SendNotice
from coordinator.clock.events import Reported, ResumeAsked
from coordinator.clock.findings import FORGED, QUIET_STEPS, Doubt, Doubts, SummedStep
from protos.checks import AUDIT_STEPS
from protos.identity import short
from tests.unit.coordinator.driver import Harness, key
from tests.unit.coordinator.test_aggregation import opened, vote
from tests.unit.coordinator.test_aggregation_ranges import answer_all

ALL = frozenset(map(key, range(7)))


def kept(doubts: Doubts, step: int) -> Doubts:
    return doubts.kept(step, SummedStep(ALL, ((key(0), key(1)),) * 2, ((key(2),),) * 2))


def test_one_word_makes_all_look_and_more_than_half_find_a_forgery() -> None:
    doubts = kept(Doubts(), 1)
    said = []
    for number in range(6):
        doubts, verdict = doubts.heard(key(number), 1, 1, 1, 7)
        said.append(verdict)
    assert said == [Doubt.ASK_ALL, *[Doubt.NOTHING] * 2, Doubt.FORGED, *[Doubt.NOTHING] * 2]
    assert f"{short(key(0))}, {short(key(1))}" in doubts.words(1, 1)
    assert not doubts.quiet, "who was right may say so again"


@pytest.mark.parametrize(("members", "needed"), [(7, 4), (3, 4), (9, 5)])
def test_most_of_the_entry_and_of_those_that_take_part_have_to_find_it(members: int, needed: int) -> None:
    """In the first steps of a run an entry may have the votes of two peers alone."""
    doubts, verdicts = kept(Doubts(), 1), []
    for number in range(needed):
        doubts, verdict = doubts.heard(key(number), 1, 0, 1, members)
        verdicts.append(verdict)
    assert verdicts.count(Doubt.FORGED) == 1 == (verdicts[-1] is Doubt.FORGED)


def test_a_false_claim_makes_all_look_once_in_a_thousand_steps_and_an_honest_claim_still_counts() -> None:
    doubts, asked = Doubts(), list[int]()
    for step in range(1, QUIET_STEPS + 3):
        doubts = kept(doubts, step)
        for number in range(2):
            doubts, verdict = doubts.heard(key(6), step, number, step, 7)
            if verdict is Doubt.ASK_ALL:
                asked.append(step)
        assert len(doubts.steps) <= AUDIT_STEPS
    assert asked == [1, QUIET_STEPS + 1]
    step = QUIET_STEPS + 2
    assert doubts.heard(key(3), step, 0, step, 7)[1] is Doubt.ASK_ALL


def test_words_about_other_steps_ranges_and_of_others_count_for_nothing() -> None:
    doubts = kept(Doubts(), 1)
    for who, step, number in ((key(9), 1, 0), (key(0), 2, 0), (key(0), 1, 2)):
        assert doubts.heard(who, step, number, 1, 7) == (doubts, Doubt.NOTHING)
    after = kept(doubts, 1 + AUDIT_STEPS)
    assert after.heard(key(0), 1, 0, 1 + AUDIT_STEPS, 7)[1] is Doubt.NOTHING


def forged() -> tuple[Harness, tuple[bytes, ...]]:
    """Two of range 1 sent the same false sum, so the third has a rest."""
    harness = opened(9, ranges=3)
    row, requests = harness.ticks[-1].by_range[1], vote(harness, *range(9))
    answer_all(harness, requests, {row[0]: 1})
    assert {*harness.run.resting} == {row[0]}
    return harness, row


def test_a_forged_sum_stops_the_run_with_the_names_of_those_who_sent_it() -> None:
    harness, row = forged()
    told = [it for number in range(4) for it in harness.feed(Reported(key(number), false_sums=((1, 1),)))]
    notices = [it for it in told if isinstance(it, SendNotice) and it.kind is NoticeKind.DOUBTED]
    assert [(it.step, it.number, it.to) for it in notices] == [(1, 1, None)], "all are asked once"
    assert not harness.run.is_paused
    harness.feed(Reported(key(4), false_sums=((1, 1),)))
    assert harness.run.is_paused
    words = harness.run.pause or ""
    assert words.startswith(FORGED)
    assert all(short(who) in words for who in row[1:])
    assert short(row[0]) not in words
    assert {*harness.run.resting} == {*row[1:]}, "the sum of the third was right"
    assert harness.run.reason.startswith(FORGED), "not the operator's words"
    for number in range(5, 9):
        harness.feed(Reported(key(number), false_sums=((1, 1),)))
    harness.feed(ResumeAsked())
    assert not harness.run.is_paused, "later words about the same sum do not stop it again"


def test_a_run_with_an_anchor_keeps_no_doubts() -> None:
    harness = opened(8, anchored=True, ranges=3)
    answer_all(harness, vote(harness, *range(8)))
    assert harness.entries
    assert not harness.run.doubts.steps
