"""run.toml files for models that people ask for first, and how fast common cards train one. Pure: text and arithmetic.

Nobody has trained these models with this project yet, and each file says so. Refuses names that it does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import tomli_w

from protos.errors import OperatorError

PART_OF_PEAK: Final = 0.35
"""Of a card's peak. Large runs of language models report 0.21 to 0.46 of their chips' (arXiv 2204.02311, table 3). The part on
home cards is not measured here."""
OPERATIONS_A_PARAMETER: Final = 6
"""Of one token: two in the forward pass, four in the backward pass (arXiv 2001.08361, table 1)."""
PEAK_FLOPS: Final = {"RTX 3060": 25.6e12, "RTX 3090": 71e12, "RTX 4090": 165e12, "H100": 989e12}
"""bf16 with fp32 sums, dense, as NVIDIA's data sheets have it."""


@dataclass(frozen=True)
class Recipe:
    """A model and the numbers of a run that trains it on about 20 tokens a parameter or more (arXiv 2203.15556)."""

    config: dict[str, Any]
    tokenizer: str
    batch_samples: int
    steps: int
    deadline_ms_max: int
    context: int = 1024
    dtype: str = "uint16"


_LLAMA: Final = {"model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": 2048}
RECIPES: Final = {
    "gpt2-124m": Recipe(
        {
            "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        "openai-community/gpt2", batch_samples=512, steps=19_000, deadline_ms_max=120_000,
    ),
    "smollm2-360m": Recipe(
        {
            **_LLAMA, "vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
            "num_attention_heads": 15, "num_key_value_heads": 5,
        },
        "HuggingFaceTB/SmolLM2-360M", batch_samples=512, steps=19_000, deadline_ms_max=300_000,
    ),
    "llama-3.2-1b": Recipe(
        {
            **_LLAMA, "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8,
        },
        "meta-llama/Llama-3.2-1B", batch_samples=1024, steps=24_000, deadline_ms_max=900_000, dtype="uint32",
    ),
}  # fmt: skip


def run_toml(name: str) -> str:
    """The file for a model. Raises OperatorError for one that is not known."""
    if name not in RECIPES:
        raise OperatorError(f"--for {name}: expected one of {', '.join(RECIPES)}")
    it = RECIPES[name]
    tokens = it.steps * it.batch_samples * it.context / 1e9
    return f"""# {name}: {tokens:.0f} billion tokens. Nobody has trained it with Swarmentum yet:
# batch and steps are a start, not a result.
# `swarmentum-coordinator run check FILE` prints what it takes of each peer: memory, disk, traffic, days.
name = "{name}"

{tomli_w.dumps({"model": {"config": it.config}})}
[data]
# If the hub gates the tokenizer, each machine needs `hf auth login` first, or a copy: tokenizer = "PATH/tokenizer.json".
# Make the shards once: swarmentum data build TEXT --out shards --tokenizer {it.tokenizer}
# Then put them on the web, and write their address and the sha256 that was printed here.
source = "shards"
tokenizer = "{it.tokenizer}"
dtype = "{it.dtype}"
context = {it.context}

[clock]
steps = {it.steps}
batch_samples = {it.batch_samples}
# The slowest peer that still counts has so long for a step.
deadline_ms_max = {it.deadline_ms_max}
snapshot_every = 100

[evaluation]
every = 100
"""


def tokens_a_second(parameters: int, peak_flops: float) -> float:
    """Of one card, by arithmetic alone."""
    return PART_OF_PEAK * peak_flops / (OPERATIONS_A_PARAMETER * parameters)
