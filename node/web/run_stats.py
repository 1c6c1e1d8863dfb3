"""The figures of one run, added up from its verified entries: by step, by identity, and what happened. Pure.

The log holds no wall time. So the caller gives the time at which it saw an entry, and only for entries that it saw come.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from node.web.answers import Happened, Steps
from protos.accounts import Account, Accounts, loss_of
from protos.changes import Settings, words
from protos.errors import Refusal
from protos.evaluation import Evaluation, Figure, figure, open_evaluation
from protos.identity import peer_id
from protos.limits import DEVICE_CHARACTERS_MAX, EVALUATIONS_MAX, PUBLIC_KEY_BYTES
from protos.log import Entry
from protos.run_facts import phase_word
from protos.text import finite, printable
from protos.v1 import coordinator_pb2 as pb

STEPS_MAX: Final = 8_000_000
"""Steps of one run that the page keeps figures of: some 60 bytes each."""
EVENTS_MAX: Final = 512
EVALUATED_STEPS_MAX: Final = 4096
"""Evaluated states that the page keeps figures of: the newest."""
SPEED_LOOKS: Final = 61
"""Looks that found new entries, over which the page measures the speed of a run: a minute of a fast run."""
STILL_TIMES: Final = 3.0
"""A run stands still if no entry comes for so many times the usual time."""
LATE_STEPS: Final = 50
"""A peer without votes in a step is told at most once in so many steps."""
SHARE_STEPS: Final = 20
"""Steps over which the page measures the share of a peer."""
UNSEEN: Final = math.nan


class RunStats:
    """The sums after the entries that were added so far."""

    def __init__(self, run_id: bytes) -> None:
        self.accounts = Accounts(run_id)
        self.events: deque[Happened] = deque(maxlen=EVENTS_MAX)
        self.votes = 0
        self._happened = 0
        self.settings: Settings = ()
        """Those that the operator changed, as the last entry has them."""
        self._run_id = run_id
        self._evaluated: dict[int, dict[bytes, Evaluation]] = {}
        self._loss, self._seen = array("d"), array("d")
        # Sums over the steps so far: a mean over any steps costs two look-ups.
        self._tokens, self._bytes, self._peers = array("Q", [0]), array("Q", [0]), array("Q", [0])
        self._losses, self._counted, self._lr = array("d", [0]), array("Q", [0]), array("d", [0])
        self._ordered: tuple[int, list[Account]] = (0, [])
        self._looks: deque[tuple[float, int, int]] = deque(maxlen=SPEED_LOOKS)
        self._shares: deque[dict[bytes, int]] = deque(maxlen=SHARE_STEPS)
        self._late: dict[bytes, int] = {}

    @property
    def head(self) -> int:
        """The last step; 0 before the first."""
        return len(self._loss)

    @property
    def loss(self) -> float | None:
        """Of the last step, in nats a token."""
        return finite(self._loss[-1]) if self._loss else None

    @property
    def tokens(self) -> int:
        """Of all steps, as the authors claim them."""
        return self._tokens[-1]

    @property
    def payload_bytes(self) -> int:
        """Of all payloads that count."""
        return self._bytes[-1]

    def add(self, entry: Entry, seen: float | None) -> None:
        """Add the next entry, which the caller has verified. Raises Refusal for an exclusion that proves nothing."""
        assert entry.step == self.head + 1, f"entry {entry.step} after {self.head}"
        new = [c.public_key for c in entry.contributions if c.public_key not in self.accounts.by_key]
        excluded = len(self.accounts.exclusions)
        self.accounts.add(entry)
        self._loss.append(loss_of(entry.contributions, self._loss[-1] if self._loss else 0.0))
        good = finite(self._loss[-1])
        self._losses.append(self._losses[-1] + (good or 0.0))
        self._counted.append(self._counted[-1] + (good is not None))
        self._lr.append(self._lr[-1] + entry.lr)
        self._seen.append(UNSEEN if seen is None else seen)
        self._tokens.append(min(self._tokens[-1] + sum(c.tokens for c in entry.contributions), (1 << 64) - 1))
        self._bytes.append(self._bytes[-1] + sum(c.payload_bytes for c in entry.contributions))
        self._peers.append(self._peers[-1] + len(entry.contributions))
        before = self._shares[-1].keys() if self._shares else set[bytes]()
        self._shares.append({c.public_key: c.samples for c in entry.contributions})
        self.votes += len(entry.contributions)
        self._tell_late(entry.step, before - self._shares[-1].keys(), seen)
        for key in new:
            self.tell("first vote", f"the first vote of {peer_id(key)} counts", seen)
        for one in self.accounts.exclusions[excluded:]:
            by = " by the operator" if one.by_operator else ""
            self.tell("excluded", f"{one.id} is excluded{by}: {one.reason}", seen)
        self.take(entry.evaluations)
        if entry.settings != self.settings:
            changed = tuple(item for item in entry.settings if item not in self.settings)
            self.settings = entry.settings
            self.tell("changed", f"the operator changed the run from step {entry.step} on: {words(changed)}", seen)
        for key in entry.readmitted:
            self.tell("readmitted", f"the operator admits {peer_id(key)} again", seen)

    def _tell_late(self, step: int, missed: Iterable[bytes], seen: float | None) -> None:
        """Peers whose votes counted in the step before, and do not in this one."""
        for key in sorted(missed):
            if step - self._late.get(key, -LATE_STEPS) >= LATE_STEPS:
                self._late[key] = step
                self.tell("late", f"no votes of {peer_id(key)} count in step {step}: late, paused or gone", seen)

    def take(self, envelopes: Iterable[bytes]) -> None:
        """Add held-out losses that peers signed, from an entry or from the facts. Those that do not verify are left out."""
        for envelope in envelopes:
            try:
                found = open_evaluation(envelope, run_id=self._run_id)
            except Refusal:
                continue
            known = self._evaluated.setdefault(found.step, {})
            if found.author in known or len(known) < EVALUATIONS_MAX:
                known.setdefault(found.author, found)
            while len(self._evaluated) > EVALUATED_STEPS_MAX:
                del self._evaluated[min(self._evaluated)]

    def held_out(self, points_max: int) -> list[Figure]:
        """The held-out losses, oldest first; of many, every n-th, and always the newest."""
        steps = sorted(self._evaluated)
        width = max(-(-len(steps) // points_max), 1)
        return [figure(list(self._evaluated[step].values())) for step in steps[::-1][::width][::-1]]

    def written(self) -> Iterator[Evaluation]:
        """The evaluations that tell what the model wrote, newest first: one a state, the first that came."""
        for step in sorted(self._evaluated, reverse=True):
            told = next((it for it in self._evaluated[step].values() if it.sample), None)
            if told is not None:
                yield told

    def tell(self, kind: str, text: str, seen: float | None) -> None:
        """Add an event to the feed; the oldest events leave a full feed. Of snapshots in a row only the newest stays."""
        self._happened += 1
        if kind == "snapshot" and self.events and self.events[-1].kind == kind:
            self.events.pop()
        told = Happened(number=self._happened, step=self.head, kind=kind, text=printable(text), seen=seen)
        self.events.append(told)

    def shares(self) -> dict[bytes, float]:
        """Public key -> its part of the samples that counted in the last SHARE_STEPS steps."""
        sums: dict[bytes, int] = {}
        for step in self._shares:
            for key, samples in step.items():
                sums[key] = sums.get(key, 0) + samples
        whole = sum(sums.values())
        return {key: samples / whole for key, samples in sums.items()} if whole else {}

    def looked(self, now: float) -> None:
        """The log was read to its end at `now`, in Unix seconds: the looks that found new entries measure the speed."""
        if not self._looks or self._looks[-1][1] != self.head:
            self._looks.append((now, self.head, self.tokens))

    def speed(self, now: float) -> tuple[float, float] | None:
        """Steps a second and tokens a second over the last looks that found new entries; None without two.

        A run that stands still becomes slower: the time since the last entry counts if it is longer than usual.
        """
        if len(self._looks) < 2:
            return None
        (first, head, tokens), (last, _, _) = self._looks[0], self._looks[-1]
        usual = (last - first) / (len(self._looks) - 1)
        seconds = (now if now - last > STILL_TIMES * usual else last) - first
        return None if seconds <= 0 else ((self.head - head) / seconds, (self.tokens - tokens) / seconds)

    def points(self, first: int, last: int, points_max: int) -> Steps:
        """The steps `first` to `last` as at most `points_max` points of equally many steps, with mean losses and rates."""
        first, last = max(first, 1), min(last, self.head)
        count = max(last - first + 1, 0)
        width = max(-(-count // points_max), 1)
        ends = [min(begin + width - 1, last) for begin in range(first, last + 1, width)]
        spans = [(max(end - width, first - 1), end) for end in ends]
        if ends:
            spans[-1] = (spans[-2][1] if len(spans) > 1 else first - 1, ends[-1])
        return Steps(
            steps=ends,
            loss=[self._mean_loss(a, b) for a, b in spans],
            tokens=[self._tokens[b] for b in ends],
            payload_bytes=[self._bytes[b] for b in ends],
            peers=[(self._peers[b] - self._peers[a]) / (b - a) for a, b in spans],
            lr=[(self._lr[b] - self._lr[a]) / (b - a) for a, b in spans],
            seen=[finite(self._seen[b - 1]) for b in ends],
            head=self.head,
        )

    def _mean_loss(self, after: int, last: int) -> float | None:
        """Over the steps after `after`, up to `last`; None if none of them has a number."""
        count = self._counted[last] - self._counted[after]
        if last - after == 1:
            return finite(self._loss[last - 1])
        return (self._losses[last] - self._losses[after]) / count if count else None

    def ordered(self) -> list[Account]:
        """The accounts, the most votes first; sorted once a step."""
        if self._ordered[0] != self.head:
            self._ordered = self.head, self.accounts.ordered()
        return self._ordered[1]


# What happened between two looks at a run, from the coordinator's facts: peers that came and went, phases, snapshots. Pure.
#
# The texts of the facts are a stranger's. `Book.tell` makes them printable.


def peers_of(facts: pb.GetRunResponse, peers_max: int) -> list[pb.PeerStatus]:
    """The peers with a whole public key: at most `peers_max`, those that are here first."""
    return [peer for peer in facts.peers if len(peer.public_key) == PUBLIC_KEY_BYTES][:peers_max]


def here(facts: pb.GetRunResponse) -> dict[bytes, pb.PeerStatus]:
    """The peers that are connected."""
    whole = peers_of(facts, len(facts.peers))
    return {peer.public_key: peer for peer in whole if peer.phase != pb.PeerPhase.PEER_PHASE_ABSENT}


def happenings(before: pb.GetRunResponse | None, now: pb.GetRunResponse) -> Iterator[tuple[str, str]]:
    """(kind, text) of each event between two looks, in the order in which a person reads them."""
    if before is None:
        return
    then, present = here(before), here(now)
    for key in present.keys() - then.keys():
        device = present[key].device[:DEVICE_CHARACTERS_MAX]
        yield "joined", f"{peer_id(key)} is connected ({device})"
    for key in then.keys() - present.keys():
        yield "left", f"{peer_id(key)} is not connected any more"
    for key in present.keys() & then.keys():
        if present[key].paused != then[key].paused:
            yield "paused", f"the owner of {peer_id(key)} {'paused it' if present[key].paused else 'lets it go on'}"
        if present[key].standing != then[key].standing:
            why = f": {present[key].standing_reason}" if present[key].standing_reason else ""
            yield "standing", f"{peer_id(key)} is {present[key].standing}{why}"
    if now.HasField("snapshot") and now.snapshot.step != (before.snapshot.step if before.HasField("snapshot") else -1):
        yield "snapshot", f"the snapshot of step {now.snapshot.step} is agreed"
    if phase_word(before) != phase_word(now):
        yield "phase", f"the run is {phase_word(now)}: {now.reason}"
