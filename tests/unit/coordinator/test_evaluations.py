"""Held-out losses at the coordinator: who may report, what journal and log keep, and that they change nothing. ADR 53."""

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.clock.effects import EntryCommitted
from coordinator.clock.events import EntriesReturned, FinishAsked, Reported, WithdrawalAsked
from coordinator.clock.state import EVALUATED_STEPS_KEPT
from coordinator.serving.metrics import Metrics
from coordinator.store import checkpoint
from protos.envelope import Kind
from protos.errors import RefusedError
from protos.evaluation import Evaluation, figures, seal_evaluation
from protos.run_config import EvaluationConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2, log_pb2
from tests.unit.coordinator.driver import RUN_ID, Harness, joined, key, snapshot_at
from tests.unit.coordinator.serving import identity, peers, served
from tests.unit.coordinator.test_machine import opened_together
from tests.unit.coordinator.test_peers import decide
from tests.unit.coordinator.test_service import WAITS, begin, one_step

EVERY_TWO = EvaluationConfig(every=2)


def evaluated(n: int, step: int, loss: float = 2.5, sample: str = "") -> bytes:
    """Without a signature: the door verifies it, and the machine reads the author."""
    body = log_pb2.Evaluation(step=step, loss=loss, tokens=64, set_sha256=bytes(32), device="cpu", sample=sample)
    envelope = envelope_pb2.SignedEnvelope(
        kind=Kind.KIND_EVALUATION, run_id=RUN_ID, public_key=key(n), body=body.SerializeToString()
    )
    return envelope.SerializeToString(deterministic=True)


def at_step(steps: int, every: EvaluationConfig = EVERY_TWO) -> Harness:
    """A run with the snapshot of step 2 agreed."""
    harness = opened_together(evaluation=every, steps=40)
    for _ in range(steps):
        decide(harness, 0, 1, 2)
        head = harness.run.head_step
        if head % 2 == 0:
            for n in range(3):
                harness.feed(Reported(key(n), snapshots=(snapshot_at(head),)))
    return harness


def say(harness: Harness, n: int, step: int, loss: float = 2.5, sample: str = "") -> bytes:
    data = evaluated(n, step, loss, sample)
    harness.feed(Reported(key(n), evaluations=(data,)))
    return data


def test_figures_are_in_the_next_entry_once_and_survive_a_crash() -> None:
    harness = at_step(2)
    before = harness.run
    first, second = say(harness, 0, 2), say(harness, 1, 2, 2.6)
    say(harness, 0, 2, 9.9)  # a second figure of one peer
    assert harness.run.evaluations == {2: {key(0): first, key(1): second}}
    assert replace(harness.run, evaluations={}, unlogged=()) == before, "they change nothing else"
    harness.restart()
    assert harness.run.unlogged == (first, second)
    harness.comes(*range(3), at=2)
    decide(harness, 0, 1, 2)
    decide(harness, 0, 1, 2)
    assert [entry.evaluations for entry in harness.entries] == [(), (), (first, second), ()]


def test_only_agreed_due_states_and_peers_whose_word_counts() -> None:
    harness = at_step(2)
    harness.feed(joined(7))
    say(harness, 7, 2)
    assert "not connected" in harness.refusals[-1]
    say(harness, 0, 1)
    assert "not to be evaluated, or not agreed" in harness.refusals[-1]
    say(harness, 0, 4)
    assert "not to be evaluated, or not agreed" in harness.refusals[-1]
    off = at_step(2, EvaluationConfig())
    say(off, 0, 2)
    assert "not to be evaluated" in off.refusals[-1]
    newcomer = at_step(2)
    newcomer.run = replace(newcomer.run, voted={2: replace(newcomer.run.voted[2], counted=frozenset({key(1)}))})
    say(newcomer, 0, 2)
    assert "your word on this state does not count" in newcomer.refusals[-1]
    assert not newcomer.run.evaluations


