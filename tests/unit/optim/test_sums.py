"""Sums of votes as bytes: one encoding, refused otherwise, and the same weights as from the payloads themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.optim.base import BY_CHUNKS, BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.exact.transforms import CAP_MAX
from node.optim.votes import silence, sums
from node.optim.votes.groups import VotesError
from node.optim.votes.payload import Choice
from node.optim.votes.places import Draw
from node.wire import UpdateDoor, aggregate, open_aggregate
from protos.errors import Refusal
from protos.slices import Update

RUN, DIGEST = b"r" * 32, b"d" * 32
LR = float(np.float32(0.01))
SHAPES = ((64, 128), (70, 130), (3,))


def votes(size: int, chunks: int, seed: int, *, part: float = 0.3) -> bytes:
    """A payload of which `part` is silent."""
    random = torch.Generator().manual_seed(seed)
    momentum = torch.randn(chunks, 64, 64, generator=random)
    momentum[torch.rand(chunks, 64, 64, generator=random) < part] = 0
    return sums.SUMMED.encode([sums.SUMMED.choose(momentum, size, None, Draw(RUN, 5))], size)


def optimizer(base: BaseConfig, cap: int) -> DeMo:
    generator = torch.Generator().manual_seed(1)
    named = [(f"p{n}", torch.nn.Parameter(torch.randn(shape, generator=generator))) for n, shape in enumerate(SHAPES)]
    return DeMo(named, DeMoConfig(selection="random", seed=RUN, base=base, cap=cap))


def test_a_word_holds_as_many_digits_as_its_bits() -> None:
    assert [sums.digits(cap) for cap in (2, 3, 4, 7, CAP_MAX)] == [27, 22, 20, 16, 8]
    assert sums.sum_bytes(27, 2) == 8
    assert sums.sum_bytes(28, 2) == 16


@given(st.integers(1, 5), st.sampled_from((2, 16, 512, 1024)), st.integers(2, CAP_MAX), st.integers(0, 1 << 16))
def test_sums_come_back_capped(chunks: int, size: int, cap: int, seed: int) -> None:
    found = np.random.default_rng(seed).integers(-cap - 2, cap + 3, (chunks, 4096 // size), dtype=np.int16)
    data = sums.pack(found, cap)
    assert len(data) == sums.sum_bytes(found.size, cap)
    assert np.array_equal(sums.unpack(data, chunks, size, cap), np.clip(found, -cap, cap))


@settings(deadline=None)  # the first packing compiles
@given(st.integers(1, 4), st.sampled_from((2, 16, 512, 1024)), st.integers(0, 1 << 16))
def test_ballots_are_payloads_as_a_peer_writes_them(chunks: int, size: int, seed: int) -> None:
    found = np.random.default_rng(seed).integers(-3, 4, (chunks, 4096 // size), dtype=np.int16)
    for level, payload in enumerate(sums.ballots(found), 1):
        silent, negative = torch.from_numpy(abs(found) < level), torch.from_numpy((found <= -level).astype(np.uint8))
        assert payload == sums.SUMMED.encode([Choice(None, negative, None, None, silence.pack(silent))], size)


def test_bytes_that_no_aggregator_makes_are_refused() -> None:
    data = sums.pack(np.zeros((1, 256), dtype=np.int16), 2)  # 10 words, 14 digits behind the last place
    with pytest.raises(VotesError, match="80 bytes of sums, not 152"):
        sums.unpack(data, 1, 8, 2)
    with pytest.raises(VotesError, match="more than its digits"):
        sums.unpack(data[:-8] + b"\xff" * 8, 1, 16, 2)
    with pytest.raises(VotesError, match="more than its digits"):
        sums.unpack(b"\xff" * 8 + data[8:], 1, 16, 2)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("base", [BaseConfig(), BY_CHUNKS], ids=["sign", "muon by chunks"])
@pytest.mark.parametrize("cap", [2, 3, 7])
def test_the_weights_are_those_of_the_payloads(
    backend: str, base: BaseConfig, cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of peers that chose other sizes than the run's."""
    monkeypatch.setenv("SWARMENTUM_OPTIM_BACKEND", backend)
    apart, together = optimizer(base, cap), optimizer(base, cap)
    chunks = apart.layout.chunks
    door = UpdateDoor(RUN, DIGEST, chunks, sums.SUMMED, cap)
    for step in range(5, 8):
        sizes = (16, 16, 64, 16, 32, 16, 16, 1024, 16)
        said = [Update(step, size, votes(size, chunks, 10 * step + peer)) for peer, size in enumerate(sizes)]
        data = aggregate(door, said, step)
        assert data == aggregate(door, said[::-1], step)
        opened = open_aggregate(door, data, step, len(data))
        assert len(opened) <= cap
        apart.apply([(it.size, it.votes) for it in said], LR, step)
        together.apply([(it.size, it.votes) for it in opened], LR, step)
        for one, other in zip(apart.replicated, together.replicated, strict=True):
            assert torch.equal(one, other)


def test_no_votes_have_a_sum_that_moves_nothing() -> None:
    door = UpdateDoor(RUN, DIGEST, 3, sums.SUMMED)
    data = aggregate(door, [], 9)
    assert open_aggregate(door, data, 9, len(data)) == ()


def test_an_aggregate_of_something_else_is_refused() -> None:
    door = UpdateDoor(RUN, DIGEST, 3, sums.SUMMED)
    data = aggregate(door, [Update(9, 16, votes(16, 3, 1))], 9)
    with pytest.raises(Refusal, match="the log names"):
        open_aggregate(door, data, 9, len(data) + 1)
    with pytest.raises(Refusal, match="step 9, expected 8"):
        open_aggregate(door, data, 8, len(data))
    with pytest.raises(Refusal, match="run"):
        open_aggregate(UpdateDoor(b"x" * 32, DIGEST, 3, sums.SUMMED), data, 9, len(data))
    with pytest.raises(Refusal, match="bytes of sums"):
        open_aggregate(UpdateDoor(RUN, DIGEST, 4, sums.SUMMED), data, 9, len(data))
    with pytest.raises(Refusal, match="bytes of sums"):
        open_aggregate(UpdateDoor(RUN, DIGEST, 3, sums.SUMMED, 7), data, 9, len(data))
    with pytest.raises(Refusal, match="beyond the sums"):
        open_aggregate(door, data + b"\x7a" + b"\x20" + bytes(32), 9, len(data) + 34)
