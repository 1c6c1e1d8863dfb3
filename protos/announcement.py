"""The door for announcements: size, parse, kind, run, signature, in this order; then the lengths of the hashes.

The other ranges depend on the caller's place in the log, and are the caller's to check.
"""

from __future__ import annotations

from protos import limits
from protos.envelope import Kind, VerifiedEnvelope, open_envelope, parse
from protos.errors import Reason, Refusal
from protos.v1 import update_pb2

BYTES_MAX = limits.ANNOUNCEMENT_BYTES_MAX + limits.ENVELOPE_OVERHEAD_BYTES_MAX
"""Of a signed announcement, envelope included."""


def open_announcement(
    data: bytes, *, run_id: bytes, author: bytes | None = None
) -> tuple[VerifiedEnvelope, update_pb2.Announcement]:
    """Verify a signed announcement, or raise `Refusal`. `author`: the only key that may have signed, if given."""
    opened = open_envelope(data, kind=Kind.KIND_ANNOUNCEMENT, run_id=run_id, bytes_max=BYTES_MAX, signer=author)
    return opened, parse(update_pb2.Announcement, opened.body)


def check_hashes(body: update_pb2.Announcement) -> None:
    """Raises `Refusal` if a hash has the wrong length. For announcements that may come from strangers."""
    if len(body.payload_sha256) != limits.HASH_BYTES or len(body.parent_hash) != limits.HASH_BYTES:
        raise Refusal(Reason.MALFORMED, "a hash has the wrong length")
