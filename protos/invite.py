"""Invite links: `swarmentum://` + base64url of an Invite protobuf + 4 bytes of checksum: no shell quotes needed.

A person may have pasted more: a whole command, a chat's line, a mail that broke or encoded the link. The first scheme counts,
in any case. The link ends where its checksum holds: words may follow it, and line breaks may be in it. Refuses to guess: a
link with a changed character has no checksum that holds, and is damaged.
"""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import unquote

from protos.envelope import Kind, open_envelope, parse, seal
from protos.errors import OperatorError, Reason, Refusal
from protos.identity import Identity
from protos.limits import (
    HASH_BYTES,
    INVITE_BYTES_MAX,
    PUBLIC_KEY_BYTES,
    TICKET_BYTES_MAX,
    TICKET_ID_BYTES,
    TICKET_LABEL_BYTES_MAX,
    TICKET_USES_MAX,
    UNIX_MS_MAX,
)
from protos.v1 import log_pb2, ticket_pb2

SCHEME: Final = "swarmentum://"
ANCHOR_SCHEME: Final = "swarmentum-anchor://"
"""Of the secret link that makes anchors, so that it is not mistaken for the link that everybody may have."""
CHECKSUM_BYTES: Final = 4
PASTED_CHARACTERS_MAX: Final = 4 * INVITE_BYTES_MAX
WORDS_MAX: Final = 256
CODED_CHARACTERS_MIN: Final = 120
"""The shortest link holds a run id, a key and a hash of a certificate."""
_SCHEME = re.compile(r"swarmentum(?:-anchor)?://", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9_-]+")
DAMAGED: Final = "the invite link is damaged or cut off; copy it again, whole"


def is_link(text: str) -> bool:
    """Whether an invite link is in a text, which otherwise is a path, a name or an id."""
    return bool(_SCHEME.search(_plain(text)))


def link_bytes(text: str) -> bytes:
    """What the link in a pasted text holds, without its checksum. OperatorError says what is wrong with it."""
    plain = _plain(text)
    found = list(_SCHEME.finditer(plain))
    if not found:
        return _without_scheme(text, plain)
    ends = [one.start() for one in found[1:]] + [len(plain)]
    parts = [plain[one.end() : end] for one, end in zip(found, ends, strict=True)]
    real = [rest for rest in parts if len("".join(_WORD.findall(rest)[:WORDS_MAX])) >= CODED_CHARACTERS_MIN]
    if not real:
        shown = plain[found[0].start() :][:40].split("\n")[0].strip()
        raise OperatorError(
            f"the invite link is damaged or cut off, or it is the example of the docs: {shown!r}. Put the whole link there "
            "that the run's operator sent; it has more than a hundred characters"
        )
    data = _checked(_WORD.findall(real[0])[:WORDS_MAX])
    if data is None:
        raise OperatorError(DAMAGED)
    return data


def _without_scheme(text: str, plain: str) -> bytes:
    """A link whose scheme was not copied is still one: its checksum says so."""
    for word in _WORD.findall(plain)[:WORDS_MAX]:
        data = _checked([word]) if len(word) >= CODED_CHARACTERS_MIN else None
        if data is not None:
            return data
    raise OperatorError(f"{text[:32]!r} is not an invite link, which starts with {SCHEME}")


def _plain(text: str) -> str:
    """Without what does not show (a chat's zero-width spaces, a soft hyphen), and without percent signs of a browser."""
    if len(text) > PASTED_CHARACTERS_MAX:
        raise OperatorError(
            f"not an invite link: {len(text)} characters, of which a link has at most {INVITE_BYTES_MAX}"
        )
    shown = "".join(character for character in text if unicodedata.category(character) != "Cf")
    return unquote(shown) if "%" in shown else shown


def _checked(words: list[str]) -> bytes | None:
    """The bytes of the first words that together have the right checksum; None if none do."""
    coded = ""
    for word in words:
        coded += word
        if len(coded) > INVITE_BYTES_MAX:
            return None
        if len(coded) < CODED_CHARACTERS_MIN or len(coded) % 4 == 1:
            continue
        data = base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4))
        if hashlib.sha256(data[:-CHECKSUM_BYTES]).digest()[:CHECKSUM_BYTES] == data[-CHECKSUM_BYTES:]:
            return data[:-CHECKSUM_BYTES]
    return None


