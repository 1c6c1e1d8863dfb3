"""A language model of 41,000 parameters that needs torch and nothing else.

A peer that builds a model of transformers spends 2.7 s of CPU time on the import. In tests about something else than the model,
that is more than the test itself. A swarm of so small models takes steps as fast as the cores allow, so tests would wait for
processes that start beside it. So a pass in training waits a moment, as for a GPU, and leaves the cores to them.
"""

import select
from typing import Final

import torch
from torch import Tensor, nn

PASS_SECONDS: Final = 0.03


class TwoTokens(nn.Module):
    """Predicts a byte from the two bytes before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.hidden = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next bytes, [batch, tokens, 256]."""
        if torch.is_grad_enabled():
            select.select([], [], [], PASS_SECONDS)  # libfaketime breaks time.sleep
        now = self.embedding(tokens)
        before = nn.functional.pad(now[:, :-1], (0, 0, 1, 0))
        logits: Tensor = self.head(torch.tanh(self.hidden(torch.cat((now, before), dim=-1))))
        return logits


def model(width: int = 64) -> nn.Module:
    """For `model.factory` of a run."""
    return TwoTokens(width)
