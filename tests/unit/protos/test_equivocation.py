"""What proves two payloads for one step, and what proves nothing: nobody can be accused of what it did not sign."""

import pytest

from protos.assignment import Range
from protos.envelope import Kind, seal
from protos.equivocation import BYTES_MAX, prove, prove_exclusion
from protos.errors import Reason, Refusal
from protos.identity import Identity
from protos.log import Entry, Equivocation, Exclusion, entry_body, open_entry, seal_entry
from protos.v1 import envelope_pb2, update_pb2

RUN = b"r" * 32
ADA, BOB = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))


def said(
    payload: bytes = b"p", who: Identity = ADA, step: int = 3, parent: bytes = b"h" * 32, run: bytes = RUN,
    kind: int = Kind.KIND_ANNOUNCEMENT, loss: float = 1.0,
) -> bytes:  # fmt: skip
    body = update_pb2.Announcement(step=step, parent_hash=parent, payload_sha256=payload * 32, loss=loss)
    return seal(who, kind, run, body).SerializeToString(deterministic=True)


def forged() -> bytes:
    envelope = envelope_pb2.SignedEnvelope.FromString(said(b"q", who=BOB))
    envelope.public_key = ADA.public_key
    return envelope.SerializeToString()


def test_two_payloads_on_one_log_prove_it_in_either_order() -> None:
    found = prove(Equivocation(said(), said(b"q")), RUN)
    assert (found.author, found.step, found.payloads) == (ADA.public_key, 3, (b"p" * 32, b"q" * 32))
    assert "two payloads announced for step 3" in found.reason
    assert prove(Equivocation(said(b"q"), said()), RUN).author == ADA.public_key


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (said(), Reason.REPLAYED),
        (said(loss=2.0), Reason.REPLAYED),
        (said(b"q", who=BOB), Reason.UNKNOWN_SIGNER),
        (said(b"q", step=4), Reason.WRONG_STEP),
        (said(b"q", parent=b"x" * 32), Reason.WRONG_PARENT),
        (said(b"q", run=b"x" * 32), Reason.WRONG_RUN),
        (said(b"q", kind=Kind.KIND_REPORT), Reason.WRONG_KIND),
        (forged(), Reason.BAD_SIGNATURE),
        (said(b"qq"), Reason.MALFORMED),
        (b"?", Reason.MALFORMED),
        (bytes(BYTES_MAX + 1), Reason.TOO_LARGE),
    ],
)
def test_what_proves_nothing(second: bytes, reason: Reason) -> None:
    for pair in (Equivocation(said(), second), Equivocation(second, said())):
        with pytest.raises(Refusal) as caught:
            prove(pair, RUN)
        assert caught.value.reason is reason


def test_the_evidence_in_an_entry_travels_whole_and_is_against_whom_it_excludes() -> None:
    exclusion = Exclusion(ADA.public_key, "why", (), Equivocation(said(), said(b"q")))
    entry = Entry(1, RUN, (), 0, b"", (Range(0, 1),), 1, exclusions=(exclusion,))
    signed = open_entry(seal_entry(BOB, RUN, entry).envelope, run_id=RUN, coordinator=BOB.public_key)
    assert signed.entry == entry
    assert entry_body(signed.entry) == entry_body(entry)
    assert prove_exclusion(exclusion, RUN).author == ADA.public_key
    with pytest.raises(Refusal, match="against"):
        prove_exclusion(Exclusion(BOB.public_key, "why", (), exclusion.equivocation), RUN)
