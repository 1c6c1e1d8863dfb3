"""Random places that each peer draws by itself: which they are, who decodes them, and what they move."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from node.optim.backends.choose import BACKEND_VARIABLE
from node.optim.base import BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.layout import Layout
from node.optim.torch_optimizer import DeMoOptimizer
from node.optim.votes import places
from node.optim.votes.payload import Format
from node.optim.votes.places import Draw
from node.training.optimizers import demo_config
from node.training.vote_checks import overlap, seen_votes
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, RunConfig, TrustConfig

CPU = torch.device("cpu")
LR = float(np.float32(0.01))
RUN = b"r" * 32
KEYS = tuple(bytes([number]) * 32 for number in range(1, 6))
SHAPES = ((64, 128), (70, 130), (3,))


def peers(sizes: Sequence[int] = (16,), **settings: object) -> list[DeMo]:
    made = []
    for number, key in enumerate(KEYS):
        config = DeMoConfig(
            selection="independent", seed=RUN, author=key, one_in=sizes[number % len(sizes)], beta=0.9, **settings  # type: ignore[arg-type]
        )  # fmt: skip
        torch.manual_seed(0)
        made.append(DeMo([(f"p{n}", torch.nn.Parameter(torch.randn(shape))) for n, shape in enumerate(SHAPES)], config))
    return made


def trained(made: list[DeMo], steps: int) -> list[tuple[int, bytes]]:
    """All peers vote and apply; returns the last step's entry."""
    entry: list[tuple[int, bytes]] = []
    for step in range(1, steps + 1):
        entry = []
        for number, demo in enumerate(made):
            for index, parameter in enumerate(demo.parameters):
                drawn = torch.Generator().manual_seed(1000 * step + 10 * number + index)
                parameter.grad = torch.randn(parameter.shape, generator=drawn)
            votes = demo.propose(LR)
            demo.settle(step != 2)
            entry.append((votes.size, votes.payload))
        for demo in made:
            demo.apply(entry, LR, step, KEYS)
    return entry


def test_places_are_those_of_the_obvious_version_and_of_nobody_else() -> None:
    draw = Draw(RUN, 7, (KEYS[0],))
    found = places.places("independent", draw, 16, 3, 5, CPU)
    named = len(RUN).to_bytes(8, "big") + RUN + (7).to_bytes(8, "big")
    scores = hashlib.shake_256(b"swarmentum/v1/places\0order" + named + KEYS[0]).digest(8 * 4096)
    masks = hashlib.shake_256(b"swarmentum/v1/places\0chunks" + named).digest(2 * 5)
    order = sorted(range(4096), key=lambda i: int.from_bytes(scores[8 * i : 8 * i + 8], "little"))
    for row, chunk in enumerate((3, 4)):
        mask = int.from_bytes(masks[2 * chunk : 2 * chunk + 2], "little") % 4096
        assert found[row].tolist() == [place ^ mask for place in order[:256]]
    assert found[0, :4].tolist() == GOLDEN, "the same on every version: peers of two versions take part in one run"
    sets = [{*places.places("independent", Draw(RUN, 7, (key,)), 16, 0, 1, CPU)[0].tolist()} for key in KEYS]
    assert all(len(one & other) < 40 for n, one in enumerate(sets) for other in sets[:n]), "16 of 256 by chance"
    few = {*places.places("independent", Draw(RUN, 7, (KEYS[0],)), 1024, 0, 1, CPU)[0].tolist()}
    assert few < sets[0]


GOLDEN = [1869, 307, 2465, 3676]


@pytest.mark.parametrize("sizes", [(16,), (4, 16, 1024)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cap": 5},
        {"cap": 5, "base": BaseConfig("muon", block=64, iterations=2)},
        {"base": "sgd"},
        {"values": "2bit", "transform": "identity"},
    ],
)
def test_back_ends_and_replicas_agree(
    sizes: tuple[int, ...], settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for backend in ("numba", "torch"):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        made = peers(sizes, **settings)
        entry = trained(made, 3)
        assert len({state_digest(demo.replicated) for demo in made}) == 1
        found.append((entry, state_digest(made[0].replicated), made[0].backend))
    assert found[0][:2] == found[1][:2]
    if "transform" not in settings:
        assert found[0][2] == "numba"


def test_an_entry_is_a_set_of_votes_and_their_authors() -> None:
    made = peers()
    entry = trained(made, 1)
    again = peers()
    order = [3, 1, 4, 0, 2]
    again[0].apply([entry[n] for n in order], LR, 1, [KEYS[n] for n in order])
    assert state_digest(again[0].replicated) == state_digest(made[0].replicated)
    again[1].apply(entry, LR, 1, [KEYS[n] for n in order])
    assert state_digest(again[1].replicated) != state_digest(made[0].replicated)


@pytest.mark.parametrize("authors", [(), KEYS[:4], (*KEYS[:4], KEYS[0]), (*KEYS[:4], b"")])
def test_votes_without_their_authors_are_refused_before_anything_moves(authors: tuple[bytes, ...]) -> None:
    made = peers()
    entry = trained(made, 1)
    before = state_digest(made[0].replicated)
    with pytest.raises(ValueError, match=r"5 payloads of \d different authors; give the author of each"):
        made[0].apply(entry, LR, 2, authors)
    assert state_digest(made[0].replicated) == before


def test_honest_votes_do_not_look_like_copies() -> None:
    form, layout = Format("independent"), Layout.of_shapes([("p", (640, 640))])
    momentum = torch.randn(layout.chunks, 64, 64)
    seen = []
    for key in KEYS[:2]:  # the same momentum: as alike as two peers can be
        draw = Draw(RUN, 1, (key,))
        payload = form.encode([form.choose(momentum, 16, None, draw)], 16)
        form.check(payload, 16, layout.chunks)
        seen.append(seen_votes(form, payload, 16, layout.chunks, draw))
    assert overlap(*seen) < 0.1


def test_a_run_has_it_with_checks_and_the_peers_key() -> None:
    optimizer = OptimizerConfig(selection="independent", one_in=32)
    RunConfig(optimizer=optimizer, clock=ClockConfig(min_peers=3), trust=TrustConfig(enabled=True)).check_new()
    assert optimizer.drawn
    assert not optimizer.shared
    assert optimizer.vote_size == 32
    config = demo_config(optimizer, 32, RUN, KEYS[0])
    assert (config.author, config.seed) == (KEYS[0], RUN)
    assert demo_config(OptimizerConfig(), 128, RUN, KEYS[0]).author == b"", "no other method knows who votes"


def test_the_optimizer_alone_has_the_places_of_its_rank() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = DeMoOptimizer(model, lr=LR, selection="independent", one_in=8, seed=5)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    assert any(not torch.equal(was, now) for was, now in zip(before, model.parameters(), strict=True))
    assert optimizer._demos[0].config.author == (1).to_bytes(4, "big")
    with pytest.raises(TypeError, match="author: no such setting"):
        DeMoOptimizer(model, lr=LR, selection="independent", author=b"x")
