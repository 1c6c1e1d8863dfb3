"""Parity with DeMo as its paper writes it down (arXiv 2411.19870v1): the same indices, the same signs, over 20 steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from node.optim.demo import DeMo, DeMoConfig
from node.optim.reference import PaperDeMo

SHAPES = [(64, 128), (192, 64), (64, 64)]
PEERS, STEPS, BETA = 2, 20, 0.95
NEAR_ZERO = 0.005
"""Of the update's root mean square: the integer basis decides the sign of what is nearer to zero its own way."""


@pytest.mark.parametrize("k", [8, 32])
def test_same_indices_and_same_signs_as_the_paper(k: int) -> None:
    config = DeMoConfig(beta=BETA, selection="topk", top_k=k, clip_norm=None)
    random = np.random.default_rng(k)
    papers = [PaperDeMo(SHAPES, BETA, k) for _ in range(PEERS)]
    parameters = [[torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES] for _ in range(PEERS)]
    peers = [DeMo(zip("abc", own, strict=True), config) for own in parameters]
    chunks = peers[0].layout.chunks
    near = 0
    for step in range(STEPS):
        lr = float(np.float32(1e-2 / (1 + step)))
        entry, everybody = [], []
        common = [random.normal(size=shape) for shape in SHAPES]
        for peer, paper, own in zip(peers, papers, parameters, strict=True):
            gradients = [(part + random.normal(size=part.shape)).astype(np.float32) for part in common]
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = torch.from_numpy(gradient)
            votes = peer.propose(lr)
            chosen = paper.extract(gradients, lr)
            everybody.append(chosen)
            wanted = [[index for index, _ in chunk] for tensor in chosen for chunk in tensor]
            ballot = config.form.decode(votes.payload, k, chunks, torch.device("cpu"))
            assert ballot.where.tolist() == wanted
            assert ballot.values.tolist() == [[sign for _, sign in chunk] for tensor in chosen for chunk in tensor]
            entry.append((votes.size, votes.payload))
            peer.settle(True)
        before = [parameter.detach().clone() for parameter in parameters[0]]
        for peer in peers:
            peer.apply(entry, lr)
        for parameter, was, update in zip(parameters[0], before, papers[0].update(everybody), strict=True):
            ours, size = -torch.sign(parameter.detach() - was).numpy(), np.sqrt(np.mean(update**2))
            clear = np.abs(update) > NEAR_ZERO * size
            assert (ours[clear] == np.sign(update[clear])).all()
            near += int((~clear).sum())
    assert near < 0.02 * STEPS * chunks * 4096, "most of the update was too near to zero to compare"
