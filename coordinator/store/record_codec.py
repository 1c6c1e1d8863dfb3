"""Journal records as bytes, and back: one table with a row for each kind of record.

The bytes of a kind never change: tests/unit/coordinator/record_bytes.json pins them. Refuses a kind that the table does not
have. Verifies the coordinator's signature on an entry only if the caller asks for it, because a signature costs 0.1 ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coordinator.clock.effects import (
    DecayStarted,
    EntryCommitted,
    Equivocated,
    Evaluated,
    Judged,
    LayoutFixed,
    OrderSigned,
    OwnerNamed,
    PeerExcluded,
    PeerLeft,
    PeerReadmitted,
    Record,
    RunArchived,
    RunEnded,
    RunPaused,
    RunResumed,
    SettingsChanged,
    SnapshotAgreed,
    SnapshotFact,
    TicketMade,
    TicketRevoked,
    TicketUsed,
    TickOpened,
    Withdrawn,
)
from protos.accounts import Owner, owner_body
from protos.changes import settings_body, settings_from_body
from protos.envelope import parse
from protos.equivocation import prove
from protos.evaluation import open_evaluation
from protos.identity import Identity
from protos.invite import ticket_body, ticket_from_body
from protos.limits import PUBLIC_KEY_BYTES, TICKET_ID_BYTES
from protos.log import (
    SignedEntry,
    equivocation_body,
    equivocation_from_body,
    open_entry,
    reopen_entry,
    seal_entry_body,
    verdict_body,
    verdict_from_body,
)
from protos.orders import open_end, seal_end, signed_order_from_body
from protos.tick import tick_body, tick_from_body
from protos.v1 import coordinator_pb2, envelope_pb2, log_pb2, ticket_pb2

ENTRY = "entry"
SNAPSHOT = "snapshot"
WITHDRAWN = "withdrawn"
"""The kind of a record that is a signed entry."""


@dataclass(frozen=True)
class Context:
    """The run that a record belongs to, the coordinator that signs its entries, and whether to verify their signatures."""

    run_id: bytes
    identity: Identity
    verified: bool = True


@dataclass(frozen=True)
class Kind:
    """One kind of record. `step`: the number in the column of that name; 0 for a record that belongs to no step.

    `write` takes the context and the record. `read` takes the context, the step and the bytes, and is its inverse.
    """

    name: str
    type: type[Any]
    step: Callable[[Any], int]
    write: Callable[[Context, Any], bytes]
    read: Callable[[Context, int, bytes], Record]


def seal(context: Context, record: EntryCommitted) -> SignedEntry:
    """The entry, signed by the coordinator. The same record always gives the same bytes."""
    return seal_entry_body(context.identity, context.run_id, record.entry, record.body)


def encode(context: Context, record: Record) -> tuple[str, int, bytes]:
    """A record as the columns (kind, step, body) of its row."""
    kind = _BY_TYPE[type(record)]
    return kind.name, kind.step(record), kind.write(context, record)


def decode(context: Context, name: str, step: int, body: bytes) -> Record:
    """Inverse of `encode`. Raises ValueError for an unknown kind, ValueError, LookupError or `Refusal` for other bytes."""
    if name not in _BY_NAME:
        raise ValueError(
            f"the journal holds a record of unknown kind {name!r}; a newer version of swarmentum wrote it, so run that one"
        )
    return _BY_NAME[name].read(context, step, body)


def _no_step(_: Record) -> int:
    return 0


def _json(**values: object) -> bytes:
    return json.dumps(values).encode()


def _write_layout(_: Context, record: LayoutFixed) -> bytes:
    return _json(layout_digest=record.layout_digest.hex(), parameters=record.parameters)


def _read_layout(_: Context, step: int, body: bytes) -> LayoutFixed:
    values = json.loads(body)
    return LayoutFixed(bytes.fromhex(values["layout_digest"]), values["parameters"])


def _write_tick(_: Context, record: TickOpened) -> bytes:
    return tick_body(record.tick).SerializeToString(deterministic=True)


def _read_tick(_: Context, step: int, body: bytes) -> TickOpened:
    return TickOpened(tick_from_body(parse(log_pb2.Tick, body)))


def _write_entry(context: Context, record: EntryCommitted) -> bytes:
    return seal(context, record).envelope


def _read_entry(context: Context, step: int, body: bytes) -> EntryCommitted:
    if context.verified:
        signed = open_entry(body, run_id=context.run_id, coordinator=context.identity.public_key)
    else:
        signed = reopen_entry(body)
    return EntryCommitted(signed.entry, parse(envelope_pb2.SignedEnvelope, body).body, signed.hash)


def _write_snapshot(_: Context, record: SnapshotAgreed) -> bytes:
    fact = record.snapshot
    return _json(step=fact.step, root=fact.root.hex(), total_bytes=fact.total_bytes)


def _read_snapshot(_: Context, step: int, body: bytes) -> SnapshotAgreed:
    values = json.loads(body)
    return SnapshotAgreed(SnapshotFact(values["step"], bytes.fromhex(values["root"]), values["total_bytes"]))


def _write_withdrawn(_: Context, record: Withdrawn) -> bytes:
    return _json(to_step=record.to_step)


def _read_withdrawn(_: Context, step: int, body: bytes) -> Withdrawn:
    return Withdrawn(step, json.loads(body)["to_step"])


def _write_judged(_: Context, record: Judged) -> bytes:
    verdicts = [verdict_body(verdict) for verdict in record.verdicts]
    body = log_pb2.Judged(verdicts=verdicts, arrival=record.arrival, samples=record.samples)
    return body.SerializeToString(deterministic=True)


def _read_judged(_: Context, step: int, body: bytes) -> Judged:
    judged = parse(log_pb2.Judged, body)
    verdicts = tuple(verdict_from_body(verdict) for verdict in judged.verdicts)
    return Judged(step, verdicts, tuple(judged.arrival), tuple(judged.samples))


def _write_ticket(_: Context, record: TicketMade) -> bytes:
    return ticket_body(record.ticket).SerializeToString(deterministic=True)


def _read_ticket(_: Context, step: int, body: bytes) -> TicketMade:
    return TicketMade(ticket_from_body(parse(ticket_pb2.Ticket, body)))


def _write_used(_: Context, record: TicketUsed) -> bytes:
    return record.ticket_id + record.public_key


def _read_used(_: Context, step: int, body: bytes) -> TicketUsed:
    return TicketUsed(body[:TICKET_ID_BYTES], body[TICKET_ID_BYTES:])


def _write_revoked(_: Context, record: TicketRevoked) -> bytes:
    return record.ticket_id + bytes([record.with_peers])


def _read_revoked(_: Context, step: int, body: bytes) -> TicketRevoked:
    return TicketRevoked(body[:TICKET_ID_BYTES], bool(body[TICKET_ID_BYTES]))


def _write_equivocated(_: Context, record: Equivocated) -> bytes:
    return equivocation_body(record.offence.equivocation).SerializeToString(deterministic=True)


def _read_equivocated(context: Context, step: int, body: bytes) -> Equivocated:
    return Equivocated(prove(equivocation_from_body(parse(log_pb2.Equivocation, body)), context.run_id))


def _write_excluded(_: Context, record: PeerExcluded) -> bytes:
    return record.public_key + record.reason.encode()


def _read_excluded(_: Context, step: int, body: bytes) -> PeerExcluded:
    return PeerExcluded(body[:PUBLIC_KEY_BYTES], body[PUBLIC_KEY_BYTES:].decode())


def _write_public_key(_: Context, record: PeerLeft | PeerReadmitted) -> bytes:
    return record.public_key


def _read_left(_: Context, step: int, body: bytes) -> PeerLeft:
    return PeerLeft(step, body)


def _read_readmitted(_: Context, step: int, body: bytes) -> PeerReadmitted:
    return PeerReadmitted(body)


def _write_paused(_: Context, record: RunPaused) -> bytes:
    return record.reason.encode()


def _read_paused(_: Context, step: int, body: bytes) -> RunPaused:
    return RunPaused(body.decode())


def _write_nothing(_: Context, record: RunResumed) -> bytes:
    return b""


def _read_resumed(_: Context, step: int, body: bytes) -> RunResumed:
    return RunResumed()


def _write_end(context: Context, record: RunEnded) -> bytes:
    return seal_end(context.identity, context.run_id, record.end).SerializeToString(deterministic=True)


def _read_end(context: Context, step: int, body: bytes) -> RunEnded:
    return RunEnded(open_end(body, run_id=context.run_id, coordinator=context.identity.public_key))


def _write_archived(_: Context, record: RunArchived) -> bytes:
    return bytes([record.archived])


def _read_archived(_: Context, step: int, body: bytes) -> RunArchived:
    return RunArchived(bool(body[0]))


def _write_decay(_: Context, record: DecayStarted) -> bytes:
    return _json(steps=record.steps)


def _read_decay(_: Context, step: int, body: bytes) -> DecayStarted:
    return DecayStarted(step, json.loads(body)["steps"])


def _write_owner(_: Context, record: OwnerNamed) -> bytes:
    return record.public_key + owner_body(record.owner).SerializeToString(deterministic=True)


def _read_owner(_: Context, step: int, body: bytes) -> OwnerNamed:
    said = parse(coordinator_pb2.Owner, body[PUBLIC_KEY_BYTES:])
    return OwnerNamed(step, body[:PUBLIC_KEY_BYTES], Owner(said.name))


def _write_changed(_: Context, record: SettingsChanged) -> bytes:
    return log_pb2.LogEntry(settings=settings_body(record.settings)).SerializeToString(deterministic=True)


def _read_changed(_: Context, step: int, body: bytes) -> SettingsChanged:
    return SettingsChanged(step, settings_from_body(parse(log_pb2.LogEntry, body).settings))


def _write_evaluated(_: Context, record: Evaluated) -> bytes:
    return record.envelope


def _read_evaluated(context: Context, step: int, body: bytes) -> Evaluated:
    return Evaluated(step, open_evaluation(body, run_id=context.run_id).author, body)


def _write_order(context: Context, record: OrderSigned) -> bytes:
    signature = log_pb2.OrderSignature(public_key=record.public_key, signature=record.signature)
    body = log_pb2.SignedOrder(body=record.body, signatures=[signature]).SerializeToString(deterministic=True)
    return record.unix_ms.to_bytes(8, "big") + body


def _read_order(context: Context, step: int, body: bytes) -> OrderSigned:
    order = signed_order_from_body(parse(log_pb2.SignedOrder, body[8:]))
    ((public_key, signature),) = order.signatures
    return OrderSigned(order.body, public_key, signature, int.from_bytes(body[:8], "big"))


KINDS = (
    Kind("layout", LayoutFixed, _no_step, _write_layout, _read_layout),
    Kind("tick", TickOpened, lambda record: record.tick.step, _write_tick, _read_tick),
    Kind(ENTRY, EntryCommitted, lambda record: record.entry.step, _write_entry, _read_entry),
    Kind("left", PeerLeft, lambda record: record.step, _write_public_key, _read_left),
    Kind(SNAPSHOT, SnapshotAgreed, lambda record: record.snapshot.step, _write_snapshot, _read_snapshot),
    Kind(WITHDRAWN, Withdrawn, lambda record: record.from_step, _write_withdrawn, _read_withdrawn),
    Kind("judged", Judged, lambda record: record.step, _write_judged, _read_judged),
    Kind("ticket", TicketMade, _no_step, _write_ticket, _read_ticket),
    Kind("used", TicketUsed, _no_step, _write_used, _read_used),
    Kind("revoked", TicketRevoked, _no_step, _write_revoked, _read_revoked),
    Kind("equivocated", Equivocated, lambda record: record.offence.step, _write_equivocated, _read_equivocated),
    Kind("excluded", PeerExcluded, _no_step, _write_excluded, _read_excluded),
    Kind("readmitted", PeerReadmitted, _no_step, _write_public_key, _read_readmitted),
    Kind("paused", RunPaused, _no_step, _write_paused, _read_paused),
    Kind("resumed", RunResumed, _no_step, _write_nothing, _read_resumed),
    Kind("ended", RunEnded, lambda record: record.end.step, _write_end, _read_end),
    Kind("archived", RunArchived, _no_step, _write_archived, _read_archived),
    Kind("decay", DecayStarted, lambda record: record.after_step, _write_decay, _read_decay),
    Kind("owner", OwnerNamed, lambda record: record.step, _write_owner, _read_owner),
    Kind("changed", SettingsChanged, lambda record: record.after_step, _write_changed, _read_changed),
    Kind("order", OrderSigned, _no_step, _write_order, _read_order),
    Kind("evaluated", Evaluated, lambda record: record.step, _write_evaluated, _read_evaluated),
)
_BY_NAME = {kind.name: kind for kind in KINDS}
_BY_TYPE = {kind.type: kind for kind in KINDS}
