"""A watcher's view of a run, pure: bytes in; their meaning, or the reason of a refusal, out.

The view checks every signature, the ranges and the hash chain itself. The view knows no clock, socket or thread, and all that
it keeps is bounded. The view raises DivergedError if a coordinator signs two histories. The view counts all other wrong bytes
of strangers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from protos import limits
from protos.accounts import loss_of
from protos.envelope import Kind, parse
from protos.equivocation import check_hashes, open_announcement
from protos.errors import DivergedError, Reason, Refusal
from protos.log import Chain, SignedEntry, open_entry
from protos.run_sections import OperatorsConfig
from protos.v1 import envelope_pb2, update_pb2

# A peer can have computed the next step at most. One more counts, because the watcher may have missed a message.
STEPS_AHEAD_MAX = 2
ENTRIES_WAITING_MAX = 64
HASHES_MAX = 1 << 16
PEERS_MAX = 2 * limits.ROSTER_PEERS_MAX


class EntrySource(Enum):
    """The source of an entry."""

    GOSSIP = "gossip"
    COORDINATOR = "coordinator"


@dataclass(frozen=True)
class EntrySeen:
    """The chain grew. The watcher had seen announcements of `announced` of its contributions, with the same payload hash."""

    signed: SignedEntry
    source: EntrySource
    announced: int

    @property
    def loss(self) -> float:
        """Of the step, in nats a token, as every other reader shows it: a liar's claim is drawn in. NaN without samples."""
        return loss_of(self.signed.entry.contributions, math.nan)


@dataclass(frozen=True)
class AnnouncementSeen:
    """A peer announced a payload; `late`: its step was committed already."""

    author: bytes
    step: int
    payload_sha256: bytes
    payload_bytes: int
    samples: int
    tokens: int
    loss: float
    compute_ms: int
    late: bool


@dataclass(frozen=True)
class Refused:
    """Bytes that the door refused; `count` is the number of refusals with this reason so far."""

    reason: Reason
    detail: str
    count: int


Event: TypeAlias = EntrySeen | AnnouncementSeen | Refused


@dataclass
class PeerRow:
    """One peer, as seen from outside. `votes_accepted` counts steps whose entry holds this peer's votes."""

    announced_step: int = 0
    payload_bytes: int = 0
    loss: float = math.nan
    votes_accepted: int = 0
    payload_bytes_accepted: int = 0
    late: int = 0


@dataclass
class WatchCounters:
    """Counters of a watch."""

    entries: dict[EntrySource, int] = field(default_factory=lambda: dict.fromkeys(EntrySource, 0))
    announcements: int = 0
    late: int = 0
    repeated: int = 0
    refused: dict[Reason, int] = field(default_factory=dict)

    @property
    def entries_all(self) -> int:
        """Entries taken, from all sources."""
        return sum(self.entries.values())


