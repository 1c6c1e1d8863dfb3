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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from node.optim.backends.interface import Backend
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


class Folding:
    """Of one step. `start`, then `last` before the last backward pass over the step's samples, then `finish`."""

    def __init__(
        self,
        layout: Layout,
        parameters: list[Tensor],
        backend: Backend,
        momentum: Tensor,
        second: FactoredMoment,
        rates: tuple[float, float],
        changes: Callable[[], None],
    ) -> None:
        """`rates`: of the momentum, and of the divided gradient (`step.accumulate`). `changes`: called before a change."""
        self._layout, self._parameters, self._backend = layout, parameters, backend
        self._momentum, self._second = momentum, second
        self._rates, self._changes = rates, changes
        pool = layout.chunks - layout.core_chunks
        self._pool = torch.zeros(pool, CHUNK_SIDE, CHUNK_SIDE, dtype=torch.float32, device=momentum.device)
        self._samples = 0
        self._before: dict[int, tuple[int, list[Tensor]]] = {}  # second moments of the tensors that joined
        self._earlier: frozenset[int] = frozenset()
        self._sums: dict[int, Tensor] = {}
        self._squares = 0.0
        self._finite = True
        self.norm: float | None = None
        """Of the whole gradient; None until `finish`."""

    def start(self) -> None:
        """The next backward pass is the first one. If one ran out of memory, they are made again: what joined stays."""
        self._samples, self._earlier = 0, frozenset(self._before)
        self._sums.clear()

    def last(self, samples: int) -> None:
        """The next backward pass completes the gradients of so many samples: they are divided by that number, and join."""
        self._samples = samples

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Take gradients where autograd makes them."""

        def ready(index: int, parameter: Tensor) -> None:
            if gradient_fault_of(parameter) is None:
                self._take(index, parameter)

        handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(partial(ready, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _take(self, index: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or not self._finite or index in self._earlier:
            return
        if self._samples:
            whole = self._summed(index, gradient)
            self._join(index, whole if self._samples == 1 else whole.div_(self._samples))
        elif index in self._sums:
            self._sums[index].add_(gradient)
        else:
            self._sums[index] = gradient.bfloat16()

    def _summed(self, index: int, gradient: Tensor) -> Tensor:
        """A gradient and what earlier passes made, in its place."""
        earlier = self._sums.pop(index, None)
        return gradient if earlier is None else gradient.add_(earlier)

    def _join(self, index: int, made: Tensor | None) -> None:
        """One tensor's gradient into the momentum, and what of it lies in the pool into the buffer."""
        (beta, scale), gradient = self._rates, dense(made)
        own = self._second.rows[index], self._second.columns[index]
        before = self._second.counts[index], [tensor.clone() for tensor in own]
        self._changes()
        if gradient is not None:
            norm = self._second.divide_one(index, gradient)
            self._squares += norm**2
            self._finite = math.isfinite(norm)
            if not self._finite:
                return
        again = index in self._before  # a parameter whose gradient comes in parts
        self._before.setdefault(index, before)
        one: list[Tensor | None] = [None] * len(self._parameters)
        one[index] = gradient
        place = self._layout.places[index]
        chunks = range(place.first_chunk, place.first_chunk + place.core_chunks)
        self._backend.fold(one, self._pool, self._momentum, 1.0 if again else beta, scale, chunks)
        if gradient is not None:
            for part, strip in self._layout.strips(index, gradient, self._pool.view(-1)):
                strip.add_(part)

    @torch.no_grad()
    def finish(self, samples: int) -> None:
        """Take what is left: sums over so many samples that had no last pass, parameters without a gradient, and the pool.

        Raises `NonFiniteGradient`; then the next step begins with the second moment as it was. Raises `ParameterChanged` if a
        gradient cannot be taken.
        """
        for index, parameter in enumerate(self._parameters):
            if fault := gradient_fault_of(parameter):
                raise ParameterChanged(f"parameter {self._layout.places[index].name} {fault}")
            if index not in self._before and self._finite:
                earlier = self._sums.pop(index, None)
                self._join(index, None if earlier is None else earlier.float().div_(samples))
        if not self._finite:
            self._set_back()
            raise NonFiniteGradient(f"gradient norm {math.sqrt(self._squares)}")
        nothing: list[Tensor | None] = [None] * len(self._parameters)
        pool = range(self._layout.core_chunks, self._layout.chunks)
        self._changes()
        self._backend.fold(nothing, self._pool, self._momentum, *self._rates, pool)
        self.norm = math.sqrt(self._squares)

    def _set_back(self) -> None:
        for index, (count, saved) in self._before.items():
            self._second.counts[index] = count
            for live, before in zip((self._second.rows[index], self._second.columns[index]), saved, strict=True):
                live.copy_(before)
