"""Each identity's contribution and all exclusions, added up entry by entry, from the log alone. Pure.

The log proves which payloads the coordinator accepted, and the samples and tokens that their authors claimed at that time. The
log holds no wall time, so uptime counts in clock steps. The caller verifies the entries.

A figure about a step is made of what peers claim: one liar must not decide it (`loss_of`). Only people read it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from protos.equivocation import prove_exclusion
from protos.errors import Refusal
from protos.identity import peer_id
from protos.log import Contribution, Entry, Exclusion
from protos.owner import Owner, groups


@dataclass
class Account:
    """One identity's line."""

    id: str
    votes_accepted: int = 0
    samples: int = 0
    tokens: int = 0
    payload_bytes: int = 0
    first_step: int = 0
    last_step: int = 0

    @property
    def uptime(self) -> float:
        """Accepted votes, divided by the number of steps from the identity's first to its last."""
        return self.votes_accepted / (self.last_step - self.first_step + 1)


@dataclass(frozen=True)
class Excluded:
    """A peer that takes part no more: from which step on, why, and the evidence in the log.

    `proven`: two announcements that the peer itself signed prove it. `verdicts`, `checkers`: the number of verdicts that the
    entry holds, and of the peers that gave them. `by_operator`: the operator decided it, and the log has no other evidence.
    `readmitted_step`: the step of the entry that admits the peer again, if one does.
    """

    id: str
    step: int
    reason: str
    proven: bool
    payloads: tuple[str, ...]
    verdicts: int
    checkers: int
    by_operator: bool = False
    readmitted_step: int | None = None

    @classmethod
    def of(cls, run_id: bytes, step: int, exclusion: Exclusion) -> Excluded:
        """Raises Refusal for announcements that prove nothing against this peer."""
        payloads: tuple[bytes, ...] = ()
        if exclusion.equivocation is not None:
            try:
                payloads = prove_exclusion(exclusion, run_id).payloads
            except Refusal as refusal:
                who = peer_id(exclusion.public_key)
                raise Refusal(refusal.reason, f"against {who}: {refusal.detail}") from refusal
        checkers = {verdict.checker for verdict in exclusion.evidence}
        return cls(
            peer_id(exclusion.public_key),
            step,
            exclusion.reason,
            bool(payloads),
            tuple(payload.hex() for payload in payloads),
            len(exclusion.evidence),
            len(checkers),
            exclusion.by_operator,
        )


def account_values(account: Account, owner: Owner) -> dict[str, Any]:
    """An identity's line under the keys of docs/json.md."""
    return asdict(account) | {"uptime": round(account.uptime, 4), "owner": owner.name}


def owner_values(owners: Mapping[bytes, Owner], accounts: Iterable[Account]) -> list[dict[str, Any]]:
    """The sums of each owner's identities whose votes count, the most votes first. `owners`: by public key."""
    by_id = {account.id: account for account in accounts}
    voted = {key: by_id[name] for key in owners if (name := peer_id(key)) in by_id}
    return [
        {
            "name": group.owner.name,
            "identities": len(group.peers),
            "votes_accepted": sum(voted[key].votes_accepted for key in group.peers),
            "samples": sum(voted[key].samples for key in group.peers),
            "tokens": sum(voted[key].tokens for key in group.peers),
            "payload_bytes": sum(voted[key].payload_bytes for key in group.peers),
        }
        for group in groups({key: owners[key] for key in voted}, lambda key: voted[key].votes_accepted)
    ]


class Accounts:
    """The sums after the entries that were added so far, in order."""

    def __init__(self, run_id: bytes) -> None:
        self._run_id = run_id
        self.by_key: dict[bytes, Account] = {}
        self.exclusions: list[Excluded] = []

    def add(self, entry: Entry) -> None:
        """Add the next entry. Raises Refusal if the entry excludes a peer with announcements that prove nothing against it."""
        if entry.readmitted:
            ids = {peer_id(key) for key in entry.readmitted}
            self.exclusions = [_readmitted(excluded, ids, entry.step) for excluded in self.exclusions]
        self.exclusions += [Excluded.of(self._run_id, entry.step, exclusion) for exclusion in entry.exclusions]
        for contribution in entry.contributions:
            account = self.by_key.get(contribution.public_key)
            if account is None:
                account = self.by_key[contribution.public_key] = Account(peer_id(contribution.public_key))
            account.votes_accepted += 1
            account.samples += contribution.samples
            account.tokens += contribution.tokens
            account.payload_bytes += contribution.payload_bytes
            account.first_step, account.last_step = account.first_step or entry.step, entry.step

    def ordered(self) -> list[Account]:
        """The most votes first."""
        return sorted(self.by_key.values(), key=lambda account: (-account.votes_accepted, account.id))


def _readmitted(excluded: Excluded, ids: set[str], step: int) -> Excluded:
    over = excluded.readmitted_step is None and excluded.id in ids
    return replace(excluded, readmitted_step=step) if over else excluded


# A contribution's loss counts as at most so many times the median of its step's.
LOSS_TIMES_MEDIAN_MAX = 2.0


def loss_of(contributions: Sequence[Contribution], before: float = 0.0) -> float:
    """Mean loss of a step in nats a token, weighted by samples, extreme claims drawn in; `before` for a step without samples.

    Weights are samples, which the coordinator handed out, not tokens, which the author claims.
    """
    counted = [c for c in contributions if c.samples]
    if not counted:
        return before
    middle = statistics.median(c.loss for c in counted)
    most = LOSS_TIMES_MEDIAN_MAX * max(abs(middle), 1e-6)
    return sum(min(max(c.loss, -most), most) * c.samples for c in counted) / sum(c.samples for c in counted)


def rate(learning_rate: float) -> float:
    """A learning rate with as many digits as mean something to a person; the log keeps its exact bits."""
    return float(f"{learning_rate:.4g}")
