"""Many peers of one coordinator without models, in a process of their own: real gRPC over TLS, and reports
as peers send them: the first of a stream is signed (ADR 57).

Payloads are only hashes, as for a coordinator. Entries and ticks are timed as bytes arrive, before anything is parsed, so that
the crowd takes little of the machine that it shares with the coordinator. One command at a time comes through a pipe.
"""

import asyncio
import hashlib
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc

from node.link.client import _OPTIONS
from protos import limits
from protos.calls import pinned_aio_channel, unpack
from protos.envelope import Kind, seal_bytes, unsigned
from protos.identity import Identity
from protos.slices import digest_of, mask_bytes, mask_of
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2, update_pb2

SERVICE = "/swarmentum.v1.CoordinatorService/"
CALL_SECONDS_MAX = 300.0
JOINS_AT_ONCE = 32
TRIES_MAX = 600
ROOT = hashlib.sha256(b"bench snapshot").digest()
ENTRY_TAG, TICK_TAG, DECIDED_TAG, PACKED_TAG, SUM_TAG = (
    0x12,
    0x0A,
    0x2A,
    0x32,
    0x3A,
)  # first byte of a FollowResponse: its only field


def seed_of(number: int) -> bytes:
    return hashlib.sha256(b"bench peer %d" % number).digest()


def payload_of(public_key: bytes, step: int) -> bytes:
    return hashlib.sha256(public_key + step.to_bytes(8, "big")).digest()


def state_of(step: int) -> bytes:
    return hashlib.sha256(b"bench state %d" % step).digest()


class BenchPeer:
    """One identity with its own connection and session."""

    def __init__(self, number: int, address: str, pem: bytes, run_id: bytes) -> None:
        self.number, self.run_id, self.identity = number, run_id, Identity.from_seed(seed_of(number))
        options = {**_OPTIONS, "grpc.use_local_subchannel_pool": 1, "grpc.max_receive_message_length": 1 << 26}
        self.channel = pinned_aio_channel(address, pem, options)
        self.calls = {name: self.channel.unary_unary(SERVICE + name) for name in ("GetRun", "GetChallenge", "Join")}
        self.session, self.sequence, self.told = b"", 0, False
        self.telling: Any = None
        self.turn = asyncio.Lock()

    def sealed(self, kind: int, data: bytes) -> Any:
        return seal_bytes(self.identity, kind, self.run_id, data)

    async def call(self, name: str, request: Any) -> bytes:
        raw: bytes = await self.calls[name](request.SerializeToString(), timeout=CALL_SECONDS_MAX)
        return raw

    async def genesis(self) -> log_pb2.Genesis:
        """The run's, which names the layout that every peer has to have."""
        return pb.GetRunResponse.FromString(await self.call("GetRun", pb.GetRunRequest(run_id=self.run_id))).genesis

    async def join(self, genesis: log_pb2.Genesis) -> Any:
        """A session, and its stream of events."""
        challenge = pb.GetChallengeResponse.FromString(
            await self.call("GetChallenge", pb.GetChallengeRequest(run_id=self.run_id))
        ).challenge
        at = f"/ip4/127.0.0.1/tcp/{10_000 + self.number}/p2p/{self.identity.peer_id}"
        body = pb.JoinBody(challenge=challenge, layout_digest=genesis.layout_digest, device="cpu", addresses=[at])
        envelope = self.sealed(Kind.KIND_JOIN, body.SerializeToString())
        answer = pb.JoinResponse.FromString(await self.call("Join", pb.JoinRequest(envelope=envelope)))
        self.session, self.sequence = answer.session_id, 1
        follow = pb.FollowBody(session_id=self.session, from_step=answer.head_step, sequence=1, unpacks=True)
        request = pb.FollowRequest(envelope=self.sealed(Kind.KIND_FOLLOW, follow.SerializeToString()))
        return self.channel.unary_stream(SERVICE + "Follow")(request.SerializeToString())

    async def report(self, body: pb.ReportBody, more: bytes = b"", *, quiet: bool = False) -> list[str]:
        """What was refused. `more`: serialised fields that many peers' reports share. `quiet`: no answer is waited for."""
        async with self.turn:
            return await self._report(body, more, quiet)

    async def _report(self, body: pb.ReportBody, more: bytes, quiet: bool) -> list[str]:
        self.sequence += 1
        body.session_id, body.sequence, body.quiet = self.session, self.sequence, quiet
        data = body.SerializeToString() + more
        if self.telling is None:
            self.telling = self.channel.stream_stream(SERVICE + "Tell")()
            envelope = self.sealed(Kind.KIND_REPORT, data)
        else:
            envelope = unsigned(self.identity.public_key, Kind.KIND_REPORT, self.run_id, data)
        async with asyncio.timeout(CALL_SECONDS_MAX):
            await self.telling.write(pb.ReportRequest(envelope=envelope).SerializeToString())
            if quiet:
                return []
            answer = pb.ReportResponse.FromString(await self.telling.read())
            if answer.sequence != self.sequence:
                return [f"an answer to report {answer.sequence}, which wanted none"]
        return [*answer.refusals, *(["unclear"] if answer.unclear else [])]

    def announcement(self, step: int, parent_hash: bytes) -> Any:
        body = update_pb2.Announcement(
            step=step,
            parent_hash=parent_hash,
            payload_sha256=payload_of(self.identity.public_key, step),
            payload_bytes=7000,
            samples=1,
            tokens=128,
            loss=2 + random.random(),  # of a real swarm no two are equal, and a packed entry has all of them
            compute_ms=100,
        )
        return self.sealed(Kind.KIND_ANNOUNCEMENT, body.SerializeToString())


