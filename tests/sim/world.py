"""The simulated world: a coordinator and peers made of the real parts, which can be killed and started again at any moment.

Files are real, in a folder of the world (in memory where there is /dev/shm); what survives a crash is what was written.
ADR 17.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import greenlet
import numpy as np
import sqlalchemy as sa
import torch
from sqlalchemy import event
from torch import Tensor, nn

from coordinator.clock.events import Asked, ExclusionAsked
from coordinator.serving.hub import Hub
from coordinator.serving.metrics import Metrics
from coordinator.serving.peer_service import CoordinatorService
from coordinator.serving.sessions import Sessions
from coordinator.store.journal import Journal
from node.blobs.payloads import Payloads
from node.building import Home, LateDoor, assemble
from node.data.samples import MixedSamples, Samples
from node.full_disk import is_full
from node.link.client import CoordinatorClient, check_genesis
from node.link.coordinators import Coordinators
from node.model.gradients import GradResult
from node.optim.votes.sums import borders
from node.overlay.settings import OverlaySettings
from node.snapshot.store import SnapshotStore
from node.swarm.api import EVENTS_MAX, Swarm
from node.swarm.facts import Committed, Event
from node.swarm.publication import Publication, SignedAnnouncement
from node.swarm.pushes import Pusher
from node.swarm.session import Outside, Session
from node.training.replica import Replica
from node.training.telemetry import Summary
from protos.assignment import Range, phases
from protos.envelope import Kind, parse, seal
from protos.errors import NetworkError, SwarmentumError
from protos.identity import Identity
from protos.invite import Invite
from protos.log import FORMAT_VERSION, run_id_of
from protos.run_config import RunConfig
from protos.slices import Update, hash_of, joined, split, with_slices
from protos.v1 import envelope_pb2, log_pb2, update_pb2
from tests.sim.checkers import Checkers
from tests.sim.clock import BEGIN_SECONDS, InlineExecutor, Thread, VirtualLoop, context_of
from tests.sim.network import COORDINATOR, Channel, Net, Overlay, SimDiscovery, SimHost

VOCABULARY, CONTEXT = 64, 8
RESTART_SECONDS = 2.0  # a supervisor starts a peer again that ended with an error
PATIENCE_SECONDS = 1200.0
"""Longer than a run: a peer that gives up and joins again would hide that the run stands still. Real ones wait without end."""


class Bigrams(nn.Module):
    """Two tensors: a table of what follows what, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(0.02 * torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids] + self.bias


