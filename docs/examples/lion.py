"""Lion (arXiv 2302.06675) as the base of `DeMoOptimizer`: a function from everybody's votes to the update."""

import torch
from torch import nn

from node.optim import base
from swarmentum import DeMoOptimizer


def lion(aggregate, state, count):
    """One correctly rounded operation at a time, element by element, so that all ranks get the same bits."""
    update = state["momentum"].mul(0.9).add_(aggregate.mul(0.1)).sign_()
    state["momentum"].mul_(0.99).add_(aggregate.mul(0.01))
    return update


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = DeMoOptimizer(model, lr=2e-3, group_size=16, base=base.given("lion", lion, ("momentum",)))
for _ in range(100):
    batch = torch.randn(32, 64)
    loss = nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
