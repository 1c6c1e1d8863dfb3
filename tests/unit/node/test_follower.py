"""How soon a peer is back on the coordinator's stream."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from node.swarm import follower as module
from node.swarm.facts import Agreed, Failed, Finished
from node.swarm.follower import Follower
from protos.calls import SessionLostError
from protos.clocks import RETRY_SECONDS_MIN
from protos.errors import NetworkError, RefusedError
from protos.v1 import coordinator_pb2 as pb


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

        async def explained(self, error: NetworkError) -> NetworkError:
            return error

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
    membership: Any = SimpleNamespace(join=join, used_twice=False)
    follower = Follower(
        b"me",
        client,
        entries=anything,
        announcements=anything,
        aggregator=anything,
        auditor=anything,
        listener=anything,
        membership=membership,
        neighbours=anything,
        connections=anything,
        outbox=anything,
        publication=anything,
        reporter=anything,
        snapshots=anything,
        patience_seconds=600,
        view=anything,
        runtime=anything,
    )
    await follower.follow_forever()
    longest = [RETRY_SECONDS_MIN * 2**n for n in range(5)] + [RETRY_SECONDS_MIN]
    assert all(most / 2 <= wait <= most for wait, most in zip(slept, longest, strict=True)), slept
    assert joined == [6], "joined once, after the one short pause"
    assert [type(event) for event in said] == [Failed]


@pytest.mark.parametrize(
    ("kept", "taken", "why"),
    [
        ({3: b"3", 4: b"4", 5: b"5"}, 5, ""),
        ({}, 2, "this peer has not kept all of them up to step 5"),
        ({3: b"3", 4: b"4", 5: b"5"}, 2, "the coordinator takes no entry after step 2 back"),
    ],
)
async def test_a_coordinator_that_is_behind_gets_the_entries_back(kept: dict[int, bytes], taken: int, why: str) -> None:
    offered: list[tuple[list[bytes], bytes]] = []
    warned: list[Any] = []

    class Client:
        async def entries(self, from_step: int) -> tuple[list[bytes], int]:
            return [b"the head"] if from_step <= 2 else [], 2

        async def offer(self, entries: list[bytes], newest: bytes) -> int:
            offered.append((entries, newest))
            return min(2 + len(offered), taken)

    def lost(step: int) -> tuple[list[bytes], bytes]:
        return [kept[n] for n in range(step + 1, 6) if n in kept], kept.get(5, b"")

    follower = Follower.__new__(Follower)
    log = SimpleNamespace(warning=lambda text, **values: warned.append(values))
    parts: Any = SimpleNamespace(lost=lost, agrees=lambda data: data == b"the head", step=5, log=log)
    follower._client, follower._entries, follower._view, follower._runtime = Client(), parts, parts, parts  # type: ignore[assignment]
    if why:
        with pytest.raises(NetworkError, match=why):
            await follower._give_back()
        assert warned == []
    else:
        await follower._give_back()
        assert offered[0] == ([b"3", b"4", b"5"], b"5")
        assert warned == [{"step": 5, "entries": 3}]


async def test_a_snapshot_that_was_agreed_while_this_peer_was_away_is_told_once_with_the_finish() -> None:
    """Without it the peer waited 30 seconds for an agreement that was there, and evaluated no last state."""
    said: list[Any] = []

    async def emit(event: Any) -> None:
        said.append(event)

    anything: Any = SimpleNamespace(emit=emit, withdraw=lambda _: None, remember=lambda _: None)
    names = ("client", "entries", "announcements", "aggregator", "auditor", "listener", "membership", "neighbours")
    parts = dict.fromkeys(
        (*names, "connections", "outbox", "publication", "reporter", "snapshots", "view", "runtime"), anything
    )
    follower = Follower(b"me", **parts, patience_seconds=1)
    kind = pb.NoticeKind
    for told, step in ((kind.NOTICE_KIND_SNAPSHOT, 2), (kind.NOTICE_KIND_FINISHED, 2), (kind.NOTICE_KIND_FINISHED, 4)):
        snapshot = pb.SnapshotRef(step=step, root=bytes(32), total_bytes=1)
        await follower._handle_notice(pb.Notice(kind=told, snapshot=snapshot))
    steps = [event.snapshot.step if isinstance(event, Agreed) else type(event) for event in said]
    assert steps == [2, Finished, 4, Finished]
