"""When a peer may vote after it joined."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from node.swarm import membership as module
from node.swarm.membership import TWICE_SILENT_SECONDS, JoinFacts, Membership
from protos.accounts import Owner
from protos.assignment import Range, SampleShare
from protos.identity import Identity
from protos.tick import Tick, seal_tick
from protos.v1 import coordinator_pb2 as pb
from tests.unit.node.test_publication import ADA, BOB, RUN, published, session


class Anything:
    """Takes every call of a join that these tests do not ask about."""

    step, addresses, owner = 6, (), Owner()

    def __init__(self) -> None:
        self.log = SimpleNamespace(warning=lambda *words, **values: None)

    def withdraw(self, roots: Any) -> None: ...

    def connect_to(self, peers: list[str]) -> None: ...

    def spawn(self, task: None) -> None: ...


@pytest.mark.parametrize(("twice", "silent"), [("a program that uses it is connected now", True), ("", False)])
async def test_an_identity_in_use_twice_votes_in_no_step_that_the_other_may_vote_in(
    twice: str, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))

    async def join(body: pb.JoinBody) -> pb.JoinResponse:
        return pb.JoinResponse(head_step=6, used_twice=twice)

    around: Any = Anything()
    client: Any = SimpleNamespace(join=join)
    peer = Membership(client, around, around, around, around, around)
    assert not peer.voteless(1)
    await peer.enter(JoinFacts(bytes(32), 1, "cpu"))
    assert bool(peer.voteless(7)) is silent
    assert bool(peer.voteless(8)) is silent
    now += TWICE_SILENT_SECONDS
    assert not peer.voteless(8)
    assert bool(peer.voteless(7)) is silent, "a long step in which the other has voted"


def tick_event(step: int, *members: Identity, attempt: int = 1) -> pb.TickEvent:
    roster = tuple(SampleShare(key, 1) for key in sorted(it.public_key for it in members))
    tick = Tick(step, RUN, attempt, roster, (Range(0, len(roster)),), 0)
    return pb.TickEvent(envelope=seal_tick(BOB, RUN, tick), deadline_ms=60_000)


@pytest.mark.parametrize(
    ("announced", "event", "silent"),
    [
        (0, tick_event(7, ADA, BOB), True),  # a new home of its identity, or its first step, began before
        (5, tick_event(7, ADA, BOB), True),  # a backup of its home
        (6, tick_event(7, ADA, BOB), False),
        (0, tick_event(7, BOB), False),  # it was not asked before
        (0, tick_event(7, BOB, attempt=2), True),  # nobody says whether it was in the first attempt
        (0, tick_event(7, ADA), True),  # an anchor may know other votes
    ],
)
async def test_whose_home_may_not_know_its_last_votes_sends_none_in_the_step_that_is_open(
    announced: int, event: pb.TickEvent, silent: bool, tmp_path: Path
) -> None:
    """With those of an earlier life they would be two payloads, if the coordinator forgot the first in a restart."""
    peer, _ = session(tmp_path)
    peer.parts.entries.start(max(announced - 1, 0), RUN)
    if announced:
        await published(peer, announced, b"votes")
    peer.parts.entries.start(6, RUN)
    peer.parts.runtime.emit = mock.AsyncMock()
    await peer.parts.follower._handle(pb.FollowResponse(tick=event))
    assert bool(peer.voteless(7)) is silent
    await peer.abstained(7, "why", not_finite=False)
    assert peer.parts.outbox.abstained.lost is silent, "all others may be in the same place"
    peer.parts.follower._fresh = True  # the coordinator started again
    await peer.parts.follower._handle(pb.FollowResponse(tick=event))
    assert bool(peer.voteless(7)) is silent
    await peer.parts.follower._handle(pb.FollowResponse(tick=tick_event(8, ADA, BOB)))
    assert not peer.voteless(8), "a step that opens now"
    peer.parts.follower._fresh = True  # its stream broke
    await peer.parts.follower._handle(pb.FollowResponse(tick=tick_event(9, ADA, BOB)))
    assert not peer.voteless(9), "no home was lost: it saw the step before"
