"""Reports that want no answer: what the coordinator did not take of them, and what a broken stream lost, is reported again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

import pytest

from node.swarm import publication
from node.swarm.facts import Published
from node.swarm.outbox import Outbox
from node.swarm.publication import Reporter
from protos.assignment import Range, SampleShare
from protos.clocks import Waits
from protos.errors import NetworkError, RefusedError
from protos.slices import mask_bytes, mask_of
from protos.tick import Tick
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2
from tests.unit.coordinator.driver import config
from tests.unit.coordinator.serving import peers, served
from tests.waiting import until

RUN, KEYS = b"r" * 32, [bytes([n]) * 32 for n in range(1, 4)]
SECONDS_MAX = 240.0


class Coordinator:
    """The client of a coordinator that takes each report."""

    def __init__(self) -> None:
        self.late: asyncio.Queue[pb.ReportResponse | None] = asyncio.Queue()
        self.quiet: list[pb.ReportBody] = []
        self.asked: list[pb.ReportBody] = []
        self.lost = 0
        self.refuses: RefusedError | None = None
        self.not_taken = ""
        self.log = mock.Mock()
        """Of the peer."""
        self.refused = 0
        self._sequence = 0

    async def tell(self, body: pb.ReportBody) -> pb.ReportResponse:
        self._sequence += 1
        if self.refuses is not None:
            self.refused += 1
            raise self.refuses
        self.asked.append(body)
        if self.not_taken:
            return pb.ReportResponse(refusals=[self.not_taken], sequence=self._sequence)
        return pb.ReportResponse(announcement_taken=body.HasField("announcement"), sequence=self._sequence)

    async def tell_quietly(self, body: pb.ReportBody, begun: Callable[[int], None]) -> None:
        self._sequence += 1
        body.sequence = self._sequence
        begun(self._sequence)
        if self.lost:
            self.lost -= 1
            self.late.put_nowait(None)
            raise NetworkError("lost on the way")
        self.quiet.append(body)


class Counted(Waits):
    """Waits that are over at once; `seconds`: those that the last one would have been."""

    seconds: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__(drawn=lambda: 1.0)
        Counted.seconds = []

    def next(self, most: float | None = None) -> float:
        Counted.seconds.append(super().next(most))
        return 0.0


def tick(step: int = 1, attempt: int = 1) -> Tick:
    return Tick(step, RUN, attempt, tuple(SampleShare(key, 1) for key in KEYS), (Range(0, 3),), 0)


@asynccontextmanager
async def reporting(
    monkeypatch: pytest.MonkeyPatch, *, withholds: bool = True
) -> AsyncIterator[tuple[Coordinator, Outbox]]:
    monkeypatch.setattr(publication, "Waits", Counted)
    coordinator, outbox = Coordinator(), Outbox()
    own = mock.Mock(
        answered=lambda facts, taken: [it for it in facts if isinstance(it, Published) and withholds and not taken]
    )
    view = mock.Mock(step=0)
    tasks: list[asyncio.Task[None]] = []
    runtime = mock.Mock(spawn=lambda task: tasks.append(asyncio.ensure_future(task)), emit=mock.AsyncMock())
    coordinator.log = runtime.log
    made = Reporter(KEYS[0], cast(Any, coordinator), outbox, own, view, runtime)
    made.resume()
    tasks.append(asyncio.ensure_future(made.report_forever()))
    outbox.open_step(tick())
    try:
        yield coordinator, outbox
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def hold_all(outbox: Outbox) -> None:
    for key in KEYS:
        outbox.hold(1, key, key)


ALL = mask_bytes(mask_of(range(3)))


async def test_holdings_are_told_quietly_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reporting(monkeypatch) as (coordinator, outbox):
        hold_all(outbox)
        await until(lambda: bool(coordinator.quiet))
        assert [body.held.places for body in coordinator.quiet] == [ALL]
        assert outbox.next_report() is None
        outbox.add_applied(1, RUN)
        await until(lambda: len(coordinator.quiet) == 2)
        assert not coordinator.quiet[1].HasField("held")
        assert coordinator.asked == []


async def test_votes_that_this_peer_does_not_withhold_are_told_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reporting(monkeypatch, withholds=False) as (coordinator, outbox):
        outbox.announce(1, envelope_pb2.SignedEnvelope(body=b"votes").SerializeToString())
        await until(lambda: bool(coordinator.quiet))
        assert coordinator.quiet[0].HasField("announcement")


async def test_places_that_were_unclear_are_named_in_a_report_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reporting(monkeypatch) as (coordinator, outbox):
        hold_all(outbox)
        await until(lambda: bool(coordinator.quiet))
        unclear = mask_bytes(mask_of([2]))
        coordinator.late.put_nowait(pb.ReportResponse(sequence=coordinator.quiet[0].sequence, unclear=unclear))
        await until(lambda: bool(coordinator.asked))
        [named] = coordinator.asked[0].holdings
        assert named.public_key == KEYS[2]
        assert coordinator.asked[0].held.places == mask_bytes(mask_of([0, 1]))


async def test_an_answer_to_a_report_about_an_earlier_roster_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reporting(monkeypatch) as (coordinator, outbox):
        hold_all(outbox)
        await until(lambda: len(coordinator.quiet) == 1)
        outbox.open_step(tick(attempt=2))
        await until(lambda: len(coordinator.quiet) == 2)
        unclear = mask_bytes(mask_of([2]))
        coordinator.late.put_nowait(pb.ReportResponse(sequence=coordinator.quiet[0].sequence, unclear=unclear))
        await until(coordinator.late.empty)
        assert outbox.next_report() is None
        assert coordinator.asked == []


@pytest.mark.parametrize("when", ["while it is written", "later"])
async def test_what_a_broken_stream_lost_is_told_again_and_answered(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    async with reporting(monkeypatch) as (coordinator, outbox):
        coordinator.lost = int(when == "while it is written")
        hold_all(outbox)
        if when == "later":
            await until(lambda: bool(coordinator.quiet))
            coordinator.late.put_nowait(None)
        await until(lambda: bool(coordinator.asked))
        assert coordinator.asked[-1].held.places == ALL
        assert outbox.next_report() is None
        quiet = len(coordinator.quiet)
        outbox.open_step(tick(attempt=2))
        await until(lambda: len(coordinator.quiet) > quiet)


async def test_a_coordinator_that_refuses_quiet_reports_is_heard_after_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them ends its stream: without a question the peer would open one stream after the other."""
    async with reporting(monkeypatch) as (coordinator, outbox):
        coordinator.refuses = RefusedError("you are excluded")
        hold_all(outbox)
        await until(lambda: bool(coordinator.quiet))
        coordinator.late.put_nowait(None)
        await until(lambda: coordinator.refused > 0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert (len(coordinator.quiet), coordinator.refused) == (1, 1)


async def test_an_announcement_that_nobody_takes_is_told_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that was restored from a backup opens no step: each peer reported five times a second, with a line each."""
    async with reporting(monkeypatch) as (coordinator, outbox):
        coordinator.not_taken = "payload of step 1: none is open"
        outbox.announce(1, envelope_pb2.SignedEnvelope(body=b"votes").SerializeToString())
        await until(lambda: len(Counted.seconds) >= 8)
        assert Counted.seconds[:7] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
        assert coordinator.log.info.call_count == 1
        coordinator.not_taken = ""
        await until(lambda: coordinator.asked[-1].HasField("announcement"))


async def test_what_is_reported_meanwhile_begins_no_second_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report of another fact began one more wait, each of which ended in a report that began the next, for ever."""
    begun = list[float]()
    async with reporting(monkeypatch) as (coordinator, outbox):
        monkeypatch.setattr(Counted, "next", lambda self, most=None: begun.append(1.0) or 3600.0)
        coordinator.not_taken = "payload of step 1: none is open"
        outbox.announce(1, envelope_pb2.SignedEnvelope(body=b"votes").SerializeToString())
        await until(lambda: bool(coordinator.asked))
        for step in range(1, 6):
            before = len(coordinator.asked)
            outbox.add_applied(step, RUN)
            await until(lambda before=before: len(coordinator.asked) > before)  # type: ignore[misc]
        outbox.pause(True)
        await until(lambda: coordinator.asked[-1].HasField("paused"))
        assert len(begun) == 1
        before = len(coordinator.asked)
        outbox.open_step(tick(attempt=2))
        await until(lambda: len(coordinator.asked) > before)  # at once, though the wait is an hour


async def test_after_many_quiet_reports_an_answer_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "UNANSWERED_MAX", 2)
    async with reporting(monkeypatch) as (coordinator, outbox):
        for attempt in range(1, 4):
            outbox.open_step(tick(attempt=attempt))
            hold_all(outbox)
            told = attempt
            await until(lambda told=told: len(coordinator.quiet) + len(coordinator.asked) == told)  # type: ignore[misc]
        assert (len(coordinator.quiet), len(coordinator.asked)) == (2, 1)


