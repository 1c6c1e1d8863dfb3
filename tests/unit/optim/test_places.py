"""Votes whose places follow from the run and the step: which coefficients, their bytes, their door, and what they move."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from node.optim import demo as family
from node.optim.backends.choose import BACKEND_VARIABLE
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.torch_optimizer import DeMoOptimizer
from node.optim.votes import groups, places, topk
from node.optim.votes.groups import NotANumber, VotesError
from node.optim.votes.payload import Format
from node.optim.votes.places import SCHEMES, SIZES, Draw
from node.optim.votes.values import EIGHT_BIT, GRIDS, SIGN
from protos import optimizer_config

CPU = torch.device("cpu")
LR = float(np.float32(0.01))
RUN = b"r" * 32
MOVING = ("random", "striding", "slicing")
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_form = pytest.mark.parametrize(
    "form",
    [Format(scheme, grid, scaled) for scheme in SCHEMES for grid in GRIDS.values() for scaled in (False, True)],  # type: ignore[arg-type]
    ids=lambda form: f"{form.selection}-{form.grid.name}-{form.scaled}",
)


def obvious(scheme: str, draw: Draw, size: int, chunk: int) -> list[int]:
    """The places of one chunk, one vote at a time."""
    count = 4096 // size
    if scheme == "full":
        return list(range(4096))
    if scheme == "random":
        named = len(draw.seed).to_bytes(8, "big") + draw.seed + draw.step.to_bytes(8, "big")
        scores = hashlib.shake_256(b"swarmentum/v1/places\0order" + named).digest(8 * 4096)
        masks = hashlib.shake_256(b"swarmentum/v1/places\0chunks" + named).digest(2 * (chunk + 1))
        order = sorted(range(4096), key=lambda i: int.from_bytes(scores[8 * i : 8 * i + 8], "little"))
        mask = int.from_bytes(masks[2 * chunk :], "little") % 4096
        return [place ^ mask for place in order[:count]]
    turn = (draw.step + chunk) % size
    if scheme == "striding":
        return [index for index in range(4096) if index % size == turn]
    number = int(format(turn, f"0{size.bit_length() - 1}b")[::-1], 2)
    return list(range(number * count, (number + 1) * count))


@every_scheme
@given(st.integers(0, 2**63), st.integers(0, 40), st.data())
@settings(max_examples=15, deadline=None)
def test_places_are_those_of_the_obvious_version(scheme: str, step: int, first: int, data: st.DataObject) -> None:
    size, draw = data.draw(st.sampled_from(places.sizes(scheme))), Draw(RUN, step)
    found = places.places(scheme, draw, size, first, first + 3, CPU)
    assert found.tolist() == [obvious(scheme, draw, size, chunk) for chunk in range(first, first + 3)]


@every_scheme
def test_places_are_different_within_a_chunk_and_those_of_a_larger_size_are_among_them(scheme: str) -> None:
    for step in (0, 1, 77, 2**40):
        before: list[set[int]] | None = None
        for size in places.sizes(scheme):
            found = places.places(scheme, Draw(RUN, step), size, 0, 5, CPU)
            assert found.shape == (5, 4096 // size)
            now = [set(row) for row in found.tolist()]
            assert all(len(row) == 4096 // size and min(row) >= 0 and max(row) < 4096 for row in now)
            assert before is None or all(small <= large for small, large in zip(now, before, strict=True))
            before = now


@pytest.mark.parametrize("scheme", ["striding", "slicing"])
@pytest.mark.parametrize("size", SIZES)
def test_a_size_of_n_visits_each_coefficient_once_in_n_steps(scheme: str, size: int) -> None:
    visits = torch.zeros(3, 4096, dtype=torch.int64)
    for step in range(5, 5 + size):
        found = places.places(scheme, Draw(RUN, step), size, 0, 3, CPU)
        visits.scatter_add_(1, found, torch.ones_like(found))
    assert torch.equal(visits, torch.ones_like(visits))


def test_random_places_follow_from_the_run_and_the_step_and_are_even() -> None:
    found = [places.places("random", Draw(RUN, step), 16, 0, 4, CPU) for step in range(400)]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], places.places("random", Draw(b"other", 0), 16, 0, 4, CPU))
    assert not torch.equal(found[0][0].sort().values, found[0][1].sort().values)
    visits = torch.zeros(4, 4096)
    for places_of in found:
        visits.scatter_add_(1, places_of, torch.ones(places_of.shape))
    assert float(visits.mean()) == 25
    assert float(visits.std()) == pytest.approx((400 / 16 * 15 / 16) ** 0.5, rel=0.1), "as chance has it"
    # the same on every version: peers of two versions take part in one run
    assert found[0][0, :6].tolist() == GOLDEN


GOLDEN = [2091, 1122, 563, 1867, 2115, 2361]


def test_a_vote_is_one_bit_and_the_default_costs_what_group_votes_do() -> None:
    for scheme in MOVING:
        form = Format(scheme)  # type: ignore[arg-type]
        assert [form.body_bytes(3, size) for size in SIZES] == [-(-3 * 512 // size) for size in SIZES]
        assert form.body_bytes(3, DeMoConfig.one_in) == groups.vote_bytes(3, 128)
    assert Format("full").body_bytes(3, 1) == 3 * 512
    assert Format("full", EIGHT_BIT, scaled=True).body_bytes(3, 1) == 3 * 4097


def test_large_k_are_for_8_bits_and_take_the_bytes_that_the_recipe_says() -> None:
    form, whole = Format("topk", EIGHT_BIT, scaled=True), momentum(64)
    sizes = {k: len(form.encode([form.choose(whole, k)], k)) / 64 for k in topk.LARGE_SIZES}
    assert 4 * 4096 / sizes[640] == pytest.approx(17.0, abs=0.1)
    assert 4 * 4096 / sizes[1536] == pytest.approx(8.0, abs=0.1)
    for k in topk.LARGE_SIZES:
        data = form.encode([form.choose(whole, k)], k)
        ballot = form.decode(data, k, 64, CPU)
        assert torch.equal(ballot.where, topk.select(whole, k))
        for grid in ("sign", "2bit"):
            with pytest.raises(VotesError, match=f"k {k} is none of"):
                Format("topk", GRIDS[grid]).body_bytes(1, k)


def momentum(chunks: int, part: float = 0.0) -> Tensor:
    """Of which `part` is zero, and the first chunk wholly if any is."""
    made = torch.Generator().manual_seed(3)
    whole = torch.randn(chunks, 64, 64, generator=made) * (torch.rand(chunks, 64, 64, generator=made) >= part)
    if part:
        whole[0] = 0.0
    return whole


@every_form
@pytest.mark.parametrize("part", [0.0, 0.5, 0.999, 1.0])
def test_what_is_read_is_what_was_chosen_and_zeros_are_silent(form: Format, part: float) -> None:
    whole, draw = momentum(5, part), Draw(RUN, 9)
    for size in form.sizes:
        tiles = [form.choose(whole[:2], size, None, draw), form.choose(whole[2:], size, None, draw, 2)]
        data = form.encode(tiles, size)
        form.check(data, size, 5)
        body, longest = form.body_bytes(5, size), form.bytes_max(5, size)
        assert len(data) == body if part == 0 or form.grid is EIGHT_BIT else body < len(data) <= longest
        ballot = form.decode(data, size, 5, CPU, draw)
        assert torch.equal(ballot.where, places.places(form.selection, draw, size, 0, 5, CPU))
        own = whole.view(5, -1).gather(1, ballot.where)
        loud = ballot.values != 0
        assert not bool((loud & (own == 0)).any()), "a coefficient of zero has a vote"
        assert torch.equal((own < 0)[loud], (ballot.values < 0)[loud])
        if form.grid is not EIGHT_BIT:
            assert torch.equal(own != 0, loud)
        piece = form.read(data, size, 5, draw).ballot(3, 5)
        assert torch.equal(piece.where, ballot.where[3:])
        assert torch.equal(piece.values, ballot.values[3:])


@given(st.sampled_from(SCHEMES), st.data())
@settings(max_examples=60, deadline=None)
def test_all_bytes_of_the_right_length_are_votes_and_have_one_encoding(scheme: str, data: st.DataObject) -> None:
    form = Format(scheme)  # type: ignore[arg-type]
    size = data.draw(st.sampled_from(form.sizes))
    chunks = 2  # whose signs fill whole bytes, at one in 1,024 too
    raw = data.draw(st.binary(min_size=form.body_bytes(chunks, size), max_size=form.body_bytes(chunks, size)))
    form.check(raw, size, chunks)
    ballot = form.decode(raw, size, chunks, CPU, Draw(RUN, 1))
    said = torch.zeros(chunks, 4096).scatter_(1, ballot.where, ballot.values.float()).view(chunks, 64, 64)
    assert form.encode([form.choose(said, size, None, Draw(RUN, 1))], size) == raw


@every_scheme
def test_the_door_refuses_what_no_peer_sends(scheme: str) -> None:
    form, size = Format(scheme), places.sizes(scheme)[-1]  # type: ignore[arg-type]
    good = form.encode([form.choose(momentum(2), size, None, Draw(RUN, 1))], size)
    quiet = form.encode([form.choose(momentum(2, 0.5), size, None, Draw(RUN, 1))], size)
    for wrong in (
        good[:-1],
        good + b"\0",
        b"",
        quiet[:-1],
        quiet + b"\0",
        good + bytes(1 + form.votes_a_chunk(size) // 8),
    ):
        with pytest.raises(VotesError):
            form.check(wrong, size, 2)
    with pytest.raises(VotesError, match="one in 3 is none of"):
        form.check(good, 3, 2)
    body = form.body_bytes(2, size)
    shouted = bytes([quiet[0] ^ 255]) + quiet[1:]  # the first chunk is silent: one of its votes has a sign now
    assert body < len(quiet)
    with pytest.raises(VotesError, match="silent vote has a code"):
        form.check(shouted, size, 2)


@every_scheme
def test_a_momentum_that_is_no_number_has_no_votes(scheme: str) -> None:
    broken = momentum(1)
    broken[0, 63, 63] = torch.nan
    with pytest.raises(NotANumber):
        Format(scheme).choose(broken, places.sizes(scheme)[0], None, Draw(RUN, 1))  # type: ignore[arg-type]


# ---- what they move ---------------------------------------------------------------------------------------------------


def peer(config: DeMoConfig) -> DeMo:
    torch.manual_seed(0)
    return DeMo(nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(70, 3)), config)


def with_gradients(demo: DeMo, seed: int) -> DeMo:
    for index, parameter in enumerate(demo.parameters):
        drawn = torch.Generator().manual_seed(100 * seed + index)
        parameter.grad = torch.randn(parameter.shape, generator=drawn)
    return demo


@every_scheme
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_the_scheme_as_published_on_parameters_themselves(
    scheme: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeToNATION with signs (arXiv 2502.06728): m = beta m + lr g, the places' values are summed and leave m, p -= lr sign."""
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    config = DeMoConfig(selection=scheme, transform="identity", beta=0.9, clip_norm=None, seed=RUN)  # type: ignore[arg-type]
    peers = [peer(config) for _ in range(3)]
    assert peers[0].backend == "torch", "the fused kernels have the default's votes only"
    layout = peers[0].layout
    whole = layout.gather([p.detach() for p in peers[0].parameters], layout.empty(CPU)).view(-1, 4096).numpy().copy()
    momenta = [np.zeros_like(whole) for _ in peers]
    for step in range(1, 6):
        entry, said = [], np.zeros_like(whole)
        for rank, (demo, own) in enumerate(zip(peers, momenta, strict=True)):
            with_gradients(demo, 10 * step + rank)
            gradient = layout.gather([p.grad for p in demo.parameters], layout.empty(CPU)).view(-1, 4096).numpy()
            own[...] = np.float32(0.9) * own + np.float32(LR) * gradient
            for chunk in range(layout.chunks):
                at = obvious(scheme, Draw(RUN, step), config.size, chunk)
                said[chunk, at] += np.sign(own[chunk, at])
                own[chunk, at] = 0.0
            votes = demo.propose(LR)
            demo.settle(True)
            entry.append((votes.size, votes.payload))
        whole -= np.float32(LR) * np.sign(said)
        for demo, own in zip(peers, momenta, strict=True):
            demo.apply(entry, LR)
            np.testing.assert_allclose(demo.momentum.view(-1, 4096).numpy(), own, rtol=0, atol=1e-6)
        found = layout.gather([p.detach() for p in peers[0].parameters], layout.empty(CPU)).view(-1, 4096).numpy()
        inside = np.abs(found) > 0  # the padding of the pool is nobody's parameter
        np.testing.assert_allclose(found[inside], whole[inside], rtol=0, atol=1e-6)
        assert len({state_digest(demo.replicated) for demo in peers}) == 1


