"""The log: entries, their hashes, and the door through which they come. The log is the training run.

Frozen dataclasses are what programs compute with; protobuf is what crosses the wire; `open_entry` is the only way from one to
the other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from protos import limits
from protos.assignment import Range
from protos.changes import Settings, settings_body, settings_from_body
from protos.envelope import Kind, open_envelope, parse, seal_bytes
from protos.errors import Reason, Refusal
from protos.evaluation import evaluations_from
from protos.identity import Identity
from protos.orders import OrderRule, SignedOrder, signed_order_body, signed_orders_from
from protos.run_sections import OperatorsConfig
from protos.slices import Aggregate, open_aggregate
from protos.v1 import envelope_pb2, log_pb2

_ENTRY_DOMAIN = b"swarmentum/v1/entry\0"
_GENESIS_DOMAIN = b"swarmentum/v1/genesis\0"
FORMAT_VERSION = 1
LEARNING_RATE_MAX = 1e6
FIGURE_MAX = 1e6
REASON_CHARACTERS_MAX = 512


@dataclass(frozen=True)
class Contribution:
    """One accepted payload: its author, its hash, and the author's claims about it."""

    public_key: bytes
    payload_sha256: bytes
    payload_bytes: int
    samples: int
    tokens: int
    loss: float
    check_permille: int = 0
    arrival: int = 0


@dataclass(frozen=True)
class Verdict:
    """The result of `checker` about `subject`'s payload of a step; protos/v1/log.proto explains the figures."""

    step: int
    checker: bytes
    subject: bytes
    payload_sha256: bytes
    own: float
    difference: float
    overlap: float = 0.0
    like: bytes = b""
    own_gain: float | None = None
    other_gain: float | None = None


@dataclass(frozen=True)
class Equivocation:
    """Two announcements as they were received; `protos.equivocation.prove` says whether they exclude each other."""

    first: bytes
    second: bytes


@dataclass(frozen=True)
class Exclusion:
    """A peer that takes part no more, with the reason. The evidence is verdicts or an equivocation; the operator's decision
    needs none."""

    public_key: bytes
    reason: str
    evidence: tuple[Verdict, ...] = ()
    equivocation: Equivocation | None = None
    by_operator: bool = False


