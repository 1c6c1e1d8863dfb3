"""How a peer computes its gradients: with less memory, or compiled. The peer chooses this itself; the gradient is the same.

Refuses a setting that the model cannot follow, before the peer joins, instead of doing without it in silence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from protos.errors import OperatorError


@dataclass(frozen=True)
class Effort:
    """`activation_checkpointing`: activations of a block are computed again in the backward pass instead of kept
    (arXiv 1604.06174): about a third more time. `compiled`: through `torch.compile`."""

    activation_checkpointing: bool = False
    compiled: bool = False

    def prepare(self, model: nn.Module) -> nn.Module:
        """The same module, set up in place: its parameters, their names and their bits stay. Raises OperatorError."""
        if self.activation_checkpointing:
            newer = getattr(model, "activation_checkpointing_enable", None)
            enable = newer or getattr(model, "gradient_checkpointing_enable", None)
            if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
                raise OperatorError(
                    f"activation_checkpointing: {type(model).__name__} has none (no activation_checkpointing_enable); "
                    "join without it, and with a smaller micro_batch"
                )
            # as transformers 5 calls it, and as those before do
            name = "activation_checkpointing_kwargs" if newer else "gradient_checkpointing_kwargs"
            enable(**{name: {"use_reentrant": False}})
            model.train()  # transformers checkpoints only a model that is being trained
        if self.compiled:
            model.compile()
        return model
