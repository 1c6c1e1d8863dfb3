"""Who makes a peer's gradients. The training asks for them, and turns what is in `.grad` into votes; it cares for nothing else.

`BuiltIn` is the loop of the command `join`: forward and backward passes over the run's samples. `Handover` (handover.py) gives
each share to a program's own loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import torch
from torch import nn

from node.data.samples import Samples
from node.model.gradients import GradientTaker, GradResult, Loss, accumulate_gradients, free_cache, no_room
from node.model.gradients import loss as next_token_loss
from node.model.spec import check_built_in
from node.optim.step import NonFiniteGradient
from protos.assignment import Range
from protos.errors import OperatorError
from protos.limits import LOSS_NATS_MAX


@dataclass(frozen=True)
class PendingGradient:
    """A gradient that waits to become votes.

    A gradient in `.grad`, on the samples of `step`, before the peer has made votes from it.
    """

    result: GradResult
    seconds: float
    step: int


def check_loss(nats: float) -> None:
    """Raises `NonFiniteGradient` for a loss that nobody may claim. It may be infinite where the gradient is finite."""
    if not abs(nats) < LOSS_NATS_MAX:
        raise NonFiniteGradient(f"the loss is {nats:g}")


class NoVotes(Exception):  # noqa: N818 - nothing failed: this peer has nothing to say in this step
    """This peer has no votes for a step, and the text says why."""


class GradientMaker(Protocol):
    """Of one replica on one device."""

    @property
    def checker(self) -> BuiltIn | None:
        """Makes the gradient over any samples of the run, in the training's thread: checks of others' votes need it."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def rest(self) -> None:
        """Give the device's memory back that only training needs."""

    def begin(self, step: int, lr: float, decided: Callable[[], bool]) -> None:
        """The next gradients are for this clock step; `decided`: they would be in vain. `should_stop` also rests, as the owner
        wants it, and then gives the same answer."""

    def mean_gradient(
        self,
        samples: Samples,
        parts: tuple[Range, ...],
        micro_batch: int,
        autocast: Any,
        should_stop: Callable[[], bool],
    ) -> GradResult:
        """Put the mean gradient over samples of `parts`, at the parameters that are here, into `.grad`, and leave these.

        Raises `NoVotes`, or `NonFiniteGradient`. A result without samples: it stopped before the first."""


class BuiltIn:
    """Next-token loss of a model over the run's samples. It computes fewer at a time if the device has no room for more."""

    def __init__(self, model: nn.Module, loss: Loss = next_token_loss) -> None:
        self._model, self._loss, self.checker = model, loss, self
        self._step = 0
        self._fits: int | None = None  # samples for which the device had room at a time, as far as is known

    @property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    def ready(self, context: int) -> None:
        """Before others wait for this peer: raises OperatorError for a model that it cannot train on samples of `context`."""
        check_built_in(self._model)

    def rest(self) -> None:
        self._free()

    def begin(self, step: int, lr: float, decided: Callable[[], bool]) -> None:
        """For the log."""
        self._step = step

    def mean_gradient(
        self,
        samples: Samples,
        parts: tuple[Range, ...],
        micro_batch: int,
        autocast: Any,
        should_stop: Callable[[], bool],
        taker: GradientTaker | None = None,
    ) -> GradResult:
        """The mean over all of the samples, or over those done before `should_stop`; `taker` as of `accumulate_gradients`."""
        model, device = self._model, self.device
        self._fits = min(self._fits or micro_batch, micro_batch)
        while True:
            size = max(min(self._fits, sum(map(len, parts))), 1)
            try:
                batches = samples.micro_batches(parts, size)
                with nullcontext() if taker is None else taker.hooked():
                    return accumulate_gradients(model, batches, device, autocast, should_stop, self._loss, taker)
            except RuntimeError as error:
                if not no_room(error):
                    raise
                if size == 1:
                    self._free()
                    what = str(error).splitlines()[0]
                    raise OperatorError(
                        f"{device} has no room for one sample of this model ({what}); close other programs that use its "
                        "memory, try --set precision=bf16, or join with another device (--device)"
                    ) from error
            # This stands after the except, because until then the error keeps the tensors of the failed pass alive.
            self._fits = size // 2
            self._free()
            log = structlog.get_logger("peer")
            log.warning("out of memory: computing fewer samples at a time", step=self._step, micro_batch=self._fits)

    def _free(self) -> None:
        self._model.zero_grad(set_to_none=True)
        free_cache(self.device)
