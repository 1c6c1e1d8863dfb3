"""The log: entries, ticks, their hashes, and the door through which they come. The log is the training run.

Frozen dataclasses are what programs compute with; protobuf is what crosses the wire; `open_entry` and `open_tick` are
the only ways from one to the other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from protos import limits
from protos.assignment import Range, Share
from protos.changes import Settings, settings_body, settings_from_body
from protos.envelope import Kind, open_envelope, parse, seal, seal_bytes
from protos.errors import Reason, Refusal
from protos.evaluation import evaluations_from
from protos.identity import Identity
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


@dataclass(frozen=True)
class Tick:
    """Step `step` is open for this roster on the state after `parent_hash`."""

    step: int
    parent_hash: bytes
    attempt: int
    roster: tuple[Share, ...]
    pool: tuple[Range, ...]
    lr_bits: int

    @cached_property
    def places(self) -> Mapping[bytes, int]:
        """Roster member -> its place in the roster's order."""
        return {share.public_key: place for place, share in enumerate(self.roster)}

    @property
    def lr(self) -> float:
        """The learning rate of the step, exactly the one that its entry will carry."""
        return lr_from_bits(self.lr_bits)


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


def _ranges(parts: Iterable[Range]) -> list[log_pb2.SampleRange]:
    return [log_pb2.SampleRange(start=part.start, stop=part.stop) for part in parts]