@pytest.mark.parametrize("scheme", MOVING)
def test_a_peer_that_says_the_step_agrees_with_one_that_counts(scheme: str) -> None:
    config = DeMoConfig(selection=scheme, seed=RUN)  # type: ignore[arg-type]
    counting, told, wrong = peer(config), peer(config), peer(config)
    for step in (1, 2, 3):
        votes = with_gradients(counting, step).propose(LR)
        assert with_gradients(told, step).propose(LR, step).payload == votes.payload
        counting.settle(True)
        told.settle(True)
        counting.apply([(votes.size, votes.payload)], LR)
        told.apply([(votes.size, votes.payload)], LR, step)
        wrong.apply([(votes.size, votes.payload)], LR, step + 1)
    assert torch.equal(counting.momentum, told.momentum)
    assert state_digest(counting.replicated) == state_digest(told.replicated) != state_digest(wrong.replicated)


def test_another_run_has_other_random_places() -> None:
    one, other = (peer(DeMoConfig(selection="random", seed=seed)) for seed in (b"one", b"other"))
    votes = [with_gradients(demo, 1).propose(LR).payload for demo in (one, other)]
    assert votes[0] != votes[1]


def test_open_votes_are_spent_at_the_places_of_their_own_step() -> None:
    """A restored peer settles votes of step 4, though it has applied three entries and counts on from there."""
    config = DeMoConfig(selection="random", seed=RUN)
    demo, again = peer(config), peer(config)
    with_gradients(demo, 1).propose(LR, 4)
    again.load_state_dict(demo.state_dict())
    before = again.momentum.clone()
    for each in (demo, again):
        each.settle(True)
    assert torch.equal(demo.momentum, again.momentum)
    gone = (before != again.momentum).view(-1, 4096)
    at = places.places("random", Draw(RUN, 4), 16, 0, len(gone), CPU)
    assert int(gone.sum()) == int((before.view(-1, 4096).gather(1, at) != 0).sum())
    assert bool(gone.gather(1, at).sum() == gone.sum())


