"""torchrun --nproc-per-node 2 docs/examples/train_with_hf_trainer.py FOLDER (needs accelerate)"""

import sys

import torch
from accelerate import DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from node.optim.digest import state_digest
from swarmentum import DeMoOptimizer


class SendNothing(DistributedDataParallelKwargs):
    """The Trainer wraps the model in DDP; with this hook DDP sends no gradient, and votes alone are exchanged."""

    def register_comm_hook(self, model):
        model.register_comm_hook(None, noop_hook)


arguments = TrainingArguments(
    output_dir=sys.argv[1], use_cpu=not torch.cuda.is_available(), max_steps=20, per_device_train_batch_size=4,
    report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, max_grad_norm=0,
)  # fmt: skip
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
model = LlamaForCausalLM(config)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (256, 32))]
trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(DeMoOptimizer(model, lr=4e-3), None))
trainer.accelerator.ddp_handler = SendNothing()
trainer.train()
print(f"rank {arguments.process_index}: weights {state_digest(list(model.parameters())).hex()[:16]}")
torch.distributed.destroy_process_group()
