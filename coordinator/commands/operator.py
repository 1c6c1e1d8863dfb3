"""Requests of the operator's commands to coordinators.

`Operator` asks the one that serves a home folder, signed with that folder's key; `call` asks those of an invite, behind the
certificate that it pins.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, TypeVar

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.config import Home, Json, settings
from coordinator.serving.served_coordinator import Serving
from coordinator.store.home_files import load_or_create
from protos.calls import details_of, error_of, fetch_certificate, pinned_channel, way_of
from protos.changes import Settings, settings_body
from protos.envelope import NO_RUN, Kind, seal
from protos.errors import NetworkError, OperatorError, RefusedError
from protos.identity import Identity
from protos.invite import Invite, seal_ticket, ticket_from_body
from protos.limits import NONCE_BYTES
from protos.log import run_id_of
from protos.run_config import RunConfig, config_from_json
from protos.run_facts import list_text, sealed_run
from protos.start import RUN_DIGITS_SHOWN, StartingState, start_body
from protos.text import as_line, printable
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from protos.v1 import log_pb2, ticket_pb2

CALL_SECONDS_MAX = 10.0
NAMED_MAX = 10
T = TypeVar("T")


def _meant(word: str, by_id: Mapping[str, T], named: list[T]) -> list[T]:
    """What a person may mean: a whole id, a name, or the beginning of an id. A name such as `1b` or `ada` may begin an id, too:
    then both are given back, and neither is meant."""
    if word in by_id:
        return [by_id[word]]
    begun = [found for whole, found in by_id.items() if word and whole.startswith(word)]
    return [*named, *(found for found in begun if not any(found is other for other in named))]


def _not_one(
    what: str, word: str, found: list[T], by_id: Mapping[str, T], names: Mapping[str, str], whose: str
) -> OperatorError:
    """The error for a word that means none or several: it names those, or what there is, the most alike first."""

    def alike(id_: str) -> float:
        return SequenceMatcher(None, word.casefold(), names[id_].casefold()).ratio()

    meant = [id_ for id_, it in by_id.items() if any(it is other for other in found)]
    ids = meant or sorted(by_id, key=alike, reverse=True)
    named = [f"{printable(names[id_])} ({id_[:RUN_DIGITS_SHOWN]})".lstrip() for id_ in ids[:NAMED_MAX]]
    there = (", ".join(named) or "none") + (", ..." if len(ids) > NAMED_MAX else "")
    return OperatorError(f"{len(found)} {what} are called {word!r}{'' if meant else f'; {whose} has'}: {there}")


class Operator:
    """One home folder's coordinator."""

    def __init__(self, home: Path) -> None:
        self.serving = Serving.read(home)
        self.identity = Identity.load_or_create(home / "identity.key")
        self._certificate = load_or_create(home)

    def create_run(
        self, config: RunConfig, layout_digest: bytes = b"", parameters: int = 0, start: StartingState | None = None
    ) -> Invite:
        """Create a run; returns its invite. Without a layout, the first anchor's or the agreed initial state's counts.

        `start`: the state of another run, in the same layout, at which this one begins.
        """
        body = pb.CreateRunBody(
            config_json=config.canonical_json(),
            layout_digest=layout_digest,
            parameters=parameters,
            start=None if start is None else start_body(start),
        )
        genesis: log_pb2.Genesis = self._call("CreateRun", body).genesis
        return self.invite(genesis)

    def states(self, genesis: log_pb2.Genesis) -> pb.ListStatesResponse:
        """Every state of a run that a fork can begin at."""
        answer: pb.ListStatesResponse = self._call("ListStates", pb.ListStatesBody(run_id=run_id_of(genesis)))
        return answer

    def list_runs(self, *, unfinished: bool = False, archived: bool = False) -> list[pb.GetRunResponse]:
        """Every run with its state. `unfinished`: those that have steps left. `archived`: the archived ones, too."""
        runs = list(self._call("ListRuns", pb.ListRunsBody(archived=archived)).runs)
        return [run for run in runs if run.phase != pb.Phase.PHASE_FINISHED] if unfinished else runs

    def anchor_link(self, genesis: log_pb2.Genesis, uses: int) -> Invite:
        """A link with which so many processes may take part as anchors, for as long as it is not revoked."""
        return self.invite(genesis, self.create_ticket(genesis, 0, uses, "anchor", anchor=True))

    def withdraw_snapshot(self, genesis: log_pb2.Genesis, step: int) -> None:
        """Agreed snapshots of `step` and later steps, and the digests since, do not count any more."""
        self._call("WithdrawSnapshot", pb.WithdrawSnapshotBody(run_id=run_id_of(genesis), step=step))

    def create_ticket(
        self, genesis: log_pb2.Genesis, expires_in_ms: int, uses: int, label: str, *, anchor: bool = False
    ) -> ticket_pb2.Ticket:
        """A new ticket of a run; `expires_in_ms` 0: the ticket never expires. `anchor`: for anchors."""
        body = pb.CreateTicketBody(
            run_id=run_id_of(genesis), expires_in_ms=expires_in_ms, uses=uses, label=label, anchor=anchor
        )
        ticket: ticket_pb2.Ticket = self._call("CreateTicket", body).ticket
        return ticket

    def tickets(self, genesis: log_pb2.Genesis) -> list[pb.TicketStatus]:
        """Every ticket of a run, oldest first."""
        return list(self._call("ListTickets", pb.ListTicketsBody(run_id=run_id_of(genesis))).tickets)

    def revoke_ticket(self, genesis: log_pb2.Genesis, ticket: ticket_pb2.Ticket, *, with_peers: bool) -> None:
        """The ticket admits no further peer; `with_peers`: the peers that joined with it have to leave."""
        body = pb.RevokeTicketBody(run_id=run_id_of(genesis), ticket_id=ticket.ticket_id, with_peers=with_peers)
        self._call("RevokeTicket", body)

    def exclude_peer(self, genesis: log_pb2.Genesis, public_key: bytes, reason: str) -> None:
        """The peer takes part no more, and is told why."""
        body = pb.ExcludePeerBody(run_id=run_id_of(genesis), public_key=public_key, reason=reason)
        self._call("ExcludePeer", body)

    def readmit_peer(self, genesis: log_pb2.Genesis, public_key: bytes) -> None:
        """The peer may join again."""
        self._call("ReadmitPeer", pb.ReadmitPeerBody(run_id=run_id_of(genesis), public_key=public_key))

    def steer(self, genesis: log_pb2.Genesis, change: pb.RunChange, reason: str = "", steps: int = 0) -> None:
        """One change in the life of a run."""
        body = pb.SteerRunBody(run_id=run_id_of(genesis), change=change, reason=reason, steps=steps)
        self._call("SteerRun", body)

    def change(self, genesis: log_pb2.Genesis, settings: Settings) -> None:
        """Other values of settings of a paused run."""
        changed = pb.RunChange.RUN_CHANGE_SETTINGS
        body = pb.SteerRunBody(run_id=run_id_of(genesis), change=changed, settings=settings_body(settings))
        self._call("SteerRun", body)

    def find_ticket(self, genesis: log_pb2.Genesis, name: str) -> pb.TicketStatus:
        """The one ticket whose id starts with `name` or whose label it is; OperatorError otherwise."""
        tickets = {status.ticket.ticket_id.hex(): status for status in self.tickets(genesis)}
        found = _meant(name, tickets, [status for status in tickets.values() if status.ticket.label == name])
        if len(found) != 1:
            labels = {id_: status.ticket.label for id_, status in tickets.items()}
            raise _not_one("invites", name, found, tickets, labels, "this run")
        return found[0]

    def invite(self, genesis: log_pb2.Genesis, ticket: ticket_pb2.Ticket | None = None) -> Invite:
        """The invite of a run, with a ticket or without."""
        run_id = run_id_of(genesis)
        signed = seal_ticket(self.identity, run_id, ticket_from_body(ticket)) if ticket is not None else b""
        return self.serving.invite(genesis, signed)

    def find(self, run: str) -> pb.GetRunResponse:
        """The one run whose id starts with `run` or whose name it is; OperatorError otherwise. A name means an unfinished run
        before finished ones, and these before archived ones."""
        runs = self.list_runs(archived=True)
        named = [r for r in runs if config_from_json(r.genesis.config_json).name == run]
        named = (
            [r for r in named if r.phase != pb.Phase.PHASE_FINISHED] or [r for r in named if not r.archived] or named
        )
        by_id = {run_id_of(r.genesis).hex(): r for r in runs}
        found = _meant(run, by_id, named)
        if len(found) != 1:
            names = {id_: config_from_json(it.genesis.config_json).name for id_, it in by_id.items()}
            raise _not_one("runs", run, found, by_id, names, "this coordinator")
        return found[0]

    def public_list(self, runs: list[str]) -> str:
        """The file that `swarmentum runs` reads, with these runs, each signed with the coordinator's key."""
        found = [self.find(run) for run in runs]
        now_ms = int(time.time() * 1000)
        return list_text(sealed_run(self.identity, self.invite(run.genesis), run, now_ms) for run in found)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of this home's coordinator, from this machine; then of the others that share its database, with the same keys."""
        others = (address for address in self.serving.coordinators if address != self.serving.advertise)
        return (f"{self.serving.host}:{self.serving.port}", *others)

    def _call(self, name: str, body: Any) -> Any:
        """Sign the body with a new nonce, and ask this home's coordinator; if it stands by, the others."""
        body.nonce = secrets.token_bytes(NONCE_BYTES)
        request = getattr(pb, f"{name}Request")(envelope=seal(self.identity, Kind.KIND_ADMIN, NO_RUN, body))
        problems: list[str] = []
        for address in self.addresses:
            try:
                return self._ask(address, name, request)
            except NetworkError as error:
                problems.append(str(error))
        raise NetworkError("; ".join(problems))

    def _ask(self, address: str, name: str, request: Any) -> Any:
        with pinned_channel(address, self._certificate.certificate_pem) as channel:
            try:
                return getattr(rpc.OperatorServiceStub(channel), name)(request, timeout=CALL_SECONDS_MAX)
            except grpc.RpcError as error:
                found = error_of(error)
                if type(found) is NetworkError:
                    text = f"the coordinator at {address} does not answer: {details_of(error)}; is it still running?"
                    raise NetworkError(text) from error
                raise found from error


