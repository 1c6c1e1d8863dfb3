"""The gRPC services: the door for peers and for the operator. Checks, translates, hands over; decides nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet

from coordinator import admission, facts, rules
from coordinator.bootstrap import bootstrap
from coordinator.events import (
    Asked,
    Claim,
    Disconnected,
    EntriesReturned,
    EntryCommitted,
    ExclusionAsked,
    Joined,
    ReadmissionAsked,
    Reported,
    RevocationAsked,
    SnapshotFact,
    TicketAsked,
    WithdrawalAsked,
)
from coordinator.gate import admitted
from coordinator.hub import Hub
from coordinator.journal import JournalError
from coordinator.reading import BusyError
from coordinator.runtime import BehindError, NotJoinedError, RunRuntime, monotonic_ms, unix_ms
from coordinator.sessions import Sessions
from protos import limits
from protos.address import block_of, network_of, site, usable
from protos.envelope import NO_RUN, Kind, Opened, check, parse
from protos.equivocation import prove
from protos.errors import Reason, Refusal
from protos.identity import peer_id
from protos.log import FORMAT_VERSION, entry_body, equivocation_from_body, open_entry, run_id_of, verdict_from_body
from protos.run_config import config_from_json
from protos.text import printable
from protos.ticket import Ticket, open_ticket, ticket_body, ticket_from_body
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from protos.v1 import envelope_pb2, log_pb2, ticket_pb2, update_pb2

Context: TypeAlias = Any  # grpc.aio.ServicerContext; grpcio ships no types
_T = TypeVar("_T")
_B = TypeVar(
    "_B",
    pb.CreateRunBody,
    pb.ListRunsBody,
    pb.CreateTicketBody,
    pb.ListTicketsBody,
    pb.RevokeTicketBody,
    pb.ExcludePeerBody,
    pb.ReadmitPeerBody,
    pb.WithdrawSnapshotBody,
)


class _Door:
    """What both services share: envelopes in, refusals out."""

    def __init__(self, hub: Hub, sessions: Sessions) -> None:
        self._hub = hub
        self._sessions = sessions

    async def _abort(self, context: Context, code: grpc.StatusCode, text: str) -> NoReturn:
        await context.abort(code, text)
        raise AssertionError("abort returned")

    async def _refuse(self, context: Context, refusal: Refusal) -> NoReturn:
        self._hub.metrics.refused.labels(refusal.reason.value).inc()
        await self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(refusal))

    async def _acting(self, context: Context) -> None:
        """Only the coordinator that holds the lease answers."""
        if self._hub.stands_by is not None:
            await self._abort(context, grpc.StatusCode.UNAVAILABLE, self._hub.stands_by)

    async def _runtime(self, context: Context, run_id: bytes) -> RunRuntime:
        await self._acting(context)
        if run_id not in self._hub.runs:
            self._hub.metrics.refused.labels(Reason.WRONG_RUN.value).inc()
            text = f"no run {run_id.hex()[:16] or '(empty)'} here; ask its operator for a new invite"
            await self._abort(context, grpc.StatusCode.NOT_FOUND, text)
        return self._hub.runs[run_id]

    def _open(self, envelope: envelope_pb2.SignedEnvelope, kind: int, signer: bytes | None = None) -> Opened:
        run_id = NO_RUN if kind == Kind.KIND_ADMIN else envelope.run_id
        return check(envelope, kind=kind, run_id=run_id, signer=signer)

    async def _handled(self, context: Context, call: Callable[[], Awaitable[_T]]) -> _T:
        try:
            return await call()
        except JournalError as error:
            await self._abort(context, grpc.StatusCode.UNAVAILABLE, str(error))


class CoordinatorService(_Door, rpc.CoordinatorServiceServicer):
    """For peers; see protos/v1/coordinator.proto for each call."""

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:  # noqa: N802
        """Public facts of a run."""
        runtime = await self._runtime(context, request.run_id)
        answer = self._hub.describe(runtime)
        answer.bootstrap.extend(self._bootstrap(runtime, context, without=b""))
        return answer

    async def GetChallenge(  # noqa: N802
        self, request: pb.GetChallengeRequest, context: Context
    ) -> pb.GetChallengeResponse:
        """A single-use challenge for Join."""
        await self._runtime(context, request.run_id)
        if context.peer() and not self._sessions.may_ask(site(network_of(context.peer())), monotonic_ms()):
            text = "too many peers join from your network address; try again in a minute"
            await self._abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        return pb.GetChallengeResponse(challenge=self._sessions.challenge(monotonic_ms()))

    async def MayJoin(self, request: pb.MayJoinRequest, context: Context) -> pb.MayJoinResponse:  # noqa: N802
        """Say before a peer builds its model whether it need not. Nothing is kept: Join decides."""
        runtime = await self._runtime(context, request.envelope.run_id)
        try:
            opened = self._open(request.envelope, Kind.KIND_JOIN)
            body = parse(pb.JoinBody, opened.body)
            self._sessions.answer(body.challenge, monotonic_ms())
            ticket = _ticket(body.ticket, opened.run_id, self._hub.identity.public_key)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        network = block_of(network_of(context.peer()))
        denial, reason = admission.may_enter(
            runtime.run, opened.public_key, ticket, unix_ms(), network, monotonic_ms(), anchor=body.anchor
        )
        if denial is not None:
            self._hub.metrics.not_admitted(runtime.run, denial)
            await self._abort(context, grpc.StatusCode.PERMISSION_DENIED, reason)
        return pb.MayJoinResponse()

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:  # noqa: N802
        """Admit a peer and open a session."""
        runtime = await self._runtime(context, request.envelope.run_id)
        try:
            opened = self._open(request.envelope, Kind.KIND_JOIN)
            body = parse(pb.JoinBody, opened.body)
            self._sessions.answer(body.challenge, monotonic_ms())
            block = block_of(network_of(context.peer()))
            event = _joined(opened, body, self._hub.identity.public_key, unix_ms(), block)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        refusals = await self._handled(context, lambda: runtime.handle(event))
        if refusals:
            await self._abort(context, grpc.StatusCode.PERMISSION_DENIED, refusals[0])
        self._hub.metrics.refused_addresses(len(body.addresses) - len(event.addresses))
        run, network = runtime.run, network_of(context.peer())
        return pb.JoinResponse(
            session_id=self._sessions.open(run.run_id, opened.public_key, network),
            head_step=run.head_step,
            head_hash=run.head_hash,
            snapshot=facts.snapshot_ref(run, run.snapshot) if run.snapshot else None,
            earlier=facts.earlier_snapshots(run),
            withdrawn=facts.withdrawn_of(run),
            bootstrap=self._bootstrap(runtime, context, without=opened.public_key),
        )

    def _bootstrap(self, runtime: RunRuntime, context: Context, without: bytes) -> list[str]:
        """Where a peer starts from: what it can dial, of peers that it is not itself."""
        run, network = runtime.run, network_of(context.peer())
        return bootstrap(run, self._sessions.networks(run.run_id), network, without, site(network).encode())

    async def Follow(self, request: pb.FollowRequest, context: Context) -> None:  # noqa: N802
        """The log, then events as they happen. Written one by one: a peer that hangs up ends the stream at once."""
        runtime = await self._runtime(context, request.envelope.run_id)
        try:
            opened = self._open(request.envelope, Kind.KIND_FOLLOW)
            body = parse(pb.FollowBody, opened.body)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        await self._in_session(context, opened, body.session_id, body.sequence)
        admitted(body.session_id)
        try:
            async with aclosing(runtime.follow(opened.public_key, body.from_step)) as events:
                async for event in events:
                    await context.write(event)
        except BehindError as error:
            await self._abort(context, grpc.StatusCode.OUT_OF_RANGE, str(error))
        except NotJoinedError as error:
            await self._abort(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
        except JournalError as error:
            await self._abort(context, grpc.StatusCode.UNAVAILABLE, str(error))

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:  # noqa: N802
        """Take what a peer announces, holds, has applied and has stored."""
        runtime = await self._runtime(context, request.envelope.run_id)
        if not self._sessions.may_report(context.peer(), monotonic_ms()):
            await self._abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many reports; tell again in a second")
        try:
            opened = self._open(request.envelope, Kind.KIND_REPORT)
            body = parse(pb.ReportBody, opened.body)
            event = _reported(opened, body)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        await self._in_session(context, opened, body.session_id, body.sequence)
        admitted(body.session_id)
        self._hub.metrics.refused_addresses(len(body.addresses) - len(event.addresses))
        refusals = await self._handled(context, lambda: runtime.handle(event))
        if body.leaving:
            await self._handled(context, lambda: runtime.handle(Disconnected(opened.public_key, leaving=True)))
        taken = event.claim is not None and rules.heard(runtime.run, opened.public_key, event.claim)
        return pb.ReportResponse(refusals=refusals, announcement_taken=taken, coordinators=self._hub.coordinators)

    async def OfferEntries(  # noqa: N802
        self, request: pb.OfferEntriesRequest, context: Context
    ) -> pb.OfferEntriesResponse:
        """Take back what the journal has lost."""
        runtime = await self._runtime(context, request.envelope.run_id)
        if not self._sessions.may_report(context.peer(), monotonic_ms()):
            await self._abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many offers; try again in a second")
        try:
            opened = self._open(request.envelope, Kind.KIND_REPORT)
            body = parse(pb.ReportBody, opened.body)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        await self._in_session(context, opened, body.session_id, body.sequence)
        admitted(body.session_id)
        try:
            event = _returned(opened, request, self._hub.identity.public_key, runtime.run.head_step)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        refusals = await self._handled(context, lambda: runtime.returned(event))
        if refusals:
            await self._abort(context, grpc.StatusCode.FAILED_PRECONDITION, refusals[0])
        return pb.OfferEntriesResponse(head_step=runtime.run.head_step)

    async def ListEntries(  # noqa: N802
        self, request: pb.ListEntriesRequest, context: Context
    ) -> pb.ListEntriesResponse:
        """One page of the log."""
        runtime = await self._runtime(context, request.run_id)
        first = min(max(request.from_step, 1), limits.STEP_MAX)
        try:
            page = await self._handled(context, lambda: runtime.entries(first, follows=False))
        except BusyError as error:
            await self._abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return pb.ListEntriesResponse(entries=page, head_step=runtime.run.head_step)

    async def _in_session(self, context: Context, opened: Opened, session_id: bytes, sequence: int) -> None:
        try:
            known = self._sessions.check(session_id, opened.run_id, opened.public_key, sequence)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        if not known:
            await self._abort(context, grpc.StatusCode.UNAUTHENTICATED, "no such session: join again")


class OperatorService(_Door, rpc.OperatorServiceServicer):
    """For the operator: requests signed by the coordinator's own key."""

    async def CreateRun(self, request: pb.CreateRunRequest, context: Context) -> pb.CreateRunResponse:  # noqa: N802
        """A new run from a configuration."""
        await self._acting(context)
        try:
            body = self._operator(request.envelope, pb.CreateRunBody)
            config = config_from_json(body.config_json)
            config.check_new()
            if body.layout_digest:
                _sized(body.layout_digest, limits.HASH_BYTES, "layout digest")
        except Refusal as refusal:
            await self._refuse(context, refusal)
        genesis = log_pb2.Genesis(
            format_version=FORMAT_VERSION,
            config_json=config.canonical_json(),
            coordinator_public_key=self._hub.identity.public_key,
            nonce=body.nonce,  # one request makes one run, however often and whenever it is played
            layout_digest=body.layout_digest,
            parameters=body.parameters,
        )
        if run_id_of(genesis) in self._hub.runs:
            await self._refuse(context, Refusal(Reason.REPLAYED, "this run was created before"))
        try:
            await self._hub.create_run(genesis)
        except JournalError as error:
            await self._abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        return pb.CreateRunResponse(genesis=genesis)

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:  # noqa: N802
        """Every run of this coordinator."""
        await self._acting(context)
        try:
            self._operator(request.envelope, pb.ListRunsBody)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        return pb.ListRunsResponse(runs=[self._hub.describe(runtime) for runtime in self._hub.runs.values()])

    async def CreateTicket(  # noqa: N802
        self, request: pb.CreateTicketRequest, context: Context
    ) -> pb.CreateTicketResponse:
        """A new ticket of a run."""
        await self._acting(context)
        try:
            body = self._operator(request.envelope, pb.CreateTicketBody)
            _bounded(body.expires_in_ms, limits.TICKET_MS_MAX, "ms until it expires")
            now = unix_ms()
            expires = now + body.expires_in_ms if body.expires_in_ms else 0
            made = ticket_pb2.Ticket(
                ticket_id=body.nonce,
                expires_unix_ms=expires,
                uses=body.uses,
                label=body.label,
                anchor=body.anchor,
            )
            event = TicketAsked(ticket_from_body(made), now)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        await self._ask(context, body.run_id, event)
        return pb.CreateTicketResponse(ticket=made)

    async def ListTickets(  # noqa: N802
        self, request: pb.ListTicketsRequest, context: Context
    ) -> pb.ListTicketsResponse:
        """Every ticket of a run, with who used it."""
        try:
            body = self._operator(request.envelope, pb.ListTicketsBody)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        run = (await self._runtime(context, body.run_id)).run
        users: dict[bytes, list[bytes]] = {}
        for public_key, came_with in run.guests.items():
            users.setdefault(came_with, []).append(public_key)
        now, found = unix_ms(), []
        for name, issued in run.tickets.items():
            used = users.get(name, [])
            state, _ = admission.ticket_state(issued, len(used), now)
            found.append(pb.TicketStatus(ticket=ticket_body(issued.ticket), users=used, state=state.value))
        return pb.ListTicketsResponse(tickets=found)

    async def RevokeTicket(  # noqa: N802
        self, request: pb.RevokeTicketRequest, context: Context
    ) -> pb.RevokeTicketResponse:
        """A ticket admits nobody else from now on."""
        await self._acting(context)
        try:
            body = self._operator(request.envelope, pb.RevokeTicketBody)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        await self._ask(context, body.run_id, RevocationAsked(body.ticket_id, body.with_peers))
        return pb.RevokeTicketResponse()

    async def ExcludePeer(  # noqa: N802
        self, request: pb.ExcludePeerRequest, context: Context
    ) -> pb.ExcludePeerResponse:
        """A peer takes part no more from now on."""
        await self._acting(context)
        try:
            body = self._operator(request.envelope, pb.ExcludePeerBody)
            _sized(body.public_key, limits.PUBLIC_KEY_BYTES, "public key")
            event = ExclusionAsked(body.public_key, _words(body.reason))
        except Refusal as refusal:
            await self._refuse(context, refusal)
        await self._ask(context, body.run_id, event)
        self._sessions.end(body.run_id, body.public_key)
        return pb.ExcludePeerResponse()

    async def ReadmitPeer(  # noqa: N802
        self, request: pb.ReadmitPeerRequest, context: Context
    ) -> pb.ReadmitPeerResponse:
        """An excluded peer may join again."""
        await self._acting(context)
        try:
            body = self._operator(request.envelope, pb.ReadmitPeerBody)
            _sized(body.public_key, limits.PUBLIC_KEY_BYTES, "public key")
        except Refusal as refusal:
            await self._refuse(context, refusal)
        await self._ask(context, body.run_id, ReadmissionAsked(body.public_key))
        return pb.ReadmitPeerResponse()

    async def WithdrawSnapshot(  # noqa: N802
        self, request: pb.WithdrawSnapshotRequest, context: Context
    ) -> pb.WithdrawSnapshotResponse:
        """What was agreed about the states after a step and later ones does not count any more."""
        await self._acting(context)
        try:
            body = self._operator(request.envelope, pb.WithdrawSnapshotBody)
            _bounded(body.step, limits.STEP_MAX, "as a step")
        except Refusal as refusal:
            await self._refuse(context, refusal)
        await self._ask(context, body.run_id, WithdrawalAsked(body.step))
        return pb.WithdrawSnapshotResponse()

    async def _ask(self, context: Context, run_id: bytes, event: Asked) -> None:
        runtime = await self._runtime(context, run_id)
        refusals = await self._handled(context, lambda: runtime.handle(event))
        if refusals:
            await self._abort(context, grpc.StatusCode.FAILED_PRECONDITION, refusals[0])

    def _operator(self, envelope: envelope_pb2.SignedEnvelope, body_type: type[_B]) -> _B:
        opened = self._open(envelope, Kind.KIND_ADMIN, signer=self._hub.identity.public_key)
        body = parse(body_type, opened.body)
        if len(UnknownFieldSet(body)):
            # one kind of envelope for all: what was signed as an exclusion must not be played as something else
            raise Refusal(
                Reason.MALFORMED, f"not a {body_type.__name__}: it has fields that this coordinator does not know"
            )
        nonce: bytes = body.nonce
        if len(nonce) != limits.NONCE_BYTES:
            raise Refusal(Reason.MALFORMED, f"nonce of {len(nonce)} bytes, expected {limits.NONCE_BYTES}")
        self._sessions.use_nonce(nonce)
        return body