def entry_body(entry: Entry) -> bytes:
    """The bytes that are hashed and signed."""
    return log_pb2.LogEntry(
        step=entry.step,
        parent_hash=entry.parent_hash,
        contributions=[_contribution_body(c) for c in entry.contributions],
        lr_bits=entry.lr_bits,
        parent_state_digest=entry.parent_state_digest,
        returned_samples=_ranges(entry.returned_samples),
        next_sample=entry.next_sample,
        trials=[_contribution_body(c) for c in entry.trials],
        exclusions=[_exclusion_body(e) for e in entry.exclusions],
        readmitted=entry.readmitted,
        settings=settings_body(entry.settings),
        evaluations=entry.evaluations,
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
    _in_range(max(len(body.first), len(body.second)) <= bound, "bytes of an announcement")
    return Equivocation(body.first, body.second)


def _contribution_body(c: Contribution) -> log_pb2.Contribution:
    return log_pb2.Contribution(**vars(c))  # both have the same names


def verdict_body(verdict: Verdict) -> log_pb2.Verdict:
    """A verdict as protobuf."""
    return log_pb2.Verdict(**vars(verdict))  # both have the same names


def verdict_from_body(body: log_pb2.Verdict, checker: bytes | None = None) -> Verdict:
    """Inverse of `verdict_body`, checking ranges; `checker`: whose report it came in. Raises `Refusal`."""
    _in_range(1 <= body.step <= limits.STEP_MAX, f"step {body.step}")
    who = body.checker if checker is None else checker
    _in_range(len(who) == len(body.subject) == limits.PUBLIC_KEY_BYTES, "public key length")
    _in_range(len(body.payload_sha256) == limits.HASH_BYTES, "payload hash length")
    _in_range(len(body.like) in (0, limits.PUBLIC_KEY_BYTES), "public key length")
    _in_range(abs(body.own) < FIGURE_MAX and abs(body.difference) < FIGURE_MAX, "figures of a verdict")
    _in_range(0 <= body.overlap <= 1, f"overlap {body.overlap}")
    gains = tuple(getattr(body, name) if body.HasField(name) else None for name in ("own_gain", "other_gain"))
    _in_range(all(abs(gain) <= 1 for gain in gains if gain is not None), f"gains {gains}")
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
    _in_range(1 <= body.step <= limits.STEP_MAX, f"step {body.step}")
    _in_range(len(body.parent_hash) == limits.HASH_BYTES, "parent hash length")
    _in_range(len(body.parent_state_digest) in (0, limits.HASH_BYTES), "state digest length")
    _in_range(len(body.exclusions) <= limits.EXCLUSIONS_MAX, f"{len(body.exclusions)} exclusions")
    _in_range(body.next_sample <= limits.SAMPLE_INDEX_MAX, f"next sample {body.next_sample}")
    return Entry(
        step=body.step,
        parent_hash=body.parent_hash,
        contributions=_contributions(body.contributions),
        lr_bits=_open_lr(body.lr_bits),
        parent_state_digest=body.parent_state_digest,
        returned_samples=_open_ranges(body.returned_samples),
        next_sample=body.next_sample,
        trials=_contributions(body.trials),
        exclusions=tuple(_exclusion(e) for e in body.exclusions),
        readmitted=_readmitted(body.readmitted),
        settings=settings_from_body(body.settings),
        evaluations=evaluations_from(body.evaluations),
    )


def _contributions(parts: Sequence[log_pb2.Contribution]) -> tuple[Contribution, ...]:
    _in_range(len(parts) <= limits.ENTRY_CONTRIBUTIONS_MAX, f"{len(parts)} contributions")
    keys = [c.public_key for c in parts]
    _in_range(keys == sorted(set(keys)), "contributions are not sorted by public key, each author once")
    for c in parts:
        _in_range(len(c.public_key) == limits.PUBLIC_KEY_BYTES, "public key length")
        _in_range(len(c.payload_sha256) == limits.HASH_BYTES, "payload hash length")
        _in_range(max(c.samples, c.tokens) <= limits.SAMPLE_INDEX_MAX, "samples or tokens")
        _in_range(c.payload_bytes <= limits.PAYLOAD_BYTES_MAX, f"payload of {c.payload_bytes} bytes")
    return tuple(
        Contribution(
            c.public_key, c.payload_sha256, c.payload_bytes, c.samples, c.tokens, c.loss, c.check_permille, c.arrival
        )
        for c in parts
    )


def _exclusion(body: log_pb2.Exclusion) -> Exclusion:
    _in_range(len(body.public_key) == limits.PUBLIC_KEY_BYTES, "public key length")
    _in_range(len(body.reason) <= REASON_CHARACTERS_MAX, "length of a reason")
    _in_range(len(body.evidence) <= limits.EVIDENCE_MAX, f"{len(body.evidence)} verdicts")
    equivocation = equivocation_from_body(body.equivocation) if body.HasField("equivocation") else None
    claimed = bool(body.evidence) or equivocation is not None
    _in_range(not (body.by_operator and claimed), "evidence of an exclusion that the operator decided")
    evidence = tuple(verdict_from_body(v) for v in body.evidence)
    return Exclusion(body.public_key, body.reason, evidence, equivocation, body.by_operator)


def _readmitted(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    _in_range(len(keys) <= limits.READMITTED_MAX, f"{len(keys)} peers readmitted")
    _in_range(all(len(key) == limits.PUBLIC_KEY_BYTES for key in keys), "public key length")
    _in_range(list(keys) == sorted(set(keys)), "readmitted peers are not sorted, each once")
    return tuple(keys)


def tick_body(tick: Tick) -> log_pb2.Tick:
    """A tick as protobuf."""
    return log_pb2.Tick(
        step=tick.step,
        parent_hash=tick.parent_hash,
        attempt=tick.attempt,
        roster=[log_pb2.RosterMember(public_key=s.public_key, samples=s.samples) for s in tick.roster],
        pool=_ranges(tick.pool),
        lr_bits=tick.lr_bits,
    )


def seal_tick(identity: Identity, run_id: bytes, tick: Tick) -> envelope_pb2.SignedEnvelope:
    """Sign a tick as the run's coordinator."""
    return seal(identity, Kind.KIND_TICK, run_id, tick_body(tick))


def open_tick(data: bytes, *, run_id: bytes, coordinator: bytes) -> Tick:
    """Verify a tick's envelope and its ranges, or raise `Refusal`."""
    bound = limits.TICK_BYTES_MAX + limits.ENVELOPE_OVERHEAD_BYTES_MAX
    opened = open_envelope(data, kind=Kind.KIND_TICK, run_id=run_id, bytes_max=bound, signer=coordinator)
    return tick_from_body(parse(log_pb2.Tick, opened.body))


def tick_from_body(body: log_pb2.Tick) -> Tick:
    """Inverse of `tick_body`, checking ranges; raises `Refusal`."""
    _in_range(1 <= body.step <= limits.STEP_MAX, f"step {body.step}")
    _in_range(len(body.parent_hash) == limits.HASH_BYTES, "parent hash length")
    _in_range(len(body.roster) <= limits.ROSTER_PEERS_MAX, f"{len(body.roster)} peers")
    keys = [member.public_key for member in body.roster]
    _in_range(keys == sorted(set(keys)), "the roster is not sorted by public key, each peer once")
    for member in body.roster:
        _in_range(len(member.public_key) == limits.PUBLIC_KEY_BYTES, "public key length")
        _in_range(member.samples <= limits.SAMPLE_INDEX_MAX, f"{member.samples} samples")
    return Tick(
        step=body.step,
        parent_hash=body.parent_hash,
        attempt=body.attempt,
        roster=tuple(Share(member.public_key, member.samples) for member in body.roster),
        pool=_open_ranges(body.pool),
        lr_bits=_open_lr(body.lr_bits),
    )


def _open_ranges(parts: Iterable[log_pb2.SampleRange]) -> tuple[Range, ...]:
    ranges = []
    for part in parts:
        _in_range(part.start <= part.stop <= limits.SAMPLE_INDEX_MAX, f"samples {part.start} to {part.stop}")
        ranges.append(Range(part.start, part.stop))
    _in_range(len(ranges) <= limits.POOL_RANGES_MAX, f"{len(ranges)} sample ranges")
    return tuple(ranges)


def _open_lr(bits: int) -> int:
    lr = lr_from_bits(bits)
    _in_range(0.0 <= lr < LEARNING_RATE_MAX, f"learning rate {lr}")
    return bits


def _in_range(good: bool, detail: str) -> None:
    if not good:
        raise Refusal(Reason.OUT_OF_RANGE, detail)


class Chain:
    """Follows a log from some point on: takes the next entry or says why not. Holds only the head."""

    def __init__(self, run_id: bytes, coordinator: bytes, step: int = 0, head: bytes | None = None) -> None:
        self.run_id = run_id
        self.coordinator = coordinator
        self.step = step
        self.head = run_id if head is None else head

    def open(self, data: bytes) -> SignedEntry:
        """Verify an envelope, whatever its step; raises `Refusal`."""
        return open_entry(data, run_id=self.run_id, coordinator=self.coordinator)

    def accept(self, signed: SignedEntry) -> None:
        """Move the head to a verified entry that follows it; raises `Refusal`, nothing changed, if it does not."""
        if signed.entry.step != self.step + 1:
            raise Refusal(Reason.WRONG_STEP, f"entry of step {signed.entry.step}, expected {self.step + 1}")
        if signed.entry.parent_hash != self.head:
            raise Refusal(Reason.WRONG_PARENT, f"entry {signed.entry.step} does not follow the head that is held here")
        self.step, self.head = signed.entry.step, signed.hash

    def extend(self, data: bytes) -> SignedEntry:
        """`open`, then `accept`."""
        signed = self.open(data)
        self.accept(signed)
        return signed