async def test_the_coordinator_answers_a_quiet_report_only_where_something_is_wrong(tmp_path: Path) -> None:
    async with served(tmp_path, config(min_peers=2, steps=5)) as here, peers(here, 2) as (ada, bob):
        await ada.join()
        await bob.join()
        numbers: list[int] = []
        await ada.client.tell_quietly(pb.ReportBody(), numbers.append)
        wrong = pb.ReportBody(applied=[pb.AppliedState(step=7, state_digest=bytes(32))])
        await ada.client.tell_quietly(wrong, numbers.append)
        answer = await ada.client.tell(pb.ReportBody())
        late = [ada.client.late.get_nowait() for _ in range(ada.client.late.qsize())]
        assert [it and (it.sequence, bool(it.refusals)) for it in late] == [(numbers[1], True)]
        assert answer.sequence == numbers[1] + 1
        here.hub.coordinators = ("127.0.0.1:1", "127.0.0.1:2")
        await ada.client.tell_quietly(pb.ReportBody(), numbers.append)
        await until(lambda: set(here.hub.coordinators) <= set(ada.client.known.addresses))


async def test_a_stream_that_ends_says_so(tmp_path: Path) -> None:
    async with served(tmp_path, config(min_peers=2, steps=5)) as here, peers(here, 1) as (ada,):
        await ada.join()
        await ada.client.tell_quietly(pb.ReportBody(), lambda _: None)
        ada.client._hang_up()
        assert ada.client.late.get_nowait() is None
        assert not (await ada.client.tell(pb.ReportBody())).refusals, "on another stream, with a signature"
