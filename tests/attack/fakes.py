"""Identities that compute nothing: what somebody with a script and no GPU can put into an open run, as many as wanted.

All fakes of a crowd say the same: states and snapshots that nobody computed, payloads that nobody has, samples in no time. They
report before any honest peer can, because they do no work. Refuses nothing: it lies wherever the protocol lets it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from node.link.client import CoordinatorClient
from protos.envelope import Kind, parse, seal
from protos.errors import SwarmentumError
from protos.identity import Identity
from protos.limits import FALSE_SUMS_MAX, HASH_BYTES
from protos.run_config import RunConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2, update_pb2
from tests.attack.base import Target
from tests.attack.joining import layout_of

POISON_BYTES = 123_456


def poison(*what: object) -> bytes:
    """32 bytes that no honest replica ever has; the same for all fakes."""
    return hashlib.sha256(repr(("poison", *what)).encode()).digest()


@dataclass
class Crowd:
    """What a crowd of fakes does. Each switch is one lie."""

    votes: bool = True
    """Announce payloads that nobody has, of many samples, in no time, with an absurd loss."""
    digests: bool = True
    snapshots: bool = True
    copies: bool = False
    """Name the payload of whoever the crowd hears first, instead of one of its own."""
    sums: bool = False
    """Send sums of each step that nobody asked them for, all alike."""
    heard: Counter[str] = field(default_factory=Counter)
    """Words of the coordinator: what it refused, and notices."""
    reported: int = 0


class Fake:
    """One identity with a session."""

    def __init__(self, target: Target, crowd: Crowd, layout: bytes) -> None:
        self.identity = Identity.generate()
        self._crowd, self._layout = crowd, layout
        self._client = CoordinatorClient(target.invite, self.identity)
        self._run_id = target.invite.run_id
        self._config: RunConfig | None = None

    async def live(self, everybody: list[Fake]) -> None:
        """Join, follow, lie, until cancelled or refused."""
        try:
            await self._client.connect()
            facts, self._config = await self._client.get_run()
            layout = facts.genesis.layout_digest or self._layout
            welcome = await self._client.join(pb.JoinBody(layout_digest=layout, parameters=10, device="cpu"))
            following = self._client.follow(welcome.head_step)
            await self._pretend(welcome.head_step)
            async for event in following:
                await self._answer(event, everybody)
        except SwarmentumError as error:
            self._crowd.heard[str(error)[:80]] += 1
        finally:
            await self._client.close()

    async def _answer(self, event: pb.FollowResponse, everybody: list[Fake]) -> None:
        what = event.WhichOneof("event")
        if what == "entry":
            entry = log_pb2.LogEntry.FromString(event.entry.body)
            await self._pretend(entry.step, entry.parent_state_digest)
        elif what == "tick" and self._crowd.votes:
            await self._vote(parse(log_pb2.Tick, event.tick.envelope.body), everybody)
        elif what == "notice":
            self._crowd.heard[f"notice {pb.NoticeKind.Name(event.notice.kind)}"] += 1

    async def _pretend(self, step: int, copied: bytes = b"") -> None:
        """To have a state and a snapshot. Most copy the digest that the log names, to seem ready and get into rosters."""
        body, config = pb.ReportBody(), self._config
        assert config is not None
        due = step % config.clock.snapshot_every == 0
        if copied and not due and self.identity.public_key[0] % 4:
            body.applied.add(step=step - 1, state_digest=copied)
        elif self._crowd.digests:
            body.applied.add(step=step, state_digest=poison("state", step))
        if self._crowd.snapshots and due:
            body.snapshots.add(step=step, root=poison("root", step), total_bytes=POISON_BYTES)
        await self._report(body)

    async def _vote(self, tick: log_pb2.Tick, everybody: list[Fake]) -> None:
        """For nothing: and hold what the whole crowd announces."""
        body = pb.ReportBody()
        announcement = update_pb2.Announcement(
            step=tick.step,
            parent_hash=tick.parent_hash,
            payload_sha256=self.payload(tick.step),
            payload_bytes=100,
            samples=sum(part.stop - part.start for part in tick.pool),
            tokens=1 << 60,
            loss=9e29,
            compute_ms=0,
        )
        body.announcement.CopyFrom(seal(self.identity, Kind.KIND_ANNOUNCEMENT, self._run_id, announcement))
        if self._crowd.sums:
            sum_ = log_pb2.Aggregate(sha256=poison("sum", tick.step), total_bytes=100)
            said = pb.Summed(step=tick.step, attempt=tick.attempt, payloads_sha256=poison(), aggregate=sum_)
            body.summed.CopyFrom(said)
            for number in range(FALSE_SUMS_MAX):
                body.false_sums.add(step=max(tick.step - 1, 1), range=number)
        for fake in everybody:
            body.holdings.add(
                step=tick.step, public_key=fake.identity.public_key, payload_sha256=fake.payload(tick.step)
            )
        await self._report(body)

    def payload(self, step: int) -> bytes:
        """The hash of a payload that nobody has; with `copies` the same of all fakes."""
        return poison("payload", step, b"" if self._crowd.copies else self.identity.public_key)

    async def _report(self, body: pb.ReportBody) -> None:
        with suppress(SwarmentumError):
            self._crowd.reported += 1
            for refusal in await self._client.report(body):
                self._crowd.heard[refusal[:60]] += 1


@asynccontextmanager
async def crowd_of(target: Target, count: int, crowd: Crowd) -> AsyncIterator[list[Fake]]:
    """So many fakes at work; they leave at the end."""
    layout = layout_of(target) if target.folder.is_dir() else bytes(HASH_BYTES)
    fakes = [Fake(target, crowd, layout) for _ in range(count)]
    tasks = [asyncio.create_task(fake.live(fakes)) for fake in fakes]
    try:
        yield fakes
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def told(crowd: Crowd) -> str:
    """What came of it, in a few words."""
    most = ", ".join(f"{count} x {what!r}" for what, count in crowd.heard.most_common(4))
    return f"{crowd.reported} reports; the coordinator said: {most or 'nothing'}"
