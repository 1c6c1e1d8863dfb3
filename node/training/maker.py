"""A peer's gradients: the training asks for them, turns what is in `.grad` into votes, and cares for nothing else.

`BuiltIn` is the loop of the command `join`: forward and backward passes over the run's samples. `Handover` gives each share to
a program's own loop, in another thread. The model belongs to one of the two threads at a time: the training hands a `Share` out
and waits; the program computes on the model, and gives the share back, with or without a gradient. So no entry of the log
changes a parameter while the program's backward pass needs it. Knows no network.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor, nn

from node.data.samples import Samples
from node.model.gradients import GradientTaker, GradResult, Loss, accumulate_gradients, free_cache, no_room, to_device
from node.model.gradients import loss as next_token_loss
from node.model.spec import check_built_in
from node.optim.step import NonFiniteGradient
from node.training.own_loss import THOROUGH_TIMES, JoinedParameters, OwnBuffers, OwnLoss, Unmoved
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


class ParametersMovedError(OperatorError):
    """The program moved the model's parameters, which the swarm alone does. The momentum is as it was."""


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


NOT_FINITE = "the gradient contains NaN or infinity (the learning rate may be too high)"
LOOK_SECONDS = 0.05


@dataclass(eq=False)
class Share:
    """What one step asks of this peer: a gradient over these samples, at the parameters that the model has now."""

    number: int
    """Of the clock step."""
    learning_rate: float
    """With which the swarm applies the votes. A program needs it only to show it."""
    indices: tuple[range, ...]
    """Of the samples, in the run's order; they grow without end, epoch after epoch."""
    _samples: Samples = field(repr=False)
    _micro_batch: int = field(repr=False)
    _device: torch.device = field(repr=False)
    _decided: Callable[[], bool] = field(repr=False)

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return sum(map(len, self.indices))

    @property
    def late(self) -> bool:
        """Whether the step is decided without this peer, or the peer is to stop or pause: more work on it is in vain."""
        return self._decided()

    def batches(self, micro_batch: int | None = None) -> Iterator[Tensor]:
        """The run's own samples of this share: int64 [n, context + 1] on the model's device, n at most `micro_batch`."""
        size = self._micro_batch if micro_batch is None else _whole("micro_batch", micro_batch)
        if size < 1:
            raise OperatorError(f"micro_batch={size}: expected how many samples to read at a time, 1 or more")
        parts = tuple(Range(part.start, part.stop) for part in self.indices)
        for batch in self._samples.micro_batches(parts, size):
            yield to_device(batch, self._device)


