"""Run by `test_trainers.py` with a Python that has accelerate and lightning: prints a digest for each trainer, twice.

The first is that of eight steps in one go, the second that of four steps, the trainer's own checkpoint, and four more.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from node.optim.digest import state_digest
from node.optim.torch_optimizer import DeMoOptimizer

STEPS = 8


def made() -> tuple[nn.Sequential, DeMoOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    return model, DeMoOptimizer(model, lr=2e-3, base="adamw")


def digest(model: nn.Module) -> str:
    return state_digest([parameter.detach() for parameter in model.parameters()]).hex()


def rows(step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))


def accelerate(folder: Path, first: int, last: int) -> str:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*made())
    if first:
        accelerator.load_state(folder / "accelerate")
    for step in range(first, last):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(rows(step)), rows(step + 1)))
        optimizer.step()
    accelerator.save_state(folder / "accelerate")
    return digest(model)


def hf_trainer(folder: Path, first: int, last: int) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "hf"), use_cpu=True, max_steps=last, per_device_train_batch_size=4, report_to="none",
        save_strategy="steps", save_steps=4, logging_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    data = [{"input_ids": it, "labels": it} for it in torch.randint(0, 256, (64, 16))]
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(DeMoOptimizer(model, lr=2e-3), None))
    trainer.train(resume_from_checkpoint=str(folder / "hf" / f"checkpoint-{first}") if first else None)
    return digest(model)


def lightning(folder: Path, first: int, last: int) -> str:
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = made()[0]

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[0].roll(1, dims=1))

        def configure_optimizers(self) -> DeMoOptimizer:
            return DeMoOptimizer(self, lr=2e-3, base="adamw")

    model = Module()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2 * last // STEPS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    # Lightning does not go on in the middle of an epoch: the first four steps are one
    batches = torch.utils.data.DataLoader([rows(step) for step in range(STEPS // 2)], batch_size=1)
    trainer.fit(model, batches, ckpt_path=folder / "lightning.ckpt" if first else None)
    trainer.save_checkpoint(folder / "lightning.ckpt")
    return digest(model)


if __name__ == "__main__":
    for trainer in (accelerate, hf_trainer, lightning):
        where = Path(sys.argv[1]) / trainer.__name__
        whole = trainer(where / "whole", 0, STEPS)
        trainer(where / "parts", 0, STEPS // 2)
        print(trainer.__name__, whole, trainer(where / "parts", STEPS // 2, STEPS), flush=True)