class Watch:
    """Follows one run. Entries wait until `begin` or `anchor`, because the watcher does not know the chain's start before."""

    def __init__(self, run_id: bytes, coordinator: bytes) -> None:
        self.run_id = run_id
        self.coordinator = coordinator
        self.peers: dict[bytes, PeerRow] = {}
        self.tally = WatchCounters()
        self.anchored_at: int | None = None
        self._chain: Chain | None = None
        self._hashes: dict[int, bytes] = {}
        self._waiting: dict[int, tuple[SignedEntry, EntrySource]] = {}
        self._announced: dict[tuple[int, bytes], bytes] = {}
        self._told_head = 0

    @property
    def head(self) -> tuple[int, bytes]:
        """Step and hash of the newest entry that is verified down to the chain's start."""
        return (self._chain.step, self._chain.head) if self._chain is not None else (0, self.run_id)

    # ---- where the chain starts --------------------------------------------------------------------------------------

    def begin(self, operators: OperatorsConfig) -> list[Event]:
        """The coordinator answers and has the whole log, so the chain starts at the genesis. `operators`: of the run; the log
        obeys nothing without their orders."""
        return self._start(0, self.run_id, operators)

    def anchor(self) -> list[Event]:
        """The coordinator does not answer: start at the first gossiped entry, and trust its parent. Nobody says whose orders
        the run obeys."""
        if self._chain is not None or not self._waiting:
            return []
        first = self._waiting[min(self._waiting)][0].entry
        self.anchored_at = first.step
        return self._start(first.step - 1, first.parent_hash)

    def _start(self, step: int, head: bytes, operators: OperatorsConfig | None = None) -> list[Event]:
        if self._chain is None:
            self._chain = Chain(self.run_id, self.coordinator, step, head, operators)
        return self._drain()

    def told_head(self, step: int) -> None:
        """The coordinator names this head. The watcher uses it only to choose the entries to ask for."""
        self._told_head = max(self._told_head, min(step, limits.STEP_MAX))

    def wanted(self) -> int | None:
        """First step to ask the coordinator for; None if no entry is known to be missing."""
        if self._chain is None or self._horizon() <= self._chain.step:
            return None
        return self._chain.step + 1

    def _horizon(self) -> int:
        return max(self.head[0], self._told_head, max(self._waiting, default=0))

    # ---- the door ----------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[Event]:
        """A message of the gossip topic. Raises DivergedError if it proves that the coordinator signed two histories."""
        try:
            if len(data) > limits.GOSSIP_MESSAGE_BYTES_MAX:
                raise Refusal(Reason.TOO_LARGE, f"message of {len(data)} bytes")
            if parse(envelope_pb2.SignedEnvelope, data).kind == Kind.KIND_LOG_ENTRY:
                return self._receive_entry(data, EntrySource.GOSSIP)
            announcement = self._receive_announcement(data)
            return [announcement] if announcement is not None else []
        except Refusal as refusal:
            return [self._refused(refusal)]

    def receive_listed(self, data: bytes) -> list[Event]:
        """An entry that the coordinator listed. The watcher trusts it no more than gossip."""
        try:
            return self._receive_entry(data, EntrySource.COORDINATOR)
        except Refusal as refusal:
            return [self._refused(refusal)]

    def refuse_oversized(self, size: int) -> list[Event]:
        """A message that was too long to hand on."""
        return [self._refused(Refusal(Reason.TOO_LARGE, f"message of {size} bytes"))]

    def _refused(self, refusal: Refusal) -> Refused:
        count = self.tally.refused[refusal.reason] = self.tally.refused.get(refusal.reason, 0) + 1
        return Refused(refusal.reason, refusal.detail, count)

    # ---- entries -----------------------------------------------------------------------------------------------------

    def _receive_entry(self, data: bytes, source: EntrySource) -> list[Event]:
        signed = open_entry(data, run_id=self.run_id, coordinator=self.coordinator)
        step = signed.entry.step
        waiting = self._waiting.get(step)
        known = waiting[0].hash if waiting is not None else self._hashes.get(step)
        if known is not None and known != signed.hash:
            raise DivergedError(
                f"the coordinator signed two different entries of step {step}: {known.hex()} and {signed.hash.hex()}; "
                "do not trust this run"
            )
        if known is not None or (self._chain is not None and step <= self._chain.step):
            self.tally.repeated += 1  # several peers gossiped it, or it is older than the remembered ones
            return []
        self._waiting[step] = (signed, source)
        if len(self._waiting) > ENTRIES_WAITING_MAX:
            del self._waiting[max(self._waiting)]  # the watcher can ask for it later
        return self._drain()

    def _drain(self) -> list[Event]:
        """Take the entries that follow the head, in order."""
        events: list[Event] = []
        while self._chain is not None and (found := self._waiting.pop(self._chain.step + 1, None)) is not None:
            signed, source = found
            try:
                self._chain.extend(signed.envelope)
            except Refusal as refusal:
                raise DivergedError(
                    f"the chain breaks at step {signed.entry.step}: {refusal.detail}, yet the coordinator signed both entries; "
                    "do not trust this run"
                ) from refusal
            events += self._committed(signed, source)
        return events

    def _committed(self, signed: SignedEntry, source: EntrySource) -> list[Event]:
        entry, announced, events = signed.entry, 0, list[Event]()
        self._hashes[entry.step] = signed.hash
        if len(self._hashes) > HASHES_MAX:
            del self._hashes[next(iter(self._hashes))]
        for contribution in entry.contributions:
            row = self._row(contribution.public_key)
            row.votes_accepted += 1
            row.payload_bytes_accepted += contribution.payload_bytes
            row.loss = contribution.loss
            sha256 = self._announced.get((entry.step, contribution.public_key))
            announced += sha256 == contribution.payload_sha256
            if contribution.payload_sha256 and sha256 not in (None, contribution.payload_sha256):
                detail = (
                    f"entry {entry.step} holds another payload of {contribution.public_key.hex()[:16]} than announced"
                )
                events.append(self._refused(Refusal(Reason.HASH_MISMATCH, detail)))
        self._announced = {key: value for key, value in self._announced.items() if key[0] > entry.step}
        self.tally.entries[source] += 1
        return [EntrySeen(signed, source, announced), *events]

    # ---- announcements -----------------------------------------------------------------------------------------------

    def _receive_announcement(self, data: bytes) -> AnnouncementSeen | None:
        opened, body = open_announcement(data, run_id=self.run_id)
        check_hashes(body)
        self._check_ranges(body)
        late = self._chain is not None and body.step <= self._chain.step
        if not late:
            self._check_place(body, opened.public_key)
            if (body.step, opened.public_key) in self._announced:
                self.tally.repeated += 1  # an author re-sends it to peers that came later
                return None
            self._announced[body.step, opened.public_key] = body.payload_sha256
        row = self._row(opened.public_key)
        self.tally.announcements += 1
        self.tally.late += late
        row.late += late
        if body.step >= row.announced_step:
            row.announced_step, row.payload_bytes = body.step, body.payload_bytes
            row.loss = body.loss
        return AnnouncementSeen(
            author=opened.public_key,
            step=body.step,
            payload_sha256=body.payload_sha256,
            payload_bytes=body.payload_bytes,
            samples=body.samples,
            tokens=body.tokens,
            loss=body.loss,
            compute_ms=body.compute_ms,
            late=late,
        )

    def _check_ranges(self, body: update_pb2.Announcement) -> None:
        if not 1 <= body.step <= limits.STEP_MAX:
            raise Refusal(Reason.OUT_OF_RANGE, f"step {body.step}")
        if not 0 < body.payload_bytes <= limits.PAYLOAD_BYTES_MAX:
            raise Refusal(Reason.OUT_OF_RANGE, f"payload of {body.payload_bytes} bytes")
        if not math.isfinite(body.loss):
            raise Refusal(Reason.OUT_OF_RANGE, f"loss {body.loss}")

    def _check_place(self, body: update_pb2.Announcement, author: bytes) -> None:
        """Check that this author may announce this step now, on this state, with this payload. Raises Refusal."""
        head_step, head_hash = self.head
        if self._chain is not None:
            if body.step > self._horizon() + STEPS_AHEAD_MAX:
                raise Refusal(Reason.WRONG_STEP, f"announcement of step {body.step}, the head is {self._horizon()}")
            if body.step == head_step + 1 and body.parent_hash != head_hash:
                raise Refusal(Reason.WRONG_PARENT, f"announcement of step {body.step} on another log")
        before = self._announced.get((body.step, author))
        if before not in (None, body.payload_sha256):
            raise Refusal(Reason.REPLAYED, f"step {body.step} announced with two payloads")
        if before is None and len(self._announced) >= limits.ROSTER_PEERS_MAX * STEPS_AHEAD_MAX:
            raise Refusal(Reason.OUT_OF_RANGE, "more announcements than a roster can have")

    def _row(self, public_key: bytes) -> PeerRow:
        """The peer's row. If the table is full, the peer that did least, longest ago, is removed."""
        row = self.peers.get(public_key)
        if row is None:
            if len(self.peers) >= PEERS_MAX:
                del self.peers[
                    min(self.peers, key=lambda k: (self.peers[k].votes_accepted, self.peers[k].announced_step))
                ]
            row = self.peers[public_key] = PeerRow()
        return row
