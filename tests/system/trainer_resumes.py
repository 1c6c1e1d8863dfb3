"""Run by `test_trainers.py` with torchrun: a Trainer of two ranks whose rate warms up from 0, in one go and in two parts."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from node.optim.digest import state_digest
from node.optim.torch_optimizer import DeMoOptimizer

TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1,
}  # fmt: skip


class SendNothing(DistributedDataParallelKwargs):
    def register_comm_hook(self, model: Any) -> None:
        model.register_comm_hook(None, noop_hook)


class SaveOwn(TrainerCallback):
    """The Trainer saves the optimizer of rank 0 alone."""

    def __init__(self, optimizer: DeMoOptimizer) -> None:
        self.optimizer = optimizer

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        where = Path(args.output_dir, f"checkpoint-{state.global_step}", f"own{args.process_index}.pt")
        torch.save(self.optimizer.state_dict(), where)


def train(folder: Path, steps: int, first: Path | None = None) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=steps, per_device_train_batch_size=4, report_to="none",
        save_strategy="steps", save_steps=4, logging_strategy="no", disable_tqdm=True, max_grad_norm=0,
        lr_scheduler_type="constant_with_warmup", warmup_steps=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    data = [{"input_ids": it, "labels": it} for it in torch.randint(0, 256, (64, 16))]
    optimizer = DeMoOptimizer(model, lr=2e-3)
    if first is not None:
        own = torch.load(first / f"own{arguments.process_index}.pt")
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: own)
    trainer = Trainer(
        model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[SaveOwn(optimizer)]
    )
    trainer.accelerator.ddp_handler = SendNothing()
    trainer.train(resume_from_checkpoint=None if first is None else str(first))
    digest = state_digest(list(model.parameters())).hex()[:16]
    sys.stdout.write(f"rank {arguments.process_index} weights {digest}\n")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    train(place / "whole", 8)
    train(place / "parts", 4)
    train(place / "parts", 8, place / "parts" / "checkpoint-4")
    torch.distributed.destroy_process_group()
