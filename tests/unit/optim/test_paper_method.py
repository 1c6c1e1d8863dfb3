"""The method `paper` against the published equations (arXiv 2411.19870v1, algorithm 1), transcribed here in fp64."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from node.optim.coefficient_payload import Cut, PaperForm, Spoken, largest_divisor
from node.optim.paper_demo import Mean, PaperConfig, PaperDeMo, basis, directions
from node.optim.step import NonFiniteGradient
from node.optim.votes.groups import VotesError

EVEN = [(128, 64), (64, 192), (64,), (256,)]
ODD = [(50, 97), (97,), (200, 30), (7,), (33, 4, 3), ()]
STEPS, BETA, K = 20, 0.999, 32
Array = npt.NDArray[np.float64]


@dataclass
class Published:
    """One worker's state of algorithm 1, and the update that all workers make of what they sent. In the parameter's domain."""

    shapes: list[tuple[int, ...]]
    k: int
    delta: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.delta = [np.zeros(shape) for shape in self.shapes]

    def extract(self, gradients: list[Array], lr: float) -> list[tuple[Array, Array]]:
        """Of every tensor, the coefficients that are sent and which those are: [chunks, coefficients]. They leave delta."""
        said = []
        for index, gradient in enumerate(gradients):
            self.delta[index] = BETA * self.delta[index] + lr * gradient
            cut = Cut.of("", gradient.shape, 64)
            down, across = dct(cut.high), dct(cut.wide)
            chunks = chunked(self.delta[index], cut)
            flat = (down @ chunks @ across.T).reshape(len(chunks), -1)
            sent = np.zeros(flat.shape)
            np.put_along_axis(sent, np.argsort(-np.abs(flat), axis=1, kind="stable")[:, : self.k], 1.0, axis=1)
            self.delta[index] = whole(chunks - down.T @ (flat * sent).reshape(chunks.shape) @ across, cut)
            said.append((flat * sent, sent))
        return said

    def update(self, everybody: list[list[tuple[Array, Array]]]) -> list[Array]:
        """The inverse transform of the mean over the workers that sent a coefficient; its sign is the step."""
        found = []
        for index, shape in enumerate(self.shapes):
            cut = Cut.of("", shape, 64)
            total = sum(worker[index][0] for worker in everybody)
            senders = sum(worker[index][1] for worker in everybody)
            mean = np.where(np.equal(senders, 0), 0.0, total / np.maximum(senders, 1))
            chunks = mean.reshape(cut.chunks, cut.high, cut.wide)
            found.append(whole(dct(cut.high).T @ chunks @ dct(cut.wide), cut))
        return found


@cache
def dct(side: int) -> Array:
    """Orthonormal DCT-II, by its definition."""
    rows = [
        [math.sqrt((1 if j == 0 else 2) / side) * math.cos(math.pi * (2 * i + 1) * j / (2 * side)) for i in range(side)]
        for j in range(side)
    ]
    return np.array(rows)


def chunked(tensor: Array, cut: Cut) -> Array:
    """Row by row of chunks, as the published code orders them."""
    matrix = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.reshape(tensor.shape[0], -1)
    rows, columns = matrix.shape
    parts = [
        matrix[top : top + cut.high, left : left + cut.wide].copy()
        for top in range(0, rows, cut.high)
        for left in range(0, columns, cut.wide)
    ]
    return np.array(parts)


def whole(chunks: Array, cut: Cut) -> Array:
    rows = 1 if len(cut.shape) < 2 else cut.shape[0]
    matrix = np.zeros((rows, math.prod(cut.shape) // rows))
    number = 0
    for top in range(0, rows, cut.high):
        for left in range(0, matrix.shape[1], cut.wide):
            matrix[top : top + cut.high, left : left + cut.wide] = chunks[number]
            number += 1
    return matrix.reshape(cut.shape)


def workers(shapes: list[tuple[int, ...]], count: int) -> list[PaperDeMo]:
    made = []
    for _ in range(count):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
        made.append(PaperDeMo(named, PaperConfig(beta=BETA, top_k=K)))
    return made


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shapes", [EVEN, ODD], ids=["even", "odd"])
def test_same_indices_and_update_signs_as_the_published_equations(shapes: list[tuple[int, ...]], count: int) -> None:
    random = np.random.default_rng(count)
    ours, theirs = workers(shapes, count), [Published(shapes, K) for _ in range(count)]
    common = [random.standard_t(3, size=shape) for shape in shapes]  # heavy tails, partly the same for all
    components = other = signs = wrong = 0
    for step in range(STEPS):
        lr = float(np.float32(1e-3 / (1 + step)))
        everybody, entry = [], []
        for peer, worker in zip(ours, theirs, strict=True):
            gradients = [
                (mean + random.standard_t(3, size=mean.shape)).astype(np.float32).astype(np.float64) for mean in common
            ]
            for parameter, gradient in zip(peer.parameters, gradients, strict=True):
                parameter.grad = torch.from_numpy(np.asarray(gradient)).to(torch.float32)
            said = worker.extract([np.asarray(gradient) for gradient in gradients], lr)
            votes = peer.propose(lr)
            for spoken, (_, sent) in zip(peer.form.decode(votes.payload, K), said, strict=True):
                components += spoken.where.size
                other += int((np.take_along_axis(sent, spoken.where, 1) == 0).sum())
            everybody.append(said)
            entry.append((votes.size, votes.payload))
            peer.settle(True)
        before = [parameter.detach().clone() for parameter in ours[0].parameters]
        for peer in ours:
            peer.apply(entry, lr)
        for index, update in enumerate(theirs[0].update(everybody)):
            moved = -torch.sign(ours[0].parameters[index].detach() - before[index]).numpy()
            signs += update.size
            wrong += int((moved != np.sign(update)).sum())
        assert all(
            torch.equal(one, same)
            for peer in ours
            for one, same in zip(peer.parameters, ours[0].parameters, strict=True)
        )
    assert other == 0, f"{other} of {components} indices differ"
    print(f"{components} components, {other} other; {signs} signs, {wrong} other")
    assert wrong <= signs / 1000, f"{wrong} of {signs} update signs differ"


def test_the_order_of_votes_and_the_device_threads_change_no_bit() -> None:
    random = np.random.default_rng(0)
    peers = workers([*EVEN, *ODD], 3)
    entry = []
    for scale, peer in zip((1e-12, 1.0, 1e9), peers, strict=True):  # exponents far apart
        for parameter in peer.parameters:
            parameter.grad = torch.from_numpy(np.asarray(scale * random.normal(size=parameter.shape), dtype=np.float32))
        votes = peer.propose(float(np.float32(1e-3)))
        entry.append((votes.size, votes.payload))
    threads = torch.get_num_threads()
    try:
        for number, (peer, order) in enumerate(zip(peers, ([0, 1, 2], [2, 0, 1], [1, 2, 0]), strict=True)):
            torch.set_num_threads(1 + number % 2)
            peer.apply([entry[place] for place in order], float(np.float32(1e-3)))
    finally:
        torch.set_num_threads(threads)
    for peer in peers[1:]:
        assert all(torch.equal(one, same) for one, same in zip(peer.parameters, peers[0].parameters, strict=True))


def test_parameters_without_elements_change_nothing() -> None:
    drawn = torch.Generator().manual_seed(0)
    first = torch.randn(64, 64, generator=drawn)
    found = []
    for empty in ([], [(0,), (0, 64), (64, 0), (0, 3, 3)]):
        named = [(str(shape), nn.Parameter(torch.zeros(shape))) for shape in [(64, 64), *empty]]
        demo = PaperDeMo(named, PaperConfig())
        for _ in range(2):
            for parameter in demo.parameters:
                parameter.grad = first.clone() if parameter.numel() else torch.zeros_like(parameter)
            votes = demo.propose(0.5)
            demo.settle(True)
            demo.apply([(votes.size, votes.payload)], 0.5)
        demo.load_state_dict(demo.state_dict())
        found.append((votes.payload, demo.parameters[0].detach()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert bool(found[0][1].any())


def test_what_nobody_sent_does_not_move() -> None:
    [peer] = workers([(64, 128), (64,)], 1)
    peer.parameters[0].grad = torch.zeros(64, 128)
    peer.parameters[0].grad[:, :64] = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    votes = peer.propose(float(np.float32(1e-3)))
    assert votes.payload[1] == 0, "a chunk of zeros is silent"
    peer.apply([(votes.size, votes.payload)], float(np.float32(1e-3)))
    assert not peer.parameters[0].detach()[:, 64:].any()
    assert not peer.parameters[1].detach().any(), "a parameter without a gradient"
    assert peer.parameters[0].detach()[:, :64].all()


def test_refused_votes_stay_in_the_momentum_or_leave_it() -> None:
    for refused in ("restore", "drop"):
        parameter = torch.nn.Parameter(torch.zeros(64, 64))
        peer = PaperDeMo([("p", parameter)], PaperConfig(refused=refused))
        parameter.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
        peer.propose(1.0)
        before = peer.state_dict()["momentum"].clone()
        peer.settle(False)
        after = peer.state_dict()["momentum"]
        assert torch.equal(before, after) == (refused == "restore")
        assert int((before != after).sum()) == (0 if refused == "restore" else 32)


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    random = np.random.default_rng(3)
    one, other = workers(ODD, 2)
    for parameter in one.parameters:
        parameter.grad = torch.from_numpy(np.asarray(random.normal(size=parameter.shape), dtype=np.float32))
    one.propose(1.0)
    other.load_state_dict(one.state_dict())
    assert other.open_votes.payload == one.open_votes.payload
    for peer in (one, other):
        peer.settle(True)
    assert torch.equal(one.state_dict()["momentum"], other.state_dict()["momentum"])
    with pytest.raises(ValueError, match="chunks of 64"):
        PaperDeMo([(f"p{i}", p) for i, p in enumerate(one.parameters)], PaperConfig(chunk=32)).load_state_dict(
            one.state_dict()
        )


def test_nothing_changes_where_the_gradient_is_not_finite() -> None:
    [peer] = workers([(8, 8)], 1)
    peer.parameters[0].grad = torch.full((8, 8), math.nan)
    with pytest.raises(NonFiniteGradient):
        peer.propose(1.0)
    assert not peer.pending
    assert not peer.state_dict()["momentum"].any()


# ---- the door --------------------------------------------------------------------------------------------------------

FORM = PaperForm((Cut.of("a", (64, 64), 64), Cut.of("b", (6,), 64), Cut.of("c", (97, 2), 64)))


def encoded(seed: int, silent: bool = False) -> bytes:
    random = torch.Generator().manual_seed(seed)
    tensors = []
    for cut in FORM.cuts:
        k = cut.sent(4)
        where = torch.stack(
            [torch.randperm(cut.elements, generator=random)[:k].sort().values for _ in range(cut.chunks)]
        )
        values = torch.randn(where.shape, generator=random) * (0.0 if silent else 1.0)
        tensors.append((where, values))
    return FORM.encode(tensors, 4)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 3), place=st.integers(0, 10_000), bit=st.integers(0, 7), silent=st.booleans())
def test_votes_have_one_encoding(seed: int, place: int, bit: int, silent: bool) -> None:
    """A changed bit is refused, or is another vote that is written in exactly these bytes."""
    data = bytearray(encoded(seed, silent))
    data[place % len(data)] ^= 1 << bit
    try:
        spoken = list(FORM.decode(bytes(data), 4))
    except VotesError:
        return
    tensors = []
    for it in spoken:
        exponents = np.where(it.speaks, it.exponents, 0).astype(np.int32)
        values = np.ldexp(it.values.astype(np.float64), exponents[:, None] - 15)
        tensors.append((torch.from_numpy(it.where), torch.from_numpy(values).to(torch.float32)))
    assert FORM.encode(tensors, 4) == bytes(data)


@pytest.mark.parametrize("length", [0, 1, -1])
def test_other_lengths_and_sizes_are_refused(length: int) -> None:
    data = encoded(0)
    wrong = data[:length] if length < 1 else data + bytes(length)
    with pytest.raises(VotesError, match="bytes of votes"):
        FORM.check(wrong, 4, 0)
    with pytest.raises(VotesError, match="k 5 is none of"):
        FORM.check(data, 5, 0)


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_chunks_are_the_largest_divisors() -> None:
    assert [largest_divisor(side, 64) for side in (1, 50, 64, 97, 100, 128, 192, 0)] == [1, 50, 64, 1, 50, 64, 64, 1]
    cut = Cut.of("a", (100, 6, 2), 64)
    assert (cut.high, cut.wide, cut.chunks) == (50, 12, 2)
    tensor = torch.arange(1200.0).view(100, 6, 2)
    assert torch.equal(cut.merge(cut.split(tensor)), tensor)


def test_the_basis_is_pinned_and_within_its_bound() -> None:
    hashes = hashlib.sha256()
    for side in range(1, 129):
        made = basis(side)
        assert float(made.abs().sum(1).max()) <= 2**18 * math.sqrt(side) * 1.0001
        assert float(made.abs().sum(0).max()) * 2**22 < 2**44
        hashes.update(made.to(torch.int64).numpy().astype("<i8").tobytes())
    assert hashes.hexdigest()[:16] == "2286af68645f33f6"


def test_the_largest_sums_are_exact() -> None:
    """The votes that come nearest to the bound: every coefficient at its largest, signs as the basis has them."""
    cut = Cut.of("a", (128, 128), 128)
    form, signs = PaperForm((cut,)), torch.sign(basis(128)[:, 0])
    values = (signs[:, None] * signs[None, :]).reshape(1, -1)
    mean = Mean(cut)
    where = torch.arange(cut.elements).view(1, -1)
    heard = Spoken(np.zeros(1, np.int16), np.array([True]), where.numpy(), (values * 32767).numpy().astype(np.int16))
    for _ in range(4):
        mean.add(heard)
    whole_numbers = [[int(v) for v in row] for row in mean.coefficients().reshape(128, 128)]
    rows = [[int(v) for v in row] for row in basis(128).tolist()]
    column = [sum(rows[j][0] * whole_numbers[j][i] for j in range(128)) for i in range(128)]
    exact = sum(round(column[j] / 2**18) * rows[j][0] for j in range(128))
    assert max(map(abs, column)) < 2**53
    assert abs(exact) < 2**53
    assert float(mean.direction(torch.device("cpu"))[0, 0]) == np.sign(exact)
    assert form.chunks == 1


def test_only_one_tensor_s_votes_are_decoded_at_a_time() -> None:
    alive: list[int] = []

    def peer(seed: int) -> Iterator[Spoken]:
        for index, spoken in enumerate(FORM.decode(encoded(seed), 4)):
            alive.append(index)
            yield spoken

    found = directions(FORM.cuts, [peer(0), peer(1), peer(2)], torch.device("cpu"))
    assert alive == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for index, cut in enumerate(FORM.cuts):
        mean = Mean(cut)
        for seed in (2, 0, 1):
            mean.add(list(FORM.decode(encoded(seed), 4))[index])
        assert torch.equal(found[index], mean.direction(torch.device("cpu")))
