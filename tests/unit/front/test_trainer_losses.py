"""The loss that a trainer's loop reports to the swarm, behind `SwarmOptimizer`: the mean, however a trainer divides it."""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from node.training.maker import Handover
from node.training.own_loss import Unmoved
from protos.errors import NetworkError, OperatorError
from swarmentum import _join
from swarmentum._join import Joined, PeerThread
from swarmentum._optimizer import SwarmOptimizer


class Peer:
    """The seam of `Joined` that the optimizer uses."""

    _has_left, _has_share, _run = False, True, "ab" * 32

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.losses, self.shares = model, list[float](), 0

    def contribute(self, loss: float, samples: int | None, tokens: int) -> None:
        self.losses.append(loss)

    def _next(self) -> Any:
        self.shares += 1
        self._has_share = True
        return SimpleNamespace(learning_rate=self.shares / 8, number=self.shares)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_parts_of_a_mean_are_added_up_and_means_are_averaged(micro_batches: int) -> None:
    """The Trainer of transformers tells the model how many tokens a whole step has, and each output is then a part."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    peer = Peer(model)
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    rows = torch.randint(0, 64, (8, 16))
    for named in ({}, {"num_items_in_batch": torch.tensor(8 * 15)}, {}):
        for part in rows.chunk(micro_batches):
            model(input_ids=part, labels=part, **named).loss.backward()
        with torch.no_grad():
            model(input_ids=rows, labels=rows)  # an evaluation is no loss of the step
        optimizer.step()
    whole = model(input_ids=rows, labels=rows).loss.item()
    assert peer.losses == pytest.approx([whole] * 3)


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, rows: torch.Tensor) -> Any:
        return SimpleNamespace(loss=(rows * self.weight).sum())


def test_a_scaler_s_infinity_is_a_step_without_votes_and_its_loss_is_none_of_the_next() -> None:
    """The scaler left such a step out: the share stayed, others waited for it, and the next loss was infinite, too."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for rows in (torch.tensor([3e38, 0.0, 0.0]), torch.tensor([1.0, 2.0, 4.0])):
        optimizer.zero_grad()
        scaler.scale(peer.model(rows).loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (peer.losses, peer.shares, scaler.get_scale()) == ([7.0], 3, 512.0)
    assert torch.equal(peer.model.weight.grad, torch.tensor([1.0, 2.0, 4.0])), "the gradient has no scale any more"


def test_a_loss_that_is_none_is_given_to_the_run_whatever_the_scaler_found() -> None:
    """Others see a run that has diverged: its peers said that their programs had no gradient."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(peer.model(torch.full((3,), math.nan)).loss).backward()
    scaler.step(optimizer)
    assert ([str(loss) for loss in peer.losses], peer.shares) == (["nan"], 2)


def test_parameters_that_the_run_has_not_are_refused() -> None:
    optimizer = SwarmOptimizer(Peer(Line()))  # type: ignore[arg-type]
    with pytest.raises(OperatorError, match="an optimizer of your own"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1


def test_a_forked_process_does_not_leave_the_run_for_the_peer() -> None:
    """A worker of a DataLoader, or a fork that ends with an error, has the peer's object and none of its threads."""
    peer = object.__new__(PeerThread)
    peer._process = os.getppid()
    peer.close()


def test_the_home_is_free_once_the_program_hears_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that joined again at once was told that an earlier peer uses the home, and to call its close()."""
    homes = list[list[Path]]()

    class Heard(Handover):
        def end(self) -> None:
            homes.append([peer.home for peer in _join._open])

    def lost(*_: object, **__: object) -> None:
        raise NetworkError("the coordinator was silent")

    monkeypatch.setattr(_join, "take_part", lost)
    settings: Any = SimpleNamespace(home=tmp_path, threads=None)
    peer = PeerThread("link", settings, Heard(Line()), reads=True)
    peer.thread.join(240)
    assert isinstance(peer.error, NetworkError)
    assert homes == [[]]


def test_a_peer_whose_thread_does_not_start_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its home stayed in use for the program, whose end failed at a thread that it cannot join."""

    def full(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    settings: Any = SimpleNamespace(home=tmp_path, threads=None)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        PeerThread("link", settings, Handover(Line()), reads=True)
    assert not _join._open


def test_a_loss_counts_where_a_backward_pass_went_through_it_and_its_gradient_is_still_there() -> None:
    """A batch whose forward or backward pass failed, and an evaluation without no_grad, were in the mean that others see."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    rows = torch.tensor([1.0, 2.0, 4.0])
    peer.model(100 * rows)  # an evaluation, or the program has caught an error here
    copy.deepcopy(peer.model)(100 * rows).loss.backward()  # an evaluation of a copy, which has the hook, too
    first, second = peer.model(rows).loss, peer.model(3 * rows).loss
    ((first + second) / 2).backward()
    optimizer.step()
    peer.model(100 * rows).loss.backward()  # the error is caught here
    optimizer.zero_grad()
    loss = peer.model(rows).loss
    optimizer.zero_grad()  # before the backward pass, as many loops do
    loss.backward()
    optimizer.step()
    peer.model(rows)  # a trainer has another loss of these outputs, such as with smoothed labels
    (peer.model.weight * rows).sum().backward()
    optimizer.step()
    peer.model(100 * rows).loss.backward()
    optimizer.report(5.0)
    peer.model(100 * rows).loss.backward()
    optimizer.step()
    assert peer.losses == [14.0, 7.0, 7.0, 5.0]


def test_a_closure_that_returns_nothing_is_as_none() -> None:
    """As with torch's optimizers; it was a TypeError of float()."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]

    def closure() -> None:
        optimizer.zero_grad()
        peer.model(torch.ones(3)).loss.backward()

    assert optimizer.step(closure) is None
    assert peer.losses == [3.0]


def test_a_closure_s_loss_is_the_last_one_that_counts() -> None:
    """Lightning's is that of the last of several micro-batches, divided by their number: others saw half of the loss."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]

    def closure(factor: float, told: float | None = None) -> torch.Tensor:
        loss: torch.Tensor = peer.model(factor * torch.ones(3)).loss / 2
        loss.backward()
        if told is not None:
            optimizer.report(told)
        return loss

    def unheard() -> torch.Tensor:
        loss: torch.Tensor = (peer.model.weight * torch.ones(3)).sum()
        loss.backward()
        return loss

    closure(1.0)
    optimizer.step(lambda: closure(3.0))
    optimizer.step(lambda: closure(3.0, 7.5))
    optimizer.step(unheard)
    assert peer.losses == [6.0, 7.5, 3.0]


class Wrapper:
    """As lightning.pytorch.core.optimizer.LightningOptimizer, which `self.optimizers()` gives to a program."""

    def __init__(self, optimizer: SwarmOptimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("LightningSwarmOptimizer", (Wrapper, SwarmOptimizer), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_what_a_wrapper_with_attributes_of_its_own_is_told_reaches_the_optimizer() -> None:
    """`self.optimizers().report(...)` was lost in silence, and so was what `zero_grad` takes back."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    wrapper: Any = Wrapper(optimizer)
    peer.model(100 * torch.ones(3)).loss.backward()
    wrapper.zero_grad()
    peer.model(torch.ones(3)).loss.backward()
    optimizer.step()
    peer.model(torch.ones(3)).loss.backward()
    wrapper.report(7.5)
    optimizer.step()
    assert peer.losses == [3.0, 7.5]


def test_the_optimizer_of_a_peer_has_no_copy() -> None:
    """A copy took no share and heard no loss; it failed at its first use without a word on why."""
    optimizer = SwarmOptimizer(Peer(Line()))  # type: ignore[arg-type]
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="belongs to the peer in this process"):
            copied(optimizer)  # type: ignore[operator]


def test_a_scheduler_shows_the_run_s_rate_and_is_told_once_that_it_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Logs had the scheduler's rate, which moved nothing."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert "rate" not in capsys.readouterr().out
    for wanted in (0.25, 0.375):
        peer.model(torch.ones(3)).loss.backward()
        optimizer.step()
        scheduler.step()
        assert (scheduler.get_last_lr(), copy.deepcopy(optimizer.param_groups)[0]["lr"]) == ([wanted], wanted)
    assert capsys.readouterr().out.count("the learning rate is the run's") == 1


def test_schedulers_of_transformers_that_ask_for_the_first_rate_are_made() -> None:
    """It was 0, by which one divides; another one refused to end above it."""
    optimizer = SwarmOptimizer(Peer(Line()))  # type: ignore[arg-type]
    for name, more in (("cosine_with_min_lr", {"min_lr": 0.01}), ("polynomial", {})):
        get_scheduler(name, optimizer, 1, 4, scheduler_specific_kwargs=more)


def test_a_state_that_the_peer_has_no_use_for_is_refused() -> None:
    """A moment of AdamW, or what another run's trainer saved, was taken in silence, and the rate of its time shown."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    saved = copy.deepcopy(optimizer.state_dict())
    adam, elsewhere = torch.optim.AdamW(peer.model.parameters()), Peer(Line())
    elsewhere._run = "cd" * 32
    for state, what in (
        (adam.state_dict(), "of another kind"),
        (SwarmOptimizer(elsewhere).state_dict(), "of run cdcd"),
    ):  # type: ignore[arg-type]
        with pytest.raises(OperatorError, match=what):
            optimizer.load_state_dict(state)
    optimizer.step(lambda: None)
    groups = optimizer.param_groups[0]
    optimizer.load_state_dict(saved)
    groups["lr"] = 1.0
    assert (optimizer.param_groups[0] is groups, groups["lr"]) == (True, 0.25)


def test_a_checkpoint_of_torch_distributed_takes_no_step() -> None:
    """It makes a state with a step of zeros where it finds none: an error, or zeros for the votes of a share."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        saved = get_optimizer_state_dict(peer.model, optimizer, options=options)
        set_optimizer_state_dict(peer.model, optimizer, saved, options=options)
    assert (peer.shares, peer.losses, peer.model.weight.grad) == (1, [], None)


def test_a_model_is_saved_whole_and_its_file_asks_for_no_swarmentum() -> None:
    """torch.save(model) failed at the optimizer's hook: Can't pickle local object."""
    model = Line()
    optimizer = SwarmOptimizer(Peer(model))  # type: ignore[arg-type]
    assert b"swarmentum" not in pickle.dumps(model)
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        copied(torch.ones(3)).loss.backward()
        assert torch.equal(copied.weight.grad, torch.ones(3))
    assert not optimizer._heard


def test_a_peer_that_the_program_closed_has_finished() -> None:
    """A loop that asks `finished` went on, and was told to call contribute once in each round."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    assert not optimizer.finished
    peer._has_left = True
    assert optimizer.finished
    with pytest.raises(OperatorError, match="this peer has ended"):
        optimizer.step()


class LineOfDict(Line):
    def forward(self, rows: torch.Tensor) -> Any:
        return {"loss": (rows * self.weight).sum()}


def test_a_compiled_model_tells_its_loss() -> None:
    """The hook was compiled, too: a warning of 20 lines, and an error with fullgraph=True."""
    peer = Peer(LineOfDict())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    compiled = torch.compile(peer.model, backend="eager", fullgraph=True)
    compiled(100 * torch.ones(3))
    compiled(torch.ones(3))["loss"].backward()
    optimizer.step()
    assert peer.losses == [3.0]


class Looking(Peer):
    """It looks at the model where it hands over, and so does its `Joined`."""

    error = None

    def _next(self) -> Any:
        Unmoved(self.model, thoroughly=True)
        return super()._next()

    def contribute(self, loss: float, samples: int | None, tokens: int) -> None:
        Unmoved(self.model, thoroughly=True)
        super().contribute(loss, samples, tokens)


def test_a_compiled_step_hands_over_as_a_plain_one() -> None:
    """Dynamo went into the wait for the next share, and failed there with an error of its own."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    peer = Looking(LineOfDict())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    peer.model(torch.ones(3))["loss"].backward()
    torch.compile(optimizer.step, backend=backend)()
    joined: Any = object.__new__(Joined)
    joined._handover = joined._peer = peer
    torch.compile(joined.contribute, backend=backend)(4.0)
    assert (peer.losses, graphs) == ([3.0, 4.0], [])


def test_a_step_goes_on_after_ctrl_c_in_its_wait() -> None:
    """A loop waits there most of the time. Each later step was refused: there is no share to contribute to."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]

    def interrupted(loss: float, samples: int | None, tokens: int) -> None:
        peer._has_share = False
        raise KeyboardInterrupt

    def once(factor: float) -> None:
        peer.model(factor * torch.ones(3)).loss.backward()

    own = peer.contribute
    peer.contribute = interrupted  # type: ignore[method-assign]
    once(1.0)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    peer.contribute = own  # type: ignore[method-assign]
    once(2.0)  # of a model that the swarm moved meanwhile
    optimizer.step()
    assert (peer.losses, peer.shares, peer.model.weight.grad) == ([], 2, None)
    once(3.0)
    optimizer.step()
    peer._has_share = False
    optimizer.step(lambda: once(4.0))
    assert (peer.losses, peer.shares) == ([9.0, 12.0], 5)


def test_a_step_without_a_gradient_is_told_apart_from_one_without_a_loss() -> None:
    """zero_grad between backward and step took both, and the error spoke of the loss."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    peer.model(torch.ones(3)).loss.backward()
    optimizer.zero_grad()
    with pytest.raises(OperatorError, match=r"no parameter has a gradient: call backward\(\) before step"):
        optimizer.step()
    (peer.model.weight * 2).sum().backward()  # type: ignore[operator]
    with pytest.raises(OperatorError, match="step needs the loss"):
        optimizer.step()


def test_a_peer_has_one_optimizer_at_a_time() -> None:
    """A second one gave the share of the first one back, without votes."""
    peer = Peer(Line())
    joined: Any = object.__new__(Joined)
    joined.model, joined._run, joined._next, joined._optimizer = peer.model, peer._run, peer._next, lambda: None
    first = joined.optimizer()
    assert (joined.optimizer() is first, peer.shares) == (True, 1)


def test_a_closure_that_leaves_its_batch_out_is_a_step_without_votes() -> None:
    """Lightning's, if training_step returns None; the trainer ended with an error."""
    peer = Peer(Line())
    optimizer = SwarmOptimizer(peer)  # type: ignore[arg-type]
    optimizer.step(lambda: None)
    assert (peer.losses, peer.shares) == ([], 2)
