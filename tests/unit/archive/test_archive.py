"""Archives: what is kept can be replayed; whatever is changed in them is found, at its step, with whose word it was."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import zstandard
from safetensors.torch import load_file, save_file, save_model

from node.archive import files, ledger
from node.archive.record import Recorder
from node.archive.verify import Verification, text, verify
from node.archive.verify import line as line_of
from node.training.replica import Replica
from node.wire import UpdateDoor, open_aggregate
from protos import slices
from protos.changes import Settings
from protos.envelope import Kind, seal, seal_bytes
from protos.errors import OperatorError, Refusal
from protos.identity import Identity, peer_id
from protos.limits import PAYLOAD_BYTES_MAX
from protos.log import (
    Contribution,
    Entry,
    Equivocation,
    Exclusion,
    SignedEntry,
    Verdict,
    lr_to_bits,
    run_id_of,
    seal_entry,
)
from protos.optimizer_config import OptimizerConfig
from protos.orders import OperatorOrder, SignedOrder, order_body
from protos.run_config import ClockConfig, RunConfig
from protos.run_sections import OperatorsConfig
from protos.slices import hash_of, sum_in
from protos.v1 import archive_pb2, log_pb2, update_pb2
from tests.sim.sums import sum_named, summed

COORDINATOR, ADA, BOB = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
LR = 2.0**-9
ROOM = 10**9


@dataclass
class Life:
    """A run of two peers without a network: real votes, a real signed log; Ada keeps the archive."""

    folder: Path
    config: RunConfig = field(default_factory=RunConfig)
    entries: list[SignedEntry] = field(default_factory=list)
    false_digest_at: int = 0
    silent: range = range(0)
    """Steps whose entries have no digest, as while an anchor is away."""
    exclusions: dict[int, Exclusion] = field(default_factory=dict)
    readmitted: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    settings: Settings = ()
    """Of the next steps."""
    orders: dict[int, SignedOrder] = field(default_factory=dict)
    long_at: int = 0
    """A step with a sum whose second slice is too long to be one."""
    sums: bool = False
    """The next steps have the sum of their votes in the log and in the archive."""

    def __post_init__(self) -> None:
        made = log_pb2.Genesis(
            format_version=1,
            config_json=self.config.canonical_json(),
            coordinator_public_key=COORDINATOR.public_key,
            nonce=bytes(16),
        )
        self.genesis = made.SerializeToString(deterministic=True)
        self.run_id = run_id_of(made)
        self.ada, self.bob = self._replica(), self._replica()
        self.archive = self.folder / "archive"
        self.recorder = self.open()

    def _replica(self) -> Replica:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = torch.nn.Linear(70, 65)
        optimizer = self.config.optimizer
        made = Replica(self.run_id, model, optimizer, optimizer.vote_size)
        made.ranges = self.config.clock.ranges
        return made

    def open(self, room: int = ROOM) -> Recorder:
        recorder = Recorder(self.archive, room, self.genesis, self.ada)
        recorder.begin(self.ada)
        return recorder

    def steps(self, count: int, *, record: bool = True, heard: bool = True) -> None:
        for _ in range(count):
            self.step(record=record, heard=heard)

    def step(self, *, record: bool = True, heard: bool = True) -> None:
        step = self.ada.step + 1
        payloads = {who.public_key: self._vote(replica, step) for who, replica in ((ADA, self.ada), (BOB, self.bob))}
        keys = sorted(payloads)
        contributions = tuple(
            Contribution(key, self.name(payloads[key]), len(payloads[key]), 2, 10 * step, 1.0) for key in keys
        )
        digest = self.ada.digest() if step > 1 and step not in self.silent else b""
        if step == self.false_digest_at:
            digest = bytes(32)
        out = (self.exclusions[step],) if step in self.exclusions else ()
        back = self.readmitted.get(step, ())
        cap, ranges = self.config.optimizer.cap, self.config.clock.ranges
        of = (self.run_id, self.ada.layout_digest, self.ada.demo.layout.chunks, self.ada.demo.form)
        door = UpdateDoor(*of, cap, ranges)
        updates = [door.open(payloads[key], step) for key in keys]
        total = summed(door, updates, step) if self.sums else b""
        aggregate = sum_named(total, ranges) if self.sums else None
        if step == self.long_at and aggregate is not None:
            first, second, third = aggregate.parts
            aggregate = sum_in([first, slices.Slice(second.sha256, 1 << 27), third])
            total = aggregate.slices + b"".join(slices.split(total, ranges)[at] for at in (0, 2))
            updates = list(open_aggregate(door, total, step, aggregate.total_bytes, lambda _: None))
        entry = Entry(
            step,
            self.ada.head,
            contributions,
            lr_to_bits(LR),
            digest,
            (),
            step,
            exclusions=out,
            readmitted=back,
            settings=self.settings,
            orders=(self.orders[step],) if step in self.orders else (),
            aggregate=aggregate,
        )
        signed = seal_entry(COORDINATOR, self.run_id, entry)
        for replica in (self.ada, self.bob):
            replica.apply(signed, updates)
        self.entries.append(signed)
        if record:
            words = {who.public_key: self.word(who, step, payloads[who.public_key]) for who in (ADA, BOB)}
            kept = [total] if self.sums else [payloads[key] for key in keys]
            self.recorder.record(signed, kept, words if heard else {})
            if self.recorder.pop_due():
                assert not self.recorder.pop_due(), "said once"
                image = self.ada.image()
                describe = self.ada.describer(image.total_bytes)
                self.recorder.segment(self.ada.step, image.total_bytes, lambda: image.pieces(1 << 20), describe)

    def _vote(self, replica: Replica, step: int) -> bytes:
        generator = torch.Generator().manual_seed(step + (10_000 if replica is self.bob else 0))
        for parameter in replica.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        return replica.vote(step, LR)

    def name(self, payload: bytes) -> bytes:
        return hash_of(payload, self.config.clock.ranges)

    def word(self, who: Identity, step: int, payload: bytes) -> bytes:
        said = update_pb2.Announcement(step=step, payload_sha256=self.name(payload), payload_bytes=len(payload))
        return seal(who, Kind.KIND_ANNOUNCEMENT, self.run_id, said).SerializeToString(deterministic=True)

    def export(self) -> Path:
        folder = self.folder / "model"
        folder.mkdir()
        save_model(self.ada.model, str(folder / "model.safetensors"))
        (folder / "swarmentum.json").write_text(json.dumps({"steps": self.ada.step}))
        return folder

    def verify(self, from_step: int | None = None) -> Verification:
        self.recorder.close()
        return verify(self.folder, from_step, None)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path)
    yield made
    made.recorder.close()


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(),
        OptimizerConfig.model_validate({"selection": "topk", "values": "2bit"}),
        OptimizerConfig.model_validate({"base": {"name": "adamw"}, "transform": "hadamard"}),
        OptimizerConfig(method="paper", chunk=32),
        OptimizerConfig(selection="random", one_in=8),
    ],
    ids=["default", "topk", "adamw", "paper", "random"],
)
def test_a_run_is_replayed_to_the_same_bits(tmp_path: Path, optimizer: OptimizerConfig) -> None:
    life = Life(tmp_path, RunConfig(optimizer=optimizer))
    life.steps(6)
    exported = life.export()
    found = life.verify()
    assert found.ok, found.reason
    assert (found.steps, found.first_step, found.last_step) == (6, 1, 6)
    assert (found.votes, found.votes_signed_by_author, found.digests_checked) == (12, 12, 5)
    assert found.state_digest == life.ada.whole_digest().hex()
    assert found.weights == f"bit-identical to {exported}"
    assert found.run == life.run_id.hex()


def summing(ranges: int, cap: int = 2) -> RunConfig:
    clock = ClockConfig(aggregators=3, ranges=ranges)
    return RunConfig(optimizer=OptimizerConfig(selection="random", cap=cap), clock=clock)


@pytest.mark.parametrize("ranges", [1, 3, 16])
def test_sums_lead_to_the_bits_of_their_payloads_and_verify_says_what_it_has_not_seen(
    ranges: int, tmp_path: Path
) -> None:
    life = Life(tmp_path, summing(ranges, cap=3))
    for life.sums in (False, True, True, False, True):
        life.step()  # the replicas apply payloads
    found = life.verify()
    assert found.ok, found.reason
    assert found.state_digest == life.ada.whole_digest().hex()
    assert (found.votes, found.votes_signed_by_author, found.votes_in_sums) == (10, 4, 6)
    assert "6 payloads are here only in sums" in text(found)


def test_a_slice_that_is_too_long_to_be_a_sum_voids_its_range_alone(tmp_path: Path) -> None:
    life = Life(tmp_path, summing(3), sums=True, long_at=2)
    life.steps(3)
    found = life.verify()
    assert found.ok, found.reason
    assert found.state_digest == life.ada.whole_digest().hex()
    assert found.steps == 3


@pytest.mark.parametrize("ranges", [1, 3])
def test_another_sum_than_the_log_names_is_found(ranges: int, tmp_path: Path) -> None:
    life = Life(tmp_path, summing(ranges), sums=True)
    life.steps(3)
    life.recorder.close()
    [segment] = files.segments(life.archive)
    path = segment.path(files.PAYLOADS)
    kept = list(files.records(path, files.PAYLOAD_RECORD_BYTES_MAX))
    first, second = (archive_pb2.ArchivedPayload.FromString(it).payload for it in kept[:2])
    others = [first, second[:-1], second[:-1] + bytes([second[-1] ^ 1]), second + b"x"]
    for other in (None, *others):
        why = "is not in this archive" if other is None else "does not have the hash"
        record = archive_pb2.ArchivedPayload.FromString(kept[1])
        record.payload = other or b""
        records = [kept[0], *([] if other is None else [record.SerializeToString()]), kept[2]]
        with path.open("wb") as file:
            for record_bytes in records:
                files.append(file, record_bytes)
        found = verify(life.folder, None, None)
        assert (found.ok, found.first_bad_step) == (False, 2)
        assert why in found.reason


def test_what_nobody_heard_is_not_called_proven(life: Life) -> None:
    life.steps(2, heard=False)
    found = life.verify()
    assert found.ok
    assert found.votes_signed_by_author == 0


def test_the_log_s_own_word_about_the_state_is_checked(tmp_path: Path) -> None:
    life = Life(tmp_path, false_digest_at=4)
    life.steps(6)
    found = life.verify()
    assert not found.ok
    assert (found.first_bad_step, found.steps) == (3, 3)
    assert found.signed_by == peer_id(COORDINATOR.public_key)
    assert "digest" in found.reason


def offence(life: Life, who: Identity, against: bytes) -> Exclusion:
    def word(payload: bytes) -> bytes:
        said = update_pb2.Announcement(step=2, parent_hash=bytes(32), payload_sha256=payload * 32, payload_bytes=1)
        return seal(who, Kind.KIND_ANNOUNCEMENT, life.run_id, said).SerializeToString(deterministic=True)

    return Exclusion(against, "two payloads", (), Equivocation(word(b"p"), word(b"q")))


def test_the_evidence_of_an_exclusion_is_checked_and_in_the_ledger(life: Life) -> None:
    eve = Identity.from_seed(b"e" * 32)
    verdicts = tuple(Verdict(2, who.public_key, BOB.public_key, bytes(32), 0.0, 0.0) for who in (ADA, eve))
    life.exclusions = {
        3: offence(life, eve, eve.public_key),
        4: Exclusion(BOB.public_key, "votes do not fit", verdicts),
    }
    life.steps(5)
    found = life.verify()
    assert found.ok, found.reason
    assert (found.exclusions, found.exclusions_proven) == (2, 1)
    told = ledger.of(str(life.folder))
    assert [(x.id, x.step, x.proven, x.verdicts, x.checkers) for x in told.exclusions] == [
        (eve.peer_id, 3, True, 0, 0),
        (BOB.peer_id, 4, False, 2, 2),
    ]
    assert told.values()["exclusions"][0]["payloads"] == ((b"p" * 32).hex(), (b"q" * 32).hex())
    ledger.show(told)


def test_what_the_operator_decided_needs_no_evidence_and_is_called_that(
    life: Life, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "excluded by the operator of this run: [spam]"
    life.exclusions = {2: Exclusion(BOB.public_key, words, by_operator=True)}
    life.readmitted = {4: (BOB.public_key,)}
    life.steps(5)
    lines: list[str] = []
    life.recorder.close()
    found = verify(life.folder, None, None, lambda step, _: lines.append(line_of(step)))
    assert found.ok, found.reason
    assert (found.exclusions, found.exclusions_proven, found.exclusions_by_operator, found.readmissions) == (1, 0, 1, 1)
    assert "1 peer excluded on the operator's word" in lines[1]
    assert "evidence" not in lines[1]
    assert "1 peer readmitted" in lines[3]
    assert "1 on the operator's word alone; 1 readmitted" in text(found)
    told = ledger.of(str(life.folder))
    [excluded] = told.exclusions
    assert (excluded.by_operator, excluded.proven, excluded.step, excluded.readmitted_step) == (True, False, 2, 4)
    assert told.values()["exclusions"][0]["readmitted_step"] == 4
    ledger.show(told)
    shown = capsys.readouterr().out
    assert words in shown
    assert "evidence: none: the operator's decision" in shown
    assert "readmitted by the operator in step 4" in shown


@pytest.mark.parametrize("signers", [(ADA, BOB), (ADA,), ()])
def test_a_run_with_operators_keys_excludes_by_their_order_alone(tmp_path: Path, signers: tuple[Identity, ...]) -> None:
    keys = OperatorsConfig(keys=[ADA.peer_id, BOB.peer_id, COORDINATOR.peer_id], needed=2)
    life = Life(tmp_path, RunConfig(operators=keys))
    body = order_body(OperatorOrder(bytes(16), 1, "spam", BOB.public_key))
    signed = [(it.public_key, seal_bytes(it, Kind.KIND_ORDER, life.run_id, body).signature) for it in signers]
    life.exclusions = {2: Exclusion(BOB.public_key, "excluded by the operator of this run: spam", by_operator=True)}
    life.orders = {2: SignedOrder(body, tuple(signed))} if signers else {}
    life.steps(3)
    found = life.verify()
    if len(signers) < keys.needed:
        assert (found.ok, found.first_bad_step, found.steps) == (False, 2, 1)
        with pytest.raises(OperatorError, match="entry 2 of the log does not hold"):
            ledger.of(str(life.folder))
        return
    assert found.ok, found.reason
    [told] = found.orders
    assert (told["step"], told["what"], told["signed_by"]) == (2, "exclude", [ADA.peer_id, BOB.peer_id])
    assert f"spam; signed by {ADA.peer_id}, {BOB.peer_id}" in text(found)
    assert ledger.of(str(life.folder)).exclusions


@pytest.mark.parametrize("what", ["against another", "nothing"])
def test_an_exclusion_without_evidence_is_found(life: Life, what: str) -> None:
    false = offence(life, ADA, BOB.public_key) if what == "against another" else Exclusion(BOB.public_key, "so", ())
    life.exclusions = {3: false}
    life.steps(4)
    found = life.verify()
    assert (found.ok, found.first_bad_step, found.steps) == (False, 3, 2)
    assert found.signed_by == peer_id(COORDINATOR.public_key)
    if what == "against another":
        with pytest.raises(OperatorError, match="false evidence"):
            ledger.of(str(life.folder))


# ---- whatever is changed is found ------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    kept = change(list(files.records(path, files.PAYLOAD_RECORD_BYTES_MAX)))
    with path.open("wb") as file:
        for record in kept:
            files.append(file, record)


def repack(record: bytes, **changes: bytes) -> bytes:
    found = archive_pb2.ArchivedPayload.FromString(record)
    for name, value in changes.items():
        setattr(found, name, value)
    return found.SerializeToString()


def flipped(data: bytes, at: int = -1) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def other_votes(record: bytes) -> bytes:
    return repack(record, payload=flipped(archive_pb2.ArchivedPayload.FromString(record).payload))


def as_before(record: bytes) -> bytes:
    """The record as earlier versions wrote it: the payload as a frame of zstd."""
    data = archive_pb2.ArchivedPayload.FromString(record).payload
    return repack(record, payload=b"", payload_zstd=zstandard.compress(data))


def bomb(record: bytes) -> bytes:
    return repack(record, payload=b"", payload_zstd=zstandard.compress(bytes(PAYLOAD_BYTES_MAX + 1)))


def foreign_word(life: Life) -> Callable[[list[bytes]], list[bytes]]:
    def change(records: list[bytes]) -> list[bytes]:
        word = life.word(Identity.from_seed(b"x" * 32), 3, b"?")
        return [*records[:4], repack(records[4], announcement=word), *records[5:]]

    return change


def another_payload_announced(life: Life) -> Callable[[list[bytes]], list[bytes]]:
    """By its author, for the same step: the proof that one of the two, author or coordinator, said two things."""

    def change(records: list[bytes]) -> list[bytes]:
        author = ADA if min(ADA.public_key, BOB.public_key) == ADA.public_key else BOB
        return [*records[:4], repack(records[4], announcement=life.word(author, 3, b"?")), *records[5:]]

    return change


PAYLOAD_CHANGES: dict[str, tuple[Callable[[Life], Callable[[list[bytes]], list[bytes]]], str]] = {
    "votes": (lambda _: lambda r: [*r[:4], other_votes(r[4]), *r[5:]], "hash"),
    "votes of before": (lambda _: lambda r: [*r[:4], as_before(other_votes(r[4])), *r[5:]], "hash"),
    "no frame": (lambda _: lambda r: [*r[:4], repack(r[4], payload=b"", payload_zstd=b"zstd"), *r[5:]], "zstd"),
    "bomb": (lambda _: lambda r: [*r[:4], bomb(r[4]), *r[5:]], "too_large"),
    "missing": (lambda _: lambda r: [*r[:4], *r[5:]], "not in this archive"),
    "no record": (lambda _: lambda r: [*r[:4], b"\xff\xff", *r[5:]], "not in this archive"),
    "foreign word": (foreign_word, "unknown_signer"),
    "two payloads": (another_payload_announced, "another payload"),
}


@pytest.mark.parametrize("name", list(PAYLOAD_CHANGES))
def test_a_changed_payload_is_found_at_its_step(life: Life, name: str) -> None:
    life.steps(5)
    change, reason = PAYLOAD_CHANGES[name]
    rewrite(files.segments(life.archive)[0].path(files.PAYLOADS), change(life))
    found = life.verify()
    assert not found.ok
    assert (found.first_bad_step, found.steps) == (3, 2), found.reason
    assert reason in found.reason


def test_an_archive_of_before_holds_its_payloads_as_frames_of_zstd(life: Life) -> None:
    life.steps(5)
    rewrite(files.segments(life.archive)[0].path(files.PAYLOADS), lambda r: [*map(as_before, r[:6]), *r[6:]])
    found = life.verify()
    assert found.ok, found.reason
    assert (found.steps, found.votes) == (5, 10)


LOG_CHANGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "signature": (lambda r: [*r[:2], flipped(r[2]), *r[3:]], "bad_signature"),
    "swapped": (lambda r: [*r[:2], r[3], r[2], *r[4:]], "wrong_step"),
    "left out": (lambda r: [*r[:2], *r[3:]], "wrong_step"),
    "not protobuf": (lambda r: [*r[:2], b"\xff\xff\xff", *r[3:]], "malformed"),
}


@pytest.mark.parametrize("name", list(LOG_CHANGES))
def test_a_changed_entry_is_found_at_its_step(life: Life, name: str) -> None:
    life.steps(5)
    change, reason = LOG_CHANGES[name]
    rewrite(files.segments(life.archive)[0].path(files.LOG), change)
    found = life.verify()
    assert not found.ok
    assert (found.first_bad_step, found.steps) == (3, 2)
    assert reason in found.reason


def test_another_coordinator_s_entry_is_not_taken(life: Life) -> None:
    life.steps(3)
    forged = seal_entry(ADA, life.run_id, life.entries[2].entry).envelope
    rewrite(files.segments(life.archive)[0].path(files.LOG), lambda r: [*r[:2], forged])
    found = life.verify()
    assert found.first_bad_step == 3
    assert "unknown_signer" in found.reason


def test_a_changed_state_or_model_is_found(life: Life) -> None:
    life.steps(3)
    exported = life.export() / "model.safetensors"
    weights = load_file(exported)
    weights["weight"].view(torch.int32)[3, 3] ^= 1
    save_file(weights, exported)
    found = life.verify()
    assert not found.ok
    assert found.first_bad_step == 3
    assert "weight differs" in found.reason

    state = files.segments(life.archive)[0].path(files.STATE)
    state.write_bytes(flipped(state.read_bytes(), 200))
    found = life.verify()
    assert found.first_bad_step == 0
    assert "hash_mismatch" in found.reason


def test_a_record_longer_than_allowed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes((1 << 31).to_bytes(4, "big"))
    with pytest.raises(Refusal, match="at most"):
        list(files.records(path, files.ENTRY_RECORD_BYTES_MAX))


# ---- a life with crashes, gaps and little room -----------------------------------------------------------------------


@pytest.mark.parametrize("file", [files.LOG, files.PAYLOADS])
def test_a_crash_in_the_middle_of_a_record_loses_that_record_alone(life: Life, file: str) -> None:
    life.steps(3)
    life.recorder.close()
    segment = files.segments(life.archive)[0]
    with segment.path(file).open("ab") as end:
        end.write((500).to_bytes(4, "big") + b"half of it")
    life.recorder = life.open()
    life.steps(2)
    found = life.verify()
    assert found.ok, found.reason
    assert found.steps == 5


@pytest.mark.parametrize("file", [files.LOG, files.PAYLOADS])
@pytest.mark.parametrize("bit", [12, 19, 24])
def test_a_length_that_rotted_does_not_end_the_archive_in_silence(life: Life, file: str, bit: int) -> None:
    """It reaches beyond the end, as that of a record which a crash cut off. The records after it are whole, and stay."""
    life.steps(6)
    life.recorder.close()
    path = files.segments(life.archive)[0].path(file)
    records = [files.LENGTH_BYTES + len(record) for record in files.records(path, files.PAYLOAD_RECORD_BYTES_MAX)]
    damaged, at = bytearray(path.read_bytes()), sum(records[:2])
    damaged[at + 3 - bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    found = life.verify()
    assert not found.ok
    if file == files.LOG:
        assert re.search("is damaged|at most", found.reason)
        with pytest.raises(OperatorError, match="the log does not hold"):
            list(ledger.archived_entries(life.archive)[1])
    life.recorder = life.open()
    life.steps(2)
    assert path.read_bytes() == damaged
    assert [segment.step for segment in files.segments(life.archive)] == [0, 6]
    assert life.verify(7).ok


def test_zeros_that_a_loss_of_power_left_are_no_records(life: Life) -> None:
    life.steps(3)
    life.recorder.close()
    log = files.segments(life.archive)[0].path(files.LOG)
    whole = log.read_bytes()
    for tail in (bytes(4096), whole[:40] + bytes(20), whole[:40]):
        log.write_bytes(whole + tail)
        assert life.verify().steps == 3
        life.recorder = life.open()
        life.recorder.close()
        assert log.read_bytes() == whole


def test_payloads_of_an_entry_that_was_not_written_do_no_harm(life: Life) -> None:
    life.steps(3)
    life.recorder.close()
    log = files.segments(life.archive)[0].path(files.LOG)
    kept = list(files.records(log, files.ENTRY_RECORD_BYTES_MAX))
    rewrite(log, lambda r: r[:2])
    again = life.open()  # a replica that is a step further: the third entry will come again from an older snapshot
    life.ada.step = 2
    assert len(files.segments(life.archive)) == 2  # the gap is a new segment
    shutil.rmtree(files.segments(life.archive)[1].folder)
    again.close()
    life.recorder = life.open()
    payloads = [
        archive_pb2.ArchivedPayload.FromString(record).payload
        for record in files.records(
            files.segments(life.archive)[0].path(files.PAYLOADS), files.PAYLOAD_RECORD_BYTES_MAX
        )
    ]
    life.recorder.record(life.entries[2], payloads[4:6], {})
    assert list(files.records(log, files.ENTRY_RECORD_BYTES_MAX)) == kept
    assert life.verify().ok


def test_a_gap_is_not_proven(life: Life) -> None:
    life.steps(2)
    life.steps(2, record=False)
    life.recorder.begin(life.ada)
    life.steps(2)
    found = life.verify()
    assert not found.ok
    assert (found.first_bad_step, found.steps) == (3, 2)
    assert "steps 3 to 4 are not in this archive" in found.reason
    assert life.verify(from_step=4).ok
    assert life.verify(from_step=4).steps == 2
    with pytest.raises(OperatorError, match="entry 3 of the log does not hold"):
        ledger.ledger(*ledger.archived_entries(life.archive))


def test_a_bounded_archive_forgets_its_oldest_part_and_can_still_be_replayed(life: Life) -> None:
    state_bytes = sum(4 * tensor.numel() for tensor in life.ada.state.values())
    life.recorder.close()
    room = 4 * state_bytes
    life.recorder = life.open(room)
    life.steps(400)
    total = sum(segment.total_bytes for segment in files.segments(life.archive))
    assert total <= room + state_bytes  # the newest segment may be about to be full
    first = files.segments(life.archive)[0].step
    assert first > 0
    found = life.verify()
    assert found.ok, found.reason
    assert (found.first_step, found.last_step) == (first + 1, 400)


def test_a_new_segment_forgets_neither_the_settings_nor_the_orders_before_it(tmp_path: Path) -> None:
    """A stolen coordinator key would wait for the step after which archives begin a segment."""
    keys = OperatorsConfig(keys=[ADA.peer_id, BOB.peer_id], needed=2)
    life = Life(tmp_path, RunConfig(operators=keys))
    state_bytes = sum(4 * tensor.numel() for tensor in life.ada.state.values())
    life.recorder.close()
    life.recorder = life.open(8 * state_bytes)
    while len(files.segments(life.archive)) < 2:
        life.step()
    begins = life.ada.step
    life.settings = (("clock.steps", "2000"),)
    life.steps(2)
    assert files.segments(life.archive)[1].step == begins
    found = life.verify()
    assert (found.ok, found.first_bad_step) == (False, begins + 1), found.reason
    assert "settings that the operators did not order" in found.reason


def test_a_smaller_limit_holds_from_the_next_step_on_and_never_takes_the_newest_state(life: Life) -> None:
    state_bytes = sum(4 * tensor.numel() for tensor in life.ada.state.values())
    life.steps(200)
    before = life.recorder.total_bytes
    life.recorder.limit(0)  # it keeps room for two states
    life.steps(40)
    after = life.recorder.total_bytes
    assert after == sum(segment.total_bytes for segment in files.segments(life.archive))
    assert after < before
    assert after <= 4 * state_bytes  # the newest segment may be about to be full
    assert life.verify().ok


def test_an_archive_without_room_for_the_state_is_refused(life: Life) -> None:
    with pytest.raises(OperatorError, match="set disk_gb to at least"):
        life.open(1000)


def test_a_folder_without_an_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="has no archive of a run"):
        verify(tmp_path, None, None)


def test_a_home_with_several_archives_asks_which(tmp_path: Path) -> None:
    for run in ("one", "two"):
        (tmp_path / "runs" / run / "archive").mkdir(parents=True)
        (tmp_path / "runs" / run / "archive" / files.GENESIS).touch()
    with pytest.raises(OperatorError, match=r"archives of several runs; name one: .*one.*two"):
        files.find(tmp_path)


# ---- the ledger ------------------------------------------------------------------------------------------------------


def test_the_ledger_counts_what_the_log_says(life: Life) -> None:
    life.steps(4)
    found = ledger.of(str(life.folder)).values()
    assert (found["from_step"], found["to_step"], found["votes_accepted"]) == (1, 4, 8)
    assert found["head"] == life.entries[-1].hash.hex()
    assert found["tokens"] == 2 * 10 * (1 + 2 + 3 + 4)
    for line in found["identities"]:
        assert line["votes_accepted"] == 4
        assert line["samples"] == 8
        assert line["uptime"] == 1.0
        assert (line["first_step"], line["last_step"]) == (1, 4)


def test_the_ledger_takes_no_forged_entry(life: Life) -> None:
    life.steps(3)
    rewrite(files.segments(life.archive)[0].path(files.LOG), lambda r: [*r[:2], flipped(r[2])])
    with pytest.raises(OperatorError, match="entry 3 of the log does not hold"):
        ledger.of(str(life.folder))
