"""torchrun --nproc-per-node 2 docs/examples/train_with_torchrun.py"""

import torch
import torch.distributed as dist
from torch import nn

from node.optim.digest import state_digest
from swarmentum import DeMoOptimizer

dist.init_process_group("gloo")
torch.manual_seed(0)  # all ranks start from the same weights
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = DeMoOptimizer(model, lr=4e-3)
torch.manual_seed(dist.get_rank())  # and each has data of its own; no DistributedDataParallel
for _ in range(100):
    batch = torch.randn(32, 64)
    loss = nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # exchanges 5 bits for every 16 parameters, and moves every rank's weights equally
print(f"rank {dist.get_rank()}: loss {loss.item():.3f}, weights {state_digest(list(model.parameters())).hex()[:16]}")
dist.destroy_process_group()