class Coordinator:
    """The real service, hub, machine and journal (SQLite); `crash` and `start`."""

    def __init__(self, net: Net, folder: Path, config: RunConfig, checkers: Checkers) -> None:
        self._net, self._checkers = net, checkers
        self.identity = Identity.from_seed(b"c" * 32)
        self.path = folder / "journal.sqlite3"
        self.url = f"sqlite:///{self.path}"
        self.genesis = log_pb2.Genesis(
            format_version=FORMAT_VERSION,
            config_json=config.canonical_json(),
            coordinator_public_key=self.identity.public_key,
            nonce=bytes(16),
        )
        self.run_id = run_id_of(self.genesis)
        self.full = False
        """The disk is full."""
        self._lives = 0
        self.service: CoordinatorService | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        journal = Journal(self.url, self.identity)
        journal.create_run(self.run_id, self.genesis)
        journal.close()

    def start(self) -> None:
        """As `swarmentum-coordinator serve`: everything from the journal."""
        context_of(COORDINATOR).run(self._start)

    def _start(self) -> None:
        assert self.service is None, "it runs"
        self._lives += 1
        journal = Journal(self.url, self.identity)
        event.listen(journal._engine, "before_cursor_execute", self._refuse)
        event.listen(journal._engine, "commit", self._refuse_commit)
        self.hub = Hub(journal, self.identity, Metrics())
        self._journal = journal
        self.hub.restore()
        self.service = CoordinatorService(self.hub, Sessions())
        self._net.alive[COORDINATOR] = self._lives
        self._checkers.coordinator_started(self.hub.runs[self.run_id].run)

    def _refuse(self, _c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if self.full and statement.startswith("INSERT"):
            raise sa.exc.OperationalError(statement, {}, Exception("database or disk is full"))

    def _refuse_commit(self, _c: Any) -> None:
        if self.full and self._net.random.random() < 0.5:
            raise sa.exc.OperationalError("COMMIT", {}, Exception("disk I/O error"))

    def crash(self) -> None:
        """kill -9: what was begun is not finished; what was journalled is there."""
        self._net.loop.continue_process(COORDINATOR)
        self.service = None
        self._net.alive[COORDINATOR] = 0
        runtime = self.hub.runs[self.run_id]
        if runtime._timer is not None:
            runtime._timer.cancel()
        runtime._stopped = True
        for task in [*self._tasks, *runtime._tasks]:
            task.cancel()
        self._journal.close()

    @property
    def head_step(self) -> int:
        return self.hub.runs[self.run_id].run.head_step

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Something that this life of the coordinator does."""
        task = self._net.loop.create_task(work, context=context_of(COORDINATOR))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def call(self, name: str, request: Any) -> Any:
        """A unary call. Its handler goes on when the caller gives up, and ends with the coordinator."""
        from tests.sim.network import UNAVAILABLE, CallError, Context

        task = self.spawn(getattr(self.service, name)(request, Context()))
        try:
            response = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise CallError(UNAVAILABLE, "the connection broke") from None
            raise
        if self.service is not None:
            self._checkers.coordinator(self.hub.runs[self.run_id].run)
        return response


async def at_once(function: Any, *given: Any) -> Any:
    """A disk, or a sum, that takes no time, without a thread."""
    return function(*given)


class SimSwarm(Swarm):
    """What the training thread sees: the real calls, on virtual time."""

    def __init__(self, make: Any, peer: PeerProcess) -> None:
        self._peer = peer
        self._closed, self._waits_for = False, ""
        self._queue: asyncio.Queue[Event] = asyncio.Queue(EVENTS_MAX)
        self._session = make(self._emit)

    async def _emit(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._peer.world.checkers.entry(self._peer.name, event.signed)
        await self._queue.put(event)

    def _call(self, work: Any, seconds_max: float, *, stoppable: bool = False) -> Any:
        try:
            return self._peer.thread.wait(asyncio.wait_for(work, seconds_max))
        except TimeoutError as error:
            raise NetworkError(f"the network side did not answer within {seconds_max:.0f} s") from error
        finally:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:  # killed before it began
                work.close()

    def _sleep(self, seconds: float) -> None:
        self._peer.thread.sleep(seconds)

    def halt(self) -> None:
        self._call(self._session.halt(), 90.0)
        while not self._queue.empty():
            self._queue.get_nowait()

    def next_event(self, seconds_max: float) -> Event | None:
        try:
            event: Event = self._peer.thread.wait(asyncio.wait_for(self._queue.get(), seconds_max))
        except TimeoutError:
            return None
        self._session.release(event)
        return event

    def applied(self, step: int, digest: bytes) -> None:
        self._peer.world.checkers.applied(self._peer.name, step, digest)
        super().applied(step, digest)


class SimReplica(Replica):
    """Computing takes time: a part of it always, the rest by samples. `compute_seconds`: of 8 samples."""

    def __init__(self, peer: PeerProcess, *args: Any) -> None:
        super().__init__(*args)
        self.first_model = Bigrams
        self._peer = peer

    def mean_gradient(self, samples: Samples, ranges: Iterable[Range], *args: Any, **kwargs: Any) -> GradResult:
        parts = tuple(ranges)
        work = 0.2 + 0.1 * sum(map(len, parts))
        self._peer.thread.sleep(work * self._peer.world.net.random.uniform(0.8, 1.2) * self._peer.compute_seconds)
        return super().mean_gradient(samples, parts, *args, **kwargs)


def identity_of(number: int) -> Identity:
    """Of peer `number`."""
    return Identity.from_seed(bytes([number % 251, number // 251]) + bytes(30))


class SimDoor(LateDoor):
    """An aggregator that lies adds something else up."""

    def __init__(self, peer: PeerProcess) -> None:
        self._peer = peer

    def aggregate(self, updates: Sequence[Update], step: int) -> bytes:
        if not self._peer.lies_in_sums:
            return super().aggregate(updates, step)
        self._peer.world.lies += 1
        return super().aggregate(updates[:1], step)


class _Stop:
    """Whether somebody has pressed Ctrl-C."""

    def __init__(self, peer: PeerProcess) -> None:
        self._peer = peer

    def __call__(self) -> bool:
        return self._peer.leaving

    def wait(self, seconds: float) -> bool:
        self._peer.thread.sleep(seconds)
        return self._peer.leaving


class PeerProcess:
    """One peer: its disk stays, its processes come and go."""

    def __init__(self, world: World, number: int, compute_seconds: float) -> None:
        self.world, self.name = world, f"peer{number}"
        self.identity = identity_of(number)
        self.folder = world.folder / self.name
        self.compute_seconds = compute_seconds
        self.lives = 0
        self.finished = False
        self.gave_up = False
        self.full = False
        self.leaving = False
        self.lies_in_sums = False
        self.replica: Replica | None = None
        self._session: Session | None = None

    @property
    def running(self) -> bool:
        return self.world.net.up(self.name) > 0

    @property
    def too_late(self) -> bool:
        """The run is over, and everybody who has its state has left: as much as a peer can get."""
        return any(peer.finished for peer in self.world.peers) and self.gave_up

    def keeps(self, after: int, step: int) -> bool:
        """Whether it runs, and has the state after `step` and the entries from `after` on."""
        has_state = (
            self.running and self.replica is not None and self.replica.step >= step and self._session is not None
        )
        return has_state and (after == step or bool(self._session.parts.entries.lost(after)[0]))

    def start(self) -> None:
        """As `swarmentum join` with the same home."""
        if self.running or self.finished:
            return
        self.lives += 1
        self.replica = None
        self.world.net.alive[self.name] = self.lives
        self.thread = Thread(self.world.loop, self._live, self.name)

    def _live(self) -> None:
        try:
            self.finished = self._train()
            self.world.note(f"{self.name} {'finished' if self.finished else 'left'}")
            self.world.loop.call_soon(self.crash)
            if not (self.finished or self.leaving):
                self.world.loop.call_later(RESTART_SECONDS, self.start)
        except (SwarmentumError, OSError) as error:
            if not isinstance(error, SwarmentumError) and not is_full(error):
                self.world.failures.append(error)
            self.world.note(f"{self.name} ended: {error}")
            self.world.checkers.ended(self.name, error)
            self.gave_up = True
            self.world.loop.call_soon(self.crash)
            self.world.loop.call_later(RESTART_SECONDS, self.start)
        except BaseException as error:
            if not isinstance(error, greenlet.GreenletExit):
                self.world.failures.append(error)
            raise

    def _train(self) -> bool:
        world = self.world
        self.folder.mkdir(exist_ok=True)
        store = SnapshotStore(self.folder / "pieces", 1 << 30)
        home = Home(self.folder, store, SimPayloads(self), SimDoor(self))
        overlay = OverlaySettings(patience_seconds=PATIENCE_SECONDS)
        outside = Outside(
            host=lambda identity, path, settings, refused: SimHost(
                world.overlay, self.name, identity, path, settings, refused
            ),
            client=lambda invite, identity, known: SimClient(world, self.name, invite, identity, known),
            discovery=lambda host, run_id: SimDiscovery(world.overlay, host, run_id),  # type: ignore[arg-type,return-value]
            aside=at_once,
        )
        swarm = SimSwarm(
            lambda emit: self._made(home.session(world.invite, self.identity, self.folder, overlay, emit, outside)),
            self,
        )
        facts = swarm.connect()
        config = check_genesis(facts.genesis, world.invite)
        replica = SimReplica(self, world.invite.run_id, Bigrams(), config.optimizer, config.optimizer.vote_size)
        self.replica = replica
        trainer = assemble(
            home,
            config,
            replica,
            swarm,
            self.samples(config),
            Summary(self.identity.peer_id, "cpu"),
            _Stop(self),
            patience_seconds=overlay.patience_seconds,
            micro_batch=64,
            autocast=None,
            behind=False,
        )
        trainer.enter(list(facts.bootstrap))
        finished = trainer.run()
        trainer.finish()
        swarm._call(swarm._session.stop(leaving=True), 10.0)
        return finished

    def samples(self, config: RunConfig) -> Samples | None:
        """What it trains on; None: it is an anchor."""
        return self.world.samples(config)

    def _made(self, session: Session) -> Session:
        self._session = session
        return session

    def crash(self, *, silently: bool = False) -> None:
        """kill -9; `silently`: other peers' connections to it do not notice."""
        if not self.running:
            return
        self.world.loop.continue_process(self.name)
        self.world.net.alive[self.name] = 0
        self.thread.kill()
        session, self._session = self._session, None
        if session is not None:
            for task in [*session.parts.runtime.tasks, *(shared.task for shared in session.fetcher._running.values())]:
                task.cancel()
            assert isinstance(session.host, SimHost)
            session.host.vanish(silently=silently)

    def equivocate(self, lies: bool) -> None:
        """Announce one payload to half of the others and to the coordinator, and another to the rest."""
        if self._session is not None:
            assert isinstance(self._session.host, SimHost)
            self._session.host.two_faced = self._other_votes if lies else None
            self._session.host.lied_to = self._heard_as if lies else lambda said: None
            pusher = self._session.parts.pusher
            pusher._push = self._push_two_faces if lies else partial(Pusher._push, pusher)  # type: ignore[method-assign]

    async def _push_two_faces(self, key: bytes, envelope: bytes, payload: bytes, name: bytes) -> bool:
        """Every other peer is pushed the other payload, with its announcement."""
        session = self._session
        assert session is not None
        others = sorted(peer.identity.public_key for peer in self.world.peers)
        if others.index(key) % 2:
            envelope = self._other_votes(envelope)
            sha256 = parse(update_pb2.Announcement, parse(envelope_pb2.SignedEnvelope, envelope).body).payload_sha256
            ranges, view = self.world.config.clock.ranges, session.parts.view
            whole = session.parts.publication._payloads.whole(sha256, ranges)
            payload = payload if whole is None else with_slices(whole, ranges, view.ranges_of(view.step + 1, key))
        if taken := await Pusher._push(session.parts.pusher, key, envelope, payload, name):
            self._heard_as(envelope)
        return taken

    def _heard_as(self, message: bytes) -> None:
        """Somebody heard this announcement of ours; with another payload than we hold by, it is an offence.

        Once the log has decided the step, every peer refuses it, so it harms nobody and nobody keeps it as evidence."""
        session = self._session
        last = None if session is None else session.parts.publication._last_announcement.value
        said = parse(envelope_pb2.SignedEnvelope, message)
        if last is None or said.kind != Kind.KIND_ANNOUNCEMENT or said.public_key != self.identity.public_key:
            return
        body = parse(update_pb2.Announcement, said.body)
        open_still = body.step > self.world.coordinator.head_step
        if open_still and body.step == last.step and body.payload_sha256 != last.payload_sha256:
            self.world.checkers.lied(self.identity.public_key, body.step)

    def _other_votes(self, message: bytes) -> bytes:
        envelope = parse(envelope_pb2.SignedEnvelope, message)
        session = self._session
        if (
            envelope.kind != Kind.KIND_ANNOUNCEMENT
            or envelope.public_key != self.identity.public_key
            or session is None
        ):
            return message
        said = parse(update_pb2.Announcement, envelope.body)
        ranges, payloads = self.world.config.clock.ranges, session.parts.publication._payloads
        payload = payloads.whole(said.payload_sha256, ranges)
        if payload is None:
            return message
        parts = []
        for part, chunks in zip(split(payload, ranges), borders(self.replica.demo.layout.chunks, ranges), strict=True):
            votes = parse(update_pb2.UpdatePayload, part)
            body = self.replica.demo.form.body_bytes(len(chunks), votes.size)
            votes.votes = bytes(byte ^ 0xFF for byte in votes.votes[:body])  # without those that say which are silent
            parts.append(votes.SerializeToString(deterministic=True))
        other = joined(parts)
        said.payload_sha256 = hash_of(other, ranges)
        payloads.put_whole(said.step, other, ranges)
        self.world.checkers.two_faced.add(self.identity.public_key)
        return seal(self.identity, Kind.KIND_ANNOUNCEMENT, envelope.run_id, said).SerializeToString(deterministic=True)

    def misname(self, lies: bool) -> None:
        """Tell the coordinator and half of the others another length of each payload than the rest."""
        session = self._session
        if session is None:
            return
        assert isinstance(session.host, SimHost)
        publication, right = session.parts.publication, dict[bytes, bytes]()

        async def sign_once(data: bytes, announcement: update_pb2.Announcement) -> SignedAnnouncement | None:
            found = await Publication._sign_once(publication, data, announcement)
            if found is None:
                return None
            envelope = parse(envelope_pb2.SignedEnvelope, found.envelope)
            said = parse(update_pb2.Announcement, envelope.body)
            said.payload_bytes -= 1
            wrong = seal(self.identity, Kind.KIND_ANNOUNCEMENT, envelope.run_id, said)
            told = wrong.SerializeToString(deterministic=True)
            right[told] = found.envelope
            self.world.misnamed.add(found.payload_sha256)
            return SignedAnnouncement(found.step, found.payload_sha256, told)

        session.host.two_faced = (lambda message: right.get(message, message)) if lies else None
        publication._sign_once = sign_once if lies else partial(Publication._sign_once, publication)  # type: ignore[method-assign]

    def check_buffers(self) -> None:
        """What is remembered stays within its bounds."""
        session = self._session
        if session is not None:
            self.world.checkers.buffers(self.name, session)


class SimPayloads(Payloads):
    """The payload folder, on a disk that can be full."""

    def __init__(self, peer: PeerProcess) -> None:
        super().__init__(peer.folder / "payloads")
        self._peer = peer

    def put(self, step: int, sha256: bytes, data: bytes, *, own: bool = False) -> bool:
        self._peer.world.payloads[sha256] = data
        return super().put(step, sha256, data, own=own)

    def _write(self, temporary: Path, data: bytes, path: Path) -> None:
        if self._peer.full:
            raise OSError(28, "No space left on device")
        super()._write(temporary, data, path)


class SimClient(CoordinatorClient):
    """The real client over a simulated channel."""

    def __init__(self, world: World, name: str, invite: Invite, identity: Identity | None, known: Coordinators) -> None:
        super().__init__(invite, identity, known)
        self._world, self._name = world, name

    async def connect(self) -> None:
        world = self._world
        await asyncio.sleep(world.net.delay())
        self._channel = Channel(
            world.net, self._name, lambda: None if world.coordinator.service is None else world.coordinator
        )


@dataclass
class World:
    """Everything, and the notes of what happened."""

    loop: VirtualLoop
    seed: int
    folder: Path
    config: RunConfig
    peers_wanted: int
    notes: list[str] = field(default_factory=list)
    misnamed: set[bytes] = field(default_factory=set)
    """Hashes of payloads whose authors told the coordinator another length."""
    liars: set[str] = field(default_factory=set)
    """Peers that were told to have two faces, whether they got to it or not."""
    payloads: dict[bytes, bytes] = field(default_factory=dict)
    """Everything that a peer ever had, by its hash."""
    lies: int = 0
    """False sums that aggregators made."""
    synced: set[int] = field(default_factory=set)
    """Inodes of files that a loss of power does not undo."""
    failures: list[BaseException] = field(default_factory=list)
    """What went wrong in a thread or a callback."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        random.seed(self.seed)  # the jitter of retries (protos/clocks.py)
        self.loop.set_exception_handler(self._failed)
        self._disks = [
            mock.patch(f"{module}.sync_file", self._sync)
            for module in ("protos.disk", "node.snapshot.store", "node.blobs.payloads")
        ]
        for patch in self._disks:
            patch.start()
        self.net = Net(self.loop, random.Random(self.seed + 1))
        self.overlay = Overlay(self.net)
        self._operating = asyncio.Lock()
        self.checkers = Checkers()
        self.coordinator = Coordinator(self.net, self.folder, self.config, self.checkers)
        key = self.coordinator.identity.public_key
        self.invite = Invite(self.coordinator.run_id, ("coordinator:1",), key, bytes(32), (), "sim")
        chance = np.random.default_rng(self.seed)
        self.tokens = (chance.integers(0, 8, 4000).cumsum() % VOCABULARY).astype(np.uint8)
        self.peers = [PeerProcess(self, n, self.random.uniform(1.0, 4.0)) for n in range(self.peers_wanted)]

    def samples(self, config: RunConfig) -> Samples:
        """The world's tokens; of a mixture, each source has a part of them."""
        mix = config.data.mix
        if not mix:
            return Samples(self.tokens, CONTEXT, config.seed)
        parts = [Samples(tokens, CONTEXT, config.seed) for tokens in np.array_split(self.tokens, len(mix))]
        return MixedSamples(parts, phases(config.data.weights(), config.clock.batch_samples), config.seed)

    def _failed(self, _loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception") or AssertionError(context["message"])
        self.failures.append(error)

    def operate(self, event: Asked) -> None:
        """The operator asks, until the coordinator is there and its disk takes it."""
        self.loop.create_task(self._operate(event))

    async def _operate(self, event: Asked) -> None:
        if isinstance(event, ExclusionAsked):
            self.checkers.removed.add(event.public_key)
        async with self._operating:  # one decision after the other
            while (answer := await self._asked(event)) is None:
                await asyncio.sleep(1.0)
        self.note(f"{type(event).__name__}: {answer or 'done'}")

    async def _asked(self, event: Asked) -> list[str] | None:
        """What was refused; None: nobody answers, or the disk does not take it."""
        if self.coordinator.service is None:
            return None
        asked = self.coordinator.spawn(self.coordinator.hub.runs[self.coordinator.run_id].handle(event))
        await asyncio.wait({asked})
        return None if asked.cancelled() or asked.exception() is not None else asked.result()

    def note(self, text: str) -> None:
        at, step = self.loop.now - BEGIN_SECONDS, self.coordinator.head_step
        self.notes.append(f"{at:9.3f} s, step {step}: {text}".replace(str(self.folder), "WORLD"))

    async def until(self, done: Callable[[], bool], seconds_max: float) -> bool:
        """Let time pass; False if it does not come true in time."""
        end = self.loop.now + seconds_max
        while not done():
            if self.loop.now >= end:
                return False
            await asyncio.sleep(0.25)
            if self.failures:
                raise self.failures[0]
            if self.coordinator.service is not None:
                self.checkers.coordinator(self.coordinator.hub.runs[self.coordinator.run_id].run)
            for peer in self.peers:
                peer.check_buffers()
        return True

    def _sync(self, file: BinaryIO) -> None:
        """Files are kept until the world ends; a full disk takes none."""
        file.flush()
        path = Path(f"/proc/self/fd/{file.fileno()}").readlink()
        if any(peer.full and path.is_relative_to(peer.folder) for peer in self.peers):
            raise OSError(28, "No space left on device")
        self.synced.add(path.stat().st_ino)

    async def close(self) -> None:
        """End everything; nothing is left on the loop."""
        for patch in self._disks:
            patch.stop()
        for peer in self.peers:
            peer.crash()
        if self.coordinator.service is not None:
            self.coordinator.crash()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def without_threads() -> Any:
    """Training threads fetch pieces with threads of their own: not here."""
    return mock.patch("node.training.sync.ThreadPoolExecutor", InlineExecutor)
