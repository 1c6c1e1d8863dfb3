"""Where peers check each other: nobody sees a payload before the coordinator has its announcement, so copies are later."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from node.blobs.payloads import Payloads
from node.overlay.host import Host
from node.overlay.settings import OverlaySettings
from node.swarm.facts import NotCounted
from node.swarm.session import Outside, Session, build
from protos.errors import NetworkError
from protos.identity import Identity
from protos.invite import Invite
from protos.log import Entry, seal_entry
from protos.slices import hash_of
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import update_pb2
from tests.waiting import until

RUN = b"r" * 32
ADA, COORDINATOR = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
INVITE = Invite(RUN, ("127.0.0.1:1",), COORDINATOR.public_key, bytes(32), (), "commits")
VOTES = b"votes"
SHA256 = hash_of(VOTES)
SECONDS_MAX = 240.0


class Coordinator:
    """Takes reports when it is told to; fails the first `failures` times, and refuses the next `refusals`."""

    def __init__(self, failures: int = 0, refusals: int = 0) -> None:
        self.failures, self.refusals = failures, refusals
        self.words = "not connected: join and follow first"
        self.heard, self.answer = asyncio.Event(), asyncio.Event()
        self.late: asyncio.Queue[pb.ReportResponse | None] = asyncio.Queue()

    async def tell(self, body: pb.ReportBody) -> pb.ReportResponse:
        self.heard.set()
        await self.answer.wait()
        if self.failures:
            self.failures -= 1
            raise NetworkError("lost on the way")
        if self.refusals:
            self.refusals -= 1
            return pb.ReportResponse(refusals=[self.words])
        return pb.ReportResponse(announcement_taken=body.HasField("announcement"))

    async def tell_quietly(self, body: pb.ReportBody, begun: Callable[[int], None]) -> None:
        begun(0)
        if (answer := await self.tell(body)).refusals:
            self.late.put_nowait(answer)


def session(folder: Path, coordinator: Coordinator, *, commits_first: bool) -> Any:
    async def emit(event: object) -> None:
        raise AssertionError(event)

    host = mock.create_autospec(Host, instance=True)
    host.identity, host.connected.return_value, host.subscribers.return_value = ADA, {}, set()
    outside = Outside(host=lambda *_: host, client=lambda *_: coordinator)  # type: ignore[arg-type,return-value]
    made = Session(build(INVITE, ADA, folder / "identity.key", OverlaySettings(), mock.Mock(), lambda sha256: None,
                   Payloads(folder / "payloads"), emit, outside))  # fmt: skip
    made.parts.view.commits_first = commits_first
    made.parts.reporter.resume()
    return made


def announcement(step: int = 1) -> update_pb2.Announcement:
    return update_pb2.Announcement(step=step, parent_hash=RUN, loss=1.0)


async def test_votes_are_shown_once_the_coordinator_has_their_announcement(tmp_path: Path) -> None:
    coordinator = Coordinator(failures=1, refusals=1)
    ada = session(tmp_path, coordinator, commits_first=True)
    telling = asyncio.ensure_future(ada.parts.reporter.report_forever())
    await ada.publish(VOTES, announcement())
    await asyncio.wait_for(coordinator.heard.wait(), SECONDS_MAX)
    for _ in range(50):  # a task that says it too early would have said it by now
        await asyncio.sleep(0)
    assert ada.parts.publication.shown(SHA256) is None
    ada.host.publish.assert_not_awaited()
    coordinator.answer.set()  # the first time it fails: they stay hidden until the report was taken
    await until(lambda: ada.parts.publication.shown(SHA256) == VOTES)
    assert (coordinator.failures, coordinator.refusals) == (0, 0), "shown though the coordinator had not taken it"
    await until(lambda: ada.host.publish.await_count)
    await ada.publish(VOTES, announcement())
    assert ada.parts.publication.shown(SHA256) == VOTES, "said again after a new tick: what was shown stays so"
    telling.cancel()


async def test_without_checks_they_are_shown_at_once(tmp_path: Path) -> None:
    ada = session(tmp_path, Coordinator(), commits_first=False)
    await ada.publish(VOTES, announcement())
    assert ada.parts.publication.shown(SHA256) == VOTES
    await asyncio.wait_for(asyncio.gather(*ada.parts.runtime.tasks), SECONDS_MAX)
    ada.host.publish.assert_awaited_once()


async def test_what_the_log_names_is_shown_though_no_answer_came(tmp_path: Path) -> None:
    ada = session(tmp_path, Coordinator(), commits_first=True)
    await ada.publish(VOTES, announcement())
    entry = seal_entry(COORDINATOR, RUN, Entry(1, RUN, (), 0, b"", (), 0))
    ada.parts.entries.start(0, RUN)
    await ada.parts.entries.receive(entry.envelope)
    assert ada.committed_step == 1
    assert ada.parts.publication.shown(SHA256) == VOTES


async def test_an_announcement_that_comes_after_the_decision_is_told_to_the_training_thread(tmp_path: Path) -> None:
    coordinator = Coordinator(refusals=1)
    coordinator.words = "payload of step 1: step 2 is open"
    coordinator.answer.set()
    ada, heard = session(tmp_path, coordinator, commits_first=False), list[object]()

    async def emit(event: object) -> None:
        heard.append(event)

    ada.parts.runtime.emit = emit
    telling = asyncio.ensure_future(ada.parts.reporter.report_forever())
    await ada.publish(VOTES, announcement())
    await until(lambda: bool(heard))
    assert heard == [NotCounted(1, "too late: payload of step 1: step 2 is open")]
    telling.cancel()
