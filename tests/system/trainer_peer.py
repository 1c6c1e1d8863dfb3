"""A Hugging Face Trainer as a peer: `python -m tests.system.trainer_peer LINK HOME`. It prints how many of its votes counted.

Runs where accelerate is installed, which this repository's environment does not have (Makefile: `.venv/.trainers`).
"""

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import swarmentum

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1,
}  # fmt: skip


class StopAtTheEnd(TrainerCallback):
    def __init__(self, optimizer: swarmentum.SwarmOptimizer) -> None:
        self.optimizer = optimizer

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop |= self.optimizer.finished


def main(link: str, home: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    data = [{"input_ids": it, "labels": it} for it in torch.randint(0, 256, (400, 32))]
    arguments = TrainingArguments(
        output_dir=f"{home}/hf", use_cpu=True, per_device_train_batch_size=4, max_steps=1000, max_grad_norm=0,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    with swarmentum.join(link, model, home=home, own_data=True, allow_code=True, listen="127.0.0.1:0") as peer:
        optimizer = peer.optimizer()
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.add_callback(StopAtTheEnd(optimizer))
        trainer.train()
    print(peer.summary.votes_accepted)


if __name__ == "__main__":
    main(*sys.argv[1:])
