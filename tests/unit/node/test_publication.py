"""A peer that does not answer slows nobody down: the training thread waits for the disk, never for another peer."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from node.blobs import payloads
from node.blobs.payloads import Payloads
from node.overlay import links
from node.overlay.host import Host
from node.overlay.settings import OverlaySettings
from node.swarm import publication, pushes
from node.swarm.publication import NAME
from node.swarm.pushes import TAKEN
from node.swarm.session import Outside, Session, build
from protos.assignment import Range, SampleShare
from protos.identity import Identity
from protos.invite import Invite
from protos.tick import Tick
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2, update_pb2
from tests.waiting import until

RUN = b"r" * 32
ADA, BOB, DAN = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
INVITE = Invite(RUN, ("127.0.0.1:1",), BOB.public_key, bytes(32), (), "publication")
SECONDS_MAX = 240.0


class Neighbours:
    """The streams to BOB, who answers, and to DAN, who is stopped until `wake`. `sent`: what each was sent, whole pushes."""

    def __init__(self, folder: Path) -> None:
        self.sent: dict[bytes, list[bytes]] = {BOB.public_key: [], DAN.public_key: []}
        self.wake, self._announced = asyncio.Event(), folder / NAME

    async def open(self, key: bytes, _protocol: str) -> tuple[Any, Any]:
        def write(data: bytes) -> None:
            assert self._announced.read_bytes() in data, "sent before it is on the disk"
            self.sent[key].append(data)

        async def answer(_size: int) -> bytes:
            if key == DAN.public_key:
                await self.wake.wait()
            return TAKEN

        reader = mock.Mock(readexactly=answer, at_eof=lambda: False, exception=lambda: None)
        return reader, mock.Mock(write=write, drain=mock.AsyncMock())

    def payloads(self, who: Identity, *datas: bytes) -> bool:
        """Whether a peer was sent exactly these, in this order."""
        sent = self.sent[who.public_key]
        return len(sent) == len(datas) and all(push.endswith(data) for push, data in zip(sent, datas, strict=True))


def session(folder: Path, *, commits_first: bool = False) -> tuple[Any, Neighbours]:
    """ADA in the roster of step 1 with both."""

    async def emit(event: object) -> None:
        raise AssertionError(event)

    host, neighbours = mock.create_autospec(Host, instance=True), Neighbours(folder)
    host.identity, host.open.side_effect, host.subscribers.return_value = ADA, neighbours.open, set()
    host.connected.return_value = {BOB.peer_id: True, DAN.peer_id: True}
    made: Session = Session(build(INVITE, ADA, folder / "identity.key", OverlaySettings(), mock.Mock(), lambda sha256: None,
                          Payloads(folder / "payloads"), emit, Outside(host=lambda *_: host)))  # fmt: skip
    made.parts.view.commits_first = commits_first
    open_step(made, 1)
    return made, neighbours


def open_step(ada: Session, step: int) -> None:
    """The log has decided the step before."""
    ada.parts.entries.start(step - 1, RUN)
    roster = tuple(SampleShare(key, 1) for key in sorted(it.public_key for it in (ADA, BOB, DAN)))
    ada.parts.view.tick = Tick(step, RUN, 1, roster, (Range(0, 3),), 0)


async def published(ada: Session, step: int, data: bytes) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        await ada.publish(data, update_pb2.Announcement(step=step, parent_hash=RUN, loss=1.0))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for an answer of DAN waits for longer than a test may take."""
    monkeypatch.setattr(pushes, "PUSH_PATIENCE_SECONDS", 1e6)
    monkeypatch.setattr(links, "STREAM_OPEN_SECONDS_MAX", 1e6)


async def test_votes_are_published_though_a_neighbour_does_not_answer(tmp_path: Path) -> None:
    ada, neighbours = session(tmp_path)
    for step, data in ((1, b"votes"), (2, b"more votes"), (3, b"last votes")):
        open_step(ada, step)
        await published(ada, step, data)
        await until(
            lambda data=data: (
                neighbours.sent[DAN.public_key][-1:] and neighbours.sent[BOB.public_key][-1].endswith(data)
            )
        )
        assert len(ada.parts.runtime.tasks) <= 2, "one that tells others, and the one before, which ends"
    await published(ada, 3, b"last votes")  # a new roster of the same step
    assert neighbours.payloads(BOB, b"votes", b"more votes", b"last votes"), "each once"
    assert neighbours.payloads(DAN, b"votes", b"more votes", b"last votes")
    neighbours.wake.set()
    await until(lambda: not ada.parts.runtime.tasks)
    assert ada.parts.pusher._has == {BOB.public_key, DAN.public_key}
    assert neighbours.payloads(DAN, b"votes", b"more votes", b"last votes"), "and not again"
    ada.host.publish.assert_not_awaited()


