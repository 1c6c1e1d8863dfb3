"""A backend of the step: the calls that `DeMo` makes. All backends give the same parameters, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from node.optim.second_moment import SecondMoment
from node.optim.step import Decay
from node.optim.votes.places import Draw


class Backend(Protocol):
    """The heavy half of a step. Gradients and parameters are contiguous, on one device, in the layout's order."""

    name: str

    def norm(self, gradients: Sequence[Tensor | None]) -> float:
        """The norm of all gradients (fp32; None counts as zeros). The norm is infinite or NaN if one of them is."""
        ...

    def fold(
        self,
        gradients: Sequence[Tensor | None],
        pool: Tensor,
        momentum: Tensor,
        beta: float,
        step: float,
        chunks: range,
    ) -> None:
        """`step.accumulate` the coefficients of some chunks in `momentum` [chunks, 64, 64]; `vote` without gradients is next.

        `gradients` are read for cores alone. What lies in the pool comes from `pool`, fp32 [pool chunks, 64, 64].
        """
        ...

    def vote(
        self,
        gradients: Sequence[Tensor | None] | None,
        momentum: Tensor,
        beta: float,
        step: float,
        size: int,
        second: SecondMoment | None = None,
    ) -> Tensor:
        """`step.accumulate` the gradients' coefficients in `momentum` [chunks, 64, 64]. Returns the payload, uint8.

        `momentum` is fp32 or bf16, and votes are those of what it keeps. Without `gradients` it has them already (`fold`).
        `step` is what `accumulate` calls lr. With `second`, gradients are divided first, in place or not. Raises
        `NotANumber` once all momentum has been written.
        """
        ...

    def spend(self, momentum: Tensor, packed: Tensor, size: int) -> None:
        """Take a payload's votes out of the momentum (`step.spend`, `step.spend_ballot`)."""
        ...

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: Decay
    ) -> None:
        """Move the parameters by the direction of `ballots`, `(size, payload)` each (`step.apply_update`).

        The same bits from every backend. Raises `VotesError` before anything is changed.
        """
        ...


@runtime_checkable
class Stepping(Backend, Protocol):
    """A backend of votes whose places may follow from the step."""

    def at(self, draw: Draw) -> Backend:
        """The same backend, with the same buffers, for the votes of one step. Asked for before each call."""
        ...


@runtime_checkable
class Taking(Backend, Protocol):
    """A backend that takes votes out of the momentum in the pass that makes them: to spend them later costs another pass."""

    def take(
        self,
        gradients: Sequence[Tensor | None] | None,
        momentum: Tensor,
        beta: float,
        step: float,
        size: int,
        second: SecondMoment | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `vote` and then `spend`. Returns also the coefficients that were spent, fp32, valid until the next call.

        If it raises `NotANumber`, they are still in the momentum.
        """
        ...

    def put_back(self, momentum: Tensor, packed: Tensor, size: int, taken: Tensor) -> None:
        """The inverse of spending what `take` returned."""
        ...
