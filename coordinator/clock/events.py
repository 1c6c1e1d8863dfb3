"""The events of a run that the machine takes: requests, reports, streams that begin and end, the timer."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.clock.effects import EntryCommitted, SnapshotFact
from protos.accounts import NOBODY, Owner
from protos.changes import Settings
from protos.equivocation import Offence
from protos.invite import Ticket
from protos.log import Verdict
from protos.slices import Aggregate


@dataclass(frozen=True)
class JoinAsked:
    """A peer asks to take part. The peer's signature and its ticket's are verified. `unix_ms`: the time by the wall clock.

    `network`: the block of public network addresses that it calls from (protos/address.py); empty for a private one.
    `anchor`: the peer asks to take part as an anchor. `software_version`: as the peer names it.
    """

    public_key: bytes
    device: str
    parameters: int
    layout_digest: bytes
    addresses: tuple[str, ...]
    ticket: Ticket | None = None
    unix_ms: int = 0
    network: str = ""
    anchor: bool = False
    software_version: str = ""
    owner: Owner = NOBODY


@dataclass(frozen=True)
class Connected:
    """The peer's event stream is open and has the whole log."""

    public_key: bytes


@dataclass(frozen=True)
class Disconnected:
    """The peer's event stream broke, or the peer left for good (`leaving`)."""

    public_key: bytes
    leaving: bool = False


@dataclass(frozen=True)
class Claim:
    """A payload that its author announced for the open step. `envelope`: the signed announcement."""

    step: int
    parent_hash: bytes
    payload_sha256: bytes
    payload_bytes: int
    samples: int
    tokens: int
    loss: float
    compute_ms: int
    envelope: bytes = b""


@dataclass(frozen=True)
class HeldPlaces:
    """Payloads of a step that a peer holds, as a bit mask over the roster of one attempt at it.

    `digest`: over their hashes (`protos.slices.digest_of`), 32 bytes.
    """

    step: int
    attempt: int
    mask: int
    digest: bytes


@dataclass(frozen=True)
class Summed:
    """The sum that an aggregator made of a step's votes. `payloads`: over the hashes of what it added up (`digest_of`)."""

    step: int
    attempt: int
    payloads: bytes
    aggregate: Aggregate


@dataclass(frozen=True)
class Reported:
    """One report of a peer: its announcement, holdings, applied states (step, digest), snapshots and verdicts.

    `held` names payloads by the places of their authors. `holdings` (step, author, payload hash) has those that the
    coordinator could not match.
    """

    public_key: bytes
    claim: Claim | None = None
    holdings: tuple[tuple[int, bytes, bytes], ...] = ()
    applied: tuple[tuple[int, bytes], ...] = ()
    snapshots: tuple[SnapshotFact, ...] = ()
    addresses: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    offences: tuple[Offence, ...] = ()
    """Proven offences of other peers."""
    bad_snapshots: tuple[SnapshotFact, ...] = ()
    """Agreed snapshots that the peer loaded and found wrong."""
    abstained: tuple[int, str] | None = None
    """The step for which the peer has no votes and will have none, and the reason, in printable text."""
    not_finite: bool | None = None
    """Whether the peer abstains because its loss or gradient is not finite; None: the peer does not say."""
    lost: bool = False
    """Whether the peer never votes in the step from which it abstains."""
    held: HeldPlaces | None = None
    paused: bool | None = None
    """Whether the peer's owner has paused it; None: as before."""
    owner: Owner | None = None
    """Whose machine the peer is now; None: as before."""
    evaluations: tuple[bytes, ...] = ()
    """Signed by this peer, and verified."""
    summed: Summed | None = None
    false_sums: tuple[tuple[int, int], ...] = ()
    """(step, range) of sums that the peer has added up again, and found false."""


@dataclass(frozen=True)
class EntriesReturned:
    """A peer has entries that this coordinator signed and does not have; `newest_step`: of the newest that it has."""

    public_key: bytes
    entries: tuple[EntryCommitted, ...]
    newest_step: int


@dataclass(frozen=True)
class TimerFired:
    """The time that the last `Arm` asked for has come."""


@dataclass(frozen=True)
class TicketAsked:
    """The operator wants this ticket to count."""

    ticket: Ticket
    unix_ms: int


@dataclass(frozen=True)
class RevocationAsked:
    """The operator wants a ticket to admit no further peer. `with_peers`: peers that joined with it have to leave."""

    ticket_id: bytes
    with_peers: bool


@dataclass(frozen=True)
class ExclusionAsked:
    """The operator wants a peer to take part no more; `reason`: in the operator's words."""

    public_key: bytes
    reason: str


@dataclass(frozen=True)
class ReadmissionAsked:
    """The operator wants an excluded peer to be admitted again."""

    public_key: bytes


@dataclass(frozen=True)
class WithdrawalAsked:
    """The operator wants the agreed snapshots of this step and later ones not to count, nor the state digests since."""

    step: int


@dataclass(frozen=True)
class PauseAsked:
    """The operator wants no further step to open; `reason`: in the operator's words, or empty."""

    reason: str


@dataclass(frozen=True)
class ResumeAsked:
    """The operator wants the steps of a paused run to open again."""


@dataclass(frozen=True)
class FinishAsked:
    """The operator wants the run to end at its newest entry; `reason`: in the operator's words, or empty."""

    reason: str


@dataclass(frozen=True)
class ArchiveAsked:
    """The operator wants a finished run to be served no more; or again (not `archived`)."""

    archived: bool


@dataclass(frozen=True)
class DecayAsked:
    """The operator wants the learning rate to decay over the next `steps` steps, and the run to end then."""

    steps: int


@dataclass(frozen=True)
class ChangeAsked:
    """The operator wants these settings of a paused run to have other values from the next step on."""

    settings: Settings


Steered = PauseAsked | ResumeAsked | FinishAsked | ArchiveAsked | DecayAsked | ChangeAsked
"""The requests of the operator about the life of the run."""


@dataclass(frozen=True)
class OrderAsked:
    """An operator of the run signed an order. The signature is verified. `unix_ms`: the wall clock's time."""

    body: bytes
    public_key: bytes
    signature: bytes
    unix_ms: int


Asked = OrderAsked | TicketAsked | RevocationAsked | ExclusionAsked | ReadmissionAsked | WithdrawalAsked | Steered
"""The requests of the operator."""


Event = JoinAsked | Connected | Disconnected | Reported | EntriesReturned | TimerFired | Asked
