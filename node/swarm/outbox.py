"""The facts that the coordinator does not have yet. Bounded, not thread-safe; refuses to know a network.

A fact stays here after a lost session, because this peer reports it again in the next session. A report names a held payload as
a bit in a mask over the open step's roster. If the coordinator could not match a payload, the next report names the payload.
Each report costs the coordinator the same, so a fact that nobody waits for may wait for others (`patience_seconds`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from node.swarm.facts import (
    Abstained,
    Accused,
    Applied,
    Checked,
    EvaluatedState,
    Fact,
    FoundBad,
    FoundFalse,
    Held,
    Owned,
    Paused,
    Published,
    Reachable,
    Stored,
    VotesSummed,
)
from protos import limits
from protos.accounts import NOBODY, Owner, owner_body
from protos.checks import AUDIT_STEPS, VERDICT_STEPS
from protos.log import Equivocation, Verdict, equivocation_body, verdict_body
from protos.slices import Aggregate, digest_of, mask_bytes, mask_of
from protos.tick import Tick
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2, log_pb2

SNAPSHOTS_TOLD_MAX = 8
"""This peer reports so many snapshots in a new session: the stored ones, and the last two roots."""
AGAIN = (Published, Held, Abstained, VotesSummed)
"""Kinds of facts that a new roster of the open step has not heard."""
PATIENT = (Held, Applied)
"""Kinds of facts that may wait: for more payloads, and for the next announcement."""
# A roster of 60 or more peers reports held payloads every 300 ms at most, until it holds all. A small roster reports them
# sooner, because its reports cost less.
HELD_SECONDS_A_MEMBER = 0.005
WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.1, 0.3


@dataclass
class Outbox:
    """Facts by kind: each method that adds one wakes `changed`; `next_report` reports new facts; `sent` marks exactly those.

    Other modules read the fields and change them through the methods.
    """

    announcement: Published | None = None
    abstained: Abstained | None = None
    summed: VotesSummed | None = None
    """The sum that this peer made as an aggregator of the open step."""
    false_sums: set[FoundFalse] = field(default_factory=set)
    holdings: dict[Held, int] = field(default_factory=dict)
    """Held payloads, and the step that each belongs to."""
    applied: dict[int, bytes] = field(default_factory=dict)
    """State digests by step."""
    snapshots: dict[int, tuple[Stored, int]] = field(default_factory=dict)
    """By step: the snapshot, and its size in bytes."""
    bad_snapshots: dict[int, tuple[FoundBad, int]] = field(default_factory=dict)
    verdicts: dict[Checked, Verdict] = field(default_factory=dict)
    equivocations: dict[bytes, Equivocation] = field(default_factory=dict)
    evaluations: dict[int, bytes] = field(default_factory=dict)
    """Signed evaluations of the last states, by step."""
    addresses: tuple[str, ...] = ()
    paused: Paused | None = None
    owner: Owner = NOBODY
    """Each Join names it, too."""
    _named: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _tick: Tick | None = None
    _by_name: set[Held] = field(default_factory=set)
    _told: set[Fact] = field(default_factory=set)
    _generation: int = 0
    _taken_in: int = 0

    # ---- adding facts ------------------------------------------------------------------------------------------------

    async def changed(self) -> None:
        """Wait until a fact is new, or has to be reported again, since the last wait."""
        await self._news.wait()
        self._news.clear()

    def wake(self) -> None:
        """End the wait in `changed`: the last report did not arrive as it was."""
        self._news.set()

    def announce(self, step: int, envelope: bytes) -> None:
        """This peer's announcement for a step; it replaces an earlier one."""
        self.announcement = Published(step, envelope)
        self._news.set()

    def hold(self, step: int, author: bytes, payload_sha256: bytes) -> None:
        """This peer holds a payload of a step that passed its checks."""
        self.holdings[Held(author, payload_sha256)] = step
        self._news.set()

    def hold_only(self, author: bytes) -> None:
        """Of what this peer has said that it holds, only this author's payloads count any more."""
        self.holdings = {held: at for held, at in self.holdings.items() if held.author == author}

    def abstain(self, step: int, reason: str, *, not_finite: bool = False, lost: bool = False) -> None:
        """This peer sends no votes for a step. The reason is cut to one line of ABSTENTION_REASON_BYTES_MAX bytes."""
        line = "".join(c if c.isprintable() else " " for c in reason).encode()[: limits.ABSTENTION_REASON_BYTES_MAX]
        self.withdraw_abstention()
        self.abstained = Abstained(step, line.decode(errors="ignore"), not_finite, lost)
        self._news.set()

    def withdraw_abstention(self) -> None:
        """This peer has votes for the step after all: an abstention does not hold any more."""
        if self.abstained is not None:
            self._told.discard(self.abstained)
        self.abstained = None

    def add_sum(self, step: int, attempt: int, payloads: bytes, aggregate: Aggregate) -> None:
        """This peer has added votes up. It says so again if it is asked again: the coordinator may have started anew."""
        self.summed = VotesSummed(step, attempt, payloads, aggregate)
        self._told.discard(self.summed)
        self._news.set()

    def doubt(self, step: int, number: int) -> None:
        """This peer has found the sum of a range false."""
        self.false_sums.add(FoundFalse(step, number))
        self._news.set()

    def add_applied(self, step: int, digest: bytes) -> None:
        """This peer has reached a state; only the newest APPLIED_MAX are kept."""
        self.applied[step] = digest
        for old in sorted(self.applied)[: -limits.APPLIED_MAX]:
            del self.applied[old]
        self._news.set()

    def add_snapshot(self, step: int, root: bytes, total_bytes: int, *, kept: bool) -> None:
        """This peer knows a snapshot's root; `kept`: other peers can pull its pieces here."""
        fact, before = Stored(step, root, kept), self.snapshots.get(step)
        if before is not None and before[0] != fact:
            self._told -= {before[0], fact}  # as often as it changes
        self.snapshots[step] = (fact, total_bytes)
        self._news.set()

    def add_bad_snapshot(self, step: int, root: bytes, total_bytes: int) -> None:
        """An agreed snapshot does not hold the state that the log names."""
        self.bad_snapshots[step] = (FoundBad(step, root), total_bytes)
        self._news.set()

    def add_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Verdicts of this peer's checks of other peers' votes."""
        self.verdicts.update({Checked(verdict.step, verdict.subject): verdict for verdict in verdicts})
        self._news.set()

    def add_evaluation(self, step: int, envelope: bytes) -> None:
        """This peer has evaluated a state; only the newest EVALUATIONS_MAX are kept."""
        self.evaluations[step] = envelope
        for old in sorted(self.evaluations)[: -limits.EVALUATIONS_MAX]:
            self._told.discard(EvaluatedState(old))
            del self.evaluations[old]
        self._news.set()

    def accuse(self, author: bytes, equivocation: Equivocation) -> bool:
        """Evidence against an author, until the log excludes it: one each, at most EQUIVOCATIONS_MAX. Whether it is new."""
        if author in self.equivocations or len(self.equivocations) >= limits.EQUIVOCATIONS_MAX:
            return False
        self.equivocations[author] = equivocation
        self._news.set()
        return True

    def move_to(self, addresses: tuple[str, ...]) -> None:
        """Other peers can dial this peer at these addresses now."""
        if addresses != self.addresses:
            self.addresses = addresses
            self._news.set()

    def pause(self, paused: bool) -> None:
        """This peer's owner has paused it, or lets it take part again."""
        self._told.discard(Paused(paused))
        self.paused = Paused(paused)
        self._news.set()

    def name_owner(self, owner: Owner) -> None:
        """This is the machine of another owner than before."""
        if owner != self.owner:
            self._told.discard(Owned(owner))
            self.owner, self._named = owner, True
            self._news.set()

    # ---- the log and the session move on -----------------------------------------------------------------------------

    def move_head(self, step: int) -> None:
        """Forget facts about steps that are decided."""
        if self.announcement is not None and self.announcement.step <= step:
            self.announcement = None
        if self.abstained is not None and self.abstained.step <= step:
            self.withdraw_abstention()
        if self.summed is not None and self.summed.step <= step:
            self.summed = None
        self.holdings = {held: at for held, at in self.holdings.items() if at > step}
        self._by_name &= self.holdings.keys()
        self.verdicts = {name: verdict for name, verdict in self.verdicts.items() if name.step > step - VERDICT_STEPS}
        self.false_sums = {it for it in self.false_sums if it.step > step - AUDIT_STEPS}
        kept = self.verdicts.keys() | self.false_sums
        self._told = {fact for fact in self._told if not isinstance(fact, (Checked, FoundFalse)) or fact in kept}

    def open_step(self, tick: Tick) -> None:
        """A step is open for this roster, perhaps again: the coordinator has none of its facts."""
        self._generation += 1
        self._tick = tick
        self._by_name.clear()
        self._told = {fact for fact in self._told if not isinstance(fact, AGAIN)}
        self._news.set()

    def excluded(self, author: bytes) -> None:
        """The log excludes an author: its evidence is not needed any more."""
        self.equivocations.pop(author, None)
        self._told.discard(Accused(author))

    def everything_again(self) -> None:
        """A new session: this peer reports every fact that still matters again (of the applied states, the last two)."""
        self._generation += 1
        self._told.clear()
        self.applied = {step: self.applied[step] for step in sorted(self.applied)[-2:]}
        self._news.set()

    def restart(self, step: int) -> None:
        """The state starts again from the snapshot of a step: later states, and snapshots of them, do not count."""
        self.applied.clear()
        kept = {at: known for at, known in self.snapshots.items() if at <= step and known[0].kept}
        self._told -= {fact for fact in self._told if isinstance(fact, Stored) and fact.step not in kept}
        self.snapshots = kept

    # ---- reports -----------------------------------------------------------------------------------------------------

    def next_report(self) -> tuple[pb.ReportBody, list[Fact]] | None:
        """A report of every new fact, and those facts; None if there is none."""
        body, facts = self._untold()
        self._taken_in = self._generation
        return (body, facts) if facts else None

    def goodbye(self) -> pb.ReportBody:
        """The last report. It has the evaluations again: that of the run's last state may be minutes old."""
        return pb.ReportBody(leaving=True, evaluations=self.evaluations.values())

    def patience_seconds(self, public_key: bytes) -> float:
        """How long new facts may wait for more; 0: not at all, or no fact is new. `public_key`: this peer's."""
        _, facts = self._untold()
        places = {} if self._tick is None else self._tick.places
        urgent = any(not isinstance(fact, PATIENT) for fact in facts)
        if not facts or urgent or public_key not in places or self._by_name:
            return 0.0
        holds = any(isinstance(fact, Held) for fact in facts)
        if holds and len(self._held()) == len(places):
            return 0.0
        return max(min(HELD_SECONDS_A_MEMBER * len(places), WAIT_SECONDS_MAX), 0.0 if holds else WAIT_SECONDS_MIN)

    def _untold(self) -> tuple[pb.ReportBody, list[Fact]]:
        body, facts = pb.ReportBody(), list[Fact]()
        self._add_open_step(body, facts)
        self._add_states(body, facts)
        for checked, verdict in list(self.verdicts.items())[-limits.VERDICTS_MAX :]:
            if self._new(checked, facts):
                body.verdicts.append(verdict_body(replace(verdict, checker=b"")))
        for found in sorted(self.false_sums, key=lambda it: (it.step, it.number))[: limits.FALSE_SUMS_MAX]:
            if self._new(found, facts):
                body.false_sums.add(step=found.step, range=found.number)
        for step, envelope in self.evaluations.items():
            if self._new(EvaluatedState(step), facts):
                body.evaluations.append(envelope)
        for author, equivocation in self.equivocations.items():
            if self._new(Accused(author), facts):
                body.equivocations.append(equivocation_body(equivocation))
        if self.addresses and self._new(Reachable(self.addresses), facts):
            body.addresses.extend(self.addresses)
        if self.paused is not None and self._new(self.paused, facts):
            body.paused = self.paused.paused
        if self._named and self._new(Owned(self.owner), facts):
            body.owner.CopyFrom(owner_body(self.owner))
        return body, facts

    def _add_states(self, body: pb.ReportBody, facts: list[Fact]) -> None:
        """Applied states, stored snapshots, and other peers' snapshots that were found wrong."""
        for step in sorted(self.applied)[-limits.APPLIED_MAX :]:
            if self._new(Applied(step, self.applied[step]), facts):
                body.applied.add(step=step, state_digest=self.applied[step])
        for step, (stored, size) in sorted(self.snapshots.items())[-limits.APPLIED_MAX :]:
            if self._new(stored, facts):
                body.snapshots.add(step=step, root=stored.root, total_bytes=size, not_kept=not stored.kept)
        for step, (bad, size) in sorted(self.bad_snapshots.items())[-limits.APPLIED_MAX :]:
            if self._new(bad, facts):
                body.bad_snapshots.add(step=step, root=bad.root, total_bytes=size)

    def _add_open_step(self, body: pb.ReportBody, facts: list[Fact]) -> None:
        if self.announcement is not None and self._new(self.announcement, facts):
            body.announcement.CopyFrom(envelope_pb2.SignedEnvelope.FromString(self.announcement.envelope))
        if self.abstained is not None and self._new(self.abstained, facts):
            body.abstained.MergeFrom(pb.Abstention(**vars(self.abstained)))
        if self.summed is not None and self._new(self.summed, facts):
            aggregate = log_pb2.Aggregate(**vars(self.summed.aggregate))
            body.summed.step, body.summed.attempt = self.summed.step, self.summed.attempt
            body.summed.payloads_sha256 = self.summed.payloads
            body.summed.aggregate.CopyFrom(aggregate)
        if self._tick is None:
            return
        held, before = self._held(), len(facts)
        for place in sorted(held):
            self._new(held[place], facts)
        if len(facts) > before or (self._by_name and self._tick.ranges):  # names of slices count for one attempt
            body.held.step, body.held.attempt = self._tick.step, self._tick.attempt
            body.held.places = mask_bytes(mask_of(held))
            body.held.payloads_sha256 = digest_of(held[place].payload_sha256 for place in sorted(held))
        for name in sorted(self._by_name, key=lambda held: (held.author, held.payload_sha256))[: limits.HOLDINGS_MAX]:
            if self._new(name, facts):
                body.holdings.add(step=self._tick.step, public_key=name.author, payload_sha256=name.payload_sha256)

    def _held(self) -> dict[int, Held]:
        """Held payloads by their author's place in the roster, for those that are reported by places."""
        assert self._tick is not None
        held: dict[int, Held] = {}
        for name, step in self.holdings.items():
            place = self._tick.places.get(name.author)
            if place is not None and step == self._tick.step and name not in self._by_name:
                held.setdefault(place, name)
        return held

    def name(self, places: int) -> list[Held]:
        """Report the payloads of these places by name, because the coordinator could not match them.

        Returns every payload of the mask: its hash is over all of them, so the coordinator has taken none of the others either.
        The next report has those in a mask without these places.
        """
        if not places or self._tick is None or self._taken_in != self._generation:
            return []
        held = self._held()
        unclear = [name for place, name in held.items() if places >> place & 1]
        if not unclear:
            return []
        self._by_name.update(unclear)
        self._told.difference_update(held.values())
        self._news.set()
        return list(held.values())

    @property
    def generation(self) -> int:
        """Grows with each session and each roster: an answer to a report of an earlier one counts no more."""
        return self._generation

    def unsent(self, facts: Sequence[Fact]) -> None:
        """The coordinator may not have these facts after all."""
        self._told.difference_update(facts)
        self._news.set()

    def _new(self, fact: Fact, facts: list[Fact]) -> bool:
        if fact in self._told:
            return False
        facts.append(fact)
        return True

    def sent(self, facts: Sequence[Fact]) -> None:
        """The coordinator has these facts. Only the last two applied states, and snapshots that are stored here, are kept.

        The answer does not count if the session or the roster changed while the report was under way.
        """
        if self._taken_in != self._generation:
            return
        self._told.update(facts)
        for step in sorted(self.applied)[:-2]:
            self._told.discard(Applied(step, self.applied.pop(step)))
        others = [
            s for s in sorted(self.snapshots)[:-2] if not (fact := self.snapshots[s][0]).kept and fact in self._told
        ]
        for step in sorted({*others, *sorted(self.snapshots)[:-SNAPSHOTS_TOLD_MAX]}):
            self._told.discard(self.snapshots.pop(step)[0])
        if len(self._told) > 4 * limits.HOLDINGS_MAX:
            self._told = {fact for fact in self._told if not isinstance(fact, Held) or fact in self.holdings}
