"""Caps: the pace of bytes, the month's count, and the part of the time that the training thread works. Virtual clocks."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from structlog.testing import capture_logs

from node.blobs.blobs import BURST_SECONDS, RELAYED_SECONDS_MAX, FlowDirection
from node.donor.live import MONTH_FILE, MONTHS_KEPT, Month
from node.donor.owner_settings import LiveSettings
from node.training.resource_limits import OWED_SECONDS_MAX, Throttle


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer, so that waits cost no time."""

    at = 1000.0

    def time(self) -> float:
        return self.at

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.at = max(self.at, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(work: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def test_bytes_of_several_streams_together_keep_the_rate() -> None:
    async def main() -> float:
        lane = FlowDirection(lambda: 100_000.0)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(stream(lane) for _ in range(8)))
        return asyncio.get_running_loop().time() - began

    async def stream(lane: FlowDirection) -> None:
        for _ in range(25):
            await lane.take(5000)

    seconds = run(main())
    assert seconds == pytest.approx(8 * 25 * 5000 / 100_000, abs=2 * BURST_SECONDS)


def test_bytes_that_were_relayed_come_off_the_rate_and_cost_own_votes_a_few_seconds_at_most() -> None:
    async def main(relayed: int) -> float:
        lane = FlowDirection(lambda: 100_000.0)
        began = asyncio.get_running_loop().time()
        lane.relayed(relayed)
        lane.relayed(relayed)  # nothing new
        for _ in range(10):
            await lane.take(50_000)
        return asyncio.get_running_loop().time() - began

    alone = run(main(0))
    assert run(main(200_000)) == pytest.approx(alone + 2.0, abs=2 * BURST_SECONDS)
    assert run(main(10**9)) == pytest.approx(alone + RELAYED_SECONDS_MAX, abs=2 * BURST_SECONDS)


def test_an_owner_with_a_cap_relays_nothing_without_saying_so() -> None:
    assert LiveSettings().relaying_mbit is None
    assert LiveSettings(relay_mbit=3).relaying_mbit == 3
    for capped in (LiveSettings(upload_mbit=5), LiveSettings(download_mbit=5)):
        assert capped.relaying_mbit == 0
        assert capped.model_copy(update={"relay_mbit": 1.0}).relaying_mbit == 1


def test_votes_go_before_the_pieces_of_strangers() -> None:
    async def main() -> list[str]:
        lane, order = FlowDirection(lambda: 10_000.0), []

        async def one(name: str, *, urgent: bool) -> None:
            await lane.take(10_000, urgent=urgent)
            order.append(name)

        pieces = [asyncio.create_task(one(f"piece {number}", urgent=False)) for number in range(3)]
        await asyncio.sleep(0.5)
        votes = asyncio.create_task(one("votes", urgent=True))
        await asyncio.gather(votes, *pieces)
        return order

    assert run(main()) == ["piece 0", "votes", "piece 1", "piece 2"]


def test_a_new_rate_counts_for_those_that_wait_already() -> None:
    async def main() -> float:
        rate: list[float | None] = [10.0]
        lane = FlowDirection(lambda: rate[0])
        await lane.take(10_000)
        waits = asyncio.create_task(lane.take(10_000))
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(1)
        rate[0] = None
        await waits
        return asyncio.get_running_loop().time() - began

    assert run(main()) <= 3.0


def test_a_way_that_is_shut_waits_until_it_is_opened() -> None:
    async def main() -> bool:
        lane = FlowDirection()
        await lane.opened()
        lane.shut = True
        waits = asyncio.create_task(lane.opened())
        await asyncio.sleep(10)
        assert not waits.done()
        lane.shut = False
        await asyncio.wait_for(waits, 2)
        return True

    assert run(main())


def test_the_month_counts_across_restarts_and_begins_anew(tmp_path: Path) -> None:
    log = structlog.get_logger()
    month = Month(tmp_path, log)
    month.count("2026-11", 100, 10)
    month.count("2026-11", 150, 10)
    again = Month(tmp_path, log)
    assert (again.up, again.down) == (150, 10)
    again.count("2026-11", 7, 3)
    assert (again.up, again.down) == (157, 13)
    again.count("2026-12", 9, 3)
    assert (again.up, again.down) == (2, 0), "bytes since the last look count for the new month"
    assert json.loads((tmp_path / MONTH_FILE).read_text()) == {
        "month": "2026-12", "up": 2, "down": 0, "others": {"2026-11": [157, 13]}
    }  # fmt: skip


def test_a_clock_that_is_wrong_for_a_while_empties_no_month(tmp_path: Path) -> None:
    """A machine without a battery for its clock begins each start in 1970."""
    log = structlog.get_logger()
    Month(tmp_path, log).count("2026-11", 900, 90)
    for _ in range(10):
        month = Month(tmp_path, log)
        month.count("1970-01", 1, 1)
        month.count("2026-11", 3, 2)
    assert (month.up, month.down) == month.of("2026-11") == (920, 100)
    month.count("2099-01", 3, 2)
    assert Month(tmp_path, log).of("2026-11") == (920, 100)
    for number in range(1, 13):
        month.count(f"2050-{number:02}", 3, 2)
    assert len(json.loads((tmp_path / MONTH_FILE).read_text())["others"]) == MONTHS_KEPT


@pytest.mark.parametrize("text", ["", "{", "[]", '{"month": "2026-11"}', '{"month": "2026-11", "up": "x", "down": 0}'])
def test_a_damaged_count_begins_anew_and_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / MONTH_FILE).write_text(text)
    with capture_logs() as lines:
        month = Month(tmp_path, structlog.get_logger())
    assert (month.up, month.down) == (0, 0)
    assert "counts from now on" in lines[0]["event"]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.at, self.worked, self.slept = 50.0, 0.0, 0.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        self.slept += seconds

    def work(self, seconds: float) -> None:
        self.at += seconds
        self.worked += seconds


@pytest.mark.parametrize("part", [0.05, 0.25, 0.5, 0.9])
def test_the_device_works_its_part_of_the_time_and_waiting_counts_as_rest(part: float) -> None:
    clock = Clock()
    throttle = Throttle(lambda: LiveSettings(duty_cycle=part), clock.now, clock.sleep)
    began, stops = clock.at, throttle.resting_until(lambda: False)
    for _ in range(50):
        with throttle.resting():
            clock.at += 0.02
        for _ in range(4):
            assert not stops()
            clock.work(0.1)
    stops()
    assert 0.97 * part <= clock.worked / (clock.at - began) <= 1.001 * part


def test_a_rest_ends_with_the_step_and_no_limit_is_no_rest() -> None:
    clock = Clock()
    settings = [LiveSettings(duty_cycle=0.1)]
    throttle = Throttle(lambda: settings[0], clock.now, clock.sleep)
    ends = clock.at + 2.0
    clock.work(1.0)
    assert throttle.resting_until(lambda: clock.at >= ends)()
    assert clock.at == pytest.approx(ends, abs=0.06)
    clock.work(1000.0)
    before = clock.slept
    assert not throttle.resting_until(lambda: False)()
    assert clock.slept - before <= OWED_SECONDS_MAX + 0.1
    settings[0] = LiveSettings()
    before = clock.slept
    clock.work(10.0)
    assert not throttle.resting_until(lambda: False)()
    assert clock.slept == before


def test_threads_change_and_come_back() -> None:
    first = torch.get_num_threads()
    settings = [LiveSettings()]
    throttle = Throttle(lambda: settings[0])
    try:
        for wanted, expected in ((first + 2, first + 2), (None, first)):
            settings[0] = LiveSettings(threads=wanted)
            throttle.refresh()
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(first)
