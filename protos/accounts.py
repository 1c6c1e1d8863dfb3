"""Credit for a run: each identity's contribution and all exclusions, from the log alone; and the owner that a peer names. Pure.

The log proves which payloads the coordinator accepted, and the samples and tokens that their authors claimed at that time. The
log holds no wall time, so uptime counts in clock steps. The caller verifies the entries.

A figure about a step is made of what peers claim: one liar must not decide it (`loss_of`). Only people read it.

An owner is a claim, which nobody checks (ADR 35). One door for the bytes of strangers: `owner_from_body`. Refuses names that do
not print on one line: control characters, and marks that turn the direction of writing. Keys of owners signed names in earlier
versions; they count as no more than the name.
"""

from __future__ import annotations

import statistics
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from protos.equivocation import prove_exclusion
from protos.errors import Reason, Refusal
from protos.identity import peer_id
from protos.limits import OWNER_CHARACTERS_MAX
from protos.log import Contribution, Entry, Exclusion
from protos.v1 import coordinator_pb2 as pb


@dataclass(frozen=True)
class Owner:
    """`name` is empty for a peer that names nobody."""

    name: str = ""


NOBODY = Owner()


@dataclass(frozen=True)
class Group:
    """The peers that name one owner."""

    owner: Owner
    peers: list[bytes] = field(default_factory=list)


def name_of(text: str) -> str:
    """The name as a person wrote it, in the one spelling that Unicode calls NFC. ValueError says what is wrong."""
    name = unicodedata.normalize("NFC", text.strip())
    if not 1 <= len(name) <= OWNER_CHARACTERS_MAX:
        raise ValueError(f"{len(name)} characters; a name has 1 to {OWNER_CHARACTERS_MAX}")
    wrong = next((c for c in name if not c.isprintable()), None)
    if wrong is not None:
        kind = unicodedata.name(wrong, "a control character")
        raise ValueError(f"the character U+{ord(wrong):04X} ({kind}) does not print; leave it out")
    return name


def owner_body(owner: Owner) -> pb.Owner:
    """As a message."""
    return pb.Owner(name=owner.name)


def owner_from_body(body: pb.Owner) -> Owner:
    """The owner that a peer names. Refusal for a wrong name."""
    name: str = body.name
    if not name:
        return NOBODY
    if len(name) > OWNER_CHARACTERS_MAX:  # Unicode's forms take quadratic time: a stranger's 1 MB is minutes
        raise Refusal(Reason.TOO_LARGE, f"the owner's name has more than {OWNER_CHARACTERS_MAX} characters")
    try:
        usual = name_of(name)
    except ValueError as error:
        raise Refusal(Reason.OUT_OF_RANGE, f"the owner's name: {error}") from error
    if usual != name:
        raise Refusal(Reason.MALFORMED, "the owner's name has spaces around it, or is not in Unicode's form NFC")
    return Owner(name)


def shown_owner(body: pb.Owner) -> Owner:
    """For a reader, who trusts no coordinator: an owner that would not pass the door is nobody."""
    try:
        return owner_from_body(body)
    except Refusal:
        return NOBODY


def owners_of(peers: Iterable[pb.PeerStatus]) -> dict[bytes, Owner]:
    """Public key of a peer -> its owner, for those that name one."""
    found = {peer.public_key: shown_owner(peer.owner) for peer in peers}
    return {public_key: owner for public_key, owner in found.items() if owner.name}


def groups(owners: Mapping[bytes, Owner], weight: Callable[[bytes], float]) -> list[Group]:
    """The peers of each owner, the owner with the largest sum of weights first."""
    found: dict[str, Group] = {}
    for public_key, owner in owners.items():
        found.setdefault(owner.name, Group(owner)).peers.append(public_key)
    return sorted(found.values(), key=lambda group: (-sum(map(weight, group.peers)), group.owner.name))


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