def _whole(name: str, value: Any) -> int:
    """A count, also one of NumPy or torch. Raises OperatorError."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise OperatorError(f"{name}={value!r}: expected a whole number") from error


class Unread(Samples):
    """Of a peer whose program has data of its own: the indices alone."""

    def __init__(self) -> None:
        self.reading_seconds = 0.0

    def micro_batches(self, ranges: Any, micro_batch: int) -> Iterator[Any]:
        """Raises OperatorError."""
        raise OperatorError(
            "this peer has joined with own_data=True, so the run's text is not read: take your own samples"
        )


class Handover:
    """Both ends: the training calls `begin` and `mean_gradient`, the program's thread the rest. `model`: the program's.

    `loss`: its loss, with which the training checks others' votes and evaluates states. None: it does neither.
    """

    def __init__(self, model: nn.Module, loss: Loss | None = None) -> None:
        self.model = model
        self.loss = None if loss is None else OwnLoss(loss)
        self.checker = None if self.loss is None else BuiltIn(model, self.loss)
        self.device: torch.device = next(model.parameters()).device
        self._joined, self._buffers = JoinedParameters(model), OwnBuffers(model)
        self._step, self._lr = 0, 0.0
        self._decided: Callable[[], bool] = lambda: False
        self._changed, self._turn = threading.Condition(), threading.Lock()
        self._offered: Share | None = None  # the training waits for it
        self._taken: Share | None = None  # the program works on it
        self._result: GradResult | Exception | None = None
        self._before: Unmoved | None = None
        self._rounds = 0
        self._ahead = False  # the share that `contribute` waited for is taken, and its round has not begun
        self._ended = False

    # ---- the training's end ------------------------------------------------------------------------------------------

    def rest(self) -> None:
        self.model.zero_grad(set_to_none=True)
        free_cache(self.device)

    def begin(self, step: int, lr: float, decided: Callable[[], bool]) -> None:
        """The next shares are of this clock step."""
        self._step, self._lr, self._decided = step, lr, decided

    def mean_gradient(
        self,
        samples: Samples,
        parts: tuple[Range, ...],
        micro_batch: int,
        autocast: Any,
        should_stop: Callable[[], bool],
    ) -> GradResult:
        """Hand the share out, and wait until it comes back. A share that nobody has taken is withdrawn when it is late."""
        indices = tuple(range(part.start, part.stop) for part in parts)
        self.model.zero_grad(set_to_none=True)
        result = self._hand_out(Share(self._step, self._lr, indices, samples, micro_batch, self.device, self._decided))
        should_stop()  # rests for the time that the program took, as the owner wants it
        if isinstance(result, Exception):
            raise result
        return result

    def _hand_out(self, share: Share) -> GradResult | Exception:
        with self._changed:
            self._offered, self._result = share, None
            self._changed.notify_all()
            while True:
                self._changed.wait(LOOK_SECONDS)
                if (result := self._given()) is not None:
                    return result
                if self._taken is None and self._decided():
                    self._offered = None
                    return GradResult(math.nan, 0, 0)

    def _given(self) -> GradResult | Exception | None:
        return (
            self._result
        )  # a call, because the other thread writes it: a type checker takes it for None where it was set

    def end(self) -> None:
        """The training is over: no more shares come."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # ---- the program's end -------------------------------------------------------------------------------------------

    @property
    def has_share(self) -> bool:
        """Whether the model is the program's: not after Ctrl-C, or another error, while it waited for a share."""
        return self._taken is not None

    def take(self) -> Share | None:
        """The next share, once there is one; None: the training is over. A share that the program still has goes back."""
        with self._alone():
            ahead, self._ahead = self._ahead, False
            if not ahead:
                self.give_back(NoVotes("the program's loop went on without a gradient for this step"))
                self._receive()
            elif self._taken is not None and self._taken.late:
                self.give_back(GradResult(math.nan, 0, 0))  # as one that nobody has taken
                self._receive()
            return self._taken

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise OperatorError(
                "another thread of this program, or what a signal interrupted, waits for this peer's next share: contribute, "
                "step and the loop over shares belong to one thread"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _receive(self) -> None:
        """Wait until the training hands the model over with the next share, or has ended."""
        with self._changed:
            while self._offered is None and not self._ended:
                self._changed.wait(LOOK_SECONDS)
            if self._offered is not None:  # until the look is done nothing is taken: Ctrl-C may end it
                self._before = Unmoved(self.model, thoroughly=self._rounds < THOROUGH_TIMES)
                self._rounds += 1
            self._taken, self._offered = self._offered, None

    def contribute(self, loss: Tensor | float, samples: int | None, tokens: int) -> None:
        """The gradient in `.grad` is this peer's. Raises OperatorError for figures that cannot be.

        Returns with the model: the program may read it, or clear gradients that the training would still need.
        """
        share = self._taken
        if share is None and self._ended:
            raise OperatorError(
                "this peer has ended: no step is left to contribute to. To go on, join with the same home"
            )
        if share is None or self._ahead:
            raise OperatorError("there is no share to contribute to: call contribute once in each round of the loop")
        samples = share.samples if samples is None else _whole("samples", samples)
        tokens = _whole("tokens", tokens)
        if not 1 <= samples <= share.samples:
            raise OperatorError(
                f"samples={samples}: this share has {share.samples}; give how many the gradient is over"
            )
        if not 0 <= tokens < 1 << 64:
            raise OperatorError(f"tokens={tokens}: expected how many tokens the gradient is over")
        if all(p.grad is None for p in self.model.parameters()):
            raise OperatorError("no parameter of the model has a gradient: call loss.backward() before contribute")
        try:
            mean = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise OperatorError(f"loss is {what}: expected a number, the mean in nats a token") from error
        result = GradResult(mean, tokens, samples)
        self._buffers.tell(self.model, share.number)
        with self._alone():
            self.give_back(result if math.isfinite(mean) else NonFiniteGradient(f"the loss is {mean}"))
            self._receive()
            self._ahead = True

    def give_back(self, result: GradResult | Exception) -> None:
        """The model belongs to the training again. Raises OperatorError if the program moved the model's parameters."""
        if self._taken is None:
            return
        moved: ParametersMovedError | None = None
        try:
            if not isinstance(result, NoVotes):  # a model may be frozen while it has no gradient to give, as at the end
                self.check()
            if name := "" if self._before is None else self._before.moved():
                raise ParametersMovedError(
                    f"the program changed the parameter {name!r} during a step. The swarm moves the parameters, the same way "
                    "on every peer: make a gradient only, without optimizer.step(), evaluate with a copy of the model, and "
                    "load no other weights (a trainer does that resumes from a checkpoint, or loads its best model). Join "
                    "again to go on from the swarm's state"
                )
        except ParametersMovedError as error:
            result = moved = error
        with self._changed:
            self._taken, self._result = None, result
            self._changed.notify_all()
        if moved is not None:
            raise moved

    def loaded(self) -> None:
        """The model has a state of the swarm."""
        self._joined.loaded()

    def check(self) -> None:
        """Raises ParametersMovedError if the model has not the parameters that joined, whatever their values are."""
        if other := self._joined.changed():
            raise ParametersMovedError(
                f"the program changed the model after join: its parameter {other} now. Cast, freeze, tie and extend a model "
                "before join, and load no weights with assign=True: the swarm moves the parameters that joined. Join again to "
                "go on from the swarm's state"
            )
