"""What is told to the coordinator: everything once, everything again after a lost session, nothing that is decided."""

from __future__ import annotations

import hashlib
from pathlib import Path

from node.swarm.outbox import Outbox
from node.swarm.payloads import Payloads
from protos import limits


def told(box: Outbox) -> tuple[int, int, int, bool]:
    report = box.take()
    if report is None:
        return 0, 0, 0, False
    body, facts = report
    box.sent(facts)
    return len(body.holdings), len(body.applied), len(body.snapshots), body.HasField("announcement")


def full() -> Outbox:
    box = Outbox()
    box.announcement = (5, b"")
    box.holdings = {(b"a" * 32, b"p" * 32): 5, (b"b" * 32, b"q" * 32): 5}
    box.add_applied(3, b"x" * 32)
    box.add_applied(4, b"y" * 32)
    box.snapshots[0] = (b"s" * 32, 100)
    return box


def test_everything_is_told_once() -> None:
    box = full()
    assert told(box) == (2, 2, 1, True)
    assert told(box) == (0, 0, 0, False)
    box.holdings[b"c" * 32, b"r" * 32] = 5
    assert told(box) == (1, 0, 0, False)


def test_a_report_that_failed_is_told_again() -> None:
    box = full()
    assert box.take() is not None
    assert told(box) == (2, 2, 1, True)


def test_a_new_session_hears_everything_that_still_matters() -> None:
    box = full()
    told(box)
    box.everything_again()
    assert told(box) == (2, 2, 1, True)


def test_another_roster_hears_payloads_again_only() -> None:
    box = full()
    told(box)
    box.announce_again()
    assert told(box) == (2, 0, 0, True)


def test_decided_steps_are_forgotten() -> None:
    box = full()
    box.move_head(5)
    assert told(box) == (0, 2, 1, False)


def test_it_stays_bounded_over_a_long_run() -> None:
    box = Outbox()
    for step in range(1, 3000):
        box.add_applied(step, step.to_bytes(32, "big"))
        box.snapshots[step] = (step.to_bytes(32, "big"), 1)
        box.holdings[b"a" * 32, step.to_bytes(32, "big")] = step
        told(box)
        box.move_head(step)
    assert len(box.applied) <= limits.APPLIED_MAX
    assert len(box.snapshots) <= 4
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
    box.abstain((7, "the gradient is not finite"))
    for again in (lambda: None, box.everything_again, box.announce_again):
        again()
        report = box.take()
        assert report is not None
        assert (report[0].abstained.step, report[0].abstained.reason) == (7, "the gradient is not finite")
        box.sent(report[1])
        assert box.take() is None
    box.move_head(7)
    assert box.abstained is None
    box.everything_again()
    assert box.take() is None


def test_votes_that_come_after_all_end_an_abstention() -> None:
    box = Outbox()
    box.abstain((7, "x"))
    box.abstain(None)
    assert box.take() is None


def test_abstentions_leave_nothing_behind() -> None:
    box = Outbox()
    for step in range(1, 5000):
        box.abstain((step, "not finite"))
        report = box.take()
        assert report is not None
        box.sent(report[1])
        box.move_head(step)
    assert not box._told
