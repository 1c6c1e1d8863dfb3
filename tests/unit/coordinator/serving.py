"""A real coordinator in this process: gRPC over TLS on 127.0.0.1, and the peers' own client."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from coordinator import __main__ as command
from coordinator.clock.state import Run
from coordinator.config import CoordinatorSettings
from coordinator.serving.event_loop import RunRuntime
from coordinator.serving.gate import Gate
from coordinator.serving.hub import Hub
from coordinator.serving.metrics import Metrics
from coordinator.serving.served_coordinator import Serving, _listen
from coordinator.store import backup, home_files
from coordinator.store.checkpoint import FoldedRuns
from coordinator.store.journal import Journal
from node.link.client import CoordinatorClient
from protos.calls import pinned_aio_channel
from protos.envelope import NO_RUN, Kind, seal
from protos.identity import Identity
from protos.invite import Invite
from protos.limits import NONCE_BYTES
from protos.log import FORMAT_VERSION, run_id_of
from protos.run_config import RunConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from protos.v1 import log_pb2, update_pb2
from tests.unit.coordinator.driver import LAYOUT, Harness, digest_of, sha, snapshot_at

COORDINATOR = Identity.from_seed(bytes([1]) * 32)
SECONDS_MAX = 240.0
"""For what comes at all; a busy machine is no failure."""


def identity(number: int) -> Identity:
    """Peer `number`'s key pair."""
    return Identity.from_seed(bytes([100 + number]) * 32)


async def eventually(true: Callable[[], Any]) -> Any:
    """What `true` returns once it is true."""
    async with asyncio.timeout(SECONDS_MAX):
        while not (value := true()):
            await asyncio.sleep(0.002)
        return value


@dataclass
class Served:
    """The parts of a coordinator that serves one run."""

    home: Path
    hub: Hub
    journal: Journal
    invite: Invite
    port: int
    certificate: home_files.Certificate
    gate: Gate

    @property
    def runtime(self) -> RunRuntime:
        return self.hub.runs[self.invite.run_id]

    def refused(self, reason: str) -> float:
        """The counter of one reason."""
        name = "swarmentum_refused_total"
        return self.hub.metrics.registry.get_sample_value(name, {"reason": reason}) or 0.0

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[Any]:
        """A raw channel that trusts the certificate."""
        async with pinned_aio_channel(f"127.0.0.1:{self.port}", self.certificate.certificate_pem) as channel:
            yield channel


def genesis_of(config: RunConfig) -> log_pb2.Genesis:
    """A run of a model of ten parameters."""
    return log_pb2.Genesis(
        format_version=FORMAT_VERSION,
        config_json=config.canonical_json(),
        coordinator_public_key=COORDINATOR.public_key,
        nonce=bytes(16),
        layout_digest=LAYOUT,
        parameters=10,
    )


def read_back(lived: Harness, home: Path) -> Run:
    """The run that a journal gives back which got this one's records; each is as it was."""
    journal, genesis = Journal(Journal.sqlite_url(home), COORDINATOR), genesis_of(lived.settings)
    journal.create_run(run_id_of(genesis), genesis)
    journal.append(run_id_of(genesis), *lived.journal)
    assert list(journal.records(run_id_of(genesis))) == lived.journal
    replay = FoldedRuns(journal)
    replay.catch_up()
    journal.close()
    return replay.runs()[0].at(0)


@asynccontextmanager
async def served(home: Path, config: RunConfig, **settings: Any) -> AsyncIterator[Served]:
    """Serve `home`; the run is created at the first start. `settings`: of the coordinator."""
    journal = Journal(Journal.sqlite_url(home), COORDINATOR)
    hub = Hub(journal, COORDINATOR, Metrics())
    hub.held = backup.is_held(home)
    hub.restore()
    certificate = home_files.load_or_create(home)
    listen = CoordinatorSettings(home=home, listen="127.0.0.1:0", **settings)
    server, port, gate = await _listen(listen, hub, certificate)
    genesis = genesis_of(config)
    run_id = run_id_of(genesis)
    if run_id not in hub.runs:
        await hub.create_run(genesis)
    invite = Invite(run_id, (f"127.0.0.1:{port}",), COORDINATOR.public_key, certificate.sha256, (), config.name)
    try:
        yield Served(home, hub, journal, invite, port, certificate, gate)
    finally:
        await hub.stop()
        await server.stop(0)
        await hub.stop()
        hub.close()


