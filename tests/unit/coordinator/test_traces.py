"""The coordinator's spans of a step, from the machine's own events: reports, a roster that is given up, the decision."""

from typing import Any

import pytest

from coordinator.clock.effects import Effect
from coordinator.clock.events import Disconnected, Event
from coordinator.serving.metrics import REPORTS_MAX, StepTraces
from protos.identity import short
from tests.unit.coordinator.driver import RUN_ID, Harness, key
from tests.unit.coordinator.test_machine import contribute, opened, opened_together

WRITTEN_MS = 3


class Recorded:
    """Keeps spans instead of sending them: (step, name, begin and end in ms, values)."""

    def __init__(self) -> None:
        self.spans = list[tuple[int, str, int, int, dict[str, Any]]]()
        self.parts, self.parts_without_tracing = dict[str, float](), dict[str, float]()

    def took(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def took_silently(self, part: str, seconds: float) -> None:
        self.parts_without_tracing[part] = self.parts_without_tracing.get(part, 0.0) + seconds

    def root(self, run_id: bytes, step: int, name: str, span: tuple[float, float], /, **values: Any) -> None:
        self.child(run_id, step, None, name, span, **values)

    def child(self, run_id: bytes, step: int, public_key: Any, name: str, span: Any, /, **values: Any) -> None:
        assert (run_id, public_key) == (RUN_ID, None)
        self.spans.append((step, name, round(1000 * span[0]), round(1000 * span[1]), values))


def traced(harness: Harness) -> Recorded:
    """What the coordinator records of this machine from now on. The effects of an event take WRITTEN_MS."""
    recorded = Recorded()
    traces = StepTraces(recorded, RUN_ID, recorded.took)  # type: ignore[arg-type]
    silent = StepTraces(None, RUN_ID, recorded.took_silently)
    feed = harness.feed

    def observed(event: Event) -> list[Effect]:
        before = harness.run
        effects = feed(event)
        for one in (traces, silent):
            one.observe(before, harness.run, event, harness.now, harness.now + WRITTEN_MS)
        return effects

    harness.feed = observed  # type: ignore[method-assign]
    return recorded


def test_a_step_is_reports_a_quorum_and_a_write() -> None:
    harness = opened(2)
    began = harness.now
    recorded = traced(harness)
    harness.now += 100
    contribute(harness, 0, holders=())
    harness.now += 50
    contribute(harness, 1, holders=())
    harness.now += 25
    contribute(harness, 0, 1)
    assert harness.run.head_step == 1
    by_name = {name: (first, last) for _, name, first, last, _ in recorded.spans}
    assert [(name, step) for step, name, *_ in recorded.spans] == [
        ("report", 1), ("report", 1), ("quorum", 1), ("write", 1), ("step", 1)
    ]  # fmt: skip
    first, second = (it for it in recorded.spans if it[1] == "report")
    assert (first[2:4], first[4]["peer"]) == ((began, began + 100), short(key(0)))
    assert (second[2:4], second[4]["peer"]) == ((began, began + 150), short(key(1)))
    assert by_name["quorum"] == (began + 150, began + 175)
    assert by_name["write"] == (began + 175, began + 175 + WRITTEN_MS)
    assert by_name["step"] == (began, began + 175 + WRITTEN_MS)
    assert recorded.parts == pytest.approx({"announcements": 0.15, "quorum": 0.025, "write": WRITTEN_MS / 1000})
    assert recorded.parts_without_tracing == recorded.parts
    values = recorded.spans[-1][4]
    assert (values["roster"], values["announced"], values["accepted"], values["attempt"]) == (2, 2, 2, 1)


def test_a_roster_that_is_given_up_is_an_attempt_of_the_same_trace() -> None:
    harness = opened_together(3)
    began = harness.now
    recorded = traced(harness)
    harness.feed(Disconnected(key(2), leaving=True))
    harness.late()
    assert harness.run.step.tick.attempt == 2
    contribute(harness, 0, 1)
    names = [(step, name) for step, name, *_ in recorded.spans]
    assert names == [(1, "attempt"), (1, "report"), (1, "report"), (1, "quorum"), (1, "write"), (1, "step")]
    assert recorded.spans[0][2:] == (began, harness.now, {"attempt": 1})
    assert recorded.spans[-1][2] == began
    assert recorded.spans[-1][4]["attempt"] == 2


def test_many_peers_have_a_bounded_number_of_spans() -> None:
    peers = REPORTS_MAX + 6
    harness = opened(peers, batch_samples=peers)
    recorded = traced(harness)
    contribute(harness, *range(peers))
    assert harness.run.head_step == 1
    assert [name for _, name, *_ in recorded.spans].count("report") == REPORTS_MAX
    assert recorded.spans[-1][4]["announced"] == peers
