"""When a peer may vote after it joined."""

from types import SimpleNamespace
from typing import Any

import pytest

from node.swarm import membership as module
from node.swarm.membership import TWICE_SILENT_SECONDS, JoinFacts, Membership
from protos.accounts import Owner
from protos.v1 import coordinator_pb2 as pb


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
