"""Gradients join the momentum as the backward pass makes them, one tensor at a time, and are freed at once.

So no step has all gradients in memory. Vectors, and the strips beside whole chunks, share chunks of the pool: they wait in a
buffer of its size. It serves a factored second moment, which divides each tensor by itself. It refuses what needs all
gradients at once: a clipped norm, and a Nesterov momentum (`check`).

Where several backward passes add a gradient up, its sum so far waits in bf16: half of what autograd would keep.

A gradient that is not finite does not join, and neither does any after it. Those before it have: the momentum keeps them for
later votes, and the second moment is set back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from node.optim.backends.choose import Backend
from node.optim.laid_out import ParameterChanged, gradient_fault_of
from node.optim.layout import CHUNK_SIDE, Layout
from node.optim.second_moment import FactoredMoment
from node.optim.step import NonFiniteGradient, dense

if TYPE_CHECKING:
    from node.optim.demo import DeMoConfig


def check(config: DeMoConfig) -> None:
    """Raises `ValueError` if a step with these settings needs all gradients at once."""
    if not config.beta2 or config.second_moment != "factored":
        raise ValueError(
            "gradients can join the momentum one by one only with a factored second moment: set beta2 and "
            "second_moment = 'factored', or keep whole gradients"
        )


@contextmanager
def hooked(parameters: Sequence[Tensor], take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `take` with a parameter and its index as soon as autograd has put a gradient into its `.grad`."""
    handles: list[Any] = [
        parameter.register_post_accumulate_grad_hook(partial(take, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class FoldingRoom:
    """Memory that stays from step to step. Small pieces between gradients would leave holes as large as gradients in the C
    library's heap: 1 to 2 bytes a parameter."""

    def __init__(self, layout: Layout, parameters: Sequence[Tensor], second: FactoredMoment) -> None:
        self._parameters, self._second = parameters, second
        chunks, device = layout.chunks - layout.core_chunks, parameters[0].device
        self.pool = torch.zeros(chunks, CHUNK_SIDE, CHUNK_SIDE, dtype=torch.float32, device=device)
        """Gradients of what lies in the pool."""
        self._counts = list(second.counts)
        self._saved = [(torch.empty_like(own), torch.empty_like(its)) for own, its in self._live()]
        self._sums: list[Tensor] = []

    def _live(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._second.rows, self._second.columns, strict=True))

    def save(self, index: int) -> None:
        """Remember a parameter's second moment."""
        self._counts[index] = self._second.counts[index]
        self._saved[index][0].copy_(self._second.rows[index])
        self._saved[index][1].copy_(self._second.columns[index])

    def set_back(self, index: int) -> None:
        """Let a parameter's second moment be what it was at `save`."""
        self._second.counts[index] = self._counts[index]
        self._second.rows[index].copy_(self._saved[index][0])
        self._second.columns[index].copy_(self._saved[index][1])

    def sum_of(self, index: int) -> Tensor:
        """The sum of a parameter's gradients over several backward passes, bf16, in its shape; with any content at first."""
        if not self._sums:
            sizes = [parameter.numel() for parameter in self._parameters]
            flat = torch.empty(sum(sizes), dtype=torch.bfloat16, device=self._parameters[0].device)
            parts = zip(torch.split(flat, sizes), self._parameters, strict=True)
            self._sums = [part.view(parameter.shape) for part, parameter in parts]
        return self._sums[index]


class Folding:
    """Of one step. `start`, then `last` before the last backward pass over the step's samples, then `finish`."""

    def __init__(
        self,
        layout: Layout,
        parameters: list[Tensor],
        backend: Backend,
        momentum: Tensor,
        second: FactoredMoment,
        room: FoldingRoom,
        rates: tuple[float, float],
        changes: Callable[[], None],
    ) -> None:
        """`rates`: of the momentum, and of the divided gradient (`step.accumulate`). `changes`: called before a change."""
        self._layout, self._parameters, self._backend = layout, parameters, backend
        self._momentum, self._second, self._room = momentum, second, room
        self._rates, self._changes = rates, changes
        self._room.pool.zero_()
        self._samples = 0
        self._joined: set[int] = set()
        self._earlier: frozenset[int] = frozenset()
        self._summed: set[int] = set()
        self._squares = 0.0
        self._finite = True
        self.norm: float | None = None
        """Of the whole gradient; None until `finish`."""

    def start(self) -> None:
        """The next backward pass is the first one. If one ran out of memory, they are made again: what joined stays."""
        self._samples, self._earlier = 0, frozenset(self._joined)
        self._summed.clear()

    def last(self, samples: int) -> None:
        """The next backward pass completes the gradients of so many samples: they are divided by that number, and join."""
        self._samples = samples

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Take gradients where autograd makes them."""

        with hooked(self._parameters, self.take):
            yield

    @torch.no_grad()
    def take(self, index: int, parameter: Tensor) -> None:
        """Take the gradient in `.grad` of the parameter with this index in the layout, and free it. `finish` names one that
        cannot be taken."""
        if gradient_fault_of(parameter) is not None:
            return
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or not self._finite or index in self._earlier:
            return
        earlier = self._room.sum_of(index) if index in self._summed else None
        if not self._samples:
            self._summed.add(index)
            self._room.sum_of(index).copy_(gradient) if earlier is None else earlier.add_(gradient)
            return
        self._summed.discard(index)
        if earlier is not None:
            gradient.add_(earlier)
        self._join(index, gradient if self._samples == 1 else gradient.div_(self._samples))

    def _join(self, index: int, made: Tensor | None) -> None:
        """One tensor's gradient into the momentum, and what of it lies in the pool into the buffer."""
        (beta, scale), gradient = self._rates, dense(made)
        again = index in self._joined  # a parameter whose gradient comes in parts
        if not again:
            self._room.save(index)
        self._changes()
        if gradient is not None:
            norm = self._second.divide_one(index, gradient)
            self._squares += norm**2
            self._finite = math.isfinite(norm)
            if not self._finite:
                return
        self._joined.add(index)
        one: list[Tensor | None] = [None] * len(self._parameters)
        one[index] = gradient
        place = self._layout.places[index]
        chunks = range(place.first_chunk, place.first_chunk + place.core_chunks)
        self._backend.fold(one, self._room.pool, self._momentum, 1.0 if again else beta, scale, chunks)
        if gradient is not None:
            for part, strip in self._layout.strips(index, gradient, self._room.pool.view(-1)):
                strip.add_(part)

    @torch.no_grad()
    def finish(self, samples: int) -> None:
        """Take what is left: sums over so many samples where the last pass made no gradient, zeros where none did, the pool.

        Raises `NonFiniteGradient`; then the next step begins with the second moment as it was. Raises `ParameterChanged` if a
        gradient cannot be taken.
        """
        for index, parameter in enumerate(self._parameters):
            if fault := gradient_fault_of(parameter):
                raise ParameterChanged(f"parameter {self._layout.places[index].name} {fault}")
            if index not in self._joined and self._finite:
                self._join(index, self._room.sum_of(index).float().div_(samples) if index in self._summed else None)
        if not self._finite:
            for index in self._joined:
                self._room.set_back(index)
            raise NonFiniteGradient(f"gradient norm {math.sqrt(self._squares)}")
        nothing: list[Tensor | None] = [None] * len(self._parameters)
        pool = range(self._layout.core_chunks, self._layout.chunks)
        self._changes()
        self._backend.fold(nothing, self._room.pool, self._momentum, *self._rates, pool)
        self.norm = math.sqrt(self._squares)