def test_text_of_the_model_only_in_a_run_that_asks_for_it() -> None:
    harness = at_step(2)
    say(harness, 0, 2, sample="buy now")
    assert "asks for no text" in harness.refusals[-1]
    assert not harness.run.evaluations
    asks = at_step(2, EvaluationConfig(every=2, sample_tokens=8))
    assert asks.run.evaluations == {}
    data = say(asks, 0, 2, sample="once upon")
    assert asks.run.evaluations == {2: {key(0): data}}


def test_memory_is_bounded() -> None:
    harness = at_step(2)
    for step in range(2, 30, 2):
        say(harness, 0, step)
        decide(harness, 0, 1, 2)
        decide(harness, 0, 1, 2)
        for n in range(3):
            harness.feed(Reported(key(n), snapshots=(snapshot_at(harness.run.head_step),)))
    assert len(harness.run.evaluations) == EVALUATED_STEPS_KEPT


def test_the_last_state_may_be_evaluated_after_the_end() -> None:
    harness = at_step(2)
    decide(harness, 0, 1, 2)
    harness.feed(FinishAsked(""))
    for n in range(3):
        harness.feed(Reported(key(n), snapshots=(snapshot_at(3),)))
    data = say(harness, 0, 3)
    assert harness.run.evaluations[3] == {key(0): data}, "no multiple of two, and the last state"


def test_entries_that_come_back_bring_their_figures() -> None:
    lived = at_step(2)
    kept = list(lived.journal)
    data = say(lived, 0, 2)
    decide(lived, 0, 1, 2)
    lost = Harness(lived.settings)
    lost.load(kept)
    lost.feed(joined(0))
    entries = tuple(record for record in lived.journal if isinstance(record, EntryCommitted))
    lost.feed(EntriesReturned(key(0), entries, len(entries)))
    assert lost.run.evaluations == {2: {key(0): data}}
    assert not lost.run.unlogged


def test_a_checkpoint_and_the_metrics_have_them() -> None:
    harness = at_step(2)
    say(harness, 0, 2)
    say(harness, 1, 2, 2.502)
    run = replace(harness.run, step=None)
    assert checkpoint.load(Harness(harness.settings).run, checkpoint.dump(run)).evaluations == run.evaluations
    metrics = Metrics()
    metrics.observe(harness.run)
    name = {"run": RUN_ID.hex()[:16]}
    assert metrics.registry.get_sample_value("swarmentum_held_out_loss_nats", name) == pytest.approx(2.501)
    assert metrics.registry.get_sample_value("swarmentum_held_out_spread_nats", name) == pytest.approx(0.002)


async def test_a_figure_of_another_peer_and_a_damaged_one_stop_at_the_door(tmp_path: Path) -> None:
    settings = WAITS.model_copy(update={"evaluation": EvaluationConfig(every=WAITS.clock.snapshot_every)})
    async with served(tmp_path, settings) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        await one_step(swarm)
        made = Evaluation(b"", 1, 2.5, 64, bytes(32), "cpu")
        theirs = seal_evaluation(identity(1), here.invite.run_id, made)
        with pytest.raises(RefusedError, match="another peer signed"):
            await swarm[0].client.report(pb.ReportBody(evaluations=[theirs]))
        with pytest.raises(RefusedError):
            await swarm[0].client.report(pb.ReportBody(evaluations=[theirs[:-1] + b"?"]))
        facts, _ = await swarm[0].client.get_run()
        assert figures(facts.evaluations, here.invite.run_id) == []


def test_a_state_whose_figures_are_forgotten_gets_no_more_of_them() -> None:
    """An attacker wants to write a figure of an old state again and again, once snapshots were withdrawn."""
    harness = at_step(8)
    for step in (2, 4, 6, 8):
        say(harness, 0, step)
    harness.feed(WithdrawalAsked(4))
    for _ in range(2):
        decide(harness, 0, 1, 2)
    for n in range(3):
        harness.feed(Reported(key(n), snapshots=(snapshot_at(10),)))
    say(harness, 0, 10)
    assert [fact.step for fact in harness.run.snapshots] == [2, 10]
    assert sorted(harness.run.evaluations) == [4, 6, 8, 10]
    journal = len(harness.journal)
    for _ in range(100):
        say(harness, 0, 2)
    assert len(harness.journal) == journal
    assert len(harness.run.unlogged) <= 1
