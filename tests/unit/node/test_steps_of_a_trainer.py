"""What the training thread does with the gradient of a step: tells that there is none, or that it is too old."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from node.model.gradients import GradResult
from node.optim.second_moment import Kind
from node.swarm.facts import Agreed, Event, Finished, Opened, Snapshot
from node.swarm.runtime import Counters
from node.training.exports import Copier
from node.training.loop import Trainer
from node.training.maker import PendingGradient
from node.training.progress import MOVES, Activity, LastStep, move
from node.training.replica import Replica
from node.training.telemetry import Summary
from protos.assignment import Range, SampleShare
from protos.optimizer_config import OptimizerConfig
from protos.run_config import RunConfig
from protos.tick import Tick
from tests.unit.node.test_checks_of_a_trainer import LR, ME, RUN, Table, samples
from tests.unit.node.test_recovery import Log

LR_BITS = int(np.float32(LR).view(np.uint32))


class Told:
    """Stands where the network side stands."""

    committed_step = 0

    def __init__(self) -> None:
        self.abstentions: list[tuple[int, str, bool]] = []
        self.published: list[Any] = []
        self.facts: list[str] = []
        self.counters = SimpleNamespace()
        self.silent = ""

    def voteless(self, step: int) -> str:
        return self.silent

    def abstained(self, step: int, reason: str, *, not_finite: bool) -> None:
        self.abstentions.append((step, reason, not_finite))

    def publish(self, data: bytes, announcement: Any) -> None:
        self.published.append(announcement)

    def paused(self, paused: bool) -> None:
        self.facts.append("paused" if paused else "goes on")

    def applied(self, step: int, digest: bytes) -> None:
        self.facts.append("has a state")

    def follow_from(self, step: int, head: bytes) -> None:
        self.facts.append("follows")


def trainer(
    folder: Path, told: Told, overlap: bool = False, make: type[Trainer] = Trainer, second: Kind = "whole"
) -> Trainer:
    torch.manual_seed(0)
    optimizer = OptimizerConfig(group_size=8, overlap=overlap)
    return make(
        config=RunConfig(optimizer=optimizer),
        replica=Replica(RUN, Table(), optimizer, 8, second=second),
        swarm=told,  # type: ignore[arg-type]
        samples=samples(),
        store=None,  # type: ignore[arg-type]
        private_path=folder / "private.pt",
        micro_batch=4,
        autocast=None,
        summary=Summary(ME.peer_id, "cpu"),
        steps=None,  # type: ignore[arg-type]
        stopping=lambda: False,  # type: ignore[arg-type]
    )


def opened(step: int, parent: bytes = RUN) -> Opened:
    tick = Tick(step, parent, 1, (SampleShare(ME.public_key, 8),), (Range(0, 8),), LR_BITS)
    return Opened(tick, (Range(8 * step, 8 * step + 8),), 1000)


@pytest.mark.parametrize("second", ["whole", "factored"])
def test_a_peer_without_a_finite_gradient_says_so(tmp_path: Path, second: Kind) -> None:
    told = Told()
    peer = trainer(tmp_path, told, second=second)
    with torch.no_grad():
        next(peer.replica.model.parameters())[0, 0] = float("nan")
    peer._contribute(opened(1))
    [(step, reason, not_finite)] = told.abstentions
    assert (step, not_finite) == (1, True)
    assert reason
    assert not told.published
    assert not peer.replica.demo.momentum.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("nats", [float("inf"), 1e30, -1e30])
def test_a_loss_that_the_coordinator_refuses_is_never_announced(tmp_path: Path, nats: float) -> None:
    """A word beyond a mask gives such a loss and a finite gradient. The votes were kept, so that no later start went on."""
    told = Told()
    peer = trainer(tmp_path, told, overlap=True)
    peer.replica.gradients(samples(), (Range(900, 907),), 4, None, lambda: False)
    peer.ready, peer.replica.step = PendingGradient(GradResult(nats, 56, 7), 0.1, 9), 9
    peer._contribute(opened(10))
    assert told.abstentions == [(10, f"the loss is {nats:g}", True)]
    assert not told.published


def test_open_votes_with_such_a_loss_stay_behind_and_the_next_step_has_votes(tmp_path: Path) -> None:
    """An earlier version published and kept them: the coordinator's refusal ended the peer at each start."""
    told = Told()
    first = trainer(tmp_path, told)
    first._contribute(opened(1))
    [announcement] = told.published
    announcement.loss = float("inf")
    first.replica.announcement = announcement.SerializeToString()
    first.replica.save_private(tmp_path / "private.pt")
    again = trainer(tmp_path, told)
    assert again.replica.load_private(tmp_path / "private.pt")
    again._contribute(opened(1))
    assert told.abstentions == [(1, "the loss is inf", True)]
    assert len(told.published) == 1
    again.replica.demo.settle(False)  # as the entry of step 1 does
    again.replica.published = None
    again._contribute(opened(2))
    assert [it.step for it in told.published] == [1, 2]


def test_a_peer_whose_identity_another_program_uses_sends_no_votes(tmp_path: Path) -> None:
    told = Told()
    told.silent = "another program may vote"
    peer = trainer(tmp_path, told)
    peer._contribute(opened(1))
    assert told.abstentions == [(1, "another program may vote", False)]
    assert not told.published
    told.silent = ""
    peer._contribute(opened(2))
    assert [it.step for it in told.published] == [2]


