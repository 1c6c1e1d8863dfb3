"""Every format writes and reads the same votes; nothing else is read."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from node.optim.votes import bits, silence, topk, values
from node.optim.votes import groups as votes
from node.optim.votes.groups import NotANumber, VotesError
from node.optim.votes.payload import PLAIN, Ballot, Choice, Format, Selection
from node.optim.votes.values import GRIDS, scales

CPU = torch.device("cpu")
FORMATS = [
    Format(selection, grid, scaled)
    for selection in ("groups", "topk")
    for grid in GRIDS.values()
    for scaled in (False, True)
]
every = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f"{f.selection}-{f.grid.name}-{f.scaled}")


def momentum(chunks: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(chunks, 64, 64, generator=torch.Generator().manual_seed(seed)) * 1e-3


@every
def test_what_is_written_is_read(form: Format) -> None:
    given = momentum(5)
    for size in form.sizes:
        data = form.encode([form.choose(given[:2], size), form.choose(given[2:], size)], size)
        form.check(data, size, 5)
        ballot = form.decode(data, size, 5, CPU)
        assert ballot.where.shape == ballot.values.shape == (5, form.votes_a_chunk(size))
        assert all(len(set(chunk.tolist())) == chunk.numel() for chunk in ballot.where)
        selected = given.view(5, -1).gather(1, ballot.where)
        loud = ballot.values != 0
        assert torch.equal((selected < 0)[loud], (ballot.values < 0)[loud])
        assert int(ballot.values.abs().max()) <= form.grid.peak
        if form.scaled:
            assert ballot.codes is not None
            near = ballot.values * scales(ballot.codes)[:, None]
            assert (
                float((near - selected).norm() / selected.norm())
                < {"sign": 0.3, "2bit": 0.2, "8bit": 0.02}[form.grid.name]
            )


def again(form: Format, ballot: Ballot, size: int) -> bytes:
    """What `encode` makes of decoded votes."""
    silent = ballot.values == 0
    negative, sizes = (ballot.values < 0).to(torch.uint8), ballot.values.abs().to(torch.uint8)
    found = ballot.where
    if form.selection == "groups":
        slots = torch.empty(4096, dtype=torch.int64)
        slots[votes.coefficients(size, CPU)] = torch.arange(4096)
        positions = (slots[ballot.where] // votes.groups(size)).to(torch.uint8)
        found = votes.pack(positions, negative, size)
    choice = Choice(found, negative, sizes, ballot.codes, silence.pack(silent))
    return form.encode([choice], size)


@every
def test_another_length_is_refused(form: Format) -> None:
    size = form.sizes[2]
    data = form.encode([form.choose(momentum(3), size)], size)
    for wrong in (b"", data[:-1], data + b"\0", data + data):
        with pytest.raises(VotesError):
            form.check(wrong, size, 3)
        with pytest.raises(VotesError):
            form.decode(wrong, size, 3, CPU)
    with pytest.raises(VotesError, match="none of"):
        form.check(data, 7, 3)


@every
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_random_bytes_are_votes_in_range_or_refused(form: Format, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(form.sizes))
    good = form.encode([form.choose(momentum(2), size)], size)
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 20))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        ballot = form.decode(bytes(raw), size, 2, CPU)
    except VotesError:
        assert form != PLAIN
        return
    assert 0 <= int(ballot.where.min()) <= int(ballot.where.max()) < 4096
    assert all(len(set(chunk.tolist())) == chunk.numel() for chunk in ballot.where)
    assert int(ballot.values.abs().max()) <= form.grid.peak
    assert again(form, ballot, size) == bytes(raw), "two encodings of the same votes"


@pytest.mark.parametrize("selection", ["groups", "topk"])
def test_not_a_number_takes_no_vote(selection: Selection) -> None:
    broken = momentum(2)
    broken[1, 5, 5] = math.nan
    with pytest.raises(NotANumber):
        Format(selection).choose(broken, 32)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(topk.SIZES), st.data())
def test_any_set_of_indices_survives(k: int, data: st.DataObject) -> None:
    # the extremes and everything between: all at one end, at both, evenly, at random
    kind = data.draw(st.sampled_from(["first", "last", "ends", "random"]))
    chunks = data.draw(st.integers(1, 4))
    shuffle = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    row = {
        "first": torch.arange(k),
        "last": torch.arange(4096 - k, 4096),
        "ends": torch.cat((torch.arange(k // 2), torch.arange(4096 - k // 2, 4096))),
        "random": torch.randperm(4096, generator=shuffle)[:k].sort().values,
    }[kind]
    chosen = row.repeat(chunks, 1)
    coded = topk.encode(chosen, k)
    assert len(coded) <= topk.bytes_max(chunks, k)
    assert topk.decode(coded, k, chunks).tolist() == chosen.tolist()


def test_top_k_takes_the_largest() -> None:
    given = momentum(3)
    chosen = topk.select(given, 32)
    flat = given.view(3, -1).abs()
    for chunk, indices in zip(flat, chosen, strict=True):
        assert sorted(chunk[indices].tolist()) == sorted(chunk.tolist())[-32:]


def test_a_component_costs_what_the_issue_allows() -> None:
    """At k = 32, indices uniform: at most 9.5 bits a component, its sign included; the entropy is 9.32."""
    form = Format("topk")
    data = form.encode([form.choose(momentum(2000), 32)], 32)
    assert 9.3 < 8 * len(data) / (2000 * 32) < 9.5


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=100))
def test_bits(width: int, codes: list[int]) -> None:
    small = torch.tensor([code % 2**width for code in codes], dtype=torch.uint8)
    packed = bits.pack(small, width)
    assert packed.numel() == bits.packed_bytes(len(codes), width)
    assert torch.equal(bits.unpack(packed, width, len(codes)), small)
    wanted = sum(code << (index * width) for index, code in enumerate(small.tolist()))
    assert int.from_bytes(packed.numpy().tobytes(), "little") == wanted


def test_scales_are_exact() -> None:
    every = scales(torch.arange(256, dtype=torch.uint8))
    assert every[0] == 0
    assert [float(every[values.SCALE_CODE_ONE + 8 * k]) for k in (-3, 0, 3)] == [0.125, 1.0, 8.0]
    ratios = (every[2:] / every[1:-1]).double()
    assert float((ratios - 2**0.125).abs().max()) < 1e-6


def test_the_agreed_scale_is_nobodys_alone() -> None:
    codes = torch.tensor([[1, 200, 0, 9], [255, 201, 0, 0], [100, 0, 0, 0], [99, 202, 0, 200]], dtype=torch.uint8)
    assert values.agreed(codes).tolist() == [100, 201, 0, 200]
    assert values.agreed(codes[:1]).tolist() == [1, 200, 0, 9]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 255), min_size=1, max_size=12), st.data())
def test_a_minority_moves_the_agreed_scale_no_further_than_the_others_say(
    honest: list[int], data: st.DataObject
) -> None:
    liars = data.draw(st.lists(st.integers(0, 255), max_size=len(honest) - 1))
    codes = torch.tensor(honest + liars, dtype=torch.uint8)[:, None]
    found = int(values.agreed(codes)[0])
    assert min(honest) <= found <= max(honest)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 255), st.integers(0, 255))
def test_a_quiet_peer_of_two_does_not_set_the_scale(honest: int, quiet: int) -> None:
    codes = torch.tensor([[honest], [min(quiet, honest)]], dtype=torch.uint8)
    assert int(values.agreed(codes)[0]) == honest


def test_a_lone_voter_sets_no_scale_above_twice_the_loudest_chunk() -> None:
    """15 peers have votes in two chunks; a hostile one also in a third, where the others are silent."""
    codes = torch.tensor([[100, 60, 0]] * 15 + [[255, 255, 255]], dtype=torch.uint8)
    assert values.agreed(codes).tolist() == [100, 60, 100 + values.SCALE_STEPS]
    assert values.scales(values.agreed(codes))[2] == 2 * values.scales(codes[:1, :1])
    quiet = torch.cat([codes[:-1], torch.tensor([[1, 1, 7]], dtype=torch.uint8)])
    assert values.agreed(quiet).tolist() == [100, 60, 7], "what is quieter is as it says"


@st.composite
def codes_of_peers(draw: st.DrawFn, chunks: int, low: int, most: int, least: int = 0) -> Tensor:
    row = st.lists(st.integers(low, 255), min_size=chunks, max_size=chunks)
    rows = draw(st.lists(row, min_size=least, max_size=most))
    return torch.tensor(rows, dtype=torch.uint8).view(len(rows), chunks)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.data())
def test_a_minority_sets_no_scale_above_twice_the_loudest_of_the_others(chunks: int, data: st.DataObject) -> None:
    """Wherever the others are silent, if each of them has a vote somewhere."""
    honest = data.draw(codes_of_peers(chunks, 0, 9, 1))
    honest[:, 0].clamp_(min=1)
    liars = data.draw(codes_of_peers(chunks, 0, len(honest) - 1))
    found = values.agreed(torch.cat([honest, liars])).int()
    assert int(found.max()) <= int(honest.max()) + values.SCALE_STEPS


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.data())
def test_where_all_peers_have_a_vote_the_scale_is_their_median(chunks: int, data: st.DataObject) -> None:
    codes = data.draw(codes_of_peers(chunks, 1, 9, 1))
    silent = torch.zeros(len(codes), 1, dtype=torch.uint8)
    wanted = codes.sort(0).values[len(codes) // 2]
    assert values.agreed(torch.cat([codes, silent], 1)).tolist() == [*wanted.tolist(), 0]
