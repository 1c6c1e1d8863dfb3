"""torchrun --nproc-per-node 2 docs/examples/train_with_accelerate.py (needs accelerate)"""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from node.optim.digest import state_digest
from swarmentum import DeMoOptimizer


class SendNothing(DistributedDataParallelKwargs):
    """Accelerate wraps the model in DDP; with this hook DDP sends no gradient, and votes alone are exchanged."""

    def register_comm_hook(self, model):
        model.register_comm_hook(None, noop_hook)


accelerator = Accelerator(cpu=not torch.cuda.is_available())
accelerator.ddp_handler = SendNothing()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = DeMoOptimizer(model, lr=4e-3)
loader = torch.utils.data.DataLoader(torch.randn(2_048, 64), batch_size=32)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # and each rank reads other batches
for batch in loader:
    loss = nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
weights = list(accelerator.unwrap_model(model).parameters())
print(f"rank {accelerator.process_index}: loss {loss.item():.3f}, weights {state_digest(weights).hex()[:16]}")
accelerator.end_training()