async def test_votes_that_were_shown_are_published_again_though_a_neighbour_does_not_answer(tmp_path: Path) -> None:
    ada, neighbours = session(tmp_path, commits_first=True)
    await published(ada, 1, b"votes")
    assert not ada.parts.runtime.tasks, "withheld: no task tells anybody"
    ada.parts.publication.answered([ada.parts.outbox.announcement], taken=True)
    await until(lambda: neighbours.payloads(BOB, b"votes") and neighbours.payloads(DAN, b"votes"))
    await published(ada, 1, b"votes")
    await until(lambda: len(ada.parts.runtime.tasks) == 1)
    assert neighbours.payloads(BOB, b"votes")
    assert neighbours.payloads(DAN, b"votes")
    await ada.parts.runtime.stop()


async def test_who_tells_others_gives_up_in_time_and_the_session_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that is stuck leaves no task behind, and fails nothing: `emit` takes no failure here."""
    monkeypatch.setattr(publication, "SAY_SECONDS_MAX", 0.01)
    ada, neighbours = session(tmp_path)
    ada.host.connected.side_effect = asyncio.Event().wait
    await published(ada, 1, b"votes")
    [telling] = ada.parts.runtime.tasks
    await until(telling.done)
    assert telling.exception() is None
    await asyncio.sleep(0)
    assert not ada.parts.runtime.tasks
    assert neighbours.payloads(BOB)


async def test_own_votes_are_hashed_again_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large they are, and however many other votes come. After a restart they are read and hashed once."""
    counting = mock.Mock(sha256=mock.Mock(side_effect=hashlib.sha256))
    monkeypatch.setattr(payloads, "hashlib", counting)
    monkeypatch.setattr(payloads, "RECENT_BYTES_MAX", 1_000)
    votes = b"v" * 5_000
    sha256 = hashlib.sha256(votes).digest()
    for times, said in ((0, votes), (1, b"other votes of a later life")):
        ada, neighbours = session(tmp_path)
        await published(ada, 1, said)
        for n in range(5):
            other = bytes([n]) * 900
            ada.parts.publication._payloads.put(1, hashlib.sha256(other).digest(), other)
            assert ada.parts.publication.shown(sha256) == votes
        assert counting.sha256.call_count == times
        await until(lambda neighbours=neighbours: neighbours.payloads(BOB, votes))
        await ada.parts.runtime.stop()


async def test_what_a_lost_home_announced_is_taken_back_and_no_other_votes_are_announced(tmp_path: Path) -> None:
    ada, _ = session(tmp_path / "one")
    await published(ada, 1, b"votes")
    envelope = (tmp_path / "one" / NAME).read_bytes()
    again, neighbours = session(tmp_path / "other")
    (tmp_path / "other").mkdir(exist_ok=True)
    follower, said = again.parts.follower, envelope_pb2.SignedEnvelope.FromString(envelope)
    forged = envelope_pb2.SignedEnvelope(kind=said.kind, body=said.body, run_id=RUN, public_key=ADA.public_key)
    await follower._handle(pb.FollowResponse(announcement=forged))
    assert not (tmp_path / "other" / NAME).exists()
    assert sum(again.parts.counters.refused.values()) == 1
    await follower._handle(pb.FollowResponse(announcement=said))
    await published(again, 1, b"other votes")
    assert (tmp_path / "other" / NAME).read_bytes() == envelope
    assert again.parts.outbox.announcement is None
    abstained = again.parts.outbox.abstained
    assert (abstained.step, abstained.reason) == (1, publication.LOST), "nobody waits for it"
    open_step(again, 2)
    await follower._handle(pb.FollowResponse(announcement=said))
    await published(again, 2, b"votes of the next step")
    await until(lambda: neighbours.sent[BOB.public_key])
    assert neighbours.payloads(BOB, b"votes of the next step")
