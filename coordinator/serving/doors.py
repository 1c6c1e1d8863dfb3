"""Doors of both services: a call's run and envelope, then the request's bytes, which become an event within their limits.

Refuses a length, a number or a text that is out of its range, with a `Refusal` that names it. Leaves the decision whether an
event fits the run to the machine. A method raises an error; `answered` turns the error into a gRPC status. Refuses to guess:
any other exception is a bug of this program, and gRPC answers it with UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import wraps
from typing import Any, TypeAlias, TypeVar

import grpc

from coordinator.clock.effects import EntryCommitted, SnapshotFact
from coordinator.clock.events import Claim, EntriesReturned, HeldPlaces, JoinAsked, Reported, Summed
from coordinator.serving.event_loop import RunRuntime
from coordinator.serving.following import FullError, NotJoinedError, PeerAheadError, ReadersBusyError
from coordinator.serving.hub import Hub
from coordinator.serving.sessions import Sessions
from coordinator.store.journal import JournalError
from protos import limits
from protos.accounts import owner_from_body
from protos.address import usable
from protos.envelope import NO_RUN, Kind, VerifiedEnvelope, check, parse
from protos.equivocation import prove
from protos.errors import Reason, Refusal, SwarmentumError
from protos.evaluation import evaluations_from, open_evaluation
from protos.identity import peer_id
from protos.invite import Ticket, open_ticket
from protos.log import entry_body, equivocation_from_body, open_entry, verdict_from_body
from protos.slices import mask_from_bytes, open_aggregate
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2, update_pb2
from protos.version import VERSION_CHARACTERS_MAX

Context: TypeAlias = Any  # grpc.aio.ServicerContext; grpcio ships no types
_S = TypeVar("_S", bound="Calls")
_Q = TypeVar("_Q")
_A = TypeVar("_A")


class StandsByError(SwarmentumError):
    """This coordinator does not act: the caller asks another one, or asks again."""


class UnknownRunError(SwarmentumError):
    """This coordinator has no run of this id."""


class NotAdmittedError(SwarmentumError):
    """The run does not admit this peer. To ask again changes nothing."""


class NoSessionError(SwarmentumError):
    """The request names a session that this coordinator does not know: the peer joins again."""


class DeclinedError(SwarmentumError):
    """The request is well formed, and the state of the run does not allow it."""


STATUS: dict[type[SwarmentumError], grpc.StatusCode] = {
    Refusal: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownRunError: grpc.StatusCode.NOT_FOUND,
    NotAdmittedError: grpc.StatusCode.PERMISSION_DENIED,
    FullError: grpc.StatusCode.PERMISSION_DENIED,
    NoSessionError: grpc.StatusCode.UNAUTHENTICATED,
    NotJoinedError: grpc.StatusCode.UNAUTHENTICATED,
    PeerAheadError: grpc.StatusCode.OUT_OF_RANGE,
    DeclinedError: grpc.StatusCode.FAILED_PRECONDITION,
    ReadersBusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StandsByError: grpc.StatusCode.UNAVAILABLE,
    JournalError: grpc.StatusCode.UNAVAILABLE,
}
"""The gRPC status of each error of a call. `protos.calls.error_of` is the other side of this table."""


def status_of(error: SwarmentumError) -> grpc.StatusCode:
    """The status of an error in STATUS, or of a subclass of one."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def answered(
    call: Callable[[_S, _Q, Context], Awaitable[_A]],
) -> Callable[[_S, _Q, Context], Coroutine[Any, Any, _A]]:
    """The same method of a service; an error in STATUS ends the call with its status and its text."""

    @wraps(call)
    async def answering(service: _S, request: _Q, context: Context) -> _A:
        try:
            return await call(service, request, context)
        except tuple(STATUS) as error:
            if isinstance(error, Refusal):
                service.hub.metrics.refused.labels(error.reason.value).inc()
            await context.abort(status_of(error), str(error))
            raise AssertionError("abort returned") from error

    return answering


class Calls:
    """The base of both services."""

    def __init__(self, hub: Hub, sessions: Sessions) -> None:
        self.hub = hub
        self.sessions = sessions

    def check_acts(self) -> None:
        """Only the coordinator that holds the lease answers. Raises StandsByError."""
        if self.hub.stands_by is not None:
            raise StandsByError(self.hub.stands_by)

    def runtime(self, run_id: bytes, *, archived: bool = False) -> RunRuntime:
        """The run of this id; `archived`: also an archived one. Raises StandsByError or UnknownRunError."""
        self.check_acts()
        runtime = self.hub.runs.get(run_id)
        if runtime is not None and (archived or not runtime.run.archived):
            return runtime
        self.hub.metrics.refused.labels(Reason.WRONG_RUN.value).inc()
        name = run_id.hex()[:16] or "(empty)"
        if runtime is not None:
            raise UnknownRunError(
                f"run {name} is finished, and its operator has archived it: it is not served any more"
            )
        if run_id in self.hub.deleted:
            raise UnknownRunError(f"run {name} was deleted by its operator")
        raise UnknownRunError(f"no run {name} here; ask its operator for a new invite")

    def opened(
        self, envelope: envelope_pb2.SignedEnvelope, kind: int, signer: bytes | None = None, *, signed: bool = True
    ) -> VerifiedEnvelope:
        """A verified envelope of this kind. Raises Refusal. Envelopes of the operator belong to no run.

        `signed`: False if the caller knows from the stream whose envelope this is.
        """
        run_id = NO_RUN if kind == Kind.KIND_ADMIN else envelope.run_id
        return check(envelope, kind=kind, run_id=run_id, signer=signer, signed=signed)


