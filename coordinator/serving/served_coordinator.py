"""A coordinator, served: home folder, lock, journal, TLS, gRPC behind its gate, health, metrics; a clean stop.

With a database that several coordinators share, it acts while it holds the lease (election.py), and stands by otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shlex
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import start_http_server

from coordinator.config import CoordinatorSettings, split_address
from coordinator.serving.call_limits import Places
from coordinator.serving.election import Election, Lease
from coordinator.serving.gate import Bounded, Gate
from coordinator.serving.hub import Hub
from coordinator.serving.metrics import Metrics
from coordinator.serving.operator_service import OperatorService
from coordinator.serving.page import line_of, pages_of
from coordinator.serving.peer_service import CoordinatorService
from coordinator.serving.sessions import Sessions
from coordinator.store import backup, home_files
from coordinator.store.database import parsed, shared
from coordinator.store.home_files import KnownRuns
from coordinator.store.journal import Journal, JournalError
from coordinator.store.wait_queues import FILE, FILE_BYTES_MAX, from_file
from protos.console import lock_home
from protos.disk import remove_at_end, replace_bytes, writing
from protos.errors import OperatorError
from protos.identity import Identity, short
from protos.invite import Invite
from protos.limits import REQUEST_BYTES_MAX
from protos.log import run_id_of
from protos.process import heeded
from protos.run_config import config_from_json
from protos.tracing import Tracing
from protos.v1 import coordinator_pb2, coordinator_pb2_grpc, log_pb2

STOP_SECONDS_MAX = 3.0
SERVICE_NAMES = tuple(service.full_name for service in coordinator_pb2.DESCRIPTOR.services_by_name.values())
_GRPC_OPTIONS = [
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a lottery
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it, gRPC waits a minute for an answer
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # Peers with several coordinators ping every second.
    ("grpc.max_concurrent_streams", 100),  # On one connection a peer needs four.
    (
        "grpc.server_handshake_timeout_ms",
        5_000,
    ),  # A silent connection holds a descriptor so long; the default is 120 s.
    ("grpc.max_connection_idle_ms", 60_000),  # A connection without a call ends. A follower always has one under way.
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.http2.bdp_probe", 0),  # with 500 peers, the pings that measure a link took 7 % of a step's CPU
]
# The last limit, never reached while `call_limits.LIMITS` holds: calls that follow, and calls of all lanes.
CONCURRENT_CALLS_MAX = 32_768
DESCRIPTORS_MAX = 65_536
DESCRIPTORS_KEPT = 128
"""For the journal, metrics and the program itself: connections never take the last ones."""
CONNECTIONS_MIN = 16


@dataclass(frozen=True)
class Serving:
    """The address and identity of a serving coordinator; `serve` writes it to `serving.json` in the home folder."""

    host: str
    port: int
    advertise: str
    public_key: str
    certificate_sha256: str
    pid: int
    metrics: str | None
    coordinators: tuple[str, ...]
    """The addresses that invites name, the acting coordinator first."""

    def naming(self, coordinators: tuple[str, ...]) -> Serving:
        """The same, with these coordinators."""
        return replace(self, coordinators=coordinators)

    def invite(self, genesis: log_pb2.Genesis, ticket: bytes = b"") -> Invite:
        """The invite of a run of this coordinator; `ticket`: signed, or empty. Raises Refusal for a wrong configuration."""
        config = config_from_json(genesis.config_json)
        return Invite(
            run_id=run_id_of(genesis),
            coordinators=self.coordinators,
            coordinator_public_key=genesis.coordinator_public_key,
            certificate_sha256=bytes.fromhex(self.certificate_sha256),
            bootstrap=tuple(config.overlay.bootstrap),
            run_name=config.name,
            ticket=ticket,
        )

    def write(self, home: Path) -> None:
        """So that the operator's commands find it, whole at any moment. Raises DiskError."""
        with writing(home / "serving.json"):
            replace_bytes(home / "serving.json", json.dumps(asdict(self)).encode(), synced=False)

    @staticmethod
    def read(home: Path) -> Serving:
        """The coordinator that serves this home folder; OperatorError if none does."""
        try:
            values = json.loads((home / "serving.json").read_text())
            return Serving(**{**values, "coordinators": tuple(values["coordinators"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise OperatorError(
                f"no coordinator serves {home}: start one with `swarmentum-coordinator serve --home {shlex.quote(str(home))}`"
            ) from error


def own_address() -> str:
    """This machine's address towards the internet, without sending anything; 127.0.0.1 if there is no route."""
    for family, documented in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((documented, 9))  # connecting a UDP socket only picks a route
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def raise_descriptors(most: int = DESCRIPTORS_MAX) -> int:
    """Let this process have as many descriptors as it may, up to `most`: each connection takes one. How many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a lower limit of its own
        return soft
    return wanted


def connections_of(descriptors: int) -> int:
    """How many connections such a process takes. Raises OperatorError for too few: gRPC would close each without a word."""
    if (most := descriptors - DESCRIPTORS_KEPT) < CONNECTIONS_MIN:
        raise OperatorError(
            f"this process may have {descriptors} open files, and a coordinator needs {DESCRIPTORS_KEPT + CONNECTIONS_MIN}, "
            "and one more for each peer: raise the limit (`ulimit -n 65536`; systemd: LimitNOFILE=65536)"
        )
    return most


async def serve(settings: CoordinatorSettings, ready: Callable[[Serving], None]) -> None:
    """Serve until SIGINT or SIGTERM. `ready` gets the address once."""
    home = settings.home
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_home(home, "coordinator"))
        backup.check_whole(home)
        identity = Identity.load_or_create(home / "identity.key")
        certificate = home_files.load_or_create(home)
        if why := certificate.ends_soon(datetime.now(UTC)):
            structlog.get_logger("coordinator").warning("the TLS certificate ends", why=why)
        metrics, url = Metrics(home), parsed(settings.database or Journal.sqlite_url(home))
        metrics_server = _serve_metrics(settings, metrics, stack)
        journal = Journal(url, identity)
        hub, front = Hub(journal, identity, metrics, _tracing(settings, identity, stack)), Front()
        stack.callback(hub.close)
        await front.show(acts=not shared(url))
        if shared(url):
            hub.stand_by("this coordinator starts; try again")
        else:
            _alone(hub, journal, home)
        stack.push_async_callback(hub.stop)  # ends the work that the last requests began
        server, port, gate = await _listen(settings, hub, certificate, front)
        stack.push_async_callback(server.stop, STOP_SECONDS_MAX)
        stack.callback(front.end_telling)
        stack.push_async_callback(hub.stop)
        serving = _serving(settings, identity, certificate, port, metrics_server)
        serving.write(home)
        stack.callback(remove_at_end, home / "serving.json")
        tasks = [asyncio.ensure_future(_signalled())]
        stack.push_async_callback(_cancelled, asyncio.ensure_future(Bounded(port, gate.under_way.keys).run()))
        if shared(url):
            lease = Lease(url, ",".join(serving.coordinators), identity, certificate.sha256)

            def met(here: tuple[str, ...]) -> None:
                hub.coordinators = here if len(here) > 1 else ()
                serving.naming(here).write(home)

            election = Election(lease, journal, hub, front.show, met)
            tasks.append(await stack.enter_async_context(_elected(election, hub)))
            serving = serving.naming(election.here)
        for page in pages_of(settings, lambda: _shown(serving, hub)):
            stack.push_async_callback(_cancelled, asyncio.ensure_future(page.run()))
        log = structlog.get_logger("coordinator")
        log.info(
            "the coordinator is serving",
            address=serving.advertise,
            runs=len(hub.runs),
            home=str(home),
            step=0,
            peer="-",
        )
        ready(serving)
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        for task in done:
            task.result()


def _tracing(settings: CoordinatorSettings, identity: Identity, stack: AsyncExitStack) -> Tracing | None:
    """What records the spans of steps, until the coordinator stops. Raises OperatorError if the extra is missing."""
    if not settings.trace:
        return None
    tracing = Tracing("swarmentum-coordinator", short(identity.public_key), structlog.get_logger("coordinator"))
    stack.push_async_callback(asyncio.to_thread, tracing.close)
    return tracing


def _alone(hub: Hub, journal: Journal, home: Path) -> None:
    """Act on the journal of this home, which no other coordinator uses."""
    known = KnownRuns(home)
    hub.noted = known.add
    _look_over(journal, known)
    hub.held = backup.is_held(home)
    _take_lines(journal, home / FILE)
    hub.restore()


def _take_lines(journal: Journal, path: Path) -> None:
    """The lines in the file of an earlier version go into the journal. The file goes after that, so a crash loses none."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        lines = from_file(file.read(FILE_BYTES_MAX))
    for run_id in {run_id for run_id, _ in journal.runs()} & (lines.keys() - journal.lines().keys()):
        journal.keep_line(run_id, lines[run_id])
    path.unlink()


@asynccontextmanager
async def _elected(election: Election, hub: Hub) -> AsyncIterator[asyncio.Task[None]]:
    """Act in turn with the database's other coordinators. Begins once this coordinator knows which one acts."""
    running = asyncio.ensure_future(election.run())
    known = asyncio.ensure_future(election.known.wait())
    try:
        await asyncio.wait({running, known}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield running
    finally:
        await hub.stop()  # while this coordinator may still write
        known.cancel()
        running.cancel()
        await asyncio.gather(known, running, return_exceptions=True)
        await election.close()


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """Answers `Check`. `Watch` would let strangers hold calls open for good, so a client has to ask again."""

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """Not here: clients that check health take this answer for "no health service" and go on."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this coordinator answers Check only")


@dataclass
class Front:
    """The outside signs that this coordinator acts: its health, and sessions, which end when another coordinator acts."""

    health: Any = field(default_factory=Health)
    sessions: Sessions = field(default_factory=Sessions)
    end_telling: Callable[[], None] = lambda: None
    """Ends the streams of reports."""

    async def show(self, acts: bool) -> None:
        """This coordinator begins or ceases to act."""
        self.sessions.forget()
        status = health_pb2.HealthCheckResponse
        for name in ("", *SERVICE_NAMES):
            await self.health.set(name, status.SERVING if acts else status.NOT_SERVING)


async def _listen(
    settings: CoordinatorSettings, hub: Hub, certificate: home_files.Certificate, front: Front | None = None
) -> tuple[Any, int, Gate]:
    """The server, its port and its gate. Without a front of its own, it shows that it acts."""
    split_address(settings.listen)
    if front is None:
        front = Front()
        await front.show(acts=True)
    connections = ("grpc.max_allowed_incoming_connections", connections_of(raise_descriptors()))
    gate = Gate(Places(), front.sessions.at, hub.metrics)
    server = grpc.aio.server(
        interceptors=[gate],
        options=[*_GRPC_OPTIONS, connections],
        maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX,
    )
    service = CoordinatorService(hub, front.sessions)
    front.end_telling = service.end_telling
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(service, server)
    coordinator_pb2_grpc.add_OperatorServiceServicer_to_server(OperatorService(hub, front.sessions), server)
    health_pb2_grpc.add_HealthServicer_to_server(front.health, server)
    credentials = grpc.ssl_server_credentials([(certificate.key_pem, certificate.certificate_pem)])
    try:
        port = server.add_secure_port(settings.listen, credentials)
    except RuntimeError as error:
        await server.stop(None)
        raise OperatorError(
            f"--listen {settings.listen}: cannot listen there; is the port in use? port 0 takes a free one"
        ) from error
    await server.start()
    return server, port, gate


def _serve_metrics(settings: CoordinatorSettings, metrics: Metrics, stack: AsyncExitStack) -> Any:
    if settings.metrics_listen is None:
        return None
    host, port = split_address(settings.metrics_listen)
    try:
        server, thread = start_http_server(port, host, registry=metrics.registry)
    except OSError as error:
        raise OperatorError(f"--metrics-listen {settings.metrics_listen}: {error.strerror}") from error
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return server


def _serving(
    settings: CoordinatorSettings,
    identity: Identity,
    certificate: home_files.Certificate,
    port: int,
    metrics_server: Any,
) -> Serving:
    host, _ = split_address(settings.listen)
    reachable = own_address() if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    at = f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"
    metrics = None
    if metrics_server is not None:
        metrics_host, metrics_port = metrics_server.server_address[:2]
        metrics = f"http://{metrics_host}:{metrics_port}/metrics"
    named = tuple((settings.advertise or at).split(","))
    local = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    return Serving(
        host=f"[{local}]" if ":" in local else local,
        port=port,
        advertise=named[0],
        coordinators=named,
        public_key=identity.public_key.hex(),
        certificate_sha256=certificate.sha256.hex(),
        pid=os.getpid(),
        metrics=metrics,
    )


def _shown(serving: Serving, hub: Hub) -> dict[bytes, Callable[[], str]]:
    """The runs for the page: run id -> its line for the page's process."""
    here = serving.naming(hub.coordinators or serving.coordinators)
    others = [address for address in here.coordinators if address != serving.advertise]
    at = (f"{serving.host}:{serving.port}", *others)
    shown = [run_id for run_id, runtime in hub.runs.items() if not runtime.run.archived]
    return {run_id: partial(line_of, here.invite(hub.genesis(run_id)), at) for run_id in shown}


def _look_over(journal: Journal, known: KnownRuns) -> None:
    """Check that the journal is this home's, and give back the room of deleted runs, if the disk has the room for that."""
    known.check(journal.place, [*(run_id for run_id, _ in journal.runs()), *journal.deleted()])
    log = structlog.get_logger("coordinator").bind(step="-", peer="-")
    try:
        if journal.shrink():
            log.info("the journal is smaller: the room of deleted runs is free", journal=journal.place)
    except JournalError as error:
        log.warning("the room of deleted runs stays in the journal", why=str(error))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _signalled() -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in heeded():
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
