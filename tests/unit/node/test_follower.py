"""How soon a peer is back on the coordinator's stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from node.swarm import follower as module
from node.swarm.client import SessionLostError
from node.swarm.events import Failed
from node.swarm.follower import Follower
from node.swarm.settings import RETRY_SECONDS_MIN
from protos.errors import NetworkError, RefusedError


async def test_a_coordinator_that_has_come_back_is_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is away is tried ever more rarely; one that only does not know the session any more is there."""
    answers = [
        *[NetworkError("refused")] * 5,
        SessionLostError("no such session"),
        RefusedError("the end of this test"),
    ]
    slept: list[float] = []
    joined: list[int] = []
    said: list[Any] = []

    class Client:
        several = False

        async def move(self) -> bool:
            return False

        async def follow(self, step: int) -> AsyncIterator[Any]:
            raise answers.pop(0)
            yield

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def join() -> None:
        joined.append(len(slept))

    async def emit(event: Any) -> None:
        said.append(event)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    log = SimpleNamespace(info=lambda *words, **values: None)
    anything: Any = SimpleNamespace(pause=lambda: None, emit=emit, log=log, step=7)
    client: Any = Client()
    follower = Follower(
        b"me",
        client,
        entries=anything,
        announcements=anything,
        snapshots=anything,
        reporter=anything,
        join=join,
        hear=anything,
        expect=anything,
        patience_seconds=600,
        view=anything,
        runtime=anything,
    )
    await follower.follow_forever()
    assert slept == [RETRY_SECONDS_MIN * 2**n for n in range(5)] + [RETRY_SECONDS_MIN]
    assert joined == [6], "joined once, after the one short pause"
    assert [type(event) for event in said] == [Failed]