def test_a_gradient_of_the_step_before_is_voted_with_and_an_older_one_is_not(tmp_path: Path) -> None:
    for age, fresh in ((1, False), (2, True), (5, True)):
        told = Told()
        peer = trainer(tmp_path, told, overlap=True)
        peer.replica.gradients(samples(), (Range(900, 907),), 4, None, lambda: False)
        peer.ready = PendingGradient(GradResult(9.0, 56, 7), 0.1, 10 - age)
        peer.replica.step = 9
        peer._contribute(opened(10))
        [announcement] = told.published
        assert (announcement.samples == 8) is fresh, f"a gradient {age} steps old"


def test_a_copier_is_paused_before_the_coordinator_could_ask_it_for_a_step(tmp_path: Path) -> None:
    told = Told()
    peer = trainer(tmp_path, told, make=Copier)
    peer.activity = Activity.FOLLOWING
    peer.follow()
    assert told.facts == ["paused", "has a state", "follows"]


@pytest.mark.parametrize(("make", "trains", "step", "behind"), [
    (Trainer, True, 1, True), (Trainer, True, 2, False), (Trainer, False, 1, False), (Copier, False, 1, False),
])  # fmt: skip
def test_only_a_peer_with_a_gradient_to_compute_hashes_its_state_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: type[Trainer], trains: bool, step: int, behind: bool
) -> None:
    """A copier took the digest of a contradicted state for that of the state that it had computed again."""
    peer, asked = trainer(tmp_path, Told(), make=make), list[bool]()
    if not trains:
        peer.samples = None
    peer.last = LastStep(2)
    peer.swarm.counters = Counters()
    monkeypatch.setattr(peer.reached, "state", lambda then, *, behind: asked.append(behind))
    peer._note(SimpleNamespace(signed=Log(2).entries[step]), accepted=False)  # type: ignore[arg-type]
    assert asked == [behind]


@pytest.mark.parametrize("late", [False, True])
def test_the_last_state_is_evaluated_though_it_is_agreed_after_the_finish(tmp_path: Path, late: bool) -> None:
    """Peers store the last state while the coordinator says that the run is finished."""
    peer, told = trainer(tmp_path, Told()), list[int]()
    peer.last, peer.replica.step = LastStep(4), 4
    peer.keeper = SimpleNamespace(check=lambda: None, agreed=lambda *_: None)  # type: ignore[assignment]
    peer.evaluator = SimpleNamespace(agreed=lambda step, root, last: told.append(step))  # type: ignore[assignment]
    finish, agreed = Finished("finished: 4 steps"), Agreed(Snapshot(4, bytes(32), 0, ()))
    events: list[Event] = [Agreed(Snapshot(3, bytes(32), 0, ())), *([finish, agreed] if late else [agreed, finish])]
    peer.swarm.next_event = lambda _: events.pop(0)  # type: ignore[method-assign, misc]
    assert peer.run()
    assert told == [3, 4]
    assert not events


def test_a_peer_that_is_stopped_while_it_awaits_the_last_agreement_has_finished_the_run(tmp_path: Path) -> None:
    peer, asked = trainer(tmp_path, Told()), iter([False, False, True])
    peer.last, peer.replica.step = LastStep(4), 4
    peer.keeper = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
    peer.evaluator = SimpleNamespace()  # type: ignore[assignment]
    peer.stopping = lambda: next(asked)  # type: ignore[assignment]
    events: list[Event | None] = [Finished("finished: 4 steps"), None]
    peer.swarm.next_event = lambda _: events.pop(0)  # type: ignore[method-assign, misc]
    assert peer.run()
    assert not events


def test_a_peer_votes_only_after_it_has_followed() -> None:
    assert MOVES.keys() == set(Activity)
    for now, then in itertools.product(Activity, Activity):
        if then in MOVES[now]:
            assert move(now, then) is then
        else:
            with pytest.raises(AssertionError, match=f"{now.value} cannot be {then.value}"):
                move(now, then)
    assert Activity.VOTING not in MOVES[Activity.LOADING] | MOVES[Activity.PAUSED]


def test_an_anchor_neither_loads_nor_saves_a_momentum_and_deletes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, its in (("peer", samples()), ("anchor", None)):
        (tmp_path / name).mkdir()
        peer, loaded = trainer(tmp_path / name, Told()), list[bool]()
        peer.samples = its
        peer.finish()
        assert peer.private_path.exists() is (its is not None)
        welcome = SimpleNamespace(settings=(), head_step=0, snapshots=())
        peer.swarm.join = lambda *_, told=welcome: told  # type: ignore[assignment, method-assign]
        peer.recovery = SimpleNamespace(begin=lambda *_: None)  # type: ignore[assignment]
        peer.private_path.write_bytes(b"of a peer with this home")
        monkeypatch.setattr(peer.replica, "load_private", lambda _, to=loaded: to.append(True))
        peer.follow = lambda *_: None  # type: ignore[method-assign]
        peer.enter([])
        assert loaded == [True] * (its is not None)
        assert peer.private_path.read_bytes() == b"of a peer with this home", "the home may be a peer's"
