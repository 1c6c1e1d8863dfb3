"""A program's own loop as a peer of a swarm: `swarmentum.join`. The peer itself is the one of the command `join`, in a thread.

Refuses to move the model by any other hand than the swarm's.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import Tensor, nn

from node.admission.consent import MachineRequest, must_ask
from node.app import Outcome
from node.app import join as take_part
from node.building import Own
from node.config import PeerSettings, load_settings
from node.model.gradients import Loss
from node.optim.process_group import TakesScale, unscale
from node.owner_commands import Stop
from node.ranks.channel import launched
from node.training.maker import Handover, NoVotes, Share
from protos.console import configure_logging
from protos.errors import OperatorError
from protos.invite import Invite

if TYPE_CHECKING:
    from node.training.telemetry import Summary

NOT_OF_A_LOOP = ("device", "precision", "activation_checkpointing", "compile")
"""Settings of the command that the program's own model and loop decide."""
CLOSE_SECONDS_MAX = 60.0


class Joined:
    """A peer whose gradients this program makes. Iterate over it: each round is a `Share`, and ends with `contribute`.

    The model belongs to the swarm in `contribute`, which waits for the next share, and to the loop otherwise, also after the
    last round. A program with several peers needs a thread for each. The `with` block ends the peer: the momentum is saved, and
    a later `join` with the same home goes on with it.
    """

    def __init__(
        self, link: str, model: nn.Module, settings: PeerSettings, *, reads: bool, loss: Loss | None = None
    ) -> None:
        self.model = model
        self.home = settings.home
        self._process = os.getpid()
        self._settings = settings
        self._handover = Handover(model, loss)
        self._stop = Stop()
        self._ready = threading.Event()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._driver: threading.Thread | None = None
        own = Own(self._handover, reads, self._ready.set)
        self._thread = threading.Thread(
            target=self._run, args=(link, settings, own), name="swarmentum peer", daemon=True
        )
        _open.add(self)
        atexit.register(_leave_all)  # once more does no harm
        self._thread.start()
        try:
            while not self._ready.wait(0.1):
                pass
        except BaseException:
            self.close()
            raise
        self._raise()

    def _run(self, link: str, settings: PeerSettings, own: Own) -> None:
        def agree(asked: MachineRequest) -> None:
            must_ask(asked, settings, can_ask=False)

        try:
            self._outcome = take_part(link, settings, agree=agree, own=own, stop=self._stop)
        except BaseException as error:  # noqa: BLE001 - it is raised again where the program waits
            self._error = error
        finally:
            self._handover.end()
            self._ready.set()

    def __iter__(self) -> Iterator[Share]:
        """Each step that wants a gradient of this peer, until the run ends, or the owner ends the peer (`swarmentum leave`).

        Raises the error that ends the peer. A round without `contribute` is a step without this peer's votes.
        """
        while (share := self._next()) is not None:
            yield share

    def _next(self) -> Share | None:
        threads = self._settings.threads
        if threads is not None:  # torch counts threads for each caller
            torch.set_num_threads(threads)
        self._driver = threading.current_thread()
        if any(it is not self and it._driver is self._driver and it._thread.is_alive() for it in list(_open)):
            raise OperatorError(
                "this thread takes the shares of another peer already. A peer waits for the next step in `contribute`, and the "
                "step waits for the other peer: run each in a thread of its own, or close the other one first"
            )
        share = self._handover.take()
        if share is None:
            self._thread.join()
            self._raise()
        return share

    def contribute(self, loss: Tensor | float, samples: int | None = None, tokens: int = 0) -> None:
        """The gradient in `.grad` is this peer's for the step: the mean over `samples` (all of the share by default).

        `loss` is their mean loss in nats a token, and `tokens` how many were predicted: others see both, and nothing checks
        them. A gradient or loss that is not finite is left out. Returns when the run wants the next gradient, or has ended:
        the model is then the swarm's newest. Raises OperatorError for figures that cannot be, and the error that ends the peer.
        """
        self._raise()
        self._handover.contribute(loss, samples, tokens)
        self._raise()

    def optimizer(self) -> SwarmOptimizer:
        """This peer as a torch optimizer, for a loop that cannot be turned: iterate no more, and call its `step`.

        Returns when a step of the run wants a gradient. Raises the error that ends the peer.
        """
        return SwarmOptimizer(self)

    @property
    def finished(self) -> bool:
        """Whether the run has made its last step."""
        return self._outcome is not None and self._outcome.summary.finished

    @property
    def summary(self) -> Summary:
        """What the peer did, as `swarmentum join --json` prints it. Raises OperatorError before the peer has ended."""
        self._raise()
        if self._outcome is None:
            raise OperatorError("the peer still takes part: its summary is there after the loop or the `with` block")
        return self._outcome.summary

    def close(self) -> None:
        """Leave the run: save the momentum, and end the peer. The other peers go on. Does nothing the second time, and in a
        process that was forked from the peer's."""
        if os.getpid() != self._process:
            return
        self._stop.ask()
        with suppress(OperatorError):  # the peer ends with it, and `_raise` tells it
            self._handover.give_back(NoVotes("the program leaves the run"))
        self._thread.join(CLOSE_SECONDS_MAX)
        if self._thread.is_alive():
            structlog.get_logger("peer").warning(
                "the peer has not ended in time: its last momentum may not be saved",
                step="-",
                seconds=CLOSE_SECONDS_MAX,
            )
        _open.discard(self)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Joined:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self._raise()


