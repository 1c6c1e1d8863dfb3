"""A peer as a torch optimizer, for loops that cannot be turned: `Joined.optimizer`.

Refuses to be a copy, or to load what another optimizer kept: the peer in this process has the momentum.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.optim's own methods: dynamo is loaded at the first call

from node.optim.process_group import TakesScale, unscale
from protos.errors import OperatorError

if TYPE_CHECKING:
    from node.training.maker import Share
    from swarmentum._join import Joined


class HeardLoss:
    """The loss in an output of the model. `is_used`: a backward pass has gone through it."""

    def __init__(self, loss: Tensor) -> None:
        self.nats, self.is_used = float(loss.detach()), False
        loss.register_hook(self._use)  # type: ignore[no-untyped-call]

    def _use(self, gradient: Tensor) -> None:
        self.is_used = True


class LossHook:
    """Of the model: hears the loss in its outputs. A copy of the model, or a file of it, has a hook that does nothing."""

    def __init__(self, owner: SwarmOptimizer) -> None:
        self._owner = weakref.ref(owner)

    @_disable_dynamo  # else torch.compile warns, or refuses fullgraph
    def __call__(self, module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        owner = self._owner()
        if owner is None or module is not owner._peer.model:
            return
        if isinstance(loss, Tensor) and loss.requires_grad:
            owner._heard.append(HeardLoss(loss))
            owner._parts = named.get("num_items_in_batch") is not None

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # loads where nobody has swarmentum


class RunGroup(dict[str, Any]):
    """A group of parameters whose `lr` is the run's, whatever a scheduler sets."""

    told = False

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "lr":
            super().__setitem__(key, value)
        elif value != self["lr"] and not self.told:
            self.told, why = True, "what a scheduler or the program sets changes nothing"
            structlog.get_logger("peer").warning("the learning rate is the run's", step="-", why=why)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class SwarmOptimizer(torch.optim.Optimizer):
    """`step` contributes what is in `.grad`, and returns when the next step of the run wants a gradient.

    The loss that others see is that of `report`, the mean of the `loss` in the model's outputs since the last step (models of
    transformers have it), or the closure's. Outputs without a backward pass do not count beside others, nor do those before
    `zero_grad`. After calls with `num_items_in_batch`, which the Trainer makes, it is their sum. `share` is what the run asks
    for now, and None once the run has ended. The learning rate in `param_groups` shows the run's, and schedulers change
    nothing. A GradScaler works: where it finds an infinity, the step has no votes of this peer.
    """

    _step_supports_amp_scaling = TakesScale()

    def __init__(self, peer: Joined) -> None:
        trained = [parameter for parameter in peer.model.parameters() if parameter.requires_grad]
        super().__init__(trained, {"lr": 0.0, "run": peer._run})
        self.param_groups[:] = map(RunGroup, self.param_groups)
        self.state.update({key: {} for key in trained})  # torch.distributed.checkpoint calls step where there is none
        self._peer = peer
        # Changed in place: Lightning's wrapper has attributes of its own.
        self._heard, self._reported = list[HeardLoss](), list[tuple[float, int | None, int]]()
        self._parts = False
        self._hook = peer.model.register_forward_hook(LossHook(self), with_kwargs=True)
        self.share: Share | None = None
        self._take()

    @property
    def finished(self) -> bool:
        """Whether no step is left: the run has ended, its owner ended the peer, or the program closed it."""
        return self.share is None or self._peer._has_left

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "the optimizer of a peer cannot be copied or pickled: it belongs to the peer in this process. Save the model; the "
            "peer's home keeps the momentum"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what this peer's optimizer, or an earlier one in the run, gave, and nothing changes. Raises OperatorError."""
        runs = [group.get("run") for group in state_dict["param_groups"]]
        if runs != [self._peer._run]:
            what = f"of run {runs[0][:16]}" if runs and runs[0] else "of an optimizer of another kind"
            raise OperatorError(
                f"this state is {what}, and the momentum of a peer in this run comes back with the peer's home alone: load no "
                "state into peer.optimizer()"
            )
        [group] = self.param_groups
        super().load_state_dict(state_dict)
        group.update(self.param_groups[0])
        self.param_groups[:] = [group]
        self._show()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises OperatorError once the optimizer is made: a run's parameters are those of its model."""
        if self.param_groups:
            raise OperatorError(
                "the swarm trains the parameters of the run's model, and no others: train yours with an optimizer of your own"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. The losses whose gradient goes are none of the next step's."""
        self._heard[:] = [loss for loss in self._heard if not loss.is_used]
        super().zero_grad(set_to_none)

    def report(self, loss: Tensor | float, samples: int | None = None, tokens: int = 0) -> None:
        """The figures of the next `step`, as `Joined.contribute` takes them."""
        self._reported[:] = [(float(loss.detach() if isinstance(loss, Tensor) else loss), samples, tokens)]

    def _loss(self, returned: Any) -> float | None:
        """That of the next step; None if nobody told one. A closure's comes after what a backward pass went through: Lightning
        divides its own, of the last micro-batch, by their number."""
        if self._reported:
            return self._reported[0][0]
        used = [loss.nats for loss in self._heard if loss.is_used]
        if returned is not None and not used:
            return float(returned.detach() if isinstance(returned, Tensor) else returned)
        found = used or [loss.nats for loss in self._heard]
        return sum(found) / (1 if self._parts else len(found)) if found else None

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises OperatorError after the end, without a loss, or for parameters that were moved; and the peer's own error."""
        if self.finished:
            raise OperatorError("this peer has ended: stop the loop when optimizer.finished is true")
        if not self._peer._has_share and not self._goes_on(closure):
            return None
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        parameters = self.param_groups[0]["params"]
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        loss = self._loss(returned)
        finite = loss is None or math.isfinite(loss)  # else the run has perhaps diverged, and is told
        empty = loss is None and all(parameter.grad is None for parameter in parameters)
        left_out = empty and closure is not None
        if left_out or (not unscale(found, scale, parameters, None) and finite):
            self._take()
            return returned
        if empty:
            raise OperatorError("no parameter has a gradient: call backward() before step, and zero_grad() after it")
        if loss is None:
            raise OperatorError(
                "step needs the loss, which other peers see: call optimizer.report(loss, tokens=...) before it, or give a "
                "model whose output has a `loss`"
            )
        _, samples, tokens = (self._reported or [(loss, None, 0)])[0]
        self._peer.contribute(loss, samples, tokens)
        self._take()
        return returned

    def _goes_on(self, closure: Callable[[], Any] | None) -> bool:
        """After an error ended the last step while it waited: whether there is a share now, and a gradient to come of it."""
        self._take()
        if closure is None and not self.finished:
            self.zero_grad()
            log = structlog.get_logger("peer")
            log.warning("the step before was interrupted: the gradient made since is left out", step="-")
        return closure is not None and not self.finished

    def _take(self) -> None:
        self._heard.clear()
        self._reported.clear()
        self.share = self._peer._next()
        if self.share is None:
            self._hook.remove()
        self._show()

    def _show(self) -> None:
        if self.share is not None:
            for group in (*self.param_groups, self.defaults):  # schedulers of transformers look there
                dict.__setitem__(group, "lr", self.share.learning_rate)