@dataclass(frozen=True)
class Entry:
    """One clock step: which votes count, and the learning rate (as float32 bits)."""

    step: int
    parent_hash: bytes
    contributions: tuple[Contribution, ...]
    lr_bits: int
    parent_state_digest: bytes
    returned_samples: tuple[Range, ...]
    next_sample: int
    trials: tuple[Contribution, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    readmitted: tuple[bytes, ...] = ()
    settings: Settings = ()
    """The settings of the run in this step that are not those of its genesis."""
    evaluations: tuple[bytes, ...] = ()
    """Held-out losses of earlier states, as their authors signed them (protos/evaluation.py)."""
    aggregate: Aggregate | None = None
    """The sum of the contributions' votes, which peers apply instead of the payloads; None: they take all payloads."""
    orders: tuple[SignedOrder, ...] = ()
    """The operators' orders behind this entry's exclusions and changes, in a run whose operators have keys."""

    @property
    def lr(self) -> float:
        """The learning rate: the float32 with these bits, exactly, as a Python float."""
        return lr_from_bits(self.lr_bits)


@dataclass(frozen=True)
class SignedEntry:
    """A verified entry, its hash, and the envelope as it travelled."""

    entry: Entry
    hash: bytes
    envelope: bytes


def lr_to_bits(lr: float) -> int:
    """Round to float32; the 32 bits."""
    return int(struct.unpack("<I", struct.pack("<f", lr))[0])


def lr_from_bits(bits: int) -> float:
    """Inverse of `lr_to_bits`; exact."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def run_id_of(genesis: log_pb2.Genesis) -> bytes:
    """A run is named by the hash of its genesis; 32 bytes."""
    return hashlib.sha256(_GENESIS_DOMAIN + genesis.SerializeToString(deterministic=True)).digest()


def entry_hash(body: bytes) -> bytes:
    """Hash of an entry's signed body: what the next entry names as its parent."""
    return hashlib.sha256(_ENTRY_DOMAIN + body).digest()


def ranges_body(parts: Iterable[Range]) -> list[log_pb2.SampleRange]:
    """Ranges of samples as protobuf."""
    return [log_pb2.SampleRange(start=part.start, stop=part.stop) for part in parts]


def entry_body(entry: Entry) -> bytes:
    """The bytes that are hashed and signed."""
    return log_pb2.LogEntry(
        step=entry.step,
        parent_hash=entry.parent_hash,
        contributions=contributions_body(entry.contributions),
        lr_bits=entry.lr_bits,
        parent_state_digest=entry.parent_state_digest,
        returned_samples=ranges_body(entry.returned_samples),
        next_sample=entry.next_sample,
        trials=contributions_body(entry.trials),
        exclusions=[_exclusion_body(e) for e in entry.exclusions],
        readmitted=entry.readmitted,
        settings=settings_body(entry.settings),
        evaluations=entry.evaluations,
        aggregate=None if entry.aggregate is None else log_pb2.Aggregate(**vars(entry.aggregate)),
        orders=map(signed_order_body, entry.orders),
    ).SerializeToString(deterministic=True)


def _exclusion_body(e: Exclusion) -> log_pb2.Exclusion:
    evidence = [verdict_body(v) for v in e.evidence]
    body = log_pb2.Exclusion(public_key=e.public_key, reason=e.reason, evidence=evidence, by_operator=e.by_operator)
    if e.equivocation is not None:
        body.equivocation.CopyFrom(equivocation_body(e.equivocation))
    return body


def equivocation_body(equivocation: Equivocation) -> log_pb2.Equivocation:
    """As protobuf."""
    return log_pb2.Equivocation(first=equivocation.first, second=equivocation.second)


def equivocation_from_body(body: log_pb2.Equivocation) -> Equivocation:
    """Inverse of `equivocation_body`, checking sizes; raises `Refusal`."""
    bound = limits.ANNOUNCEMENT_BYTES_MAX + limits.ENVELOPE_OVERHEAD_BYTES_MAX
    in_range(max(len(body.first), len(body.second)) <= bound, "bytes of an announcement")
    return Equivocation(body.first, body.second)


def contributions_body(parts: Iterable[Contribution]) -> list[log_pb2.Contribution]:
    """Contributions as protobuf."""
    return [log_pb2.Contribution(**vars(c)) for c in parts]  # both have the same names


def verdict_body(verdict: Verdict) -> log_pb2.Verdict:
    """A verdict as protobuf."""
    return log_pb2.Verdict(**vars(verdict))  # both have the same names


def verdict_from_body(body: log_pb2.Verdict, checker: bytes | None = None) -> Verdict:
    """Inverse of `verdict_body`, checking ranges; `checker`: whose report it came in. Raises `Refusal`."""
    in_range(1 <= body.step <= limits.STEP_MAX, f"step {body.step}")
    who = body.checker if checker is None else checker
    in_range(len(who) == len(body.subject) == limits.PUBLIC_KEY_BYTES, "public key length")
    in_range(len(body.payload_sha256) == limits.HASH_BYTES, "payload hash length")
    in_range(len(body.like) in (0, limits.PUBLIC_KEY_BYTES), "public key length")
    in_range(abs(body.own) < FIGURE_MAX and abs(body.difference) < FIGURE_MAX, "figures of a verdict")
    in_range(0 <= body.overlap <= 1, f"overlap {body.overlap}")
    gains = tuple(getattr(body, name) if body.HasField(name) else None for name in ("own_gain", "other_gain"))
    in_range(all(abs(gain) <= 1 for gain in gains if gain is not None), f"gains {gains}")
    figures = body.own, body.difference, body.overlap, body.like
    return Verdict(body.step, who, body.subject, body.payload_sha256, *figures, *gains)


def seal_entry(identity: Identity, run_id: bytes, entry: Entry) -> SignedEntry:
    """Sign an entry as the run's coordinator."""
    return seal_entry_body(identity, run_id, entry, entry_body(entry))


def seal_entry_body(identity: Identity, run_id: bytes, entry: Entry, body: bytes) -> SignedEntry:
    """The same with the entry's bytes, which take milliseconds to make in a large swarm."""
    envelope = seal_bytes(identity, Kind.KIND_LOG_ENTRY, run_id, body)
    return SignedEntry(entry, entry_hash(body), envelope.SerializeToString(deterministic=True))


def open_entry(data: bytes, *, run_id: bytes, coordinator: bytes) -> SignedEntry:
    """Verify a log entry's envelope and its ranges, or raise `Refusal`. The chain is the caller's to check."""
    bound = limits.ENTRY_BYTES_MAX + limits.ENVELOPE_OVERHEAD_BYTES_MAX
    opened = open_envelope(data, kind=Kind.KIND_LOG_ENTRY, run_id=run_id, bytes_max=bound, signer=coordinator)
    return SignedEntry(_entry(opened.body), entry_hash(opened.body), data)


def reopen_entry(data: bytes) -> SignedEntry:
    """An entry that the caller has signed or verified before: its ranges, but not its signature again. Raises `Refusal`.

    Never for what comes from a stranger.
    """
    body = parse(envelope_pb2.SignedEnvelope, data).body
    return SignedEntry(_entry(body), entry_hash(body), data)


def _entry(data: bytes) -> Entry:
    body = parse(log_pb2.LogEntry, data)
    in_range(1 <= body.step <= limits.STEP_MAX, f"step {body.step}")
    in_range(len(body.parent_hash) == limits.HASH_BYTES, "parent hash length")
    in_range(len(body.parent_state_digest) in (0, limits.HASH_BYTES), "state digest length")
    in_range(len(body.exclusions) <= limits.EXCLUSIONS_MAX, f"{len(body.exclusions)} exclusions")
    in_range(body.next_sample <= limits.SAMPLE_INDEX_MAX, f"next sample {body.next_sample}")
    aggregate = open_aggregate(body.aggregate) if body.HasField("aggregate") else None
    hash_bytes = 0 if aggregate is not None and aggregate.payloads_sha256 else limits.HASH_BYTES
    return Entry(
        step=body.step,
        parent_hash=body.parent_hash,
        contributions=open_contributions(body.contributions, hash_bytes=hash_bytes),
        lr_bits=open_lr(body.lr_bits),
        parent_state_digest=body.parent_state_digest,
        returned_samples=open_ranges(body.returned_samples),
        next_sample=body.next_sample,
        trials=open_contributions(body.trials),
        exclusions=tuple(_exclusion(e) for e in body.exclusions),
        readmitted=_readmitted(body.readmitted),
        settings=settings_from_body(body.settings),
        evaluations=evaluations_from(body.evaluations),
        aggregate=aggregate,
        orders=signed_orders_from(body.orders),
    )


def summed_entry(entry: Entry, aggregate: Aggregate, payloads_sha256: bytes) -> Entry:
    """The entry with the sum of its votes, and one hash for their payloads' hashes."""
    unnamed = tuple(replace(c, payload_sha256=b"") for c in entry.contributions)
    return replace(entry, contributions=unnamed, aggregate=replace(aggregate, payloads_sha256=payloads_sha256))


def with_payloads(signed: SignedEntry, known: Mapping[bytes, bytes]) -> SignedEntry:
    """The entry with the payload hashes of these authors, which a summed entry does not name. Its bytes stay the same."""
    named = tuple(
        replace(c, payload_sha256=c.payload_sha256 or known.get(c.public_key, b"")) for c in signed.entry.contributions
    )
    return replace(signed, entry=replace(signed.entry, contributions=named))


def open_contributions(
    parts: Sequence[log_pb2.Contribution], *, hash_bytes: int = limits.HASH_BYTES
) -> tuple[Contribution, ...]:
    """Inverse of `contributions_body`, checking ranges and order; raises `Refusal`. `hash_bytes`: of each payload's hash."""
    in_range(len(parts) <= limits.ENTRY_CONTRIBUTIONS_MAX, f"{len(parts)} contributions")
    keys = [c.public_key for c in parts]
    in_range(keys == sorted(set(keys)), "contributions are not sorted by public key, each author once")
    for c in parts:
        in_range(len(c.public_key) == limits.PUBLIC_KEY_BYTES, "public key length")
        in_range(len(c.payload_sha256) == hash_bytes, "payload hash length")
        in_range(max(c.samples, c.tokens) <= limits.SAMPLE_INDEX_MAX, "samples or tokens")
        in_range(c.payload_bytes <= limits.PAYLOAD_BYTES_MAX, f"payload of {c.payload_bytes} bytes")
    return tuple(
        Contribution(
            c.public_key, c.payload_sha256, c.payload_bytes, c.samples, c.tokens, c.loss, c.check_permille, c.arrival
        )
        for c in parts
    )


def _exclusion(body: log_pb2.Exclusion) -> Exclusion:
    in_range(len(body.public_key) == limits.PUBLIC_KEY_BYTES, "public key length")
    in_range(len(body.reason) <= REASON_CHARACTERS_MAX, "length of a reason")
    in_range(len(body.evidence) <= limits.EVIDENCE_MAX, f"{len(body.evidence)} verdicts")
    equivocation = equivocation_from_body(body.equivocation) if body.HasField("equivocation") else None
    claimed = bool(body.evidence) or equivocation is not None
    in_range(not (body.by_operator and claimed), "evidence of an exclusion that the operator decided")
    evidence = tuple(verdict_from_body(v) for v in body.evidence)
    return Exclusion(body.public_key, body.reason, evidence, equivocation, body.by_operator)


def _readmitted(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    in_range(len(keys) <= limits.READMITTED_MAX, f"{len(keys)} peers readmitted")
    in_range(all(len(key) == limits.PUBLIC_KEY_BYTES for key in keys), "public key length")
    in_range(list(keys) == sorted(set(keys)), "readmitted peers are not sorted, each once")
    return tuple(keys)


def open_ranges(parts: Iterable[log_pb2.SampleRange]) -> tuple[Range, ...]:
    """Inverse of `ranges_body`, checking ranges; raises `Refusal`."""
    ranges = []
    for part in parts:
        in_range(part.start <= part.stop <= limits.SAMPLE_INDEX_MAX, f"samples {part.start} to {part.stop}")
        ranges.append(Range(part.start, part.stop))
    in_range(len(ranges) <= limits.POOL_RANGES_MAX, f"{len(ranges)} sample ranges")
    return tuple(ranges)


def open_lr(bits: int) -> int:
    """The bits of a learning rate that is in range; raises `Refusal`."""
    lr = lr_from_bits(bits)
    in_range(0.0 <= lr < LEARNING_RATE_MAX, f"learning rate {lr}")
    return bits


def in_range(good: bool, detail: str) -> None:
    """Raises `Refusal` with this detail unless `good`."""
    if not good:
        raise Refusal(Reason.OUT_OF_RANGE, detail)


class Chain:
    """Follows a log from some point on: takes the next entry or says why not. Holds the head. `operators`: of the run; their
    orders are checked, too, as far as the entries from this point on tell."""

    def __init__(
        self,
        run_id: bytes,
        coordinator: bytes,
        step: int = 0,
        head: bytes | None = None,
        operators: OperatorsConfig | None = None,
    ) -> None:
        self.run_id = run_id
        self.coordinator = coordinator
        self.step = step
        self.head = run_id if head is None else head
        self._rule = None if operators is None else OrderRule(run_id, operators, None if step else ())

    def open(self, data: bytes) -> SignedEntry:
        """Verify an envelope, whatever its step; raises `Refusal`."""
        return open_entry(data, run_id=self.run_id, coordinator=self.coordinator)

    def accept(self, signed: SignedEntry) -> None:
        """Move the head to a verified entry that follows it; raises `Refusal`, nothing changed, if it does not."""
        if signed.entry.step != self.step + 1:
            raise Refusal(Reason.WRONG_STEP, f"entry of step {signed.entry.step}, expected {self.step + 1}")
        if signed.entry.parent_hash != self.head:
            raise Refusal(Reason.WRONG_PARENT, f"entry {signed.entry.step} does not follow the head that is held here")
        if self._rule is not None:
            self._rule.check(signed.entry)
        self.step, self.head = signed.entry.step, signed.hash

    def extend(self, data: bytes) -> SignedEntry:
        """`open`, then `accept`."""
        signed = self.open(data)
        self.accept(signed)
        return signed
