"""Run by `test_trainers.py` with a Python that has accelerate and lightning: prints digests of trainers and of loops by hand.

One line for each trainer and setting: plain, gradients of four batches added up, clipped, and both in mixed precision.
"""

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from node.optim.torch_optimizer import DeMoOptimizer
from tests.system.trainer_checkpoints import digest, made

BATCHES = 16
CASES: dict[str, tuple[int, float, bool]] = {  # batches of a step, the norm of its gradient, bf16
    "plain": (1, 0.0, False), "added": (4, 0.0, False), "clipped": (1, 0.01, False), "mixed": (4, 0.01, True)
}  # fmt: skip
ROWS = torch.randn(BATCHES, 8, 64, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(0, 256, (BATCHES, 4, 16), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(batch).float(), batch.roll(1, dims=1))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip


def by_hand(
    model: Any, loss: Callable[[Any, Tensor], Tensor], batches: Tensor, several: int, norm: float, bf16: bool
) -> str:
    optimizer = DeMoOptimizer(model, lr=2e-3, base="adamw")
    model.train()
    for number, batch in enumerate(batches, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            found = loss(model, batch)
        (found / several).backward()
        if number % several == 0:
            if norm:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
    return digest(model)


def accelerate(several: int, norm: float, bf16: bool) -> str:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=several, mixed_precision="bf16" if bf16 else "no")
    model, optimizer = accelerator.prepare(*made())
    for batch in ROWS:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients and norm:
                accelerator.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
    return digest(model)


def lightning(several: int, norm: float, bf16: bool) -> str:
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = made()[0]

        def training_step(self, batch: Tensor) -> Tensor:
            return loss_of(self.layers, batch[0])

        def configure_optimizers(self) -> DeMoOptimizer:
            return DeMoOptimizer(self.layers, lr=2e-3, base="adamw")

    model = Module()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=several, gradient_clip_val=norm or None,
        precision="bf16-mixed" if bf16 else "32-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(list(ROWS), batch_size=1))
    return digest(model)


def hf_trainer(several: int, norm: float, bf16: bool) -> str:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model, rows = llama(), [{"input_ids": it, "labels": it} for it in IDS.flatten(0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=BATCHES // several, per_device_train_batch_size=IDS.shape[1],
            gradient_accumulation_steps=several, max_grad_norm=norm, bf16=bf16, report_to="none", save_strategy="no",
            logging_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        InOrder(
            model, arguments, train_dataset=rows, optimizers=(DeMoOptimizer(model, lr=2e-3, base="adamw"), None)
        ).train()
    return digest(model)


def main() -> None:
    for name, case in CASES.items():
        hand = by_hand(made()[0], loss_of, ROWS, *case)
        for trainer in (accelerate, lightning):
            print(f"{trainer.__name__}:{name}", trainer(*case), hand, flush=True)
        hand = by_hand(llama(), lambda model, batch: model(input_ids=batch, labels=batch).loss, IDS, *case)
        print(f"hf_trainer:{name}", hf_trainer(*case), hand, flush=True)


if __name__ == "__main__":
    sys.exit(main())
