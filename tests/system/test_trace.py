"""`--trace`: one trace a step holds what the coordinator and both peers did. A receiver that is away costs no step."""

import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from protos.tracing import ids_of
from tests.system.local_swarm import LocalSwarm, Process, toml_of_run, wait_for
from tests.system.otlp import Receiver, attributes

pytest.importorskip("opentelemetry.sdk", reason="needs the extra swarmentum[trace]")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra swarmentum[trace]")
pytestmark = pytest.mark.system

RUN = toml_of_run("traced", clock={"steps": 4, "batch_samples": 8, "min_peers": 2, "snapshot_every": 2, "strict": True})
STEPS = 4
AT_COORDINATOR = {"step", "report", "quorum", "write"}
AT_PEER = {"peer", "compute", "vote", "publish", "payloads", "apply"}


class TracedSwarm(LocalSwarm):
    """Its coordinator sends traces."""

    def __init__(self, folder: Path, run_toml: str, environment: dict[str, str]) -> None:
        self.environment = {"OTEL_BSP_SCHEDULE_DELAY": "200", "NO_PROXY": "127.0.0.1", **environment}
        super().__init__(folder, run_toml)

    def surroundings(self, name: str) -> dict[str, str]:
        return self.environment

    def start(self, name: str, *command: str, environment: dict[str, str] | None = None) -> Process:
        traced = ("--trace",) if "serve" in command else ("--set", "track=otlp") if "join" in command else ()
        return super().start(name, *command, *traced, environment=environment)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_a_trace_of_a_step_holds_spans_of_the_coordinator_and_of_both_peers(tmp_path: Path, receiver: Receiver) -> None:
    began = time.time_ns()
    with TracedSwarm(tmp_path, RUN, {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}) as swarm:
        peers = [swarm.join(name) for name in ("ada", "bob")]
        ended = [peer.finish() for peer in peers]
        assert [code for code, _ in ended] == [0, 0], (tmp_path / "ada.log").read_text()[-2000:]
        run_id, keys = swarm.invite.run_id, [values["id"] for _, values in ended]
        swarm.processes["coordinator"].interrupt()
        swarm.processes["coordinator"].child.wait(60)
    over = time.time_ns()
    for step in range(1, STEPS + 1):
        trace, root = ids_of(run_id, step)
        spans = receiver.of(trace)
        by_service = {
            who: [span for service, _, span in spans if service == who]
            for who in ("swarmentum-coordinator", "swarmentum-peer")
        }
        assert {span.name for span in by_service["swarmentum-coordinator"]} >= AT_COORDINATOR
        assert {instance for service, instance, _ in spans if service == "swarmentum-peer"} == set(keys)
        assert began <= min(span.start_time_unix_nano for *_, span in spans)
        assert max(span.end_time_unix_nano for *_, span in spans) <= over
        assert all(attributes(span)["step"] == step for *_, span in spans)
        assert all(attributes(span)["run"] == run_id.hex()[:16] for *_, span in spans)
        check_coordinator(by_service["swarmentum-coordinator"], root)
        for key in keys:
            check_peer([span for _, instance, span in spans if instance == key], root)
    names = {span.name for *_, span in receiver.spans}
    assert names - AT_COORDINATOR - AT_PEER <= {"wait", "snapshot"}
    assert "snapshot" in names
    assert {int.from_bytes(span.trace_id, "big") for *_, span in receiver.spans} == {
        ids_of(run_id, step)[0] for step in range(1, STEPS + 1)
    }
    assert not swarm.events("ada", "traces: spans may be lost")


def check_coordinator(spans: list[Any], root: int) -> None:
    """One root with the derived id; its children lie inside it; both peers reported."""
    [top] = [span for span in spans if span.name == "step"]
    assert int.from_bytes(top.span_id, "big") == root
    assert not top.parent_span_id
    facts = attributes(top)
    assert (facts["roster"], facts["announced"], facts["accepted"], facts["run_name"]) == (2, 2, 2, "traced")
    assert len([span for span in spans if span.name == "report"]) == 2
    inside(top, [span for span in spans if span is not top])


def check_peer(spans: list[Any], root: int) -> None:
    """One part of the step below the root; inside it, in the order of a step: compute, vote, publish, payloads, apply."""
    by_name = {span.name: span for span in spans}
    assert by_name.keys() >= AT_PEER
    part = by_name["peer"]
    assert int.from_bytes(part.parent_span_id, "big") == root
    assert attributes(part)["accepted"] is True
    assert all(span.parent_span_id == part.span_id for span in spans if span is not part)
    during = [by_name[name] for name in ("compute", "vote", "publish", "apply")]
    inside(part, during)
    for first, second in pairwise(during):
        assert first.end_time_unix_nano <= second.start_time_unix_nano + CLOCK_NS
    payloads = by_name["payloads"]
    assert payloads.end_time_unix_nano <= by_name["apply"].start_time_unix_nano + CLOCK_NS


CLOCK_NS = 1_000_000
"""The coordinator's clock has whole milliseconds."""


def inside(outer: Any, inner: list[Any]) -> None:
    for span in inner:
        assert outer.start_time_unix_nano - CLOCK_NS <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= outer.end_time_unix_nano + CLOCK_NS


@pytest.mark.nightly
def test_a_receiver_that_does_not_answer_costs_no_step(tmp_path: Path) -> None:
    """The address takes connections and never says a word, for the coordinator and the peers alike."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        swarm = TracedSwarm(tmp_path, RUN, {"OTEL_EXPORTER_OTLP_ENDPOINT": where, "OTEL_BSP_MAX_QUEUE_SIZE": "20",
                                            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "10"})  # fmt: skip
        try:
            peers = [swarm.join(name) for name in ("ada", "bob")]
            assert [peer.finish()[0] for peer in peers] == [0, 0]
            assert swarm.last_step("ada") == STEPS
            wait_for("the end of the log", lambda: swarm.events("ada", "the last spans are not sent: their receiver is "
                                                                "too slow or does not answer"))  # fmt: skip
            assert len(swarm.events("ada", "traces: spans may be lost")) <= 1
        finally:
            swarm.close()
