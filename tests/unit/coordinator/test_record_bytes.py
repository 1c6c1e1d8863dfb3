"""Every kind of record keeps its bytes: a journal that was written years ago is read, and the same record is written again.

`record_bytes.json` was written once, by the code before there was a table of kinds. A change to it breaks every journal.
"""

import json
import typing
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.clock import effects
from coordinator.store.journal import Journal
from protos.accounts import Owner
from protos.assignment import Range, SampleShare
from protos.changes import settings_of
from protos.envelope import Kind, seal
from protos.equivocation import prove
from protos.evaluation import Evaluation, seal_evaluation
from protos.identity import Identity
from protos.invite import Ticket
from protos.log import Contribution, Entry, Equivocation, Exclusion, Verdict, entry_body, entry_hash, lr_to_bits
from protos.orders import End, OperatorOrder, order_body
from protos.tick import Tick
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2, update_pb2

COORDINATOR = Identity.from_seed(bytes(32))
RUN_ID = bytes([7]) * 32
PINNED = Path(__file__).with_name("record_bytes.json")
GENESIS = log_pb2.Genesis(format_version=1, config_json="{}", coordinator_public_key=COORDINATOR.public_key)


def a(number: int) -> bytes:
    """32 bytes."""
    return bytes([number]) * 32


def equivocation() -> Equivocation:
    author = Identity.from_seed(a(5))
    said = [
        update_pb2.Announcement(step=3, parent_hash=a(1), payload_sha256=a(payload), payload_bytes=9, samples=4)
        for payload in (2, 3)
    ]
    first, second = (
        seal(author, Kind.KIND_ANNOUNCEMENT, RUN_ID, body).SerializeToString(deterministic=True) for body in said
    )
    return Equivocation(first, second)


def verdict(like: bytes = b"") -> Verdict:
    return Verdict(3, a(1), a(2), a(3), own=1.5, difference=-2.25, overlap=0.5, like=like)


def evaluation() -> bytes:
    return seal_evaluation(Identity.from_seed(a(5)), RUN_ID, Evaluation(b"", 50, 2.5, 512, a(6), "cpu"))


def entry() -> effects.EntryCommitted:
    made = Entry(
        step=3,
        parent_hash=a(9),
        contributions=(Contribution(a(1), a(2), 640, 4, 512, 2.5, 1000, 1),),
        lr_bits=lr_to_bits(1e-3),
        parent_state_digest=a(4),
        returned_samples=(Range(4, 8),),
        next_sample=12,
        trials=(Contribution(a(2), a(3), 64, 4, 512, 3.5, 16, 2),),
        exclusions=(
            Exclusion(a(6), "too many bad checks", (verdict(),)),
            Exclusion(a(7), "a word", (), None, by_operator=True),
        ),
        readmitted=(a(8),),
    )
    body = entry_body(made)
    return effects.EntryCommitted(made, body, entry_hash(body))


