"""The door for update payloads: everything that is not exactly right is refused, each with its own reason."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.optim.votes.groups import vote_bytes
from node.optim.votes.payload import Format
from node.optim.votes.values import TWO_BIT
from node.wire import UpdateDoor
from protos.errors import Reason, Refusal
from protos.limits import UPDATE_HEADER_BYTES_MAX
from protos.optimizer_config import GROUP_SIZES
from protos.slices import Update, encode_update, hash_of
from protos.v1 import update_pb2

RUN, LAYOUT, CHUNKS = b"r" * 32, b"l" * 32, 3
DOOR = UpdateDoor(RUN, LAYOUT, CHUNKS)


def payload(
    step: int = 7, group_size: int = 128, run: bytes = RUN, layout: bytes = LAYOUT, extra: bytes = b""
) -> bytes:
    votes = bytes(range(256)) * 100
    return encode_update(run, layout, Update(step, group_size, votes[: vote_bytes(CHUNKS, group_size)] + extra))


@given(st.sampled_from(GROUP_SIZES), st.integers(1, 1 << 40), st.randoms())
def test_every_byte_string_of_the_right_length_is_a_payload(group_size: int, step: int, random: object) -> None:
    votes = random.randbytes(vote_bytes(CHUNKS, group_size))  # type: ignore[attr-defined]
    data = encode_update(RUN, LAYOUT, Update(step, group_size, votes))
    assert DOOR.open(data, step) == Update(step, group_size, votes)
    assert len(data) - len(votes) <= UPDATE_HEADER_BYTES_MAX
    assert len(hash_of(data)) == 32


def refusal(data: bytes, step: int = 7, door: UpdateDoor = DOOR) -> Reason:
    with pytest.raises(Refusal) as caught:
        door.open(data, step)
    assert caught.value.detail
    return caught.value.reason


def test_votes_count_only_at_the_length_that_the_log_names() -> None:
    data = payload()
    assert DOOR.open(data, 7, len(data)) == DOOR.open(data, 7)
    for named in (len(data) - 1, len(data) + 1, 0):
        with pytest.raises(Refusal, match="the log names") as caught:
            DOOR.open(data, 7, named)
        assert caught.value.reason is Reason.OUT_OF_RANGE


def test_each_fault_has_its_reason() -> None:
    assert refusal(bytes(DOOR.bytes_max + 1)) is Reason.TOO_LARGE
    assert refusal(payload()[:-1]) is Reason.MALFORMED
    assert refusal(b"\xff\xff\xff") is Reason.MALFORMED
    assert refusal(b"") is Reason.WRONG_RUN
    assert refusal(payload(run=b"x" * 32)) is Reason.WRONG_RUN
    assert refusal(payload(step=8)) is Reason.WRONG_STEP
    assert refusal(payload(layout=b"x" * 32)) is Reason.WRONG_LAYOUT
    assert refusal(payload(extra=b"x")) is Reason.OUT_OF_RANGE
    odd = update_pb2.UpdatePayload(run_id=RUN, step=7, layout_digest=LAYOUT, size=100, votes=b"")
    assert refusal(odd.SerializeToString()) is Reason.OUT_OF_RANGE


def test_a_door_opens_the_format_of_its_run_only() -> None:
    form = Format("topk", TWO_BIT, scaled=True)
    door = UpdateDoor(RUN, LAYOUT, CHUNKS, form)
    votes = form.encode([form.choose(torch.randn(CHUNKS, 64, 64), 64)], 64)
    data = encode_update(RUN, LAYOUT, Update(7, 64, votes))
    assert door.open(data, 7) == Update(7, 64, votes)
    assert refusal(data) is Reason.OUT_OF_RANGE
    assert refusal(payload(), door=door) is Reason.OUT_OF_RANGE
    broken = encode_update(RUN, LAYOUT, Update(7, 64, votes[:-1] + b"\0"))
    assert refusal(broken, door=door) is Reason.OUT_OF_RANGE


def test_silent_votes_pass_and_a_second_encoding_of_them_does_not() -> None:
    form = Format()
    momentum = torch.randn(CHUNKS, 64, 64)
    momentum[1] = 0.0
    votes = form.encode([form.choose(momentum, 128)], 128)
    body, tail = votes[:96], votes[96:]
    assert tail == b"\2" + bytes([255]) * 4
    data = encode_update(RUN, LAYOUT, Update(7, 128, votes))
    assert DOOR.open(data, 7, len(data)) == Update(7, 128, votes)
    for wrong in (
        b"\0",
        b"\2" + bytes(4),
        b"\2" + bytes([255]) * 3,
        b"\3" + bytes([255]) * 8,
        b"\x0a" + bytes([255]) * 8,
    ):
        assert refusal(encode_update(RUN, LAYOUT, Update(7, 128, body + wrong))) is Reason.OUT_OF_RANGE
    every = form.encode([form.choose(torch.zeros(CHUNKS, 64, 64), 8)], 8)
    data = encode_update(RUN, LAYOUT, Update(7, 8, every))
    assert len(data) <= DOOR.bytes_max, "the longest payload there is"
    assert DOOR.open(data, 7).votes == every


def test_unknown_fields_cannot_carry_bytes_along() -> None:
    assert refusal(payload() + b"\x7a" + bytes([100]) + bytes(100)) is Reason.MALFORMED


@given(st.binary(max_size=2000))
def test_random_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(Refusal):
        DOOR.open(data, 7)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_is_another_valid_vote(position: int, flip: int) -> None:
    data = bytearray(payload())
    data[position % len(data)] ^= flip
    try:
        update = DOOR.open(bytes(data), 7)
    except Refusal:
        return
    assert len(update.votes) == vote_bytes(CHUNKS, update.size)
