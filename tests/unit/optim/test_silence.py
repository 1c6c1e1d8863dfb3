"""What has no gradient does not move: silent votes in every format, on every backend, through every door and base."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from node.optim import aggregate
from node.optim.backends.choose import BACKEND_VARIABLE
from node.optim.base import Base, BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.layout import Layout
from node.optim.votes import groups as votes
from node.optim.votes import silence, topk, values
from node.optim.votes.groups import VotesError
from node.optim.votes.payload import PLAIN, Format
from node.optim.votes.values import EIGHT_BIT, GRIDS, SIGN, TWO_BIT
from tests.unit.optim import reference

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LR = float(np.float32(0.01))
VOCABULARY, MET, WIDTH = 192, 128, 64
"""A third of the tokens is never met: rows 128 to 191, which fill a whole chunk."""

METHODS = {
    "default": DeMoConfig(),
    "g = 8": DeMoConfig(group_size=8),
    "second moment": DeMoConfig(beta=0.95, beta2=0.99, group_size=16),
    "top-32": DeMoConfig(selection="topk"),
    "top-512, identity": DeMoConfig(selection="topk", top_k=512, transform="identity"),
    "2 bits": DeMoConfig(values="2bit", group_size=16),
    "2 bits, top-4": DeMoConfig(values="2bit", selection="topk", top_k=4),
    "8 bits": DeMoConfig(values="8bit", group_size=32),
    "8 bits, top-k": DeMoConfig(values="8bit", selection="topk", transform="hadamard"),
    "identity": DeMoConfig(transform="identity", group_size=16),
    "sgd": DeMoConfig(base=BaseConfig("sgd", momentum=0.9, nesterov=True)),
    "sgd with sizes": DeMoConfig(magnitudes=True, values="8bit", base=BaseConfig("sgd")),
    "sgd with signs and sizes": DeMoConfig(magnitudes=True, base=BaseConfig("sgd")),
    "sgd with 2 bits and sizes": DeMoConfig(magnitudes=True, values="2bit", selection="topk", base=BaseConfig("sgd")),
    "random": DeMoConfig(selection="random"),
    "random, identity": DeMoConfig(selection="random", one_in=2, transform="identity"),
    "striding, 2 bits": DeMoConfig(selection="striding", values="2bit"),
    "slicing": DeMoConfig(selection="slicing", one_in=4),
    "full": DeMoConfig(selection="full"),
    "full, 8 bits and sizes": DeMoConfig(selection="full", values="8bit", magnitudes=True, base=BaseConfig("sgd")),
    "Nesterov in the peer": DeMoConfig(
        nesterov=0.9, selection="topk", top_k=640, values="8bit", magnitudes=True, base=BaseConfig("sgd")
    ),
    "adamw": DeMoConfig(base=BaseConfig("adamw", beta1=0.5)),
    "muon": DeMoConfig(base=BaseConfig("muon", momentum=0.8)),
    "muon by chunks": DeMoConfig(base=BaseConfig("muon", block=64)),
}
FORMATS = [Format(s, g, scaled) for s in ("groups", "topk") for g in GRIDS.values() for scaled in (False, True)]
every_form = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f"{f.selection}-{f.grid.name}-{f.scaled}")


class Experts(nn.Module):
    """An embedding of which a third is never met, two experts of which one is never asked, and a map that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.stacked = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 8)
        self.unused = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.experts[0](self.embed(tokens)) @ self.stacked[0])

    def idle(self) -> list[Tensor]:
        """What no token reaches, copied."""
        parts = (self.embed.weight[MET:], self.experts[1].weight, self.stacked[1], self.unused)
        return [part.detach().clone() for part in parts]


def swarm(config: DeMoConfig, peers: int = 2) -> list[tuple[Experts, DeMo]]:
    made = []
    for _ in range(peers):
        torch.manual_seed(0)
        model = Experts()
        made.append((model, DeMo(model, config)))
    return made