@dataclass
class Open:
    """The open step, as its tick says."""

    step: int = 0
    parent_hash: bytes = b""
    roster: list[bytes] = field(default_factory=list)
    attempt: int = 1
    aggregators: list[bytes] = field(default_factory=list)


class Crowd:
    """The peers of one process. Every method is a command of the pipe, and returns what goes back."""

    def __init__(self, numbers: Iterable[int], address: str, pem: bytes, run_id: bytes, together: bool) -> None:
        self.together = together
        self.peers = [BenchPeer(number, address, pem, run_id) for number in numbers]
        self.open, self.lost, self.tasks = Open(), list[str](), list[Any]()
        self.ticks, self.entries = list[float](), list[float]()
        self.sizes, self.changed, self.decided = {"tick": 0, "entry": 0, "sent": 0}, asyncio.Event(), b""

    async def join(self) -> dict[str, Any]:
        slots, refused = asyncio.Semaphore(JOINS_AT_ONCE), list[str]()
        genesis = await self.peers[0].genesis()

        async def one(peer: BenchPeer) -> None:
            async with slots:
                try:
                    stream = await peer.join(genesis)
                except grpc.aio.AioRpcError as error:
                    refused.append(f"{error.code().name}: {error.details()}")
                    return
            self.tasks.append(asyncio.ensure_future(self._listen(peer, stream)))

        await asyncio.gather(*map(one, self.peers))
        await self._until(lambda: len(self.lost) + sum(peer.told for peer in self.peers) >= len(self.tasks))
        return {"admitted": sum(peer.told for peer in self.peers), "refused": (refused + self.lost)[:3]}

    async def ready(self) -> dict[str, Any]:
        """All have the initial state."""
        said = pb.ReportBody(
            applied=[pb.AppliedState(step=0, state_digest=state_of(0))],
            snapshots=[pb.SnapshotRef(step=0, root=ROOT, total_bytes=1000)],
        ).SerializeToString()
        return await self._all([peer.report(pb.ReportBody(), said) for peer in self.peers])

    async def tick(self, step: int) -> dict[str, Any]:
        """All peers here have the tick of this step."""
        await self._until(lambda: len(self.ticks) >= len(self.peers) and self.open.step == step)
        self.ticks, self.entries = [], []
        return {"sizes": self.sizes}

    async def announce(self) -> dict[str, Any]:
        """Every peer's first report of a step: its announcement, and that it holds its own payload."""
        step, parent = self.open.step, self.open.parent_hash
        bodies = []
        for peer in self.peers:
            body = pb.ReportBody(announcement=peer.announcement(step, parent))
            body.held.CopyFrom(self._held([peer.identity.public_key]))
            if step > 1 and self.together:
                body.applied.add(step=step - 1, state_digest=state_of(step - 1))
            bodies.append(
                peer.report(body, quiet=bool(self.open.aggregators))
            )  # that run is not open: no votes are withheld
        return await self._all(bodies)

    async def hold(self, first: int, last: int) -> dict[str, Any]:
        """Peers `first` <= number < `last` tell that they hold the payloads of all; in a step with aggregators, those do."""
        said = pb.ReportBody(held=self._held(self.open.roster)).SerializeToString()
        summing, began_at = self.open.aggregators, time.monotonic()
        if summing:
            telling = [self._hold_all(peer, said) for peer in self.peers if peer.identity.public_key in summing]
        else:
            chosen = [peer for peer in self.peers if first <= peer.number < last]
            telling = [peer.report(pb.ReportBody(), said, quiet=True) for peer in chosen]
        return {"began_at": began_at, **await self._all(telling)}

    async def _hold_all(self, peer: BenchPeer, said: bytes) -> list[str]:
        """Until the coordinator has taken all announcements, which were told quietly."""
        while (refused := await peer.report(pb.ReportBody(), said)) == ["unclear"]:
            await asyncio.sleep(0.02)
        return refused

    async def entry(self) -> dict[str, Any]:
        """When each peer got the entry."""
        await self._until(lambda: len(self.entries) >= len(self.peers))
        return {"at": self.entries}

    async def applied(self, step: int) -> dict[str, Any]:
        """Every peer's last report of a step: the digest of its state."""
        said = pb.ReportBody(applied=[pb.AppliedState(step=step, state_digest=state_of(step))]).SerializeToString()
        return await self._all([peer.report(pb.ReportBody(), said) for peer in self.peers])

    def _held(self, authors: list[bytes]) -> pb.HeldPlaces:
        step, places = self.open.step, {key: place for place, key in enumerate(self.open.roster)}
        mask, digest = mask_of(places[key] for key in authors), digest_of(payload_of(key, step) for key in authors)
        return pb.HeldPlaces(step=step, attempt=self.open.attempt, places=mask_bytes(mask), payloads_sha256=digest)

    async def _all(self, reports: list[Any]) -> dict[str, Any]:
        refused = [why for said in await asyncio.gather(*reports) for why in said]
        return {"refusals": len(refused), "why": refused[:2]}

    async def _listen(self, peer: BenchPeer, stream: Any) -> None:
        try:
            async for raw in stream:
                now, peer.told = time.monotonic(), True
                if raw[0] == SUM_TAG:
                    self.tasks.append(asyncio.ensure_future(self._add_up(peer, raw)))
                if raw[0] in (ENTRY_TAG, DECIDED_TAG, PACKED_TAG):
                    self.entries.append(now)
                if raw[0] in (TICK_TAG, DECIDED_TAG, PACKED_TAG):
                    self.ticks.append(now)
                    if peer is self.peers[0]:
                        self._opened(raw)
                self.changed.set()
            self.lost.append("the stream ended")
        except grpc.aio.AioRpcError as error:
            self.lost.append(f"{error.code().name}: {error.details()}")
        self.changed.set()

    async def _add_up(self, peer: BenchPeer, raw: bytes) -> None:
        """A sum, which is only a hash here, as the payloads are."""
        asked = pb.FollowResponse.FromString(raw).sum
        digest = digest_of(c.payload_sha256 for c in asked.contributions)
        said = pb.Summed(step=asked.step, attempt=asked.attempt, payloads_sha256=digest)
        said.aggregate.sha256, said.aggregate.total_bytes = digest, 7000
        await peer.report(pb.ReportBody(summed=said))

    def _opened(self, raw: bytes) -> None:
        event = pb.FollowResponse.FromString(raw)
        if event.HasField("decided_zstd"):
            event.decided.ParseFromString(unpack(event.decided_zstd, self.decided, limits.DECIDED_BYTES_MAX))
        if event.HasField("decided"):
            self.decided = event.decided.SerializeToString(deterministic=True)
        said = event.decided.tick if event.HasField("decided") else event.tick
        self.sizes = {"tick": said.ByteSize(), "entry": event.decided.entry.ByteSize(), "sent": len(raw)}
        tick = log_pb2.Tick.FromString(said.envelope.body)
        roster = [member.public_key for member in tick.roster]
        self.open = Open(tick.step, tick.parent_hash, roster, tick.attempt, list(tick.aggregators))

    async def _until(self, done: Any) -> None:
        async with asyncio.timeout(CALL_SECONDS_MAX):
            while not done():
                self.changed.clear()
                await self.changed.wait()


def serve_commands(pipe: Connection, numbers: range, address: str, pem: bytes, run_id: bytes, together: bool) -> None:
    """The process: commands from the pipe, one at a time, until an empty one."""

    async def run() -> None:
        crowd, loop = Crowd(numbers, address, pem, run_id, together), asyncio.get_running_loop()
        while True:
            name, *arguments = await loop.run_in_executor(None, pipe.recv)
            if not name:
                break
            try:
                pipe.send(await getattr(crowd, name)(*arguments))
            except (TimeoutError, grpc.RpcError) as error:
                pipe.send({"failed": f"{name}: {type(error).__name__} {error}; streams lost: {crowd.lost[:2]}"})
        for task in crowd.tasks:
            task.cancel()

    asyncio.run(run())
