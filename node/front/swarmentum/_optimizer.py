"""A peer behind `torch.optim.Optimizer`, for trainers whose loop nobody can turn: `step` gives the gradient, and waits.

Refuses to move a parameter itself: the swarm does that between the end of one step and the begin of the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from node.training.handover import Share
from protos.errors import OperatorError

if TYPE_CHECKING:
    from swarmentum._join import Joined

_NONE: tuple[int | None, int] = None, 0


class SwarmOptimizer(torch.optim.Optimizer):
    """`step` contributes what is in `.grad`, and returns when the next step of the run wants a gradient.

    The loss that others see is that of `report`, of the closure, or the mean of the `loss` in the model's outputs since the
    last step (models of transformers have it). After calls with `num_items_in_batch`, which the Trainer makes, it is their sum.
    `share` is what the run asks for now, and None once the run has ended. The learning rate in `param_groups` shows the run's,
    and schedulers change nothing.
    """

    def __init__(self, peer: Joined) -> None:
        trained = [parameter for parameter in peer.model.parameters() if parameter.requires_grad]
        super().__init__(trained, {"lr": 0.0})
        self._peer = peer
        self._losses: list[float] = []
        self._parts, self._figures = False, _NONE
        owner = weakref.ref(self)

        def heard(module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
            loss, mine = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None), owner()
            if mine is not None and isinstance(loss, Tensor) and loss.requires_grad:
                mine._losses.append(float(loss.detach()))
                mine._parts = named.get("num_items_in_batch") is not None

        self._hook = peer.model.register_forward_hook(heard, with_kwargs=True)
        self.share: Share | None = None
        self._take()

    @property
    def finished(self) -> bool:
        """Whether no step is left: the run has ended, or its owner ended the peer."""
        return self.share is None

    def report(self, loss: Tensor | float, samples: int | None = None, tokens: int = 0) -> None:
        """The figures of the next `step`, as `Joined.contribute` takes them."""
        self._losses, self._parts = [float(loss.detach() if isinstance(loss, Tensor) else loss)], False
        self._figures = samples, tokens

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises OperatorError after the run's end, without a loss, or for parameters that somebody moved; and the error that
        ends the peer."""
        if self.finished:
            raise OperatorError(
                "the run has ended, and this peer with it: stop the loop when optimizer.finished is true"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.report(loss, *self._figures)
        if not self._losses:
            raise OperatorError(
                "step needs the loss, which other peers see: call optimizer.report(loss, tokens=...) before it, or give a "
                "model whose output has a `loss`"
            )
        self._peer.contribute(sum(self._losses) / (1 if self._parts else len(self._losses)), *self._figures)
        self._take()
        return loss

    def _take(self) -> None:
        self._losses, self._figures = [], _NONE
        self.share = self._peer._next()
        if self.share is None:
            self._hook.remove()
        else:
            for group in self.param_groups:
                group["lr"] = self.share.learning_rate
