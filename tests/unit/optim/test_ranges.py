"""Votes and sums by range: every payload comes back, and sums of slices are slices of the sum."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.optim.votes import sums
from node.optim.votes.groups import VotesError
from node.optim.votes.sums import borders, cut, join
from node.wire import UpdateDoor, aggregate, encode, open_aggregate
from protos.errors import Refusal
from protos.slices import Aggregate, Update, hash_of, list_bytes, slice_of, split, sum_in
from protos.slices import open_aggregate as named_aggregate
from protos.v1 import log_pb2
from tests.sim.sums import summed
from tests.unit.optim.test_sums import DIGEST, RUN, votes

STEP = 5


def door(chunks: int, ranges: int, cap: int = 2) -> UpdateDoor:
    return UpdateDoor(RUN, DIGEST, chunks, sums.SUMMED, cap, ranges)


def payload(update: Update, chunks: int, ranges: int) -> bytes:
    return encode(RUN, DIGEST, update, chunks, ranges)


@given(st.integers(1, 70), st.integers(1, 64))
def test_ranges_are_alike_and_cover_the_chunks(chunks: int, ranges: int) -> None:
    found = borders(chunks, ranges)
    assert [chunk for part in found for chunk in part] == list(range(chunks))
    assert all(part.start % 2 == 0 for part in found if part)
    assert max(map(len, found)) - min(map(len, found)) <= 3


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.integers(2, 8),
    st.sampled_from((2, 16, 512, 1024)),
    st.integers(0, 1 << 16),
    st.sampled_from((0, 0.3, 1)),
)
def test_a_payload_comes_back_from_its_slices(chunks: int, ranges: int, size: int, seed: int, part: float) -> None:
    said = votes(size, chunks, seed, part=part)
    parts = cut(said, size, chunks, ranges)
    for one, chunks_of in zip(parts, borders(chunks, ranges), strict=True):
        sums.SUMMED.check(one, size, len(chunks_of))
    assert join(parts, [size] * ranges, chunks) == (size, said)
    data = payload(Update(STEP, size, said), chunks, ranges)
    assert door(chunks, ranges).open(data, STEP, len(data)) == Update(STEP, size, said)
    assert len(data) <= door(chunks, ranges).bytes_max


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(2, 6), st.integers(2, 7), st.integers(0, 1 << 16))
def test_sums_of_slices_are_those_of_whole_payloads(chunks: int, ranges: int, cap: int, seed: int) -> None:
    """Also of peers that chose other sizes than the run's: the same votes, bit for bit."""
    sizes = (16, 64, 16, 1024, 32)
    said = [Update(STEP, size, votes(size, chunks, seed + peer)) for peer, size in enumerate(sizes)]
    one, several = (summed(door(chunks, count, cap), said, STEP) for count in (1, ranges))
    assert open_aggregate(door(chunks, 1, cap), one, STEP, len(one)) == open_aggregate(
        door(chunks, ranges, cap), several, STEP, len(several)
    )


def test_no_votes_have_a_sum_of_slices_that_moves_nothing() -> None:
    data = summed(door(6, 3), [], STEP)
    assert open_aggregate(door(6, 3), data, STEP, len(data)) == ()


def test_a_slice_of_a_sum_that_is_none_costs_its_own_range_alone() -> None:
    updates = [Update(STEP, 16, votes(16, 6, peer)) for peer in range(3)]
    whole, cuts = door(6, 3), [split(payload(update, 6, 3), 3) for update in updates]
    made = [aggregate(part, [part.open(it[at], STEP) for it in cuts], STEP) for at, part in enumerate(whole.parts)]
    made[1] = b"nothing of the kind"
    data = sum_in([slice_of(it) for it in made]).slices + b"".join(made)
    with pytest.raises(Refusal):
        open_aggregate(whole, data, STEP, len(data))
    told: list[Refusal] = []
    found = open_aggregate(whole, data, STEP, len(data), told.append)
    assert len(told) == 1
    quiet = [sums.SUMMED.read(it.votes, it.size, 6).silent for it in found]
    assert all(rows is not None and int(rows[2:4].min()) == 255 for rows in quiet), "chunks 2 and 3 are the range"
    assert any(int(rows[:2].min()) < 255 and int(rows[4:].min()) < 255 for rows in quiet if rows is not None)


def test_a_payload_has_one_name_and_each_wrong_byte_is_seen() -> None:
    data = payload(Update(STEP, 16, votes(16, 8, 1)), 8, 4)
    head = data[: list_bytes(4)]
    assert hash_of(data, 4) == hash_of(head) != hash_of(data)
    assert hash_of(data[:-1] + b"\0", 4) == b"", "a slice is not the one that the list names"
    with pytest.raises(Refusal, match="other bytes than the list"):
        door(8, 4).open(data[:-1] + b"\0", STEP)
    with pytest.raises(Refusal, match="behind the last slice"):
        door(8, 4).open(data + b"\0", STEP)
    for wrong in (
        head,
        data[: len(head) // 2],
        payload(Update(STEP, 16, votes(16, 8, 1)), 8, 1),
        payload(Update(STEP, 16, votes(16, 8, 1)), 8, 5),
    ):
        with pytest.raises(Refusal):
            door(8, 4).open(wrong, STEP)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from((2, 16, 64, 1024)), min_size=2, max_size=5),
    st.integers(1, 11),
    st.integers(0, 1 << 16),
    st.sampled_from((0, 0.3, 1)),
)
def test_slices_of_several_sizes_say_what_their_sums_say(sizes: list[int], chunks: int, seed: int, part: float) -> None:
    """Aggregators of one range do not see the other sizes, so such a payload counts: a checker has to be able to open it."""
    ranges = len(sizes)
    each = [
        split(payload(Update(STEP, size, votes(size, chunks, seed, part=part)), chunks, ranges), ranges)
        for size in sizes
    ]
    parts = [each[at][at] for at in range(ranges)]
    data = sum_in([slice_of(it) for it in parts]).slices + b"".join(parts)
    whole = door(chunks, ranges)
    update = whole.open(data, STEP, len(data))
    made = [aggregate(one, [one.open(it, STEP)], STEP) for one, it in zip(whole.parts, parts, strict=True)]
    total = sum_in([slice_of(it) for it in made]).slices + b"".join(made)
    summed_up = open_aggregate(whole, total, STEP, len(total))
    again = open_aggregate(
        door(chunks, 1), aggregate(door(chunks, 1), [update], STEP), STEP, sum_length(chunks, update)
    )
    assert summed_up == again


def sum_length(chunks: int, update: Update) -> int:
    return len(aggregate(door(chunks, 1), [update], STEP))


def test_parts_that_are_no_votes_are_not_joined() -> None:
    with pytest.raises(VotesError):
        join([b"", b""], [16, 16], 8)


def test_a_sum_in_the_log_has_the_list_that_its_hash_names() -> None:
    named = sum_in([slice_of(b"one"), slice_of(b"two")])
    assert [it.total_bytes for it in named.parts] == [3, 3]
    body = log_pb2.Aggregate(**vars(named))
    assert named_aggregate(body) == named
    for wrong in (
        {"total_bytes": named.total_bytes + 1},
        {"sha256": bytes(32)},
        {"slices": named.slices[:-1]},
        {"slices": bytes(40)},
    ):
        with pytest.raises(Refusal):
            named_aggregate(log_pb2.Aggregate(**vars(dataclasses.replace(named, **wrong))))  # type: ignore[arg-type]
    assert Aggregate(bytes(32), 7).parts == (dataclasses.replace(slice_of(b""), sha256=bytes(32), total_bytes=7),)
