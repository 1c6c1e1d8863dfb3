"""torchrun --nproc-per-node 2 docs/examples/train_with_lightning.py (needs lightning)"""

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from node.optim.digest import state_digest
from swarmentum import DeMoOptimizer


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def training_step(self, batch):
        return nn.functional.mse_loss(self.layers(batch), batch.roll(1, dims=1))

    def configure_optimizers(self):
        return DeMoOptimizer(self, lr=4e-3)

    def on_train_start(self):
        """Lightning wraps the model in DDP; with this hook DDP sends no gradient, and votes alone are exchanged."""
        self.trainer.strategy.model.register_comm_hook(None, noop_hook)


strategy = DDPStrategy(process_group_backend="gloo")
trainer = Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
model = Model()
trainer.fit(model, torch.utils.data.DataLoader(torch.randn(2_048, 64), batch_size=32))
print(f"rank {trainer.global_rank}: weights {state_digest(list(model.parameters())).hex()[:16]}")
