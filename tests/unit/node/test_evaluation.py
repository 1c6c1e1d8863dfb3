"""The held-out loss of a stored state: its value, that it is of that state and not of the training's. ADR 53."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch.nn import functional

from node.data.samples import Batch
from node.snapshot.store import SnapshotStore
from node.training.held_out import Evaluator, held_out_loss, set_sha256
from node.training.host_maker import HostMaker
from node.training.replica import Replica
from protos.errors import DataError
from protos.evaluation import AGREE_NATS, Evaluation, open_evaluation, seal_evaluation
from protos.identity import Identity
from protos.limits import SNAPSHOT_PIECE_BYTES
from protos.run_config import ClockConfig, EvaluationConfig, RunConfig
from tests.unit.node.test_checks_of_a_trainer import RUN, Table, samples

CONFIG = RunConfig(clock=ClockConfig(snapshot_every=5), evaluation=EvaluationConfig(every=5, samples=16))


class Peer:
    """A replica, its store, and an evaluator; `found` has what it reported."""

    def __init__(self, folder: Path, read: Any = None, write: Any = None, maker: Any = lambda _: None) -> None:
        model = Table()
        self.replica = Replica(RUN, model, CONFIG.optimizer, 8, maker=maker(model))
        self.store = SnapshotStore(folder, 1 << 30)
        self.found: list[Evaluation] = []
        self.told = threading.Event()
        read = read or (lambda: samples().validation(CONFIG.evaluation.samples))
        log = structlog.get_logger("test")
        self.evaluator = Evaluator(CONFIG, self.replica, self.store, read, self.tell, 8, log, write)

    def tell(self, made: Evaluation) -> None:
        self.found.append(made)
        self.told.set()

    def keep(self) -> bytes:
        image = self.replica.image()
        pieces = list(image.pieces(SNAPSHOT_PIECE_BYTES))
        describe = self.replica.describer(image.total_bytes)
        manifest = describe(tuple(hashlib.sha256(piece).digest() for piece in pieces))
        self.store.write(iter(pieces), image.total_bytes, describe)
        return manifest.root


def expected(table: torch.Tensor) -> float:
    rows = torch.as_tensor(samples().validation(16))
    logits = table[rows[:, :-1]]
    return float(functional.cross_entropy(logits.flatten(0, 1).double(), rows[:, 1:].flatten()))


def test_the_loss_is_of_the_stored_state_while_the_training_goes_on(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    table = peer.replica.demo.parameters[0].detach()
    wanted, root = expected(table), peer.keep()
    table.mul_(50.0)  # the training is past that state
    peer.evaluator.agreed(5, root, 100)
    assert peer.told.wait(240)
    peer.evaluator.finish()
    [made] = peer.found
    assert (made.step, made.device, made.tokens) == (5, "cpu", samples().validation(16)[:, 1:].size)
    assert made.loss == pytest.approx(wanted, abs=AGREE_NATS / 10)
    assert made.set_sha256 == set_sha256(samples().validation(16))


def test_the_stored_state_writes_a_text_that_is_cut_at_the_limit(tmp_path: Path) -> None:
    peer = Peer(tmp_path, write=lambda model: "é" * 600 + str(model.training))
    peer.evaluator.agreed(5, peer.keep(), 100)
    assert peer.told.wait(240)
    peer.evaluator.finish()
    [made] = peer.found
    assert made.sample.endswith("False")
    ada = Identity.from_seed(bytes(32))
    assert open_evaluation(seal_evaluation(ada, RUN, made), run_id=RUN).sample == "é" * 512


class OnCard(HostMaker):
    """A CPU stands for the card."""

    evaluates_short = True


@pytest.mark.parametrize("how", [OnCard, HostMaker])
def test_a_card_without_room_for_fp32_weights_evaluates_in_bf16_and_says_so(
    how: type[HostMaker], tmp_path: Path
) -> None:
    seen: list[tuple[torch.dtype, bool]] = []

    def write(model: torch.nn.Module) -> str:
        seen.append((next(model.parameters()).dtype, torch.is_autocast_enabled("cpu")))
        return ""

    peer = Peer(tmp_path, write=write, maker=lambda model: how(model, torch.device("cpu")))
    table = peer.replica.demo.parameters[0].detach()  # type: ignore[attr-defined]
    wanted, root = expected(table), peer.keep()
    table.mul_(50.0)
    peer.evaluator.agreed(5, root, 100)
    assert peer.told.wait(240)
    peer.evaluator.finish()
    [made] = peer.found
    short = how is OnCard
    assert made.device == ("other" if short else "cpu")
    assert seen == [(torch.bfloat16, True) if short else (torch.float32, False)]
    assert made.loss == pytest.approx(wanted, rel=5e-3 if short else 1e-5)
    assert (peer.evaluator._model is None) is short, "2 bytes a parameter of the card for no longer than it takes"


def test_two_peers_of_one_kind_agree_whatever_their_micro_batch() -> None:
    model, batch = Table(), samples().validation(16)
    found = [held_out_loss(model, batch, torch.device("cpu"), size, lambda: False, 0.0) for size in (1, 3, 16)]
    assert max(found) - min(found) < AGREE_NATS / 100  # type: ignore[type-var,operator]


def test_states_that_are_not_due_or_not_here_are_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.training.held_out.STORE_SECONDS_MAX", 0.0)
    peer = Peer(tmp_path)
    peer.evaluator.agreed(7, peer.keep(), 100)
    peer.evaluator.agreed(5, bytes(32), 100)
    peer.evaluator.finish()
    assert not peer.found


def test_samples_that_are_not_here_yet_leave_a_state_out(tmp_path: Path) -> None:
    asked = []

    def read() -> Batch:
        asked.append(None)
        if len(asked) == 1:
            raise DataError("the shard is on its way")
        return samples().validation(16)

    peer = Peer(tmp_path, read)
    root = peer.keep()
    peer.evaluator.agreed(5, root, 100)
    with peer.evaluator._changed:
        peer.evaluator._changed.wait_for(lambda: bool(asked) and not peer.evaluator._busy, 240)
    peer.evaluator.agreed(10, root, 100)
    assert peer.told.wait(240)
    peer.evaluator.finish()
    assert [made.step for made in peer.found] == [10]


def test_a_set_has_its_own_name() -> None:
    batch = samples().validation(16)
    other = batch.copy()
    other[0, 0] ^= 1
    assert len({set_sha256(batch), set_sha256(other), set_sha256(batch[:-1])}) == 3


def test_what_a_loss_raises_ends_no_evaluator(tmp_path: Path) -> None:
    """A program's own loss may do anything: the next state is evaluated, and the end waits for nothing."""
    peer = Peer(tmp_path)
    answers: list[Any] = [ValueError("no"), RuntimeError("not for memory"), float("nan"), 2.5]

    def own(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        answer = answers[0]
        if isinstance(answer, Exception):
            raise answer
        return torch.tensor(answer)

    log = structlog.get_logger("test")
    read = lambda: samples().validation(CONFIG.evaluation.samples)  # noqa: E731
    made = Evaluator(CONFIG, peer.replica, peer.store, read, peer.tell, 8, log, loss=own)
    root = peer.keep()
    while answers:
        made.agreed(5, root, 10)
        if len(answers) == 1:
            assert peer.told.wait(240)
        made._changed.acquire()
        try:
            assert made._changed.wait_for(lambda: made._waiting is None and not made._busy, 240)
        finally:
            made._changed.release()
        answers.pop(0)
    made.close()
    assert [it.loss for it in peer.found] == [2.5]


def test_what_a_loss_keeps_during_an_evaluation_is_good_for_a_backward_pass() -> None:
    kept: list[torch.Tensor] = []

    def own(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        kept.append(torch.ones(len(rows)))
        return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    held_out_loss(Table(), samples().validation(4), torch.device("cpu"), 4, lambda: False, 0.0, own)
    (kept[0] * torch.ones(4, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
