"""Gradients of a peer whose weights, momentum and optimizer are in the main memory (`memory = "host"`): `HostMaker`.

The device holds bf16 weights, a gradient or two, and activations. The weights are read from the replica's fp32 parameters
before each gradient, whatever has changed those, so they are never old. The backward pass gives each gradient to the main
memory as fp32, where it joins the momentum, or stays in the parameter's `.grad`. On a CUDA device a thread does that behind the
backward pass. With `memory = "stream"` the device has the weights of one block or two at a time (`block_stream.py`), read from
the same parameters. Refuses a model that does not compute with bf16 weights (`ready`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from node.data.samples import Samples
from node.model.device import autocast as autocast_on
from node.model.device import short_copy
from node.model.gradients import GradientTaker, GradResult, Loss, no_room
from node.model.gradients import loss as next_token_loss
from node.model.size import Effort, blocks_with_weights, no_stream
from node.optim.folding import hooked
from node.optim.laid_out import ParameterChanged, gradient_fault_of
from node.optim.layout import named_tensors
from node.training.block_stream import BlockStream, HostTransfer, Read
from node.training.maker import BuiltIn
from protos.assignment import Range
from protos.errors import OperatorError

MOVING_MAX: Final = 1
"""Gradients that wait on the device for the one before, while the backward pass makes the next."""
SMALL: Final = 0.02
"""A weight with which a model computes finite numbers."""


class Mover:
    """Moves the gradients of one step into the main memory: to a taker, or else into `.grad` of `parameters`, as a sum."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        copies: Sequence[tuple[str, Tensor]],
        transfer: HostTransfer,
        room: Callable[[], Tensor],
        taker: GradientTaker | None,
        pool: ThreadPoolExecutor | None,
    ) -> None:
        """`copies`: those of `parameters`, with names. `room`: fp32 numbers for the largest gradient. `pool`: one thread;
        None: the backward pass waits."""
        self._parameters, self._copies, self._transfer, self._room = parameters, copies, transfer, room
        self._taker, self._pool = taker, pool
        self._moving: deque[Future[None]] = deque()
        self._mean = False  # one pass, over the mean

    def start(self) -> None:
        self._wait(0)
        for parameter in self._parameters:
            parameter.grad = None
        self._mean = False
        if self._taker is not None:
            self._taker.start()

    def last(self, samples: int) -> None:
        self._wait(0)
        self._mean = samples == 1
        if self._taker is not None:
            self._taker.last(samples)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """See `GradientTaker`. No gradient is on its way afterwards."""
        try:
            with hooked([own for _, own in self._copies], self.take):
                yield
            self._wait(0)
        finally:
            for moving in self._moving:
                moving.cancel()
            while self._moving:
                if not (moving := self._moving.popleft()).cancelled():
                    moving.exception()

    def finish(self, samples: int) -> None:
        """Make the mean over so many samples of what is in `.grad`."""
        sums = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if sums and not self._mean:
            torch._foreach_div_(sums, float(samples))

    def _wait(self, most: int) -> None:
        """Until at most so many gradients are on their way. Raises what one has failed with."""
        while len(self._moving) > most:
            self._moving.popleft().result()

    def take(self, index: int, parameter: Tensor) -> None:
        """See `GradientTaker`: of a copy. Raises `ParameterChanged` for a gradient that cannot be moved."""
        if fault := gradient_fault_of(parameter):
            raise ParameterChanged(f"parameter {self._copies[index][0]} {fault}")
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "autograd has just put it there"
        made = self._transfer.made()
        if self._pool is None:
            self._move(index, gradient, made)
            return
        self._wait(MOVING_MAX)
        self._moving.append(self._pool.submit(self._move, index, gradient, made))

    @torch.no_grad()
    def _move(self, index: int, gradient: Tensor, made: Any) -> None:
        parameter = self._parameters[index]
        if self._taker is None and parameter.grad is None:
            parameter.grad = self._transfer.down(gradient, torch.empty_like(parameter), made)
            return
        found = self._transfer.down(gradient, self._room()[: gradient.numel()].view(gradient.shape), made)
        if self._taker is None:
            assert parameter.grad is not None, "the case before"
            parameter.grad.add_(found)
        else:
            parameter.grad = found
            self._taker.take(index, parameter)


Kept = tuple[torch.dtype, torch.device, tuple[int, ...], bool]


class CopiedParameter(NamedTuple):
    """A parameter of the replica, and that of the copy, which has to stay what it was."""

    name: str
    whole: Tensor
    own: Tensor
    kept: Kept