def bounded(count: int, most: int, what: str) -> None:
    """Refusal OUT_OF_RANGE if there are more than `most`."""
    if count > most:
        raise Refusal(Reason.OUT_OF_RANGE, f"{count} {what}, at most {most}")


def sized(value: bytes, size: int, what: str) -> bytes:
    """The value; Refusal MALFORMED if its length is not `size` bytes."""
    if len(value) != size:
        raise Refusal(Reason.MALFORMED, f"{what} of {len(value)} bytes, expected {size}")
    return value


def operators_reason(reason: str, *, needed: bool) -> str:
    """The operator's reason for a decision, which peers, readers of the run and their terminals show. `needed`: not empty."""
    most = limits.EXCLUSION_REASON_BYTES_MAX
    if (needed and not reason.strip()) or len(reason.encode()) > most or not reason.isprintable():
        text = f"the reason takes {int(needed)} to {most} bytes, printable and on one line"
        raise Refusal(Reason.OUT_OF_RANGE, text)
    return reason


def ticket(data: bytes, run_id: bytes, coordinator: bytes) -> Ticket | None:
    """The verified ticket in these bytes; None for no bytes."""
    return open_ticket(data, run_id=run_id, coordinator=coordinator) if data else None


def joined(
    opened: VerifiedEnvelope, body: pb.JoinBody, coordinator: bytes, now_unix_ms: int, network: str
) -> JoinAsked:
    """A request to join. `network`: the block of public addresses that the peer calls from."""
    sized(body.layout_digest, limits.HASH_BYTES, "layout digest")
    return JoinAsked(
        opened.public_key,
        printable(body.device, limits.DEVICE_CHARACTERS_MAX),
        body.parameters,
        body.layout_digest,
        _addresses(body.addresses, opened.public_key),
        ticket(body.ticket, opened.run_id, coordinator),
        now_unix_ms,
        network,
        body.anchor,
        printable(body.software_version, VERSION_CHARACTERS_MAX),
        owner_from_body(body.owner),
    )


def returned(
    opened: VerifiedEnvelope, request: pb.OfferEntriesRequest, coordinator: bytes, head_step: int
) -> EntriesReturned:
    """Entries beyond the head with the coordinator's own signature.

    The newest is verified first, so a peer that has none costs one verification.
    """
    bounded(len(request.entries), limits.ENTRIES_PAGE_MAX, "entries")
    newest = _own(request.newest, opened.run_id, coordinator)
    if newest.entry.step <= head_step:
        return EntriesReturned(opened.public_key, (), newest.entry.step)
    entries = tuple(_own(envelope, opened.run_id, coordinator) for envelope in request.entries)
    return EntriesReturned(opened.public_key, entries, newest.entry.step)


def reported(opened: VerifiedEnvelope, body: pb.ReportBody) -> Reported:
    """A report with each of its parts within its limits."""
    bounded(len(body.holdings), limits.HOLDINGS_MAX, "holdings")
    bounded(len(body.applied), limits.APPLIED_MAX, "applied states")
    bounded(len(body.snapshots), limits.APPLIED_MAX, "snapshots")
    bounded(len(body.bad_snapshots), limits.APPLIED_MAX, "bad snapshots")
    bounded(len(body.verdicts), limits.VERDICTS_MAX, "verdicts")
    bounded(len(body.equivocations), limits.EQUIVOCATIONS_MAX, "equivocations")
    bounded(len(body.false_sums), limits.FALSE_SUMS_MAX, "false sums")
    claim = _claim(opened, body.announcement) if body.HasField("announcement") else None
    return Reported(
        opened.public_key,
        claim=claim,
        held=_held(body.held) if body.HasField("held") else None,
        holdings=tuple(
            (
                h.step,
                sized(h.public_key, limits.PUBLIC_KEY_BYTES, "author"),
                sized(h.payload_sha256, limits.HASH_BYTES, "payload hash"),
            )
            for h in body.holdings
        ),
        applied=tuple((a.step, sized(a.state_digest, limits.HASH_BYTES, "state digest")) for a in body.applied),
        snapshots=_snapshots(body.snapshots),
        bad_snapshots=_snapshots(body.bad_snapshots),
        addresses=_addresses(body.addresses, opened.public_key),
        verdicts=tuple(verdict_from_body(verdict, opened.public_key) for verdict in body.verdicts),
        # The offender's own signatures prove an offence, so a reporter can invent none.
        offences=tuple(prove(equivocation_from_body(pair), opened.run_id) for pair in body.equivocations),
        abstained=_abstained(body.abstained) if body.HasField("abstained") else None,
        not_finite=body.abstained.not_finite if body.abstained.HasField("not_finite") else None,
        lost=body.abstained.lost,
        paused=body.paused if body.HasField("paused") else None,
        owner=owner_from_body(body.owner) if body.HasField("owner") else None,
        evaluations=_evaluations(opened, body.evaluations),
        summed=_summed(body.summed) if body.HasField("summed") else None,
        false_sums=tuple((said.step, said.range) for said in body.false_sums),
    )


