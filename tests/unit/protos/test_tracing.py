"""Spans as a receiver gets them: ids that all parties derive, the sampler's choice of steps, errors in plain words."""

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from protos.errors import OperatorError
from protos.tracing import Tracing, ids_of, part_of
from tests.system.otlp import Receiver, attributes

pytest.importorskip("opentelemetry.sdk", reason="needs the extra swarmentum[trace]")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra swarmentum[trace]")

RUN, ADA, BOB = b"r" * 32, b"a" * 32, b"b" * 32


class Log:
    def __init__(self) -> None:
        self.lines = list[tuple[str, dict[str, Any]]]()

    def warning(self, event: str, **facts: Any) -> None:
        self.lines.append((event, facts))


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield receiver
    receiver.close()


def test_ids_differ_by_run_step_and_peer() -> None:
    traces = {ids_of(run, step) for run in (RUN, b"s" * 32) for step in (1, 2, 3)}
    assert len(traces) == 6
    assert len({root for _, root in traces} | {part_of(RUN, 1, key) for key in (ADA, BOB)}) == 8


def test_the_spans_of_two_programs_are_one_tree(receiver: Receiver) -> None:
    log = Log()
    coordinator, peer = Tracing("coordinator", "c", log), Tracing("peer", "ada", log)
    before, now = time.time_ns(), time.monotonic()
    coordinator.root(RUN, 7, "step", (now - 2.0, now - 1.0), roster=2)
    peer.part(RUN, 7, ADA, "peer", (now - 1.5, now - 1.0))
    peer.child(RUN, 7, ADA, "compute", (now - 1.5, now - 1.25), ahead=False)
    for tracing in (coordinator, peer):
        tracing.close()
    trace, root = ids_of(RUN, 7)
    found = {span.name: span for _, _, span in receiver.of(trace)}
    assert found.keys() == {"step", "peer", "compute"}
    ids = {name: int.from_bytes(span.span_id, "big") for name, span in found.items()}
    assert (ids["step"], ids["peer"]) == (root, part_of(RUN, 7, ADA))
    assert found["step"].parent_span_id == b""
    assert found["peer"].parent_span_id == found["step"].span_id
    assert found["compute"].parent_span_id == found["peer"].span_id
    took = found["compute"].end_time_unix_nano - found["compute"].start_time_unix_nano
    assert took == pytest.approx(250_000_000, abs=2)
    assert found["step"].start_time_unix_nano < before
    assert attributes(found["compute"]) == {"ahead": False, "run": RUN.hex()[:16], "step": 7}
    assert [it[:2] for it in receiver.of(trace)].count(("peer", "ada")) == 2
    assert log.lines == []


def test_all_parties_sample_the_same_steps(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    coordinator, peer = Tracing("coordinator", "c", Log()), Tracing("peer", "ada", Log())
    for step in range(1, 201):
        coordinator.root(RUN, step, "step", (1.0, 2.0))
        peer.part(RUN, step, ADA, "peer", (1.0, 2.0))
    for tracing in (coordinator, peer):
        tracing.close()
    steps = {service: [attributes(it)["step"] for who, _, it in receiver.spans if who == service]
             for service in ("coordinator", "peer")}  # fmt: skip
    assert sorted(steps["coordinator"]) == sorted(steps["peer"])
    assert 20 < len(steps["peer"]) < 80


def test_the_owners_name_of_the_service_counts(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = Tracing("peer", "ada", Log())
    tracing.part(RUN, 1, ADA, "peer", (1.0, 2.0))
    tracing.close()
    assert [service for service, *_ in receiver.spans] == ["mine"]


def test_a_span_that_the_library_refuses_costs_a_line_of_the_log(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    tracing = Tracing("peer", "ada", log)

    def fails(*_args: Any, **_values: Any) -> None:
        raise ValueError("not this one")

    monkeypatch.setattr(tracing._tracer, "start_span", fails)
    for step in range(1, 100):
        tracing.part(RUN, step, ADA, "peer", (1.0, 2.0))
    tracing.close()
    assert log.lines == [("traces: spans may be lost", {"why": "ValueError: not this one", "more": 0})]


def test_an_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(OperatorError, match=r"pip install '\.\[trace\]'"):
        Tracing("peer", "ada", Log())


def test_a_protocol_that_is_not_spoken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(OperatorError, match="OTEL_EXPORTER_OTLP_PROTOCOL=grpc: this program sends http/protobuf alone"):
        Tracing("peer", "ada", Log())
