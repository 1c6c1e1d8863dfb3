"""A model that only programs train (`swarmentum.join`), since it takes no tokens or gives no logits: `own_loop = True`.

The run then makes its first parameters from the model's code, and nobody calls it. Refuses the built-in loop.
"""

from __future__ import annotations

from typing import Final

from torch import nn

from protos.errors import OperatorError

OWN_LOOP: Final = "own_loop"
"""The attribute of a module."""


def has_own_loop(model: nn.Module) -> bool:
    """Whether its peers bring loops of their own."""
    return getattr(model, OWN_LOOP, False) is True


def check_built_in(model: nn.Module) -> None:
    """Raises OperatorError for a model that the built-in loop cannot train."""
    if has_own_loop(model):
        raise OperatorError(
            "the run's model has own_loop = True: programs train it with swarmentum.join (docs/python.md), and the command "
            "`swarmentum join` has no loss for it. `swarmentum anchor` can serve the run"
        )
