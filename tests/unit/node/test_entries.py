"""Entries in order: what is dropped before a re-sync stays dropped, however many were on their way."""

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

from node.swarm.entries import ENTRIES_AHEAD_MAX, WAITING_BYTES_MAX, Entries, Witness
from node.swarm.runtime import Counters, Runtime, View
from protos.assignment import Range, SampleShare
from protos.identity import Identity
from protos.log import Entry, SignedEntry, seal_entry
from protos.tick import Tick

RUN = b"r" * 32
ADA, COORDINATOR = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))


def log_of(steps: int) -> list[SignedEntry]:
    entries: list[SignedEntry] = []
    for step in range(1, steps + 1):
        parent = entries[-1].hash if entries else RUN
        entries.append(seal_entry(COORDINATOR, RUN, Entry(step, parent, (), 0, b"", (), 0)))
    return entries


class Played:
    """Entries whose payloads are nowhere, so that none is ever collected; `collected` are those that were begun."""

    def __init__(self, folder: Path) -> None:
        self.collected: list[int] = []
        self.entry_bytes = 1000
        self.view = View(RUN, COORDINATOR.public_key)
        self.emit = mock.AsyncMock()
        self.runtime = Runtime(ADA.public_key, self.emit, Counters(), self.view)
        self.entries = Entries(
            ADA.public_key,
            witness=Witness(RUN, COORDINATOR.public_key, folder),
            collector=mock.Mock(collect=self.collect, bytes_of=lambda signed: self.entry_bytes),
            announcements=mock.Mock(named_in=lambda entry: {}, disputed=lambda entry: []),
            auditor=mock.Mock(),
            publication=mock.Mock(named_in=lambda entry: None, announced_in=lambda step: b""),
            outbox=mock.Mock(),
            topic=mock.Mock(),
            view=self.view,
            runtime=self.runtime,
        )

    async def collect(self, signed: SignedEntry, said: Any, aggregators: Any) -> None:
        self.collected.append(signed.entry.step)
        await asyncio.Event().wait()

    async def drop(self, *more: asyncio.Task[Any]) -> None:
        """As `Session.halt` does."""
        tasks = [*more, *self.entries.drop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns(5)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_nothing_overheard_comes_after_a_drop(tmp_path: Path) -> None:
    """With a full queue, one gossiped entry waited for room in it and others for that one; emptying it let them in."""
    played, log = Played(tmp_path), log_of(ENTRIES_AHEAD_MAX + 4)
    played.entries.start(0, RUN)
    for signed in log:
        played.entries.receive_gossiped(signed.envelope)
        await turns(3)
    assert len(played.collected) == ENTRIES_AHEAD_MAX + 1, "the queue is full, and one entry waits for room"
    assert len(played.runtime.tasks) > ENTRIES_AHEAD_MAX + 1
    await played.drop()
    assert played.entries.drop() == []
    assert not played.runtime.tasks, "a task is left that nobody would end before the session does"


async def test_nothing_of_the_stream_comes_after_a_drop(tmp_path: Path) -> None:
    """Its task is ended through another one, a turn later: until then it would put what waited, and take more."""
    played, log = Played(tmp_path), log_of(ENTRIES_AHEAD_MAX + 4)

    async def stream() -> None:
        for signed in log:
            await played.entries.receive(signed.envelope)

    async def follow() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(stream())

    played.entries.start(0, RUN)
    following = asyncio.ensure_future(follow())
    await turns(2 * len(log))
    assert len(played.collected) == ENTRIES_AHEAD_MAX + 1
    await played.drop(following)
    assert played.entries.drop() == []
    assert not played.runtime.tasks


async def test_what_is_overheard_between_two_followings_is_not_delivered_by_the_second(tmp_path: Path) -> None:
    """While the training thread loads a snapshot, gossip goes on."""
    played, log = Played(tmp_path), log_of(6)
    played.entries.start(5, log[4].hash)
    await played.drop()
    played.entries.receive_gossiped(log[5].envelope)
    await turns(5)
    played.entries.start(2, log[1].hash)
    for signed in log[2:]:
        await played.entries.receive(signed.envelope)
    await turns(5)
    assert played.collected == [3, 4, 5, 6]
    await played.drop()


async def test_entries_with_large_votes_wait_for_room_and_a_drop_lets_none_in(tmp_path: Path) -> None:
    """320 entries of four payloads each, at 1 B parameters 20 GB, waited for the training thread."""
    played, log = Played(tmp_path), log_of(6)
    played.entry_bytes = WAITING_BYTES_MAX // 2
    played.entries.start(0, RUN)
    for signed in log:
        played.entries.receive_gossiped(signed.envelope)
        await turns(5)
    assert played.collected == [1, 2]
    played.entries.release(1)
    await turns(5)
    assert played.collected == [1, 2, 3]
    waits = asyncio.create_task(played.entries.receive(log[4].envelope))
    await turns(5)
    await played.drop(waits)
    assert played.collected == [1, 2, 3]


async def test_entries_of_a_large_swarm_are_gossiped_rarely(tmp_path: Path) -> None:
    """Every step's in a swarm of up to GOSSIPED_MEMBERS, one step's for each so many members beyond; members take turns."""
    for members, every in ((1, 1), (8, 1), (9, 2), (20, 3)):
        played = Played(tmp_path / str(members))
        played.entries._collector.collect = mock.AsyncMock()  # type: ignore[method-assign]
        said = mock.AsyncMock()
        played.entries._topic.say = said  # type: ignore[method-assign]
        others = (Identity.from_seed(bytes([100 + n]) * 32).public_key for n in range(members - 1))
        roster = tuple(SampleShare(key, 1) for key in sorted((ADA.public_key, *others)))
        played.entries.start(0, RUN)
        played.view.tick = Tick(1, RUN, 1, roster, (Range(0, members),), 0)
        delivered = asyncio.create_task(played.entries.deliver_forever())
        log = log_of(2 * every * members)
        for signed in log:
            await played.entries.receive(signed.envelope)
        await turns(3)
        told = [envelope for (envelope,), _ in said.call_args_list]
        steps = [signed.entry.step for signed in log if signed.envelope in told]
        turn = played.view.roster.index(ADA.public_key)
        assert steps == [
            step for step in range(1, len(log) + 1) if step % every == 0 and step // every % members == turn
        ]
        assert len(steps) == 2
        await played.drop(delivered)