def _bounded(count: int, most: int, what: str) -> None:
    if count > most:
        raise Refusal(Reason.OUT_OF_RANGE, f"{count} {what}, at most {most}")


def _sized(value: bytes, size: int, what: str) -> bytes:
    if len(value) != size:
        raise Refusal(Reason.MALFORMED, f"{what} of {len(value)} bytes, expected {size}")
    return value


def _words(reason: str) -> str:
    """Why the operator excludes a peer: for the peer, the log's readers and their terminals."""
    most = limits.EXCLUSION_REASON_BYTES_MAX
    if not reason.strip() or len(reason.encode()) > most or not reason.isprintable():
        text = f"the reason takes 1 to {most} bytes, printable and on one line"
        raise Refusal(Reason.OUT_OF_RANGE, text)
    return reason


def _addresses(addresses: Iterable[str], public_key: bytes) -> tuple[str, ...]:
    """Those that lead to the signer; the others are left out, and the peer is welcome."""
    return tuple(address.text for address in usable(addresses, peer_id(public_key)))


def _ticket(data: bytes, run_id: bytes, coordinator: bytes) -> Ticket | None:
    return open_ticket(data, run_id=run_id, coordinator=coordinator) if data else None


def _joined(opened: Opened, body: pb.JoinBody, coordinator: bytes, now_unix_ms: int, network: str) -> Joined:
    _sized(body.layout_digest, limits.HASH_BYTES, "layout digest")
    return Joined(
        opened.public_key,
        printable(body.device, limits.DEVICE_CHARACTERS_MAX),
        body.parameters,
        body.layout_digest,
        _addresses(body.addresses, opened.public_key),
        _ticket(body.ticket, opened.run_id, coordinator),
        now_unix_ms,
        network,
        body.anchor,
    )


