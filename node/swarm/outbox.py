"""What is still to be told to the coordinator; survives a lost session, because it is told again. Bounded, not thread-safe."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from protos import limits
from protos.checks import VERDICT_STEPS
from protos.log import Equivocation, Verdict, equivocation_body, verdict_body
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2

AGAIN = ("payload", "held", "abstained")
"""Kinds of facts that a new roster of the open step has not heard."""


@dataclass
class Outbox:
    """Facts by kind; `take` makes a report of what is new, `sent` forgets exactly that."""

    announcement: tuple[int, bytes] | None = None
    abstained: tuple[int, str] | None = None
    holdings: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    applied: dict[int, bytes] = field(default_factory=dict)
    snapshots: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    bad_snapshots: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    verdicts: dict[tuple[int, bytes], Verdict] = field(default_factory=dict)
    equivocations: dict[bytes, Equivocation] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by whoever has added something to tell; cleared by whoever tells it."""
    _told: set[object] = field(default_factory=set)
    _generation: int = 0
    _taken_in: int = 0

    def move_head(self, step: int) -> None:
        """Forget what belongs to steps that are decided."""
        if self.announcement is not None and self.announcement[0] <= step:
            self.announcement = None
        if self.abstained is not None and self.abstained[0] <= step:
            self.abstain(None)
        self.holdings = {key: at for key, at in self.holdings.items() if at > step}
        self.verdicts = {name: verdict for name, verdict in self.verdicts.items() if name[0] > step - VERDICT_STEPS}
        self._told = {
            f for f in self._told if not (isinstance(f, tuple) and f[0] == "verdict") or f[1:] in self.verdicts
        }

    def abstain(self, abstained: tuple[int, str] | None) -> None:
        """There will be no votes for a step, and why; None: there are."""
        self._told.discard(("abstained", self.abstained))
        self.abstained = abstained

    def add_applied(self, step: int, digest: bytes) -> None:
        """A state was reached; only the newest APPLIED_MAX are kept."""
        self.applied[step] = digest
        for old in sorted(self.applied)[: -limits.APPLIED_MAX]:
            del self.applied[old]

    def accuse(self, author: bytes, equivocation: Equivocation) -> bool:
        """Evidence against an author, until an entry says that it is excluded; one each, of a few. Whether it is new."""
        if author in self.equivocations or len(self.equivocations) >= limits.EQUIVOCATIONS_MAX:
            return False
        self.equivocations[author] = equivocation
        return True

    def excluded(self, author: bytes) -> None:
        """The log says so: nothing more to tell."""
        self.equivocations.pop(author, None)
        self._told.discard(("equivocation", author))

    def everything_again(self) -> None:
        """A new session: what still matters is told again (of the applied states, the last)."""
        self._generation += 1
        self._told.clear()
        self.applied = {step: self.applied[step] for step in sorted(self.applied)[-2:]}

    def announce_again(self) -> None:
        """The open step has another roster: say again what we have for it."""
        self._generation += 1
        self._told = {fact for fact in self._told if not (isinstance(fact, tuple) and fact[0] in AGAIN)}

    def restart(self) -> None:
        """The state starts again from a snapshot: what was applied before does not count."""
        self.applied.clear()
        self.snapshots.clear()

    def take(self) -> tuple[pb.ReportBody, list[object]] | None:
        """A report of everything that was not told yet, and its facts; None if there is nothing."""
        body, facts = pb.ReportBody(), list[object]()
        self._taken_in = self._generation
        self._take_open_step(body, facts)
        self._take_states(body, facts)
        for (step, subject), verdict in list(self.verdicts.items())[-limits.VERDICTS_MAX :]:
            if self._new(("verdict", step, subject), facts):
                body.verdicts.append(verdict_body(replace(verdict, checker=b"")))
        for author, equivocation in self.equivocations.items():
            if self._new(("equivocation", author), facts):
                body.equivocations.append(equivocation_body(equivocation))
        if self.addresses and self._new(("addresses", self.addresses), facts):
            body.addresses.extend(self.addresses)
        return (body, facts) if facts else None

    def _take_states(self, body: pb.ReportBody, facts: list[object]) -> None:
        """States reached, snapshots stored, and snapshots of others that were found wrong."""
        for step in sorted(self.applied)[-limits.APPLIED_MAX :]:
            if self._new(("applied", step, self.applied[step]), facts):
                body.applied.add(step=step, state_digest=self.applied[step])
        for step, (root, size) in sorted(self.snapshots.items()):
            if self._new(("snapshot", step, root), facts):
                body.snapshots.add(step=step, root=root, total_bytes=size)
        for step, (root, size) in sorted(self.bad_snapshots.items())[-limits.APPLIED_MAX :]:
            if self._new(("bad snapshot", step, root), facts):
                body.bad_snapshots.add(step=step, root=root, total_bytes=size)

    def _take_open_step(self, body: pb.ReportBody, facts: list[object]) -> None:
        if self.announcement is not None and self._new(("payload", self.announcement), facts):
            body.announcement.CopyFrom(envelope_pb2.SignedEnvelope.FromString(self.announcement[1]))
        if self.abstained is not None and self._new(("abstained", self.abstained), facts):
            body.abstained.step, body.abstained.reason = self.abstained
        for (author, payload), step in list(self.holdings.items())[: limits.HOLDINGS_MAX]:
            if self._new(("held", author, payload), facts):
                body.holdings.add(step=step, public_key=author, payload_sha256=payload)

    def _new(self, fact: object, facts: list[object]) -> bool:
        if fact in self._told:
            return False
        facts.append(fact)
        return True

    @staticmethod
    def says(fact: object, announcement: bytes) -> bool:
        """Whether a fact of a report is this announcement."""
        return isinstance(fact, tuple) and fact[0] == "payload" and fact[1][1] == announcement

    def sent(self, facts: list[object]) -> None:
        """The coordinator has these facts. Applied states but the last two, and old snapshots, need no keeping.

        If something was to be told again while the report was under way, its answer does not count: it is told again.
        """
        if self._taken_in != self._generation:
            return
        self._told.update(facts)
        for step in sorted(self.applied)[:-2]:
            self._told.discard(("applied", step, self.applied.pop(step)))
        for step in sorted(self.snapshots)[:-2]:
            self._told.discard(("snapshot", step, self.snapshots.pop(step)[0]))
        if len(self._told) > 4 * limits.HOLDINGS_MAX:
            held = {("held", *key) for key in self.holdings}
            self._told = {f for f in self._told if not (isinstance(f, tuple) and f[0] == "held") or f in held}
