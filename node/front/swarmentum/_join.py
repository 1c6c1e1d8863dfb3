"""A program's own loop as a peer of a swarm: `swarmentum.join`. The peer itself is the one of the command `join`, in a thread.

Refuses to move the model by any other hand than the swarm's.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import structlog
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from node.admission.consent import MachineRequest, must_ask
from node.app import Outcome
from node.app import join as take_part
from node.building import Own
from node.config import PeerSettings, load_settings
from node.model.gradients import Loss
from node.owner_commands import Stop
from node.ranks import launched
from node.training.maker import Handover, NoVotes, ParametersMovedError, Share
from protos.console import configure_logging
from protos.errors import OperatorError
from protos.invite import Invite
from swarmentum._optimizer import SwarmOptimizer

if TYPE_CHECKING:
    from node.training.telemetry import Summary

NOT_OF_A_LOOP = ("device", "precision", "activation_checkpointing", "compile")
"""Settings of the command that the program's own model and loop decide."""
CLOSE_SECONDS_MAX = 60.0
P = ParamSpec("P")
R = TypeVar("R")


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Not compiled with a program's step. Dynamo takes 1.3 s to load: a program without it loads none."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **named)

    return call


class PeerThread:
    """The peer of a `Joined`, which it does not know: it ends with that object, as with `close`."""

    def __init__(self, link: str, settings: PeerSettings, handover: Handover, *, reads: bool) -> None:
        self.handover, self.home, self.threads = handover, settings.home.resolve(), settings.threads
        self.stop, self.ready = Stop(), threading.Event()
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        self.driver: threading.Thread | None = None
        self._process = os.getpid()
        own = Own(handover, reads, self.ready.set)
        self.thread = threading.Thread(
            target=self._run, args=(link, settings, own), name="swarmentum peer", daemon=True
        )
        _open.add(self)
        atexit.register(_leave_all)  # once more does no harm
        try:
            self.thread.start()
        except RuntimeError:  # the system gives no thread
            _open.discard(self)
            raise

    def _run(self, link: str, settings: PeerSettings, own: Own) -> None:
        def agree(asked: MachineRequest) -> None:
            must_ask(asked, settings, can_ask=False)

        try:
            self.outcome = take_part(link, settings, agree=agree, own=own, stop=self.stop)
        except BaseException as error:  # noqa: BLE001 - it is raised again where the program waits
            self.error = error
        finally:
            _open.discard(self)  # first: the program may join again as soon as it hears of the end
            self.handover.end()
            self.ready.set()

    @property
    def is_here(self) -> bool:
        """Not in a process that was forked from the peer's."""
        return os.getpid() == self._process

    def leave(self) -> None:
        """Ask the peer to end. Waits for nothing."""
        if self.is_here:
            self.stop.ask()
            with suppress(OperatorError):  # the peer ends with it, and its `error` tells it
                self.handover.give_back(NoVotes("the program leaves the run"))

    def close(self) -> None:
        """See `Joined.close`."""
        self.leave()
        if self.is_here:
            self.thread.join(CLOSE_SECONDS_MAX)
            if self.thread.is_alive():
                log, why = structlog.get_logger("peer"), "its last momentum may not be saved"
                log.warning("the peer has not ended in time", step="-", seconds=CLOSE_SECONDS_MAX, why=why)


_open = set[PeerThread]()  # whose threads run


def _leave_all() -> None:
    """A program that ends without `close`: its peers leave cleanly."""
    for peer in list(_open):
        peer.close()


def _wait_for(home: Path) -> None:
    """Until an earlier peer of this program, which is ending, has left its home. Raises OperatorError for one that is not."""
    for peer in [it for it in list(_open) if it.is_here and it.home == home.resolve()]:
        if not peer.stop():
            raise OperatorError(
                f"home={str(home)!r}: an earlier peer of this program is using it: call its close() first, or join with "
                "another home for a second peer"
            )
        peer.close()