class HostMaker(BuiltIn):
    """As `BuiltIn`, with a bf16 copy of `model` on `device`, made by `ready` or for the first gradient."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        effort: Effort | None = None,
        loss: Loss = next_token_loss,
        *,
        behind: bool | None = None,
        stream: bool = False,
    ) -> None:
        """`model`: the replica's, in the main memory. `effort`: how the copy computes. `behind`: whether a thread takes the
        gradients; by default with CUDA alone, since on a CPU it would take the cores of the backward pass. `stream`: weights
        of blocks are on the device while a block computes. Raises OperatorError for a model whose blocks cannot do so."""
        super().__init__(model, loss)
        if stream and (fault := no_stream(model)):
            raise OperatorError(f"memory = stream: {fault}; set memory to host or auto")
        self._streams = stream
        self._blocks: BlockStream | None = None
        self._whole, self._place, self._effort = model, device, effort or Effort()
        self._parameters = [parameter for _, parameter in named_tensors(model)]
        self._copies: list[tuple[str, Tensor]] = []
        self._made: list[CopiedParameter] = []
        self._transfer: HostTransfer | None = None
        self._room: Tensor | None = None
        self._behind = device.type == "cuda" if behind is None else behind
        self._pool: ThreadPoolExecutor | None = None

    @property
    def device(self) -> torch.device:
        return self._place

    def ready(self, context: int) -> None:
        """See `BuiltIn`. The copy has to compute a loss."""
        super().ready(context)
        try:
            self._make_copy()
            with torch.no_grad(), autocast_on(self._place, "bf16"), self._small_weights():
                found = self._loss(self._model, torch.zeros(1, context + 1, dtype=torch.int64, device=self._place))
            if self._blocks is not None and found.isnan():
                raise ValueError("it reads weights of a block outside of the block's forward pass")
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, RuntimeError) and no_room(error):
                raise OperatorError(
                    f"{self._place} has no room for bf16 weights and one sample of this model; close other programs that use "
                    "its memory, or join with another device (--device)"
                ) from error
            mode, weights, other = "host", "bf16 weights", "small"
            if self._streams:
                mode, weights, other = "stream", "bf16 weights of one block at a time", "host"
            raise OperatorError(
                f"memory = {mode}: the run's model does not compute with {weights} ({str(error).partition(chr(10))[0]}). "
                f"To mend it, set memory to {other}"
            ) from error

    @contextmanager
    def _small_weights(self) -> Iterator[None]:
        """A model whose blocks come and go has numbers of which no loss is NaN: the replica may be blank. For one forward
        pass; the next gradient reads the weights anew."""
        blocks = self._blocks
        if blocks is None:
            yield
            return
        for pair in self._made:
            if pair.name not in self._lent:
                pair.own.fill_(SMALL)
        read, blocks.read = blocks.read, lambda name: torch.full_like(read(name), SMALL)
        try:
            yield
        finally:
            blocks.read = read

    def rest(self) -> None:
        """See `GradientMaker`. The copy's weights go, too."""
        self._drop_blocks()
        for pair in self._made:
            if pair.name not in self._lent:
                pair.own.data = pair.own.new_empty(0)
        super().rest()

    @property
    def _lent(self) -> frozenset[str]:
        """Names of the parameters that come and go."""
        return frozenset() if self._blocks is None else self._blocks.names

    def _drop_blocks(self) -> None:
        if self._blocks is not None:
            self._blocks.drop()

    @property
    def evaluates_short(self) -> bool:
        """Whether held-out losses are of bf16 weights: fp32 ones would take the main memory's CPU hours."""
        return self._place.type != "cpu"

    @torch.no_grad()
    def to_evaluate(self, read: Read) -> nn.Module:
        """A further copy in bf16, of a state that is not this peer's own. `read` may be asked as long as the copy computes."""
        model, blocks = self._short(read)
        for name, own in model.named_parameters():
            if blocks is None or name not in blocks.names:
                own.copy_(read(name))
        return model.eval().requires_grad_(requires_grad=False)

    def _short(self, read: Read) -> tuple[nn.Module, BlockStream | None]:
        """A copy on the device. `read`: the weights of its blocks, where these come and go."""
        if not self._streams:
            return short_copy(self._whole, self._place), None
        lent = {id(own) for _, block in blocks_with_weights(self._whole) for own in block.parameters()}
        model = short_copy(self._whole, self._place, lent)
        return model, BlockStream(model, self._place, read, behind=self._behind)

    def mean_gradient(
        self,
        samples: Samples,
        parts: tuple[Range, ...],
        micro_batch: int,
        autocast: Any,
        should_stop: Callable[[], bool],
        taker: GradientTaker | None = None,
    ) -> GradResult:
        transfer = self._refresh()
        mover = Mover(self._parameters, self._copies, transfer, self._numbers, taker, self._pool)
        result = super().mean_gradient(samples, parts, micro_batch, autocast, should_stop, mover)
        mover.finish(result.samples)
        return result

    @torch.no_grad()
    def _refresh(self) -> HostTransfer:
        """The weights on the device are those of the replica, rounded. Raises `ParameterChanged` if the model has changed its
        copy's."""
        transfer = self._make_copy()
        self._drop_blocks()
        made = transfer.made()  # the last pass may read the weights still
        for name, whole, own, was in self._made:
            if not own.numel():  # since `rest`
                own.data = own.new_empty(whole.shape)
            if (now := _kind(own)) != was:
                raise ParameterChanged(f"parameter {name}: its copy was {_words(was)}, and is {_words(now)} now")
            if name not in self._lent:
                transfer.up(whole, own, made)
        return transfer

    def _make_copy(self) -> HostTransfer:
        if self._transfer is not None:
            return self._transfer
        model, self._blocks = self._short(dict(self._whole.named_parameters()).__getitem__)
        self._model = model if self._streams else self._effort.prepare(model)
        self._copies = named_tensors(self._model)
        pairs = zip(self._whole.named_parameters(), self._model.parameters(), strict=True)
        self._made = [CopiedParameter(name, whole, own, _kind(own)) for (name, whole), own in pairs]
        self._transfer = HostTransfer(self._place, max(pair.whole.numel() for pair in self._made))
        if self._behind:
            self._pool = ThreadPoolExecutor(1, "gradients")
        return self._transfer

    def _numbers(self) -> Tensor:
        """Room for one gradient. It stays: see `FoldingRoom`."""
        if self._room is None:
            self._room = torch.empty(max(parameter.numel() for parameter in self._parameters))
        return self._room


def _kind(own: Tensor) -> Kept:
    return own.dtype, own.device, tuple(own.shape), own.requires_grad


def _words(kept: Kept) -> str:
    dtype, device, shape, trained = kept
    return f"{str(dtype).removeprefix('torch.')} {shape} on {device}, {'trained' if trained else 'frozen'}"
