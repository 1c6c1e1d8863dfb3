"""The part of an optimizer that does not depend on its devices: its settings, its votes that are not judged, its parameters.

Also its private state as a dict, and the checks before such a dict is taken over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from node.optim.laid_out import LaidOut, zeros_like
from node.optim.layout import Layout
from node.optim.second_moment import Moment, local_part
from node.optim.votes.payload import Format
from node.optim.votes.places import Draw

if TYPE_CHECKING:
    from node.optim.demo import DeMoConfig


class Nesterov:
    """A peer's own Nesterov momentum: what its gradients pass before they join the momentum that the votes are taken from.

        n <- mu n + g
        g <- g + mu n

    n of every parameter is fp32 in its shape (of sharded ones this rank's rows), and private to the peer. DiLoCo's outer
    optimizer (arXiv 2311.08105) is this rule on the mean of all peers. The rule is linear: the mean of the peers' results is
    the result of their mean. So each peer can apply it before the votes, and only parameters are replicated. Votes leave the
    other momentum, and n keeps what it has. It costs 4 bytes a parameter, and nothing on the wire. It refuses nothing: the
    caller has checked that gradients are finite. ADR 33.
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.momenta = [zeros_like(local_part(parameter)) for parameter in parameters]

    @torch.no_grad()
    def advance(self, scale: float = 1.0) -> None:
        """Replace `.grad` of every parameter, in place: `scale` times it is g. None counts as zeros, and becomes a tensor."""
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local_part(parameter.grad)
            momentum.mul_(self.decay).add_(own, alpha=scale)
            own.mul_(scale).add_(momentum, alpha=self.decay)

    def state_dict(self) -> dict[str, Any]:
        """Private to the peer."""
        return {"momenta": self.momenta}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, by copy. Raises `ValueError` if it belongs to other parameters."""
        momenta = state["momenta"]
        if [tuple(momentum.shape) for momentum in momenta] != [tuple(momentum.shape) for momentum in self.momenta]:
            raise ValueError("the saved Nesterov momentum belongs to other parameters")
        for mine, theirs in zip(self.momenta, momenta, strict=True):
            mine.copy_(theirs)


class Voting:
    """What `DeMo` and `ShardedDeMo` share."""

    config: DeMoConfig
    _laid_out: LaidOut
    _pending: tuple[int, Any] | None
    _second: Moment | None

    @property
    def form(self) -> Format:
        """The format of payloads."""
        return self.config.form

    def _draw(self, step: int, authors: Sequence[bytes] | None = None, payloads: int = 1) -> Draw:
        """What the places of a step's votes follow from: of this peer's own votes, or of so many payloads of `authors`.

        Raises `ValueError` if places follow from authors, and not each payload has one.
        """
        whose = (self.config.author,) if authors is None else tuple(authors)
        self.form.check_authors(payloads, whose)
        return Draw(self.config.seed, step, whose if self.form.independent else ())

    @property
    def size(self) -> int:
        """This peer's group size or k, for its next votes."""
        return self.config.size

    @size.setter
    def size(self, size: int) -> None:
        self.config = self.config.with_size(size)

    @property
    def pending(self) -> bool:
        """Whether votes are out that `settle` has not been told about."""
        return self._pending is not None

    @property
    def second_counts(self) -> list[int] | None:
        """Gradients that the second moment has seen of each parameter; None without one."""
        return None if self._second is None else self._second.counts

    def check_parameters(self) -> None:
        """Raises `ValueError` with a parameter's name if it is no longer what was laid out, or its gradient cannot be taken."""
        self._laid_out.check_parameters()
        self._laid_out.check_gradients()


@dataclass(frozen=True)
class ParameterState:
    """The live tensors of one parameter by name, as `torch.optim.Optimizer.state` has them."""

    private: dict[str, Tensor] = field(default_factory=dict)
    """A peer's own."""
    replicated: dict[str, Tensor] = field(default_factory=dict)
    """Equal on all peers."""


def by_parameter(
    layout: Layout,
    momentum: Tensor,
    second: Moment | None,
    nesterov: Nesterov | None,
    base: dict[str, Tensor],
) -> list[ParameterState]:
    """The state of each parameter, as views. `momentum` and the buffers of `base` are fp32 [chunks, 64, 64].

    The chunks of the pool hold parts of many parameters, whose transform mixes them: they stand with the first parameter.
    """
    chunked = {name: tensor for name, tensor in base.items() if tensor.ndim > 1}
    states = [ParameterState(own) for own in own_tensors(len(layout.places), second, nesterov)]
    for own, place in zip(states, layout.places, strict=True):
        core = slice(place.first_chunk, place.first_chunk + place.core_chunks)
        if place.core_chunks:
            own.private["momentum"] = momentum[core]
            own.replicated.update({f"base_{name}": tensor[core] for name, tensor in chunked.items()})
    pool = slice(layout.core_chunks, layout.chunks)
    if layout.pool_elements:
        states[0].private["momentum_pool"] = momentum[pool]
        states[0].replicated.update({f"base_{name}_pool": tensor[pool] for name, tensor in chunked.items()})
    states[0].replicated.update({f"base_{name}": tensor for name, tensor in base.items() if tensor.ndim == 1})
    return states


def own_tensors(parameters: int, second: Moment | None, nesterov: Nesterov | None) -> list[dict[str, Tensor]]:
    """The live tensors of a second moment and of a Nesterov momentum, by parameter and name."""
    found: list[dict[str, Tensor]] = [{}] * parameters if second is None else second.by_tensor()
    return [own | ({} if nesterov is None else {"nesterov": nesterov.momenta[i]}) for i, own in enumerate(found)]


def private_state(
    layout: Layout,
    method: str,
    momentum: Tensor,
    pending: tuple[int, Tensor] | None,
    second: Moment | None,
    *,
    step: int = 0,
    pending_step: int = 0,
    nesterov: Nesterov | None = None,
) -> dict[str, Any]:
    """The state under the keys of every optimizer here; `pending` is `(size, payload as uint8)`.

    `method` says what the tensors mean: a state of another method does not fit, whatever its shapes. `step` is that of
    the last entry, and `pending_step` that of the pending votes.
    """
    size, packed = pending or (None, None)
    return {
        "layout": layout.digest().hex(),
        "method": method,
        "momentum": momentum,
        "pending": packed,
        "pending_size": size,
        "second": None if second is None else second.state_dict(),
        "nesterov": None if nesterov is None else nesterov.state_dict(),
        "step": step,
        "pending_step": pending_step,
    }


def check_state(
    state: Mapping[str, Any],
    layout: Layout,
    method: str,
    shape: Sequence[int],
    *,
    second: bool,
    nesterov: bool = False,
) -> None:
    """Raises `ValueError` unless `state` is of this layout and method, and its momentum has this shape.

    The state also has to have a second moment and a Nesterov momentum if this optimizer has them (`second`, `nesterov`), and
    otherwise none. A state of an earlier version has no Nesterov momentum.
    """
    if state["layout"] != layout.digest().hex():
        raise ValueError(
            "the saved momentum belongs to another model (the layouts differ): load a state that this model saved"
        )
    if state["method"] != method:
        raise ValueError(
            f"the saved state is of method {state['method']!r}, not {method!r}: load it with the settings that saved it"
        )
    if state["momentum"].shape != tuple(shape):
        raise ValueError(
            f"the saved momentum has shape {tuple(state['momentum'].shape)}, not {tuple(shape)}: the saved state is damaged"
        )
    if second != (state["second"] is not None):
        saved, here = ("no", "a") if second else ("a", "no")
        raise ValueError(
            f"the saved state has {saved} second moment, and this optimizer has {here} second moment: set beta2 as it was"
        )
    if nesterov != (state.get("nesterov") is not None):
        saved, here = ("no", "a") if nesterov else ("a", "no")
        raise ValueError(
            f"the saved state has {saved} Nesterov momentum, and this optimizer has {here} Nesterov momentum: set nesterov as "
            "it was"
        )
