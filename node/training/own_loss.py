"""A program's loss, which may do anything, and the check that nobody but the swarm moves a model's parameters."""

from __future__ import annotations

import math

import structlog
import torch
from torch import Tensor, nn

from node.model.examine import changed_buffers, kept_buffers, other_buffer, some_numbers
from node.model.gradients import Loss, no_room
from protos.errors import OperatorError

THOROUGH_TIMES = 4
"""So often the values of all parameters are compared, which costs a pass over them."""
BUFFERS_SHOWN = 3


class Unmoved:
    """Tells whether somebody moved a model's parameters since. `thoroughly`: also behind autograd's back, by `.data`."""

    def __init__(self, model: nn.Module, *, thoroughly: bool) -> None:
        self._model, self._norms = model, None
        self._were = {name: _place(p) for name, p in model.named_parameters()}
        if thoroughly:
            self._norms = self._of_all()

    def _of_all(self) -> list[float]:
        with torch.no_grad():
            found = torch._foreach_norm([p.detach() for p in self._model.parameters()])
        return [float(norm) for norm in found]

    def moved(self) -> str:
        """The name of the first parameter that was moved, or that is another one; empty if none was."""
        found = {name: _place(p) for name, p in self._model.named_parameters()}
        if changed := next((name for name in self._were | found if found.get(name) != self._were.get(name)), ""):
            return changed
        if self._norms is None:
            return ""
        pairs = zip(self._were, self._norms, self._of_all(), strict=True)
        return next((name for name, was, now in pairs if was != now and not math.isnan(was)), "")


class JoinedParameters:
    """A model's parameters as they were when it joined: the tensors, their types, and which are trained."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._were = model, dict(model.named_parameters())
        self._kinds = {name: _kind(parameter) for name, parameter in self._were.items()}
        self._frozen: dict[str, tuple[tuple[int, int], float]] = {}

    def loaded(self) -> None:
        """The swarm has given the model a state: its digest tells who moves what is trained, and nothing else what is not."""
        self._frozen = {name: (_place(it), _sum(it)) for name, it in self._were.items() if not it.requires_grad}

    def changed(self) -> str:
        """What another parameter than then is now, in words; empty if none is."""
        now = dict(self._model.named_parameters())
        for name in self._were | now:
            if name not in now or name not in self._were:
                return f"{name!r} is {'new' if name in now else 'gone'}"
            if now[name] is not self._were[name]:
                return f"{name!r} is another tensor"
            if (kind := _kind(now[name])) != self._kinds[name]:
                dtype, device, trained = kind
                return f"{name!r} is {dtype} on {device}, {'trained' if trained else 'frozen (requires_grad=False)'}"
            place, numbers = self._frozen.get(name, (None, 0.0))
            if place is not None and (at := _place(now[name])) != place:
                if _sum(now[name]) != numbers:
                    return f"{name!r} has other numbers"
                self._frozen[name] = at, numbers  # written and written back, as around a look at averaged weights
        return ""


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device, bool]:
    return parameter.dtype, parameter.device, parameter.requires_grad


def _place(parameter: Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def _sum(parameter: Tensor) -> float:
    return 0.0 if parameter.is_meta else float(some_numbers(parameter.detach()).double().nan_to_num().sum())


class OwnBuffers:
    """The buffers of a model when it joined."""

    def __init__(self, model: nn.Module) -> None:
        self._were: dict[str, Tensor] | None = {name: some_numbers(it) for name, it in kept_buffers(model).items()}

    def tell(self, model: nn.Module, step: int) -> None:
        """Once, after the program's first passes: what these changed, nobody else gets."""
        were, self._were = self._were, None
        if were is not None and (changed := changed_buffers(model, were, some_numbers)):
            structlog.get_logger("peer").warning(
                "the program's passes change buffers of its model",
                step=step,
                buffers=", ".join(
                    f"{module}: {', '.join(names)}" for module, names in list(changed.items())[:BUFFERS_SHOWN]
                ),
                why="no vote carries buffers: each peer has its own, and an export of another peer those of no training. Use "
                "GroupNorm or LayerNorm, or save the model in this program",
            )


def tell_buffers(model: nn.Module, start: nn.Module | None) -> None:
    """Of a program's model that joins; `start`: the run's, if its code was called."""
    log, why = (
        structlog.get_logger("peer"),
        "no vote carries buffers: with others the same parameters are another model",
    )
    if start is not None and (other := other_buffer(model, start)):
        log.warning("a buffer of the program's model has other numbers than the run's", step="-", buffer=other, why=why)
    elif start is None and (kept := kept_buffers(model)):
        shown = ", ".join(list(kept)[:BUFFERS_SHOWN])
        log.info(
            "buffers of the program's model are not compared",
            step="-",
            buffers=shown,
            why=f"{why}; allow_code=True does",
        )


def other_parameter(mine: dict[str, nn.Parameter], theirs: dict[str, nn.Parameter]) -> str:
    """The first parameter that the model and the run's do not both have, in words. The layout tells those that are trained."""
    for name in (*mine, *theirs):
        ours, runs = (str(tuple(it[name].shape)) if name in it else "not there" for it in (mine, theirs))
        if ours != runs:
            return f"{name} is {ours}, and {runs} in the run's"
    return ""


class OwnLoss:
    """A program's loss. Raises OperatorError, with what it did, for one that fails, moves a parameter, or gives no mean to
    differentiate. The model's modes are afterwards as they were."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self._calls = loss, 0

    def __call__(self, model: nn.Module, samples: Tensor) -> Tensor:
        self._calls += 1
        before = Unmoved(model, thoroughly=self._calls <= THOROUGH_TIMES)
        modes = [(module, module.training) for module in model.modules()]
        trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            found = self._loss(model, samples)
        except Exception as error:
            if isinstance(error, RuntimeError) and no_room(error):
                raise
            raise OperatorError(
                f"the loss that the program gave to join failed: {type(error).__name__}: {error}"
            ) from error
        finally:
            for module, mode in modes:
                module.training = mode
            for parameter, wanted in trained:
                parameter.requires_grad_(wanted)
        if moved := before.moved():
            raise OperatorError(
                f"the loss that the program gave to join changed the parameter {moved!r}: this peer's state is no longer the "
                "swarm's. A loss computes a value alone; the swarm moves the parameters"
            )
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise OperatorError(
                f"the loss that the program gave to join returned {what}; expected the mean in nats a token over the samples, "
                "a scalar tensor"
            )
        if torch.is_grad_enabled() and not found.requires_grad:
            raise OperatorError("the loss that the program gave to join has no gradient: return it without detach()")
        return found.reshape(())
