"""The door for gossiped announcements."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.swarm.inbox import Inbox
from protos import limits
from protos.envelope import Kind, seal
from protos.equivocation import prove
from protos.errors import Reason, Refusal
from protos.identity import Identity
from protos.log import Contribution, Entry, Equivocation
from protos.v1 import envelope_pb2, update_pb2

RUN = b"r" * 32
ADA, BOB, EVE = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
BYTES_MAX = 1000


def announcement(
    author: Identity = ADA,
    step: int = 1,
    parent: bytes = RUN,
    payload: bytes = b"p" * 32,
    size: int = 10,
    run: bytes = RUN,
) -> bytes:
    body = update_pb2.Announcement(step=step, parent_hash=parent, payload_sha256=payload, payload_bytes=size)
    return seal(author, Kind.KIND_ANNOUNCEMENT, run, body).SerializeToString()


def inbox(*members: Identity) -> Inbox:
    made = Inbox(RUN)
    made.open_step(1, [member.public_key for member in members or (ADA, BOB)])
    return made


def reason(box: Inbox, data: bytes) -> Reason:
    with pytest.raises(Refusal) as caught:
        box.offer(data, BYTES_MAX)
    return caught.value.reason


def test_members_are_taken_once() -> None:
    box = inbox()
    taken = box.offer(announcement(), BYTES_MAX)
    assert (taken.author, taken.step, taken.payload_bytes) == (ADA.public_key, 1, 10)
    assert box.may_pull(taken)
    assert reason(box, announcement()) is Reason.REPLAYED
    assert box.contradicted(taken) is None
    second = box.offer(announcement(payload=b"q" * 32), BYTES_MAX)
    assert box.contradicted(second) is taken
    assert prove(Equivocation(taken.envelope, second.envelope), RUN).author == ADA.public_key
    assert reason(box, announcement(payload=b"z" * 32)) is Reason.REPLAYED
    assert box.offer(announcement(BOB), BYTES_MAX).author == BOB.public_key


def test_each_fault_has_its_reason() -> None:
    box = inbox()
    tampered = envelope_pb2.SignedEnvelope.FromString(announcement())
    tampered.body = tampered.body + b"\x40\x01"
    assert reason(box, tampered.SerializeToString()) is Reason.BAD_SIGNATURE
    assert reason(box, bytes(2000)) is Reason.TOO_LARGE
    assert reason(box, b"\x01\x02") is Reason.MALFORMED
    assert reason(box, announcement(run=b"x" * 32)) is Reason.WRONG_RUN
    assert reason(box, announcement(EVE)) is Reason.UNKNOWN_SIGNER
    assert reason(box, announcement(step=0)) is Reason.WRONG_STEP
    assert reason(box, announcement(step=9)) is Reason.WRONG_STEP
    assert reason(box, announcement(parent=b"x" * 32)) is Reason.WRONG_PARENT
    assert reason(box, announcement(size=BYTES_MAX + 1)) is Reason.OUT_OF_RANGE
    assert reason(box, announcement(payload=b"short")) is Reason.MALFORMED
    record = seal(ADA, Kind.KIND_PEER_RECORD, RUN, update_pb2.PeerRecord()).SerializeToString()
    assert reason(box, record) is Reason.WRONG_KIND


def test_what_comes_before_the_tick_waits_for_the_roster() -> None:
    box = inbox()
    early = box.offer(announcement(step=2, parent=b"h" * 32), BYTES_MAX)
    stranger = box.offer(announcement(EVE, step=2, parent=b"h" * 32), BYTES_MAX)
    assert not box.may_pull(early)
    box.move_head(1, b"h" * 32)
    assert box.open_step(2, [ADA.public_key]) == [early]
    assert box.may_pull(early)
    assert not box.may_pull(stranger)
    assert reason(box, announcement(EVE, step=2, parent=b"h" * 32)) is Reason.UNKNOWN_SIGNER


def test_two_payloads_are_evidence_only_on_one_log_and_before_the_tick_too() -> None:
    box = inbox()
    other_log = box.offer(announcement(step=2, parent=b"x" * 32), BYTES_MAX)
    first = box.offer(announcement(BOB, step=2, parent=b"h" * 32), BYTES_MAX)
    second = box.offer(announcement(BOB, step=2, parent=b"h" * 32, payload=b"q" * 32), BYTES_MAX)
    assert box.contradicted(box.offer(announcement(step=2, parent=b"h" * 32, payload=b"q" * 32), BYTES_MAX)) is None
    box.move_head(1, b"h" * 32)
    assert other_log not in (waiting := box.open_step(2, [ADA.public_key, BOB.public_key])), "of another log: forgotten"
    assert [one for one in waiting if one.author == BOB.public_key] == [first, second]
    assert (box.contradicted(first), box.contradicted(second)) == (None, first)


def test_another_payload_of_the_step_that_was_decided_last_is_evidence() -> None:
    """An author that shows the coordinator one payload and a few peers another is found out after the entry, too."""
    box = inbox()
    box.open_step(1, [ADA.public_key, BOB.public_key])
    first = box.offer(announcement(step=1), BYTES_MAX)
    named = Contribution(ADA.public_key, b"q" * 32, 10, 1, 1, 1.0)
    entry = Entry(1, first.parent_hash, (named,), 0, b"", (), 1)
    assert box.disputed(entry) == [first.envelope]
    assert box.disputed(replace(entry, contributions=(replace(named, payload_sha256=first.payload_sha256),))) == []
    box.move_head(1, b"h" * 32)
    assert reason(box, announcement(BOB, step=1)) is Reason.WRONG_STEP, "nothing of its author is here to contradict"
    assert reason(box, announcement(step=1)) is Reason.WRONG_STEP, "the same again is none"
    late = box.offer(announcement(step=1, payload=b"q" * 32), BYTES_MAX)
    assert box.is_decided(late.step)
    assert box.contradicted(late) == first
    assert reason(box, announcement(step=1, payload=b"r" * 32)) is Reason.REPLAYED, "two are enough"
    box.move_head(2, b"i" * 32)
    assert reason(box, announcement(step=1, payload=b"s" * 32)) is Reason.WRONG_STEP


def test_strangers_cannot_fill_it_for_good() -> None:
    box = inbox()
    for number in range(40):
        box.offer(announcement(Identity.from_seed(number.to_bytes(32, "big")), step=2), BYTES_MAX)
    box.move_head(1, b"h" * 32)
    assert box.open_step(2, [ADA.public_key]) == []
    assert box.offer(announcement(step=2, parent=b"h" * 32), BYTES_MAX).author == ADA.public_key


def test_strangers_of_a_later_step_keep_no_member_of_the_open_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows the next roster, so everybody may announce for it: 6,144 of them filled the inbox until the step ended."""
    monkeypatch.setattr(limits, "ROSTER_PEERS_MAX", 3)
    box = inbox()
    for number in range(10, 19):
        box.offer(announcement(Identity.from_seed(number.to_bytes(32, "big")), step=2), BYTES_MAX)
    assert reason(box, announcement(EVE, step=2)) is Reason.OUT_OF_RANGE
    for member in (ADA, BOB):
        assert box.may_pull(box.offer(announcement(member), BYTES_MAX))
    assert len(box._seen) == 9


@given(st.binary(max_size=1500))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Refusal):
        inbox().offer(data, BYTES_MAX)