def operator_at(home: Path | None) -> Operator:
    """Who asks the coordinator of this home."""
    return Operator(settings(home=home).home)


INVITE_CALL_SECONDS_MAX = 15.0


def call(invite: Invite, name: str, request: Any, stub: Any = rpc.CoordinatorServiceStub) -> Any:
    """The answer of the first of the invite's coordinators that gives one. NetworkError, RefusedError."""
    problems: list[str] = []
    for address in invite.coordinators:
        try:
            proxy = way_of(address)
            pem = fetch_certificate(address, invite.certificate_sha256, proxy=proxy)
            with pinned_channel(address, pem, proxy=proxy) as channel:
                return getattr(stub(channel), name)(request, timeout=INVITE_CALL_SECONDS_MAX)
        except grpc.RpcError as error:
            found = error_of(error)
            if isinstance(found, RefusedError):
                raise found from error
            problems.append(str(found))
        except NetworkError as error:
            problems.append(str(error))
    raise NetworkError("; ".join(problems))


def facts_of(invite: Invite) -> pb.GetRunResponse:
    """The facts of the invite's run. RefusedError if the coordinator shows another one."""
    facts: pb.GetRunResponse = call(invite, "GetRun", pb.GetRunRequest(run_id=invite.run_id))
    genesis = facts.genesis
    if run_id_of(genesis) != invite.run_id or genesis.coordinator_public_key != invite.coordinator_public_key:
        raise RefusedError("the coordinator's run is not the one that the invite names; ask for a new invite")
    return facts


HEALTH_SECONDS_MAX = 5.0
"""`health` is for probes of containers and services. It checks over gRPC and TLS as peers do; a plain gRPC probe of Kubernetes
speaks no TLS."""


def health(
    live: Annotated[
        bool, typer.Option("--live", help="A coordinator that stands by is fine, too: it answers, and does not act.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Ask the coordinator of --home whether it acts. Exit code 0: yes; 1: it stands by; 2: none serves --home; 3: no answer."""
    folder = settings(home=home).home
    serving = Serving.read(folder)
    address = f"{serving.host}:{serving.port}"
    with pinned_channel(address, load_or_create(folder).certificate_pem) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_SECONDS_MAX)
        except grpc.RpcError as error:
            raise NetworkError(f"the coordinator at {address} does not answer: {details_of(error)}") from error
    acts = answer.status == health_pb2.HealthCheckResponse.SERVING
    print(as_line({"address": address, "acts": acts}) if as_json else f"{address} {'acts' if acts else 'stands by'}")
    raise typer.Exit(0 if acts or live else 1)
