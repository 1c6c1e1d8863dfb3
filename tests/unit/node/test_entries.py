"""Entries in order: what is dropped before a re-sync stays dropped, however many were on their way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

from node.swarm.counters import Counters
from node.swarm.entries import ENTRIES_AHEAD_MAX, Entries
from node.swarm.runtime import Runtime
from node.swarm.view import View
from node.swarm.witness import Witness
from protos.identity import Identity
from protos.log import Entry, SignedEntry, seal_entry

RUN = b"r" * 32
ADA, COORDINATOR = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))


def log_of(steps: int) -> list[SignedEntry]:
    entries: list[SignedEntry] = []
    for step in range(1, steps + 1):
        parent = entries[-1].hash if entries else RUN
        entries.append(seal_entry(COORDINATOR, RUN, Entry(step, parent, (), 0, b"", (), 0)))
    return entries


async def test_nothing_of_the_former_following_comes_after_a_drop(tmp_path: Path) -> None:
    """With a full queue, one gossiped entry waited for room in it and others for that one; emptying it let them in."""
    collected: list[int] = []

    async def collect(signed: SignedEntry, said: Any) -> None:
        collected.append(signed.entry.step)
        await asyncio.Event().wait()  # its payloads are nowhere

    view = View(RUN, COORDINATOR.public_key)
    runtime = Runtime(ADA.public_key, mock.AsyncMock(), Counters(), view)
    entries = Entries(
        ADA.public_key,
        witness=Witness(RUN, COORDINATOR.public_key, tmp_path),
        collector=mock.Mock(collect=collect),
        announcements=mock.Mock(named_in=lambda entry: {}),
        publication=mock.Mock(named_in=lambda entry: None),
        outbox=mock.Mock(),
        topic=mock.Mock(),
        view=view,
        runtime=runtime,
    )
    log = log_of(ENTRIES_AHEAD_MAX + 4)
    entries.start(0, RUN)
    for signed in log:
        entries.overhear(signed.envelope)
        for _ in range(3):
            await asyncio.sleep(0)
    assert len(collected) == ENTRIES_AHEAD_MAX + 1, "the queue is full, and one entry waits for room"
    assert len(runtime.tasks) > ENTRIES_AHEAD_MAX + 1

    tasks = entries.drop()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(5):
        await asyncio.sleep(0)
    assert entries.drop() == []
    assert not runtime.tasks, "a task is left that nobody would end before the session does"
    entries.start(0, RUN)
    await entries.take(log[0].envelope)
    assert view.step == 1
    await runtime.stop()