def train(peers: list[tuple[Experts, DeMo]], steps: int, lr: float = LR) -> list[list[tuple[int, bytes]]]:
    entries = []
    for step in range(steps):
        entry = []
        for rank, (model, demo) in enumerate(peers):
            model.zero_grad()
            drawn = torch.Generator().manual_seed(100 * step + rank)
            tokens = torch.randint(MET, (8,), generator=drawn)
            (model(tokens) - torch.randn(8, WIDTH, generator=drawn)).square().mean().backward()
            proposal = demo.propose(lr)
            accepted = (step + rank) % 4 > 0
            demo.settle(accepted)
            entry += [(proposal.size, proposal.payload)] * accepted
        for _, demo in peers:
            demo.apply(entry, lr)
        entries.append(entry)
    return entries


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("name", METHODS)
def test_what_never_gets_a_gradient_stays_bit_equal(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    peers = swarm(METHODS[name])
    start, embedding = peers[0][0].idle(), peers[0][0].embed.weight.detach().clone()
    train(peers, 6, 1.0 if METHODS[name].magnitudes else LR)
    assert len({state_digest(demo.replicated) for _, demo in peers}) == 1
    for was, now in zip(start, peers[0][0].idle(), strict=True):
        assert now.numpy().tobytes() == was.numpy().tobytes()
    moved = (peers[0][0].embed.weight.detach() - embedding)[:MET].abs().mean()
    assert float(moved) > (1e-6 if METHODS[name].magnitudes else 0.1 * LR), "what is trained does move"


def test_weight_decay_reaches_what_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = swarm(DeMoConfig(weight_decay=0.5))
    start = peers[0][0].idle()
    train(peers, 1)
    factor = float(np.float32(1) - np.float32(LR) * np.float32(0.5))
    assert all(torch.equal(now, was * factor) for was, now in zip(start, peers[0][0].idle(), strict=True))


@pytest.mark.parametrize("g", votes.GROUP_SIZES)
def test_every_backend_has_the_reference_s_bytes_and_bits(g: int, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = []
    for backend in ("torch", "numba"):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        peers += swarm(DeMoConfig(group_size=g), 1)
    oracles = [reference.Reference([p.detach().numpy() for p in demo.parameters], 0.999, 0.0, 1.0) for _, demo in peers]
    for step in range(3):
        entry = []
        for rank, ((model, demo), oracle) in enumerate(zip(peers, oracles, strict=True)):
            model.zero_grad()
            model(torch.arange(8) + 8 * rank + 16 * step).square().mean().backward()
            gradients = [np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy() for p in demo.parameters]
            proposal, wanted = demo.propose(LR), oracle.propose(gradients, LR, g)
            assert len(proposal.payload) > PLAIN.body_bytes(demo.layout.chunks, g)
            assert [len(proposal.payload), proposal.payload] == [len(wanted), wanted]
            demo.settle(True)
            oracle.settle(True)
            entry.append((g, proposal.payload))
        for (_, demo), oracle in zip(peers, oracles, strict=True):
            demo.apply(entry, LR)
            oracle.apply(entry, LR)
            for parameter, tensor in zip(demo.parameters, oracle.tensors, strict=True):
                assert parameter.detach().numpy().tobytes() == tensor.tobytes()


def sparse(chunks: int, part: float, seed: int = 0) -> Tensor:
    """Momentum of which `part` is zero, one chunk wholly and one not at all."""
    made = torch.Generator().manual_seed(seed)
    whole = torch.randn(chunks, 64, 64, generator=made) * (torch.rand(chunks, 64, 64, generator=made) >= part)
    whole[0] = 0.0
    whole[-1] = torch.randn(64, 64, generator=made)
    return whole


@every_form
@pytest.mark.parametrize("part", [0.5, 0.99, 0.9995, 1.0])
def test_a_silent_vote_is_read_as_zero_and_the_rest_as_it_was(form: Format, part: float) -> None:
    momentum = sparse(5, part)
    for size in form.sizes:
        data = form.encode([form.choose(momentum[:2], size), form.choose(momentum[2:], size)], size)
        assert len(data) <= form.bytes_max(5, size)
        form.check(data, size, 5)
        read = form.read(data, size, 5)
        ballot = read.ballot(0, 5)
        own = momentum.view(5, -1).gather(1, ballot.where)
        loud = ballot.values != 0
        assert not bool((loud & (own == 0)).any()), "a coefficient of zero has a vote"
        assert not bool(loud[0].any())
        if form.grid is not EIGHT_BIT:
            assert torch.equal(own != 0, loud)
        assert torch.equal((own < 0)[loud], (ballot.values < 0)[loud])
        for first, last in ((0, 1), (1, 2), (1, 5), (3, 4)):
            part_of = read.ballot(first, last)
            assert torch.equal(part_of.where, ballot.where[first:last])
            assert torch.equal(part_of.values, ballot.values[first:last])


@every_form
def test_nothing_silent_costs_nothing(form: Format) -> None:
    size = form.sizes[2]
    momentum = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1))
    data = form.encode([form.choose(momentum, size)], size)
    if form.selection == "groups":
        assert len(data) == form.body_bytes(4, size)
    else:
        indices = data[form._front_bytes(4, size) :]
        assert topk.split(indices, size, 4) == (indices, b"")


