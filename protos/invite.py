"""Invite links: `swarmentum://` + base64url of an Invite protobuf + 4 bytes of checksum: no shell quotes needed."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass

from protos.envelope import parse
from protos.errors import OperatorError, Refusal
from protos.limits import HASH_BYTES, INVITE_BYTES_MAX, PUBLIC_KEY_BYTES
from protos.ticket import open_ticket
from protos.v1 import log_pb2

AROUND_A_LINK = "\"'`<>()[]{}.,;:!?\u00ab\u00bb\u2018\u2019\u201c\u201d"
"""What people and programs put before and after a link; base64url has none of it."""

SCHEME = "swarmentum://"
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
    """A signed ticket (protos/ticket.py), which runs in admission mode `invite` ask for; empty in others."""

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
        text = base64.urlsafe_b64encode(data + hashlib.sha256(data).digest()[:4]).decode("ascii")
        return SCHEME + text.rstrip("=")

    @staticmethod
    def parse(link: str) -> Invite:
        """Read a link; OperatorError says what is wrong with it.

        A link that was copied out of a chat or a page may have line breaks, spaces, quotes or a full stop: none is of the link.
        """
        text = "".join(link.split()).strip(AROUND_A_LINK)
        if not is_link(text) or len(text) > INVITE_BYTES_MAX:
            raise OperatorError(f"not an invite link: it starts with {SCHEME}, got {text[:32]!r}")
        coded = text[len(SCHEME) :]
        try:
            data = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise OperatorError("the invite link is damaged or cut off; copy it again, whole") from error
        if len(data) < 4 or hashlib.sha256(data[:-4]).digest()[:4] != data[-4:]:
            raise OperatorError("the invite link is damaged or cut off; copy it again, whole")
        try:
            body = parse(log_pb2.Invite, data[:-4])
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


def is_link(text: str) -> bool:
    """Whether a text is meant as an invite link, and not as a path or a name. Schemes have any case (RFC 3986)."""
    return "".join(text.split()).lstrip(AROUND_A_LINK)[: len(SCHEME)].lower() == SCHEME


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
