"""The private second moment is Adam's, and is the peer's own."""

from __future__ import annotations

import pytest
import torch

from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.second_moment import SecondMoment


@pytest.mark.parametrize("compiled", [False, True])
def test_divided_gradients_are_adams_without_momentum(compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(0)
    parameter = torch.zeros(30, 7, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([parameter], lr=1.0, betas=(0.0, 0.95), eps=1e-8)
    ours, moved = SecondMoment([torch.zeros(30, 7)], 0.95, compiled=compiled), torch.zeros(30, 7)
    for scale in (1.0, 100.0, 1e-4, 3.0):
        gradient = torch.randn(30, 7, generator=generator) * scale
        parameter.grad = gradient.double()
        adam.step()
        ours.divide([gradient])
        moved -= gradient
    assert torch.allclose(moved.double(), parameter.detach(), atol=1e-4)


def test_threads_and_ranges_change_no_bit_of_the_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = pytest.importorskip("node.optim.backends.numba.moment")
    threads, found = torch.get_num_threads(), []
    try:
        for count, length in ((1, 1 << 18), (3, 7)):
            torch.set_num_threads(count)
            monkeypatch.setattr(moment, "RANGE_ELEMENTS", length)
            generator = torch.Generator().manual_seed(0)
            second = SecondMoment([torch.zeros(11, 9), torch.zeros(0), torch.zeros(5)], 0.9, compiled=True)
            for _ in range(3):
                gradients = [torch.randn(11, 9, generator=generator), torch.zeros(0), None]
                second.divide(gradients)
            found.append([gradients[0], *second.squares])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not found[0][-1].any()


def test_peers_with_and_without_it_train_together() -> None:
    peers = [
        DeMo([("a", torch.nn.Parameter(torch.zeros(70, 80)))], DeMoConfig(beta2=beta2)) for beta2 in (0.0, 0.95, 0.99)
    ]
    lr = float(torch.tensor(0.01))
    for step in range(3):
        entry = []
        for number, peer in enumerate(peers):
            peer.parameters[0].grad = torch.randn(70, 80, generator=torch.Generator().manual_seed(10 * step + number))
            votes = peer.propose(lr)
            peer.settle(True)
            entry.append((votes.size, votes.payload))
        for peer in peers:
            peer.apply(entry, lr)
        assert len({state_digest(peer.replicated) for peer in peers}) == 1


def test_a_state_with_it_does_not_fit_one_without() -> None:
    with_it, without = (DeMo([("a", torch.zeros(3, requires_grad=True))], DeMoConfig(beta2=b)) for b in (0.9, 0.0))
    for one, other in ((with_it, without), (without, with_it)):
        with pytest.raises(ValueError, match="set beta2 as it was"):
            one.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="other parameters"):
        SecondMoment([torch.zeros(3)], 0.9).load_state_dict(SecondMoment([torch.zeros(4)], 0.9).state_dict())
