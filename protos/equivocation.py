"""The proof that a peer announced two payloads for one step. The offender's own signatures are the proof.

Refuses pairs that an honest author can have signed: announcements of other steps, of another log, or of the same payload. A
coordinator that signs two logs gets an announcement on each.
"""

from __future__ import annotations

from dataclasses import dataclass

from protos import limits
from protos.envelope import Kind, VerifiedEnvelope, open_envelope, parse
from protos.errors import Reason, Refusal
from protos.identity import short
from protos.log import Equivocation, Exclusion
from protos.v1 import update_pb2

# The door for announcements: size, parse, kind, run, signature, in this order; then the lengths of the hashes.
#
# The other ranges depend on the caller's place in the log, and are the caller's to check.

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


@dataclass(frozen=True)
class Offence:
    """A proven offence: its author, its step, and the two payloads."""

    author: bytes
    step: int
    payloads: tuple[bytes, bytes]
    equivocation: Equivocation

    @property
    def reason(self) -> str:
        """Why the author is excluded, for people."""
        one, other = (payload.hex()[:16] for payload in self.payloads)
        return (
            f"excluded from the run: two payloads announced for step {self.step}, {one} and {other}, both signed by "
            f"{short(self.author)}; the log holds both announcements"
        )


def prove(equivocation: Equivocation, run_id: bytes) -> Offence:
    """The offence that two announcements of this run prove, or `Refusal`."""
    first, one = open_announcement(equivocation.first, run_id=run_id)
    check_hashes(one)
    second, other = open_announcement(equivocation.second, run_id=run_id)
    check_hashes(other)
    if first.public_key != second.public_key:
        raise Refusal(Reason.UNKNOWN_SIGNER, "the two announcements have two authors")
    if one.step != other.step or not 1 <= one.step <= limits.STEP_MAX:
        raise Refusal(Reason.WRONG_STEP, f"the two announcements are of steps {one.step} and {other.step}")
    if one.parent_hash != other.parent_hash:
        raise Refusal(Reason.WRONG_PARENT, f"the two announcements of step {one.step} are on two logs")
    if one.payload_sha256 == other.payload_sha256:
        raise Refusal(Reason.REPLAYED, f"the two announcements of step {one.step} name one payload")
    return Offence(first.public_key, one.step, (one.payload_sha256, other.payload_sha256), equivocation)


def prove_exclusion(exclusion: Exclusion, run_id: bytes) -> Offence:
    """`prove` what an entry holds against a peer that it excludes for two payloads; `Refusal` if it is against another."""
    assert exclusion.equivocation is not None, "excluded for something else"
    offence = prove(exclusion.equivocation, run_id)
    if offence.author != exclusion.public_key:
        raise Refusal(Reason.UNKNOWN_SIGNER, f"the evidence is against {short(offence.author)}")
    return offence
