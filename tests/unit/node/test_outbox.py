"""What is told to the coordinator: everything once, everything again after a lost session, nothing that is decided."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from node.blobs.payloads import Payloads
from node.swarm.facts import Held
from node.swarm.outbox import WAIT_SECONDS_MAX, WAIT_SECONDS_MIN, Outbox
from protos import limits
from protos.assignment import Range, SampleShare
from protos.log import Equivocation, Verdict
from protos.slices import mask_from_bytes
from protos.tick import Tick


def told(box: Outbox) -> tuple[int, int, int, bool]:
    report = box.next_report()
    if report is None:
        return 0, 0, 0, False
    body, facts = report
    box.sent(facts)
    held = mask_from_bytes(body.held.places).bit_count() + len(body.holdings)
    return held, len(body.applied), len(body.snapshots), body.HasField("announcement")


def opened(step: int) -> Tick:
    roster = tuple(SampleShare(name * 32, 1) for name in (b"a", b"b", b"c"))
    return Tick(step, bytes(32), 1, roster, (Range(0, 3),), 0)


def full() -> Outbox:
    box = Outbox()
    box.open_step(opened(5))
    box.announce(5, b"")
    box.hold(5, b"a" * 32, b"p" * 32)
    box.hold(5, b"b" * 32, b"q" * 32)
    box.add_applied(3, b"x" * 32)
    box.add_applied(4, b"y" * 32)
    box.add_snapshot(0, b"s" * 32, 100, kept=True)
    return box


def test_everything_is_told_once() -> None:
    box = full()
    assert told(box) == (2, 2, 1, True)
    assert told(box) == (0, 0, 0, False)
    box.hold(5, b"c" * 32, b"r" * 32)
    assert told(box) == (3, 0, 0, False), "all that it holds, with one hash over it"


def test_what_the_coordinator_could_not_match_is_told_by_name() -> None:
    box = full()
    body, facts = box.next_report() or (None, [])
    assert body.held.places == b"\x03"
    assert body.held.payloads_sha256 == hashlib.sha256(b"p" * 32 + b"q" * 32).digest()
    unheard = box.name(0b10)
    assert unheard == [Held(b"a" * 32, b"p" * 32), Held(b"b" * 32, b"q" * 32)], "of a mask, all is taken or nothing"
    box.sent([fact for fact in facts if fact not in unheard])
    body, facts = box.next_report() or (None, [])
    assert [(held.step, held.public_key, held.payload_sha256) for held in body.holdings] == [(5, b"b" * 32, b"q" * 32)]
    assert body.held.places == b"\x01", "the other one again, in a mask that can be matched"
    assert body.held.payloads_sha256 == hashlib.sha256(b"p" * 32).digest()
    box.sent(facts)
    assert told(box) == (0, 0, 0, False)
    box.hold(5, b"c" * 32, b"r" * 32)
    body, _ = box.next_report() or (None, [])
    assert body.held.places == b"\x05", "the one that it named is not said twice"
    assert not body.holdings


def test_an_answer_to_another_roster_names_nothing() -> None:
    box = full()
    box.next_report()
    box.open_step(opened(5))
    assert box.name(0b11) == []


def test_a_few_payloads_wait_for_more_and_all_do_not() -> None:
    box = Outbox()
    box.open_step(opened(5))
    me = b"a" * 32
    assert box.patience_seconds(me) == 0.0, "nothing is new"
    box.hold(5, b"b" * 32, b"q" * 32)
    assert 0 < box.patience_seconds(me) <= WAIT_SECONDS_MAX
    assert box.patience_seconds(b"z" * 32) == 0.0, "not in the roster: somebody may wait for its word"
    box.add_applied(4, b"y" * 32)
    assert 0 < box.patience_seconds(me) <= WAIT_SECONDS_MAX
    for name in (b"a", b"c"):
        box.hold(5, name * 32, name * 32)
    assert box.patience_seconds(me) == 0.0, "it holds all"
    told(box)
    box.add_applied(5, b"y" * 32)
    assert box.patience_seconds(me) >= WAIT_SECONDS_MIN
    box.announce(6, b"")
    assert box.patience_seconds(me) == 0.0, "the clock waits for announcements"


def test_a_report_that_failed_is_told_again() -> None:
    box = full()
    assert box.next_report() is not None
    assert told(box) == (2, 2, 1, True)


def test_a_new_session_hears_everything_that_still_matters() -> None:
    box = full()
    told(box)
    box.everything_again()
    assert told(box) == (2, 2, 1, True)


def test_another_roster_hears_payloads_again_only() -> None:
    box = full()
    told(box)
    box.open_step(opened(5))
    assert told(box) == (2, 0, 0, True)


def test_decided_steps_are_forgotten() -> None:
    box = full()
    box.move_head(5)
    assert told(box) == (0, 2, 1, False)


def test_it_stays_bounded_over_a_long_run() -> None:
    box = Outbox()
    for step in range(1, 3000):
        box.add_applied(step, step.to_bytes(32, "big"))
        box.add_snapshot(step, step.to_bytes(32, "big"), 1, kept=step % 3 == 0)
        box.open_step(opened(step))
        box.hold(step, b"a" * 32, step.to_bytes(32, "big"))
        told(box)
        box.move_head(step)
    assert len(box.applied) <= limits.APPLIED_MAX
    assert len(box.snapshots) <= 9
    assert len(box._told) <= 5 * limits.HOLDINGS_MAX


def test_payloads_are_bounded_outlive_the_process_and_rot_is_noticed(tmp_path: Path) -> None:
    store = Payloads(tmp_path, bytes_max=100)
    blobs = [bytes([step]) * 30 for step in range(10)]
    names = [hashlib.sha256(blob).digest() for blob in blobs]
    for step, (name, blob) in enumerate(zip(names, blobs, strict=True)):
        assert store.put(step, name, blob)
        assert not store.put(step, name, blob)
    assert [store.get(name) is not None for name in names] == [False] * 7 + [True] * 3
    (tmp_path / "incoming").write_bytes(b"half")
    again = Payloads(tmp_path, bytes_max=100)
    assert again.get(names[9]) == blobs[9]
    (tmp_path / f"8-{names[8].hex()}").write_bytes(b"rotten")
    assert again.get(names[8]) is None
    again.forget_until(9)
    assert list(tmp_path.iterdir()) == []


def test_an_abstention_is_told_once_and_again_to_whoever_has_not_heard_it() -> None:
    box = Outbox()
    box.abstain(7, "the gradient is not finite", not_finite=True)
    for again in (lambda: None, box.everything_again, lambda: box.open_step(opened(7))):
        again()
        report = box.next_report()
        said = report[0].abstained
        assert (said.step, said.reason, said.not_finite) == (7, "the gradient is not finite", True)
        box.sent(report[1])
        assert box.next_report() is None
    box.move_head(7)
    assert box.abstained is None
    box.everything_again()
    assert box.next_report() is None


def test_votes_that_come_after_all_end_an_abstention() -> None:
    box = Outbox()
    box.abstain(7, "x")
    box.withdraw_abstention()
    assert box.next_report() is None


def test_abstentions_leave_nothing_behind() -> None:
    box = Outbox()
    for step in range(1, 5000):
        box.abstain(step, "not finite")
        report = box.next_report()
        box.sent(report[1])
        box.move_head(step)
    assert not box._told


def test_what_a_report_may_not_hold_waits_for_no_answer() -> None:
    """A coordinator was slow while a peer caught up: the peer ended with "259 snapshots, at most 256"."""
    box, many = Outbox(), limits.APPLIED_MAX + 3
    for step in range(1, many + 1):
        box.add_snapshot(step, step.to_bytes(32, "big"), 1, kept=False)
    report = box.next_report()
    assert [s.step for s in report[0].snapshots] == list(range(4, many + 1))
    box.sent(report[1])
    assert box.next_report() is None


def test_a_new_session_hears_of_the_snapshots_that_are_here() -> None:
    """A peer that is seldom drawn stores an old one, and knows newer roots: joiners are sent to it for the old one."""
    box = Outbox()
    for step in (10, 20, 30, 40):
        box.add_snapshot(step, step.to_bytes(32, "big"), 1, kept=step == 10)
        told(box)
    box.everything_again()
    report = box.next_report()
    assert [(s.step, s.not_kept) for s in report[0].snapshots] == [(10, False), (30, True), (40, True)]
    box.sent(report[1])
    box.add_snapshot(10, box.snapshots[10][0].root, 1, kept=False)
    report = box.next_report()
    assert [(s.step, s.not_kept) for s in report[0].snapshots] == [(10, True)]
    box.sent(report[1])
    assert sorted(box.snapshots) == [30, 40]


def test_a_snapshot_that_goes_while_a_report_is_under_way_is_taken_back() -> None:
    """The fact was forgotten unreported: joiners were sent to peers without the pieces, for two periods of three."""
    box = Outbox()
    for step in (10, 20, 30):
        box.add_snapshot(step, step.to_bytes(32, "big"), 1, kept=True)
    told(box)
    box.add_applied(31, b"d" * 32)
    report = box.next_report()
    box.add_snapshot(10, (10).to_bytes(32, "big"), 1, kept=False)
    box.sent(report[1])
    report = box.next_report()
    assert [(s.step, s.not_kept) for s in report[0].snapshots] == [(10, True)]
    box.sent(report[1])
    assert sorted(box.snapshots) == [20, 30]


def test_a_peer_that_starts_again_from_a_snapshot_still_tells_of_older_ones() -> None:
    box = Outbox()
    for step in (10, 20, 30):
        box.add_snapshot(step, step.to_bytes(32, "big"), 1, kept=step < 30)
    told(box)
    box.restart(20)
    box.everything_again()
    report = box.next_report()
    assert [(s.step, s.not_kept) for s in report[0].snapshots] == [(10, False), (20, False)]


def test_a_snapshot_that_is_stored_again_is_reported_again() -> None:
    box, root = Outbox(), b"r" * 32
    for kept in (True, False, True, False):
        box.add_snapshot(10, root, 1, kept=kept)
        report = box.next_report()
        assert [s.not_kept for s in report[0].snapshots] == [not kept]
        box.sent(report[1])


@pytest.mark.parametrize(
    "add",
    [
        lambda box: box.announce(5, b""),
        lambda box: box.hold(5, b"a" * 32, b"p" * 32),
        lambda box: box.abstain(5, "x"),
        lambda box: box.add_applied(4, b"y" * 32),
        lambda box: box.add_snapshot(0, b"s" * 32, 100, kept=True),
        lambda box: box.add_bad_snapshot(0, b"s" * 32, 100),
        lambda box: box.add_verdicts([Verdict(4, b"c" * 32, b"s" * 32, b"p" * 32, 1.0, 1.0)]),
        lambda box: box.accuse(b"a" * 32, Equivocation(b"1", b"2")),
        lambda box: box.move_to(("/ip4/192.0.2.1/tcp/1/p2p/x",)),
        lambda box: box.open_step(opened(5)),
        lambda box: box.everything_again(),
    ],
)
async def test_each_fact_that_is_added_wakes_the_reporter(add: Callable[[Outbox], object]) -> None:
    box = Outbox()
    waiting = asyncio.ensure_future(box.changed())
    await asyncio.sleep(0)
    assert not waiting.done()
    add(box)
    await asyncio.wait_for(waiting, 240)
