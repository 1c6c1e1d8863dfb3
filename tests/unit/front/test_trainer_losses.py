"""The loss that a trainer's loop reports to the swarm, behind `SwarmOptimizer`: the mean, however a trainer divides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swarmentum._join import SwarmOptimizer


class Peer:
    """The seam of `Joined` that the optimizer uses."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.losses = model, list[float]()

    def contribute(self, loss: float, samples: int | None, tokens: int) -> None:
        self.losses.append(loss)

    def _next(self) -> Any:
        return SimpleNamespace(learning_rate=0.0)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_parts_of_a_mean_are_added_up_and_means_are_averaged(micro_batches: int) -> None:
    """The Trainer of transformers tells the model how many tokens a whole step has, and each output is then a part."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    peer = Peer(model)
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    rows = torch.randint(0, 64, (8, 16))
    for named in ({}, {"num_items_in_batch": torch.tensor(8 * 15)}, {}):
        for part in rows.chunk(micro_batches):
            model(input_ids=part, labels=part, **named).loss.backward()
        with torch.no_grad():
            model(input_ids=rows, labels=rows)  # an evaluation is no loss of the step
        optimizer.step()
    whole = model(input_ids=rows, labels=rows).loss.item()
    assert peer.losses == pytest.approx([whole] * 3)
