"""A peer's spans of a step: what it did itself, what it waited for, and nothing of a log that it only replays."""

import time
from types import SimpleNamespace
from typing import Any

from node.swarm.facts import Committed, Opened
from node.training.telemetry import STEPS_KEPT, Spans
from protos.assignment import Range
from protos.tick import Tick

RUN, KEY = b"r" * 32, b"k" * 32


class Recorded:
    """Keeps spans instead of sending them."""

    def __init__(self) -> None:
        self.spans = list[tuple[int, str, float, float, dict[str, Any]]]()

    def part(self, run_id: bytes, step: int, public_key: bytes, name: str, span: Any, /, **values: Any) -> None:
        assert (run_id, public_key) == (RUN, KEY)
        self.spans.append((step, name, *span, values))

    child = part

    @property
    def names(self) -> list[tuple[int, str]]:
        return [(step, name) for step, name, *_ in self.spans]


def opened(step: int, attempt: int = 1, samples: int = 4) -> Opened:
    tick = Tick(step, b"h" * 32, attempt, (), (), 0)
    return Opened(tick, (Range(0, samples),) if samples else None, 1000)


def committed(step: int, came: float, whole: float) -> Committed:
    signed: Any = SimpleNamespace(entry=SimpleNamespace(step=step, contributions=(1, 2)))
    return Committed(signed, (), came=came, whole=whole)


def test_a_step_from_its_tick_to_its_applied_entry() -> None:
    recorded = Recorded()
    spans = Spans(recorded, RUN, KEY)  # type: ignore[arg-type]
    spans.opened(opened(3))
    for name in ("compute", "vote", "publish"):
        with spans.timed(3, name):
            pass
    published = time.monotonic()
    spans.opened(opened(3, attempt=2, samples=0))
    spans.decided(committed(3, published + 1, published + 2))
    with spans.timed(3, "apply"):
        pass
    spans.applied(3, accepted=True)
    spans.applied(3, accepted=False)  # again, after a re-sync
    with spans.timed(3, "snapshot", kept=True):
        pass
    assert [name for _, name in recorded.names] == [
        "compute", "vote", "publish", "wait", "payloads", "apply", "peer", "snapshot"
    ]  # fmt: skip
    by_name = {name: (began, ended, values) for _, name, began, ended, values in recorded.spans}
    assert by_name["wait"][0] <= published
    assert by_name["wait"][1] == by_name["payloads"][0] == published + 1
    assert by_name["payloads"][1:] == (published + 2, {"payloads": 2})
    assert by_name["peer"][2] == {"attempt": 2, "asked": True, "accepted": True, "applied": True}
    assert by_name["peer"][0] <= by_name["compute"][0]
    spans.close()
    assert len(recorded.spans) == 8


def test_a_replayed_step_is_nothing_and_one_that_is_left_open_is_told() -> None:
    recorded = Recorded()
    spans = Spans(recorded, RUN, KEY)  # type: ignore[arg-type]
    with spans.timed(1, "apply"):
        pass
    spans.decided(committed(1, 1.0, 2.0))
    spans.applied(1, accepted=False)
    assert recorded.spans == []
    for step in range(2, STEPS_KEPT + 10):
        spans.opened(opened(step))
        spans.applied(step, accepted=True)
    recorded.spans.clear()
    spans.opened(opened(1000))
    spans.close()
    assert recorded.names == [(1000, "peer")]
    assert recorded.spans[0][4]["applied"] is False
    assert len(spans._parts) == STEPS_KEPT


def test_without_a_receiver_nothing_is_kept() -> None:
    spans = Spans()
    spans.opened(opened(1))
    with spans.timed(1, "compute"):
        pass
    spans.decided(committed(1, 1.0, 2.0))
    spans.applied(1, accepted=True)
    spans.close()
    assert not spans._parts


def test_metrics_get_the_seconds_of_each_part_without_a_receiver_of_traces() -> None:
    spans, began = Spans(summed=True), time.monotonic()
    for step in (3, 4):
        spans.opened(opened(step))
        with spans.timed(step, "compute"):
            time.sleep(0.01)
        now = time.monotonic()
        spans.decided(committed(step, now + 1, now + 3))
        spans.applied(step, accepted=True)
    with spans.timed(9, "apply"):  # of a log that this peer only replays
        pass
    assert spans.seconds.keys() == {"compute", "wait", "payloads"}
    lasted = time.monotonic() - began
    assert 0.02 <= spans.seconds["compute"] <= lasted
    assert 2 <= spans.seconds["wait"] <= 2 + lasted
    assert round(spans.seconds["payloads"], 6) == 4
    silent = Spans()
    silent.opened(opened(3))
    with silent.timed(3, "compute"):
        pass
    silent.applied(3, accepted=True)
    silent.close()
    assert silent.seconds == {}