def _summed(body: pb.Summed) -> Summed:
    bounded(body.step, limits.STEP_MAX, "as a step")
    payloads = sized(body.payloads_sha256, limits.HASH_BYTES, "digest of payloads")
    sized(body.aggregate.payloads_sha256, 0, "digest of payloads in a sum")  # the coordinator fills it in
    return Summed(body.step, body.attempt, payloads, open_aggregate(body.aggregate))


def _evaluations(opened: VerifiedEnvelope, parts: Iterable[bytes]) -> tuple[bytes, ...]:
    """The reporter's own evaluations: somebody else's figure would be signed, and taken from them."""
    found = evaluations_from(parts)
    for data in found:
        if open_evaluation(data, run_id=opened.run_id).author != opened.public_key:
            raise Refusal(Reason.UNKNOWN_SIGNER, "an evaluation that another peer signed")
    return found


def _addresses(addresses: Iterable[str], public_key: bytes) -> tuple[str, ...]:
    """The addresses that lead to the signer. The others are left out, and the request still counts."""
    return tuple(address.text for address in usable(addresses, peer_id(public_key)))


def _own(envelope: envelope_pb2.SignedEnvelope, run_id: bytes, coordinator: bytes) -> EntryCommitted:
    data = envelope.SerializeToString(deterministic=True)
    signed = open_entry(data, run_id=run_id, coordinator=coordinator)
    if entry_body(signed.entry) != envelope.body:
        raise Refusal(
            Reason.MALFORMED,
            f"entry {signed.entry.step} has fields that this coordinator does not know; it needs a newer version of swarmentum",
        )
    return EntryCommitted(signed.entry, envelope.body, signed.hash)


def _held(body: pb.HeldPlaces) -> HeldPlaces:
    """A mask of at most as many places as a roster may have. The machine compares the mask with the open step's roster."""
    bounded(len(body.places), limits.ROSTER_PEERS_MAX // 8, "bytes of places")
    bounded(body.step, limits.STEP_MAX, "as a step")
    digest = sized(body.payloads_sha256, limits.HASH_BYTES, "digest of payloads")
    return HeldPlaces(body.step, body.attempt, mask_from_bytes(body.places), digest)


def _snapshots(references: Iterable[pb.SnapshotRef]) -> tuple[SnapshotFact, ...]:
    """Root and size together name a snapshot."""
    facts = []
    for s in references:
        bounded(s.total_bytes, limits.SNAPSHOT_PIECES_MAX * limits.SNAPSHOT_PIECE_BYTES, "bytes of a snapshot")
        root = sized(s.root, limits.HASH_BYTES, "snapshot root")
        facts.append(SnapshotFact(s.step, root, s.total_bytes, kept=not s.not_kept))
    return tuple(facts)


def _abstained(body: pb.Abstention) -> tuple[int, str]:
    bounded(body.step, limits.STEP_MAX, "as a step")
    bounded(len(body.reason.encode()), limits.ABSTENTION_REASON_BYTES_MAX, "bytes in a reason")
    if not body.reason.isprintable():
        raise Refusal(Reason.OUT_OF_RANGE, "the reason of an abstention does not print on one line")
    return body.step, body.reason


def _claim(opened: VerifiedEnvelope, envelope: envelope_pb2.SignedEnvelope) -> Claim:
    """The author's own announcement. The key that signed the report must have signed the announcement, too."""
    inner = check(envelope, kind=Kind.KIND_ANNOUNCEMENT, run_id=opened.run_id, signer=opened.public_key)
    bounded(len(inner.body), limits.ANNOUNCEMENT_BYTES_MAX, "bytes in an announcement")
    body = parse(update_pb2.Announcement, inner.body)
    bounded(body.payload_bytes, limits.PAYLOAD_BYTES_MAX, "payload bytes")
    bounded(body.step, limits.STEP_MAX, "as a step")
    if not abs(body.loss) < limits.LOSS_NATS_MAX:
        raise Refusal(Reason.OUT_OF_RANGE, f"loss {body.loss}, expected a number below {limits.LOSS_NATS_MAX:g}")
    return Claim(
        step=body.step,
        parent_hash=sized(body.parent_hash, limits.HASH_BYTES, "parent hash"),
        payload_sha256=sized(body.payload_sha256, limits.HASH_BYTES, "payload hash"),
        payload_bytes=body.payload_bytes,
        samples=min(body.samples, limits.SAMPLE_INDEX_MAX),
        tokens=min(body.tokens, limits.SAMPLE_INDEX_MAX),
        loss=body.loss,
        compute_ms=body.compute_ms,
        envelope=inner.raw,
    )