def test_the_optimizer_alone_counts_its_exchanges_and_saves_the_count() -> None:
    def trained(steps: int, state: dict[str, object] | None = None) -> tuple[nn.Module, DeMoOptimizer]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = DeMoOptimizer(model, lr=LR, selection="random", one_in=8, seed=5)
        for step in range(steps):
            for index, parameter in enumerate(model.parameters()):
                drawn = torch.Generator().manual_seed(10 * step + index)
                parameter.grad = torch.randn(parameter.shape, generator=drawn)
            optimizer.step()
        return model, optimizer

    _, first = trained(3)
    demo = first._demos[0]
    assert demo.state_dict()["step"] == 3
    assert demo.config.seed == (5).to_bytes(8, "big")
    model, other = trained(0)
    other.load_state_dict(first.state_dict())
    assert other._demos[0].state_dict()["step"] == 3
    before = model.weight.detach().clone()
    model.weight.grad, model.bias.grad = torch.ones(64, 64), torch.ones(64)
    other.step()
    assert not torch.equal(before, model.weight)


def test_sizes_have_the_names_that_a_run_has() -> None:
    assert family.SIZE_KEYS == optimizer_config.SIZE_KEYS
    assert SIZES == optimizer_config.ONE_IN_SIZES
    assert topk.SIZES + topk.LARGE_SIZES == optimizer_config.TOP_K_SIZES
    assert topk.SIZES[-1] == optimizer_config.TOP_K_FEW_BITS_MAX
    assert SCHEMES == optimizer_config.SHARED
    assert places.DRAWN == optimizer_config.DRAWN
    for scheme in places.DRAWN:
        config = DeMoConfig(selection=scheme)  # type: ignore[arg-type]
        assert config.with_size(config.form.sizes[-1]).size == config.form.sizes[-1]
        with pytest.raises(VotesError):
            config.with_size(3)
    assert replace(DeMoConfig(), group_size=8).with_size(64).group_size == 64
    assert Format("random", SIGN).drawn
    assert not Format("topk").drawn
