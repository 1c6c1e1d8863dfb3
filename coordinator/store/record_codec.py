"""Journal records as bytes, and back: one table with a row for each kind of record.

The bytes of a kind never change: tests/unit/coordinator/record_bytes.json pins them. Refuses a kind that the table does not
have. Verifies the coordinator's signature on an entry only if the caller asks for it, because a signature costs 0.1 ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

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
    write: Callable[[Context, Any], bytes]
    read: Callable[[Context, int, bytes], Record]
    step: Callable[[Any], int] = lambda _: 0


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


def _proto(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _json(**values: object) -> bytes:
    return json.dumps(values).encode()


def _read_layout(_: Context, step: int, body: bytes) -> LayoutFixed:
    values = json.loads(body)
    return LayoutFixed(bytes.fromhex(values["layout_digest"]), values["parameters"])


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


def _write_judged(_: Context, record: Judged) -> bytes:
    verdicts = [verdict_body(verdict) for verdict in record.verdicts]
    return _proto(log_pb2.Judged(verdicts=verdicts, arrival=record.arrival, samples=record.samples))


def _read_judged(_: Context, step: int, body: bytes) -> Judged:
    judged = parse(log_pb2.Judged, body)
    verdicts = tuple(verdict_from_body(verdict) for verdict in judged.verdicts)
    return Judged(step, verdicts, tuple(judged.arrival), tuple(judged.samples))


def _read_owner(_: Context, step: int, body: bytes) -> OwnerNamed:
    said = parse(coordinator_pb2.Owner, body[PUBLIC_KEY_BYTES:])
    return OwnerNamed(step, body[:PUBLIC_KEY_BYTES], Owner(said.name))


def _write_order(_: Context, record: OrderSigned) -> bytes:
    signature = log_pb2.OrderSignature(public_key=record.public_key, signature=record.signature)
    return record.unix_ms.to_bytes(8, "big") + _proto(log_pb2.SignedOrder(body=record.body, signatures=[signature]))


def _read_order(_: Context, step: int, body: bytes) -> OrderSigned:
    order = signed_order_from_body(parse(log_pb2.SignedOrder, body[8:]))
    ((public_key, signature),) = order.signatures
    return OrderSigned(order.body, public_key, signature, int.from_bytes(body[:8], "big"))


KINDS = (
    Kind(
        "layout",
        LayoutFixed,
        lambda _, record: _json(layout_digest=record.layout_digest.hex(), parameters=record.parameters),
        _read_layout,
    ),
    Kind(
        "tick",
        TickOpened,
        lambda _, record: _proto(tick_body(record.tick)),
        lambda _, step, body: TickOpened(tick_from_body(parse(log_pb2.Tick, body))),
        lambda record: record.tick.step,
    ),
    Kind(
        ENTRY,
        EntryCommitted,
        lambda context, record: seal(context, record).envelope,
        _read_entry,
        lambda record: record.entry.step,
    ),
    Kind(
        "left",
        PeerLeft,
        lambda _, record: record.public_key,
        lambda _, step, body: PeerLeft(step, body),
        lambda record: record.step,
    ),
    Kind(SNAPSHOT, SnapshotAgreed, _write_snapshot, _read_snapshot, lambda record: record.snapshot.step),
    Kind(
        WITHDRAWN,
        Withdrawn,
        lambda _, record: _json(to_step=record.to_step),
        lambda _, step, body: Withdrawn(step, json.loads(body)["to_step"]),
        lambda record: record.from_step,
    ),
    Kind("judged", Judged, _write_judged, _read_judged, lambda record: record.step),
    Kind(
        "ticket",
        TicketMade,
        lambda _, record: _proto(ticket_body(record.ticket)),
        lambda _, step, body: TicketMade(ticket_from_body(parse(ticket_pb2.Ticket, body))),
    ),
    Kind(
        "used",
        TicketUsed,
        lambda _, record: record.ticket_id + record.public_key,
        lambda _, step, body: TicketUsed(body[:TICKET_ID_BYTES], body[TICKET_ID_BYTES:]),
    ),
    Kind(
        "revoked",
        TicketRevoked,
        lambda _, record: record.ticket_id + bytes([record.with_peers]),
        lambda _, step, body: TicketRevoked(body[:TICKET_ID_BYTES], bool(body[TICKET_ID_BYTES])),
    ),
    Kind(
        "equivocated",
        Equivocated,
        lambda _, record: _proto(equivocation_body(record.offence.equivocation)),
        lambda context, step, body: Equivocated(
            prove(equivocation_from_body(parse(log_pb2.Equivocation, body)), context.run_id)
        ),
        lambda record: record.offence.step,
    ),
    Kind(
        "excluded",
        PeerExcluded,
        lambda _, record: record.public_key + record.reason.encode(),
        lambda _, step, body: PeerExcluded(body[:PUBLIC_KEY_BYTES], body[PUBLIC_KEY_BYTES:].decode()),
    ),
    Kind("readmitted", PeerReadmitted, lambda _, record: record.public_key, lambda _, step, body: PeerReadmitted(body)),
    Kind(
        "paused",
        RunPaused,
        lambda _, record: record.reason.encode(),
        lambda _, step, body: RunPaused(body.decode()),
    ),
    Kind("resumed", RunResumed, lambda _, record: b"", lambda _, step, body: RunResumed()),
    Kind(
        "ended",
        RunEnded,
        lambda context, record: _proto(seal_end(context.identity, context.run_id, record.end)),
        lambda context, step, body: RunEnded(
            open_end(body, run_id=context.run_id, coordinator=context.identity.public_key)
        ),
        lambda record: record.end.step,
    ),
    Kind(
        "archived",
        RunArchived,
        lambda _, record: bytes([record.archived]),
        lambda _, step, body: RunArchived(bool(body[0])),
    ),
    Kind(
        "decay",
        DecayStarted,
        lambda _, record: _json(steps=record.steps),
        lambda _, step, body: DecayStarted(step, json.loads(body)["steps"]),
        lambda record: record.after_step,
    ),
    Kind(
        "owner",
        OwnerNamed,
        lambda _, record: record.public_key + _proto(owner_body(record.owner)),
        _read_owner,
        lambda record: record.step,
    ),
    Kind(
        "changed",
        SettingsChanged,
        lambda _, record: _proto(log_pb2.LogEntry(settings=settings_body(record.settings))),
        lambda _, step, body: SettingsChanged(step, settings_from_body(parse(log_pb2.LogEntry, body).settings)),
        lambda record: record.after_step,
    ),
    Kind("order", OrderSigned, _write_order, _read_order),
    Kind(
        "evaluated",
        Evaluated,
        lambda _, record: record.envelope,
        lambda context, step, body: Evaluated(step, open_evaluation(body, run_id=context.run_id).author, body),
        lambda record: record.step,
    ),
)
_BY_NAME = {kind.name: kind for kind in KINDS}
_BY_TYPE = {kind.type: kind for kind in KINDS}
