"""Tickets: the coordinator's signed permission, inside an invite link, for a number of identities to join a run.

Refuses bytes that the run's coordinator did not sign. Whether a ticket still counts, only the coordinator knows. ADR 18.
"""

from __future__ import annotations

from dataclasses import dataclass

from protos.envelope import Kind, open_envelope, parse, seal
from protos.errors import Reason, Refusal
from protos.identity import Identity
from protos.limits import (
    TICKET_BYTES_MAX,
    TICKET_ID_BYTES,
    TICKET_LABEL_BYTES_MAX,
    TICKET_USES_MAX,
    UNIX_MS_MAX,
)
from protos.v1 import ticket_pb2


@dataclass(frozen=True)
class Ticket:
    """`uses`: how many identities may join with it. `expires_unix_ms`: by the coordinator's clock; 0: never.

    `anchor`: they may take part as anchors (docs/security.md), in a run of any admission mode.
    """

    ticket_id: bytes
    expires_unix_ms: int
    uses: int
    label: str = ""
    anchor: bool = False


def ticket_body(ticket: Ticket) -> ticket_pb2.Ticket:
    """As it travels."""
    return ticket_pb2.Ticket(
        ticket_id=ticket.ticket_id,
        expires_unix_ms=ticket.expires_unix_ms,
        uses=ticket.uses,
        label=ticket.label,
        anchor=ticket.anchor,
    )


def ticket_from_body(body: ticket_pb2.Ticket) -> Ticket:
    """From the wire, every field in its range; raises `Refusal`."""
    if len(body.ticket_id) != TICKET_ID_BYTES:
        raise Refusal(Reason.MALFORMED, f"ticket id of {len(body.ticket_id)} bytes, expected {TICKET_ID_BYTES}")
    if not 1 <= body.uses <= TICKET_USES_MAX:
        raise Refusal(Reason.OUT_OF_RANGE, f"a ticket for {body.uses} peers; expected 1 to {TICKET_USES_MAX}")
    if body.expires_unix_ms > UNIX_MS_MAX:
        raise Refusal(Reason.OUT_OF_RANGE, f"a ticket until {body.expires_unix_ms} ms, at most {UNIX_MS_MAX}")
    if len(body.label.encode()) > TICKET_LABEL_BYTES_MAX or not body.label.isprintable():
        raise Refusal(
            Reason.OUT_OF_RANGE, f"the label takes at most {TICKET_LABEL_BYTES_MAX} bytes, printable and on one line"
        )
    return Ticket(body.ticket_id, body.expires_unix_ms, body.uses, body.label, body.anchor)


def seal_ticket(coordinator: Identity, run_id: bytes, ticket: Ticket) -> bytes:
    """The serialised envelope that a link carries; always the same bytes for the same ticket."""
    envelope = seal(coordinator, Kind.KIND_TICKET, run_id, ticket_body(ticket))
    return envelope.SerializeToString(deterministic=True)


def open_ticket(data: bytes, *, run_id: bytes, coordinator: bytes) -> Ticket:
    """Verify and parse; raises `Refusal`."""
    opened = open_envelope(data, kind=Kind.KIND_TICKET, run_id=run_id, bytes_max=TICKET_BYTES_MAX, signer=coordinator)
    return ticket_from_body(parse(ticket_pb2.Ticket, opened.body))
