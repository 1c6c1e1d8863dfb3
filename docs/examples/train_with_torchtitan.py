"""torchrun --nproc-per-node 1 train_with_torchtitan.py LINK HOME (needs torchtitan). The run's model.factory is `model`."""

import sys
from dataclasses import replace

import torch
from torch import Tensor, nn
from torchtitan.models.llama3.config_registry import llama3_debugmodel as settings
from torchtitan.trainer import Trainer

import swarmentum


def model() -> nn.Module:
    made = settings().model_spec.model.build()
    made.init_states()
    return made


class Peer(Trainer):
    """torchtitan's data, loss, backward pass and metrics, without FSDP. The swarm moves and keeps the model."""

    def __init__(self, config, **join):
        config.model_spec = replace(config.model_spec, parallelize_fn=lambda model, **parallel: model)
        config.training.disable_cuda_graphs, config.training.max_norm = True, float("inf")
        super().__init__(config)
        self.peer = swarmentum.join(model=self.model_parts[0], own_data=True, **join)
        self.votes = self.peer.optimizer()
        self.optimizers.optimizers = [self.votes]

    def forward_backward_step(self, *, labels, **batch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = super().forward_backward_step(labels=labels, **batch)
        self.votes.report(loss, tokens=labels.numel())
        return loss

    def should_continue_training(self) -> bool:
        return not self.votes.finished


if __name__ == "__main__":
    trainer = Peer(settings(), link=sys.argv[1], home=sys.argv[2], allow_code=True)
    trainer.train()
    trainer.peer.close()
    trainer.close()
