"""A full disk at the coordinator: one error, a metric, a reason for everybody; nothing lost, and the run goes on with room."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

from coordinator.clock.effects import EntryCommitted
from coordinator.serving import throttled_log
from coordinator.serving.metrics import Metrics
from coordinator.serving.served_coordinator import Serving
from coordinator.serving.throttled_log import FAILING, FULL, RETRY_MS_MAX, Trouble
from coordinator.store import home_files
from coordinator.store.journal import FullDiskError, JournalError
from protos.calls import SessionLostError
from protos.disk import DiskError
from protos.errors import NetworkError
from tests.unit.coordinator.serving import peers, served, tick_of
from tests.unit.coordinator.test_service import WAITS, _open_tick, begin, eventually, one_step
from tests.unit.small_disk import fill, small_disk

LINES = {"error", "warning", "info"}


async def test_a_full_disk_is_one_error_a_metric_and_a_reason_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 120 lines in 20 s that blamed the peers, and no error."""
    monkeypatch.setattr(throttled_log, "RETRY_MS_MIN", 20)
    monkeypatch.setattr(throttled_log, "RETRY_MS_MAX", 20)
    with small_disk(tmp_path / "disk", 4 << 20) as disk, structlog.testing.capture_logs() as lines:
        async with served(disk, WAITS) as here, peers(here, 2) as swarm:
            name = {"run": here.invite.run_id.hex()[:16]}

            def metric(word: str) -> float | None:
                return here.hub.metrics.registry.get_sample_value(f"swarmentum_journal_{word}", name)

            await begin(here, swarm)
            await one_step(swarm)
            assert metric("failing") == 0
            filling, tick = fill(disk), tick_of(await swarm[0].until("tick"))
            await swarm[0].contribute(tick, swarm)
            with pytest.raises(NetworkError, match="disk is full"):
                await swarm[1].contribute(tick, swarm)
            await eventually(lambda: (metric("failures_total") or 0) >= 1)
            assert metric("failing") == 1
            facts, _ = await swarm[0].client.get_run()
            assert facts.reason == FULL
            assert str(disk) not in facts.reason
            await eventually(lambda: not here.runtime.streams.newest)
            with pytest.raises(NetworkError, match="disk is full"):
                await swarm[0].contribute(tick, swarm)
            said = [line for line in lines if line["log_level"] == "error"]
            assert [line["event"] for line in said] == [FULL]
            assert "full" in said[0]["error"]
            assert not [line for line in lines if line["event"] == "a request was refused"]
            filling.unlink()
            for peer in swarm:
                await joins(peer)
            for peer in swarm:
                await peer.contribute(_open_tick(here), swarm)
            await eventually(lambda: here.runtime.run.head_step == 2)
            assert metric("failing") == 0
            facts, _ = await swarm[0].client.get_run()
            assert facts.reason != FULL
            assert any("goes on" in line["event"] for line in lines)
            entries = [r for r in here.journal.records(here.invite.run_id) if isinstance(r, EntryCommitted)]
            assert [r.entry.step for r in entries] == [1, 2]


def test_a_start_on_a_full_disk_ends_with_a_sentence(tmp_path: Path) -> None:
    serving = Serving("127.0.0.1", 1, "127.0.0.1:1", "", "", 1, None, ())
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        fill(disk)
        for write in (home_files.load_or_create, serving.write):
            with pytest.raises(DiskError, match="No space left"):
                write(disk)


async def joins(peer: Any) -> None:
    """As a peer's program does: it follows in its session, and joins only when the coordinator says so."""
    for _ in range(200):
        try:
            with suppress(SessionLostError):
                await anext(peer.client.follow(1))
            await peer.join(from_step=1)
            await peer.ready(1)
        except NetworkError:
            await eventually(lambda: True)
            continue
        return
    raise AssertionError("no room was noticed")


class Lines:
    def __init__(self) -> None:
        self.said: list[str] = []

    def error(self, event: str, **_: Any) -> None:
        self.said.append(event)

    warning = error


def test_an_outage_is_said_once_a_minute_and_tried_less_and_less_often() -> None:
    lines, now = Lines(), 1_000
    made = Trouble(lines, Metrics(), "run")
    made.check(now)
    waits = []
    while now < 200_000:
        again = made.failed(FullDiskError("Auf dem Gerät ist kein Speicherplatz mehr verfügbar"), now, 7)
        waits.append(again - now)
        with pytest.raises(JournalError, match="disk is full"):
            made.check(again - 1)
        made.check(again)
        now = again
    longest = [1_000, 2_000, 4_000, RETRY_MS_MAX]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=False)), waits
    assert RETRY_MS_MAX / 2 <= waits[-1] <= RETRY_MS_MAX
    assert lines.said == [FULL] * 4
    made.over(now, 8)
    assert made.why == ""
    assert len(lines.said) == 5
    made.failed(JournalError("attempt to write a readonly database at /home/ada"), now, 8)
    assert made.why == FAILING