def every_kind() -> dict[str, effects.Record]:
    """At least one of each kind, by a name of its own."""
    shares = (SampleShare(a(1), 4), SampleShare(a(2), 8))
    return {
        "layout": effects.LayoutFixed(a(1), 123_456),
        "tick": effects.TickOpened(Tick(3, a(9), 2, shares, (Range(0, 12), Range(20, 22)), lr_to_bits(2e-3))),
        "entry": entry(),
        "left": effects.PeerLeft(3, a(2)),
        "snapshot": effects.SnapshotAgreed(effects.SnapshotFact(10, a(3), 5_000_000)),
        "withdrawn": effects.Withdrawn(10, 17),
        "judged": effects.Judged(3, (verdict(), verdict(a(4))), (a(2), a(4))),
        "ticket": effects.TicketMade(Ticket(bytes(range(16)), 1_700_000_000_000, 5, "for Ada", anchor=True)),
        "used": effects.TicketUsed(bytes(range(16)), a(3)),
        "revoked": effects.TicketRevoked(bytes(range(16)), with_peers=True),
        "revoked alone": effects.TicketRevoked(bytes(range(16)), with_peers=False),
        "equivocated": effects.Equivocated(prove(equivocation(), RUN_ID)),
        "excluded": effects.PeerExcluded(a(3), "votes from a café, ☕"),
        "readmitted": effects.PeerReadmitted(a(3)),
        "paused": effects.RunPaused("the data is wrong, ☕"),
        "paused for no reason": effects.RunPaused(""),
        "resumed": effects.RunResumed(),
        "ended": effects.RunEnded(End(17, a(3), "it is good enough, ☕")),
        "order": effects.OrderSigned(
            order_body(OperatorOrder(bytes(16), 1, "a word, ☕", a(3))), a(4), bytes([5]) * 64, 1_700_000_000_000
        ),
        "archived": effects.RunArchived(True),
        "not archived": effects.RunArchived(False),
        "decay": effects.DecayStarted(700, 300),
        "owner": effects.OwnerNamed(17, a(3), Owner("Ada, ☕")),
        "no owner": effects.OwnerNamed(117, a(3), Owner()),
        "evaluated": effects.Evaluated(50, Identity.from_seed(a(5)).public_key, evaluation()),
        "changed": effects.SettingsChanged(700, settings_of({"clock.steps": 2000, "optimizer.lr": 5e-4})),
    }


def rows_of(journal: Journal) -> list[list[object]]:
    with journal._engine.connect() as connection:
        found = connection.execute(sa.text("SELECT kind, step, body FROM records ORDER BY number")).all()
    return [[row.kind, row.step, bytes(row.body).hex()] for row in found]


@pytest.fixture
def journal(tmp_path: Path) -> typing.Iterator[Journal]:
    made = Journal(Journal.sqlite_url(tmp_path), COORDINATOR)
    made.create_run(RUN_ID, GENESIS)
    yield made
    made.close()


def test_every_kind_of_record_is_pinned() -> None:
    assert {type(record) for record in every_kind().values()} == set(typing.get_args(effects.Record))
    assert every_kind().keys() == json.loads(PINNED.read_text()).keys()


def test_records_are_written_as_they_always_were(journal: Journal) -> None:
    journal.append(RUN_ID, *every_kind().values())
    written = dict(zip(every_kind(), rows_of(journal), strict=True))
    assert written == json.loads(PINNED.read_text())


def test_records_that_were_written_long_ago_are_read(journal: Journal) -> None:
    insert = sa.text("INSERT INTO records VALUES (:run, :number, :kind, :step, :body)")
    with journal._engine.begin() as connection:
        for number, (kind, step, body) in enumerate(json.loads(PINNED.read_text()).values()):
            row = {"run": RUN_ID, "number": number, "kind": kind, "step": step, "body": bytes.fromhex(body)}
            connection.execute(insert, row)
    assert list(journal.records(RUN_ID)) == list(every_kind().values())


def test_an_owner_whose_key_signed_in_an_earlier_version_keeps_the_name(journal: Journal) -> None:
    body = a(3) + pb.Owner(name="Ada, ☕", public_key=a(4), signature=bytes([5]) * 64).SerializeToString()
    with journal._engine.begin() as connection:
        row = {"run": RUN_ID, "body": body}
        connection.execute(sa.text("INSERT INTO records VALUES (:run, 0, 'owner', 17, :body)"), row)
    assert list(journal.records(RUN_ID)) == [every_kind()["owner"]]


def test_a_kind_that_nobody_writes_is_an_error(journal: Journal) -> None:
    with journal._engine.begin() as connection:
        row = {"run": RUN_ID, "body": b"?"}
        connection.execute(sa.text("INSERT INTO records VALUES (:run, 0, 'unheard of', 0, :body)"), row)
    with pytest.raises(ValueError, match="unheard of"):
        list(journal.records(RUN_ID))
