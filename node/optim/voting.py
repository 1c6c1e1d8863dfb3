"""The part of an optimizer that does not depend on its devices: its settings, its votes that are not judged, its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from node.optim.laid_out import LaidOut
from node.optim.layout import Layout
from node.optim.nesterov import Nesterov
from node.optim.second_moment import Moment
from node.optim.votes.payload import Format
from node.optim.votes.places import Draw

if TYPE_CHECKING:
    from node.optim.demo import DeMoConfig


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