class Joined:
    """A peer whose gradients this program makes. Iterate over it: each round is a `Share`, and ends with `contribute`.

    The model belongs to the swarm in `contribute`, which waits for the next share, and to the loop otherwise, also after the
    last round. A program with several peers needs a thread for each. The `with` block, or the end of the object, ends the peer:
    the momentum is saved, and a later `join` with the same home goes on with it.
    """

    def __init__(
        self, link: str, model: nn.Module, settings: PeerSettings, *, reads: bool, loss: Loss | None = None
    ) -> None:
        self.model, self.home, self._run = model, settings.home, Invite.parse(link).run_id.hex()
        self._handover = Handover(model, loss)
        self._optimizer: Callable[[], SwarmOptimizer | None] = lambda: None  # weak: the peer ends with its object
        self._peer = PeerThread(link, settings, self._handover, reads=reads)
        weakref.finalize(self, self._peer.leave).atexit = False
        try:
            while not self._peer.ready.wait(0.1):
                pass
        except BaseException:
            self.close()
            raise
        self._raise()

    def __iter__(self) -> Iterator[Share]:
        """Each step that wants a gradient of this peer, until the run ends, or the owner ends the peer (`swarmentum leave`).

        Raises the error that ends the peer. A round without `contribute` is a step without this peer's votes.
        """
        while (share := self._next()) is not None:
            yield share

    def _next(self) -> Share | None:
        mine = self._peer
        if mine.threads is not None:  # torch counts threads for each caller
            torch.set_num_threads(mine.threads)
        mine.driver = threading.current_thread()
        if any(it is not mine and it.driver is mine.driver and not it.stop() for it in list(_open)):
            raise OperatorError(
                "this thread takes the shares of another peer already. A peer waits for the next step in `contribute`, and the "
                "step waits for the other peer: run each in a thread of its own, or close the other one first"
            )
        with self._left_when_moved():
            share = self._handover.take()
        if share is None:
            mine.thread.join()
            self._raise()
        return share

    @_untraced
    def contribute(self, loss: Tensor | float, samples: int | None = None, tokens: int = 0) -> None:
        """The gradient in `.grad` is this peer's for the step: the mean over `samples` (all of the share by default).

        `loss` is their mean loss in nats a token, and `tokens` how many were predicted: others see both, and nothing checks
        them. A gradient or loss that is not finite is left out. Returns when the run wants the next gradient, or has ended:
        the model is then the swarm's newest. Raises OperatorError for figures that cannot be, and the error that ends the peer.
        """
        self._raise()
        with self._left_when_moved():
            self._handover.contribute(loss, samples, tokens)
        self._raise()

    def optimizer(self) -> SwarmOptimizer:
        """This peer as a torch optimizer, for a loop that cannot be turned: iterate no more, and call its `step`.

        Returns when a step of the run wants a gradient; a second call gives the same one. Raises the error that ends the peer.
        """
        made = self._optimizer()
        if made is None:
            made = SwarmOptimizer(self)
            self._optimizer = weakref.ref(made)
        return made

    @property
    def finished(self) -> bool:
        """Whether the run has made its last step."""
        return self._peer.outcome is not None and self._peer.outcome.summary.finished

    @property
    def _has_share(self) -> bool:
        return self._handover.has_share

    @property
    def _has_left(self) -> bool:
        """Whether the peer has ended, and no error ended it."""
        return self._peer.outcome is not None

    @property
    def summary(self) -> Summary:
        """What the peer did, as `swarmentum join --json` prints it. Raises OperatorError before the peer has ended."""
        self._raise()
        if self._peer.outcome is None:
            raise OperatorError("the peer still takes part: its summary is there after the loop or the `with` block")
        return self._peer.outcome.summary

    def close(self) -> None:
        """Leave the run: save the momentum, and end the peer. The other peers go on. A second time, or in a fork: nothing."""
        self._peer.close()

    @contextmanager
    def _left_when_moved(self) -> Iterator[None]:
        """The program hears of the error once the peer has left its home: it may join again at once."""
        try:
            yield
        except ParametersMovedError:
            self._peer.close()
            raise

    def _raise(self) -> None:
        if self._peer.error is not None:
            raise self._peer.error

    def __enter__(self) -> Joined:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self._raise()


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
        home=home,
        allow_code=allow_code or None,
        allow_data=allow_data or None,
        yes=yes or None,
        **settings,
    )
    Invite.parse(link).public("swarmentum.join")
    if not structlog.is_configured():
        configure_logging(as_json=False, target=sys.stderr)
    _wait_for(chosen.home)
    return Joined(link, model, chosen, reads=not own_data, loss=loss)