# More addresses than this make a link that nobody wants to copy.
COORDINATORS_MAX = 8
ID_DIGITS_MIN = 16
"""Of a run's id: with fewer, somebody can make another run whose id begins so."""


@dataclass(frozen=True)
class Invite:
    """The addresses of a run's coordinators, and the key and certificate that identify them."""

    run_id: bytes
    coordinators: tuple[str, ...]
    coordinator_public_key: bytes
    certificate_sha256: bytes
    bootstrap: tuple[str, ...]
    run_name: str
    ticket: bytes = b""
    """A signed ticket, which runs in admission mode `invite` ask for; empty in others."""

    def link(self) -> str:
        """The text that people pass on."""
        data = log_pb2.Invite(
            run_id=self.run_id,
            coordinators=self.coordinators,
            coordinator_public_key=self.coordinator_public_key,
            certificate_sha256=self.certificate_sha256,
            bootstrap=self.bootstrap,
            run_name=self.run_name,
            ticket=self.ticket,
        ).SerializeToString(deterministic=True)
        text = base64.urlsafe_b64encode(data + hashlib.sha256(data).digest()[:CHECKSUM_BYTES]).decode("ascii")
        return (ANCHOR_SCHEME if self.makes_anchors else SCHEME) + text.rstrip("=")

    @property
    def makes_anchors(self) -> bool:
        """Whether its ticket makes anchors: this link is the operator's secret. Older versions wrote it as any other."""
        try:
            return (
                bool(self.ticket)
                and open_ticket(self.ticket, run_id=self.run_id, coordinator=self.coordinator_public_key).anchor
            )
        except Refusal:
            return False

    def public(self, what: str) -> Invite:
        """This invite. OperatorError if it makes anchors, and `what` would take or show a link for peers."""
        if self.makes_anchors:
            raise OperatorError(
                f"this link makes anchors: its holder decides about the run's state. {what} takes the link for peers, which "
                f"begins with {SCHEME} (`swarmentum-coordinator run invite NAME` prints it). Keep this one secret: it is for "
                "`swarmentum anchor`"
            )
        return self

    def without_ticket(self) -> Invite:
        """This invite for everybody's eyes: it shows the run, and admits nobody where a ticket is needed."""
        return replace(self, ticket=b"")

    @staticmethod
    def parse(link: str) -> Invite:
        """Read the link in a text that a person pasted (protos/invite.py); OperatorError says what is wrong with it."""
        data = link_bytes(link)
        try:
            body = parse(log_pb2.Invite, data)
        except Refusal as error:
            raise OperatorError(f"the invite link is of another version of swarmentum ({error.detail})") from error
        lengths = (len(body.run_id), len(body.coordinator_public_key), len(body.certificate_sha256))
        if lengths != (HASH_BYTES, PUBLIC_KEY_BYTES, HASH_BYTES) or not body.coordinators:
            raise OperatorError("the invite link is of another version of swarmentum: a field is missing")
        if body.ticket:
            try:
                open_ticket(body.ticket, run_id=body.run_id, coordinator=body.coordinator_public_key)
            except Refusal as error:
                raise OperatorError(f"the invite link's ticket is not its coordinator's ({error.detail})") from error
        return Invite(
            run_id=body.run_id,
            coordinators=tuple(body.coordinators),
            coordinator_public_key=body.coordinator_public_key,
            certificate_sha256=body.certificate_sha256,
            bootstrap=tuple(body.bootstrap),
            run_name=body.run_name,
            ticket=body.ticket,
        )


def run_named(text: str) -> str:
    """The run that a person means by an invite link or an id: its id in hex, or the start of it. Raises OperatorError."""
    plain = text.strip().lower()
    if re.fullmatch(rf"[0-9a-f]{{{ID_DIGITS_MIN},{2 * HASH_BYTES}}}", plain):
        return plain
    if is_link(text):
        return Invite.parse(text).run_id.hex()
    raise OperatorError(
        f"--run {text[:80]!r}: expected an invite link, or {ID_DIGITS_MIN} to {2 * HASH_BYTES} hex digits of an id"
    )


# Tickets: the coordinator's signed permission, inside a link, for a number of identities to join. Refuses bytes that it did not
# sign. Whether a ticket still counts, only the coordinator knows. ADR 18.


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
