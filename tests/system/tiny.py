"""A language model of 41,000 parameters that needs torch and nothing else.

A peer that builds a model of transformers spends 2.7 s of CPU time on the import. In tests about something else than the model,
that is more than the test itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TwoTokens(nn.Module):
    """Predicts a byte from the two bytes before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.hidden = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next bytes, [batch, tokens, 256]."""
        now = self.embedding(tokens)
        before = nn.functional.pad(now[:, :-1], (0, 0, 1, 0))
        logits: Tensor = self.head(torch.tanh(self.hidden(torch.cat((now, before), dim=-1))))
        return logits


def model(width: int = 64) -> nn.Module:
    """For `model.factory` of a run."""
    return TwoTokens(width)