@pytest.mark.parametrize(
    "form", [f for f in FORMATS if f.grid is not EIGHT_BIT], ids=lambda f: f"{f.selection}-{f.grid.name}-{f.scaled}"
)
def test_a_bad_tail_is_refused(form: Format) -> None:
    size, chunks = form.sizes[1], 3
    wide = silence.row_bytes(form.votes_a_chunk(size))
    momentum = sparse(chunks, 0.0)
    data = form.encode([form.choose(momentum, size)], size)
    body, tail = data[: -1 - wide], data[-1 - wide :]
    assert tail == b"\1" + bytes([255]) * wide
    nothing = b"\0", b"\0" + bytes(wide), b"\1" + bytes(wide)
    longer = tail + b"\0", tail + bytes(wide), b"\3" + tail[1:], b"\3" + tail[1:] + bytes(wide)
    loud = b"\4" + tail[1:], b"\5" + 2 * tail[1:]  # of a chunk whose votes say something
    behind = b"\x09" + 2 * tail[1:], b"\x81" + tail[1:]
    for wrong in (*nothing, *longer, *loud, *behind, tail[:-1]):
        with pytest.raises(VotesError):
            form.check(body + wrong, size, chunks)
    form.check(data, size, chunks)
    partly = b"\1" + bytes([254]) + tail[2:]
    if form.scaled:  # a scale of 0 beside a vote
        with pytest.raises(VotesError, match="scale is 0"):
            form.check(body + partly, size, chunks)
    else:
        form.check(body + partly, size, chunks)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20), st.sampled_from([4, 8, 32, 512]), st.floats(0, 1), st.integers(0, 2**31))
def test_which_votes_are_silent_has_one_encoding(chunks: int, count: int, part: float, seed: int) -> None:
    silent = torch.rand(chunks, count, generator=torch.Generator().manual_seed(seed)) < part
    rows = silence.pack(silent)
    assert torch.equal(silence.unpack(rows, count), silent)
    tail = silence.encode(rows)
    assert (tail == b"") is not bool(silent.any())
    assert len(tail) <= silence.bytes_max(chunks, count)
    read = silence.decode(tail, chunks, count)
    assert read is None or torch.equal(read, rows)
    random = np.random.default_rng(seed)
    if tail:
        changed = bytearray(tail)
        changed[random.integers(len(tail))] ^= 1 << random.integers(8)
        try:
            again = silence.decode(bytes(changed), chunks, count)
        except VotesError:
            return
        assert again is not None
        assert silence.encode(again) == bytes(changed)


def test_sums_of_silent_votes_are_zero_and_point_nowhere() -> None:
    total = aggregate.VoteSum(2, CPU)
    momentum = torch.zeros(2, 64, 64)
    for size in votes.GROUP_SIZES:
        data = PLAIN.encode([PLAIN.choose(momentum, size)], size)
        total.add(size, data)
    sums = total.sums(0, 2)
    assert not sums.any()
    layout = Layout.of_shapes([("weight", (64, 128))])
    direction = Base(BaseConfig(), layout, CPU).direct_chunks(aggregate.inverse(sums), 0)
    assert direction.numpy().tobytes() == bytes(2 * 4096 * 4), "zero, and no zero with a sign"


def test_on_the_8_bit_grid_the_size_zero_is_silent_and_has_one_encoding() -> None:
    form = Format("groups", EIGHT_BIT)
    data = bytearray(form.encode([form.choose(sparse(1, 1.0)[:1] * 0, 128)], 128))
    form.check(bytes(data), 128, 1)
    data[-1] = 1
    with pytest.raises(VotesError, match="silent vote has a code"):
        form.check(bytes(data), 128, 1)


@pytest.mark.parametrize("grid", [SIGN, TWO_BIT, EIGHT_BIT], ids=lambda g: g.name)
def test_a_silent_component_lies_at_the_lowest_free_index(grid: values.Grid) -> None:
    form, momentum = Format("topk", grid), torch.zeros(1, 64, 64)
    momentum[0, 0, 1], momentum[0, 5, 5] = 1.0, -1.0
    ballot = form.decode(form.encode([form.choose(momentum, 8)], 8), 8, 1, CPU)
    assert ballot.where.tolist() == [[0, 1, 2, 3, 4, 5, 6, 325]]
    assert (ballot.values.sign().tolist()) == [[0, 1, 0, 0, 0, 0, 0, -1]]


def test_what_a_silent_vote_stands_for_is_not_spent() -> None:
    """8 bits: a coefficient that is next to nothing beside the others of its chunk says nothing, and stays."""
    [(_, demo)] = swarm(DeMoConfig(values="8bit", selection="topk", top_k=8, clip_norm=None, beta=0.0), 1)
    for parameter in demo.parameters:
        parameter.grad = torch.zeros_like(parameter)
    gradient = torch.zeros(64, 64)
    gradient[0, :8] = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e-4])
    matrix = demo._transform.matrix
    demo.parameters[-1].grad = torch.from_numpy(matrix.T @ gradient.double().numpy() @ matrix).float()
    demo.propose(1.0)
    demo.settle(True)
    left = demo.momentum.view(-1, 4096)
    assert float(left.abs().max()) == pytest.approx(1e-4, rel=0.05)
    assert int((left.abs() > 5e-5).sum()) == 1


def test_a_restored_payload_with_silent_votes_goes_on() -> None:
    [(model, demo)], [(_, other)] = swarm(DeMoConfig(), 1), swarm(DeMoConfig(), 1)
    model(torch.arange(8)).square().mean().backward()
    payload = demo.propose(LR).payload
    other.load_state_dict(demo.state_dict())
    assert other.open_votes.payload == payload
    for each in (demo, other):
        each.settle(True)
    assert torch.equal(demo.momentum, other.momentum)