def _returned(opened: Opened, request: pb.OfferEntriesRequest, coordinator: bytes, head_step: int) -> EntriesReturned:
    """Entries beyond the head, with our own signature. The newest is verified first: who has none costs one look."""
    _bounded(len(request.entries), limits.ENTRIES_PAGE_MAX, "entries")
    newest = _own(request.newest, opened.run_id, coordinator)
    if newest.entry.step <= head_step:
        return EntriesReturned(opened.public_key, (), newest.entry.step)
    entries = tuple(_own(envelope, opened.run_id, coordinator) for envelope in request.entries)
    return EntriesReturned(opened.public_key, entries, newest.entry.step)


def _own(envelope: envelope_pb2.SignedEnvelope, run_id: bytes, coordinator: bytes) -> EntryCommitted:
    data = envelope.SerializeToString(deterministic=True)
    signed = open_entry(data, run_id=run_id, coordinator=coordinator)
    if entry_body(signed.entry) != envelope.body:
        raise Refusal(Reason.MALFORMED, f"entry {signed.entry.step} was made by another version of this program")
    return EntryCommitted(signed.entry, envelope.body, signed.hash)


def _reported(opened: Opened, body: pb.ReportBody) -> Reported:
    _bounded(len(body.holdings), limits.HOLDINGS_MAX, "holdings")
    _bounded(len(body.applied), limits.APPLIED_MAX, "applied states")
    _bounded(len(body.snapshots), limits.APPLIED_MAX, "snapshots")
    _bounded(len(body.bad_snapshots), limits.APPLIED_MAX, "bad snapshots")
    _bounded(len(body.verdicts), limits.VERDICTS_MAX, "verdicts")
    _bounded(len(body.equivocations), limits.EQUIVOCATIONS_MAX, "equivocations")
    claim = _claim(opened, body.announcement) if body.HasField("announcement") else None
    return Reported(
        opened.public_key,
        claim=claim,
        holdings=tuple(
            (
                h.step,
                _sized(h.public_key, limits.PUBLIC_KEY_BYTES, "author"),
                _sized(h.payload_sha256, limits.HASH_BYTES, "payload hash"),
            )
            for h in body.holdings
        ),
        applied=tuple((a.step, _sized(a.state_digest, limits.HASH_BYTES, "state digest")) for a in body.applied),
        snapshots=_snapshots(body.snapshots),
        bad_snapshots=_snapshots(body.bad_snapshots),
        addresses=_addresses(body.addresses, opened.public_key),
        verdicts=tuple(verdict_from_body(verdict, opened.public_key) for verdict in body.verdicts),
        # Whoever reports it, the offender's own signatures prove it: a reporter can make nothing up.
        offences=tuple(prove(equivocation_from_body(said), opened.run_id) for said in body.equivocations),
        abstained=_abstained(body.abstained) if body.HasField("abstained") else None,
    )


