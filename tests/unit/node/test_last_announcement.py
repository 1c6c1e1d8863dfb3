"""One payload a step, whatever happens to the peer: what was announced is on the disk, and said again."""

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from node.blobs.payloads import Payloads
from node.overlay.host import Host
from node.overlay.settings import OverlaySettings
from node.swarm.facts import Held, Published
from node.swarm.outbox import Outbox
from node.swarm.publication import NAME, LastAnnouncement
from node.swarm.session import Outside, Session, build
from protos.errors import OperatorError
from protos.identity import Identity
from protos.invite import Invite
from protos.limits import EQUIVOCATIONS_MAX
from protos.log import Equivocation
from protos.slices import hash_of
from protos.v1 import update_pb2

RUN = b"r" * 32
ADA, BOB = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
INVITE = Invite(RUN, ("127.0.0.1:1",), BOB.public_key, bytes(32), (), "announcements")


def session(folder: Path) -> Any:
    """A life of Ada: her disk, and nobody who hears her."""

    async def emit(event: object) -> None:
        raise AssertionError(event)

    async def make() -> Session:
        host = mock.create_autospec(Host, instance=True)
        host.identity, host.connected.return_value, host.subscribers.return_value = ADA, {}, set()
        return Session(build(INVITE, ADA, folder / "identity.key", OverlaySettings(), mock.Mock(), lambda sha256: None,
                       Payloads(folder / "payloads"), emit, Outside(host=lambda *_: host)))  # fmt: skip

    return asyncio.run(make())


def publish(life: Any, step: int, data: bytes, loss: float = 1.0) -> bytes | None:
    """What is gossiped of it."""

    async def said() -> None:
        await life.publish(data, update_pb2.Announcement(step=step, parent_hash=RUN, loss=loss))
        await asyncio.gather(*life.parts.runtime.tasks)

    life.host.publish.reset_mock()
    asyncio.run(said())
    return life.host.publish.await_args.args[1] if life.host.publish.await_args else None


def test_other_votes_for_the_same_step_are_never_announced(tmp_path: Path) -> None:
    said = publish(first := session(tmp_path), 1, b"votes")
    assert said is not None
    assert (tmp_path / NAME).read_bytes() == said, "on the disk before anybody heard it"
    assert publish(first, 1, b"votes after a re-sync") == said
    second = session(tmp_path)
    assert publish(second, 1, b"votes of a later life", loss=2.0) == said
    assert second.parts.outbox.announcement == Published(1, said)
    assert second.parts.outbox.holdings == {Held(ADA.public_key, hash_of(b"votes")): 1}
    assert publish(second, 1, b"votes", loss=2.0) == said, "word for word"
    after = publish(second, 2, b"next")
    assert after not in (None, said)
    assert publish(second, 1, b"votes") is None, "a log that goes back"


def test_who_lost_what_it_announced_sits_the_step_out(tmp_path: Path) -> None:
    assert publish(session(tmp_path), 1, b"votes")
    for payload in (tmp_path / "payloads").iterdir():
        payload.unlink()
    later = session(tmp_path)
    assert publish(later, 1, b"other votes") is None
    assert later.parts.outbox.announcement is None
    assert publish(later, 2, b"next") is not None


@pytest.mark.parametrize("author", [ADA, BOB])
def test_a_file_that_is_no_announcement_of_ours_is_not_passed_over(tmp_path: Path, author: Identity) -> None:
    publish(session(tmp_path), 1, b"votes")
    if author is ADA:
        (tmp_path / NAME).write_bytes(b"?")
    with pytest.raises(OperatorError, match="last announcement of this run"):
        LastAnnouncement(tmp_path, RUN, author.public_key)


def test_evidence_is_told_until_the_log_has_it_and_bounded() -> None:
    box = Outbox()
    assert box.accuse(b"a", Equivocation(b"1", b"2"))
    assert not box.accuse(b"a", Equivocation(b"3", b"4"))
    for n in range(10):
        box.accuse(bytes([n]), Equivocation(b"1", b"2"))
    assert len(box.equivocations) == EQUIVOCATIONS_MAX
    report = box.next_report()
    assert len(report[0].equivocations) == EQUIVOCATIONS_MAX
    box.sent(report[1])
    assert box.next_report() is None
    box.everything_again()
    assert box.next_report() is not None
    for author in list(box.equivocations):
        box.excluded(author)
    assert box.next_report() is None
