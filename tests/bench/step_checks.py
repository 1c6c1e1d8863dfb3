"""What the checks of a step cost: `DeMoOptimizer` on a Llama of about 25 million parameters, one sample of 128 tokens."""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from node.optim.torch_optimizer import DeMoOptimizer
from tests.bench.timing import medians_ms

CHECKS_A_CALL = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers", type=int, default=7, help="layers of 3.2 million parameters (default 7: 26 million)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds; medians are reported (default 15)")


def measure(options: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=options.layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=6144, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = DeMoOptimizer(model, lr=1e-3)
    rows = torch.randint(0, 6144, (1, 128))

    def gradient() -> None:
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()

    def checks() -> None:
        """All that a step looks at beside its votes: parameters and gradients twice more than in `propose` and `apply`."""
        for _ in range(CHECKS_A_CALL):
            assert optimizer._found_fault() is None
            for demo in optimizer._demos:
                demo.check_parameters()
                demo._laid_out.check_parameters()

    gradient()
    found = medians_ms({"gradient": gradient, "step": optimizer.step, "checks": checks}, options.rounds)
    found["checks"] /= CHECKS_A_CALL
    whole = found["gradient"] + found["step"]
    figures: dict[str, object] = {f"{name}_ms": round(value, 3) for name, value in found.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tensors": len(list(model.parameters())),
        **figures,
        "checks_of_step": round(found["checks"] / found["step"], 4),
        "checks_of_gradient_and_step": round(found["checks"] / whole, 4),
        "at": time.strftime("%Y-%m-%d"),
    }