def _snapshots(said: Iterable[pb.SnapshotRef]) -> tuple[SnapshotFact, ...]:
    """Root and size together are what a snapshot is."""
    facts = []
    for s in said:
        _bounded(s.total_bytes, limits.SNAPSHOT_PIECES_MAX * limits.SNAPSHOT_PIECE_BYTES, "bytes of a snapshot")
        facts.append(SnapshotFact(s.step, _sized(s.root, limits.HASH_BYTES, "snapshot root"), s.total_bytes))
    return tuple(facts)


def _abstained(body: pb.Abstention) -> tuple[int, str]:
    _bounded(body.step, limits.STEP_MAX, "as a step")
    _bounded(len(body.reason.encode()), limits.ABSTENTION_REASON_BYTES_MAX, "bytes in a reason")
    if not body.reason.isprintable():
        raise Refusal(Reason.OUT_OF_RANGE, "the reason of an abstention does not print on one line")
    return body.step, body.reason


def _claim(opened: Opened, envelope: envelope_pb2.SignedEnvelope) -> Claim:
    """The author's own announcement: signed by the same key as the report that carries it."""
    inner = check(envelope, kind=Kind.KIND_ANNOUNCEMENT, run_id=opened.run_id, signer=opened.public_key)
    _bounded(len(inner.body), limits.ANNOUNCEMENT_BYTES_MAX, "bytes in an announcement")
    body = parse(update_pb2.Announcement, inner.body)
    _bounded(body.payload_bytes, limits.PAYLOAD_BYTES_MAX, "payload bytes")
    _bounded(body.step, limits.STEP_MAX, "as a step")
    if not abs(body.loss) < 1e30:
        raise Refusal(Reason.OUT_OF_RANGE, f"loss {body.loss}")
    return Claim(
        step=body.step,
        parent_hash=_sized(body.parent_hash, limits.HASH_BYTES, "parent hash"),
        payload_sha256=_sized(body.payload_sha256, limits.HASH_BYTES, "payload hash"),
        payload_bytes=body.payload_bytes,
        samples=min(body.samples, limits.SAMPLE_INDEX_MAX),
        tokens=min(body.tokens, limits.SAMPLE_INDEX_MAX),
        loss=body.loss,
        compute_ms=body.compute_ms,
        envelope=inner.raw,
    )