_open: weakref.WeakSet[Joined] = weakref.WeakSet()


def _leave_all() -> None:
    """A program that ends without `close`: its peers leave cleanly."""
    for joined in list(_open):
        joined.close()


def join(
    link: str,
    model: nn.Module,
    *,
    loss: Loss | None = None,
    home: str | os.PathLike[str] | None = None,
    own_data: bool = False,
    allow_code: bool = False,
    allow_data: bool = False,
    yes: bool = False,
    **settings: Any,
) -> Joined:
    """Take part in a run with a model and a loop of this program's own. Returns when the peer is in the run.

    `model`: parameters with the run's names and shapes, fp32, on one device. It gets the swarm's parameters. `loss`: called as
    loss(model, samples) with int64 [n, context + 1] on the model's device, also in another thread with a copy of the model;
    returns the mean in nats a predicted token. With it the peer checks others' votes where the run asks for that, and reports
    held-out losses. `home`: of the identity and the momentum (default ~/.swarmentum/peer). `own_data`: the run's text is not
    read; the program has samples of its own. `allow_code`, `allow_data`, `yes`: the consents of the command `join`. Only with
    `allow_code` is the run's model code called, for the first parameters. Without it the peer takes a state that other peers
    agreed on. `settings`: others of the command, such as archive=True, upload_mbit=20 or listen="127.0.0.1:0".

    Raises OperatorError for a model with another layout or a wrong setting, NetworkError, RefusedError.
    """
    if launched(os.environ) is not None:
        raise OperatorError("swarmentum.join takes one process: start the program without torchrun")
    if unused := [name for name in NOT_OF_A_LOOP if name in settings]:
        raise OperatorError(f"{', '.join(unused)}: the model that you give, and your loop, decide this; leave it out")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OperatorError("the model has no parameter that is trained")
    chosen = load_settings(
        home=None if home is None else Path(home),
        allow_code=allow_code or None,
        allow_data=allow_data or None,
        yes=yes or None,
        **settings,
    )
    Invite.parse(link).public("swarmentum.join")
    if not structlog.is_configured():
        configure_logging(as_json=False, target=sys.stderr)
    return Joined(link, model, chosen, reads=not own_data, loss=loss)


_NONE: tuple[int | None, int] = None, 0


class SwarmOptimizer(torch.optim.Optimizer):
    """`step` contributes what is in `.grad`, and returns when the next step of the run wants a gradient.

    The loss that others see is that of `report`, of the closure, or the mean of the `loss` in the model's outputs since the
    last step (models of transformers have it). After calls with `num_items_in_batch`, which the Trainer makes, it is their sum.
    `share` is what the run asks for now, and None once the run has ended. The learning rate in `param_groups` shows the run's,
    and schedulers change nothing. A GradScaler works: where it finds an infinity, the step has no votes of this peer.
    """

    _step_supports_amp_scaling = TakesScale()

    def __init__(self, peer: Joined) -> None:
        trained = [parameter for parameter in peer.model.parameters() if parameter.requires_grad]
        super().__init__(trained, {"lr": 0.0})
        self._peer = peer
        self._losses: list[float] = []
        self._parts, self._figures = False, _NONE
        owner = weakref.ref(self)

        def heard(module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
            loss, mine = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None), owner()
            if mine is not None and isinstance(loss, Tensor) and loss.requires_grad:
                mine._losses.append(float(loss.detach()))
                mine._parts = named.get("num_items_in_batch") is not None

        self._hook = peer.model.register_forward_hook(heard, with_kwargs=True)
        self.share: Share | None = None
        self._take()

    @property
    def finished(self) -> bool:
        """Whether no step is left: the run has ended, or its owner ended the peer."""
        return self.share is None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises OperatorError once the optimizer is made: a run's parameters are those of its model."""
        if self.param_groups:
            raise OperatorError(
                "the swarm trains the parameters of the run's model, and no others: train yours with an optimizer of your own"
            )
        super().add_param_group(param_group)

    def report(self, loss: Tensor | float, samples: int | None = None, tokens: int = 0) -> None:
        """The figures of the next `step`, as `Joined.contribute` takes them."""
        self._losses, self._parts = [float(loss.detach() if isinstance(loss, Tensor) else loss)], False
        self._figures = samples, tokens

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises OperatorError after the run's end, without a loss, or for parameters that somebody moved; and the error that
        ends the peer."""
        if self.finished:
            raise OperatorError(
                "the run has ended, and this peer with it: stop the loop when optimizer.finished is true"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.report(loss, *self._figures)
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        finite = all(map(math.isfinite, self._losses))  # else the run has perhaps diverged, and is told
        if not unscale(found, scale, self.param_groups[0]["params"], None) and finite:
            self._take()
            return loss
        if not self._losses:
            raise OperatorError(
                "step needs the loss, which other peers see: call optimizer.report(loss, tokens=...) before it, or give a "
                "model whose output has a `loss`"
            )
        self._peer.contribute(sum(self._losses) / (1 if self._parts else len(self._losses)), *self._figures)
        self._take()
        return loss

    def _take(self) -> None:
        self._losses, self._figures = [], _NONE
        self.share = self._peer._next()
        if self.share is None:
            self._hook.remove()
        else:
            for group in self.param_groups:
                group["lr"] = self.share.learning_rate