@contextmanager
def operated(here: Served, group: str = "invite") -> Iterator[Any]:
    """A group of the operator's commands, on this coordinator's home: what a command prints, as JSON."""
    path = here.home / "identity.key"
    if not path.exists():
        path.write_bytes(COORDINATOR.to_libp2p())
    address = here.invite.coordinators[0]
    pin = here.certificate.sha256.hex()
    Serving("127.0.0.1", here.port, address, COORDINATOR.public_key.hex(), pin, 1, None, (address,)).write(here.home)

    async def run(*arguments: str) -> Any:
        home = ("--home", str(here.home), "--json")
        done = await asyncio.to_thread(CliRunner().invoke, command.app, [group, *arguments, *home])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        # the coordinator runs in this process, and logs to the same stdout
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    yield run


@dataclass
class LivePeer:
    """A peer without a model: real signatures, real calls, payloads that are only hashes."""

    number: int
    client: CoordinatorClient
    run_id: bytes
    stream: AsyncGenerator[pb.FollowResponse, None] | None = None

    @property
    def key(self) -> bytes:
        return identity(self.number).public_key

    async def join(self, from_step: int = 0, layout: bytes = LAYOUT) -> pb.FollowResponse:
        """Connect, join, follow, tell that the initial state is there; the first event."""
        await self.client.connect()
        await self.client.join(pb.JoinBody(layout_digest=layout, parameters=10, device="cpu"))
        self.stream = self.client.follow(from_step)  # type: ignore[assignment]
        return await self.event()

    async def event(self) -> pb.FollowResponse:
        assert self.stream is not None
        async with asyncio.timeout(SECONDS_MAX):
            return await anext(self.stream)

    async def until(self, what: str) -> pb.FollowResponse:
        """The next event of a kind."""
        while True:
            event = await self.event()
            if event.WhichOneof("event") == what:
                return event

    async def ready(self, step: int = 0) -> list[str]:
        """Tell the state after `step` and the snapshot of step 0."""
        fact = snapshot_at(0)
        return await self.client.report(
            pb.ReportBody(
                applied=[pb.AppliedState(step=step, state_digest=digest_of(step))],
                snapshots=[pb.SnapshotRef(step=0, root=fact.root, total_bytes=fact.total_bytes)],
            )
        )

    def payload(self, step: int) -> bytes:
        return sha("payload", self.number, step)

    def announcement(self, tick: log_pb2.Tick, **changed: Any) -> Any:
        """This peer's announcement of a step, signed."""
        body = update_pb2.Announcement(
            step=tick.step, parent_hash=tick.parent_hash, payload_sha256=self.payload(tick.step), payload_bytes=10,
            samples=1, tokens=128, loss=2.0, compute_ms=5,
        )  # fmt: skip
        for name, value in changed.items():
            setattr(body, name, value)
        return seal(identity(self.number), Kind.KIND_ANNOUNCEMENT, self.run_id, body)

    async def contribute(self, tick: log_pb2.Tick, holds: list[LivePeer]) -> list[str]:
        """Announce, and hold these peers' payloads."""
        holdings = [
            pb.Holding(step=tick.step, public_key=peer.key, payload_sha256=peer.payload(tick.step)) for peer in holds
        ]
        return await self.client.report(pb.ReportBody(announcement=self.announcement(tick), holdings=holdings))

    async def close(self) -> None:
        if self.stream is not None:
            await self.stream.aclose()
        await self.client.close()


@asynccontextmanager
async def peers(here: Served, count: int) -> AsyncIterator[list[LivePeer]]:
    """Peers that have not joined yet."""
    made = [LivePeer(n, CoordinatorClient(here.invite, identity(n)), here.invite.run_id) for n in range(count)]
    try:
        yield made
    finally:
        for peer in made:
            await peer.close()


def tick_of(event: pb.FollowResponse) -> log_pb2.Tick:
    return log_pb2.Tick.FromString(event.tick.envelope.body)


def operator_stub(channel: Any) -> Any:
    return rpc.OperatorServiceStub(channel)


def create_request(config: RunConfig, by: Identity = COORDINATOR, kind: int = Kind.KIND_ADMIN) -> pb.CreateRunRequest:
    body = pb.CreateRunBody(config_json=config.canonical_json(), nonce=secrets.token_bytes(NONCE_BYTES))
    return pb.CreateRunRequest(envelope=seal(by, kind, NO_RUN, body))
