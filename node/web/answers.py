"""The answers of the JSON API, as values: the page, the description of the API (OpenAPI) and the code share these types.

Units: bytes are bytes, `seconds` are seconds, `seen` and `looked` are Unix seconds by this machine's clock, losses are nats a
token. Identities are libp2p peer ids, hashes and the run id are hex digits.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """A frozen value; the docstring of a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Problem(Answer):
    """Why a request has no answer."""

    error: str
    """What is wrong, with which value, and what to do."""


class RunHead(Answer):
    """What a run is, and where it is."""

    run: str
    name: str
    phase: str
    """`waiting`, `open`, `paused`, `finished`, or `unknown` while the coordinator has not answered."""
    reason: str
    """Why the run is in this phase."""
    step: int
    """The last step whose entry this process has verified."""
    steps: int
    """Steps of the whole run."""
    loss: float | None
    problem: str
    """Why this answer may be old or incomplete; empty if it is neither."""


class RunLine(RunHead):
    """A run in the list."""

    peers: int
    """Connected peers."""


class RunList(Answer):
    """All runs of this page, one page of them at a time."""

    runs: list[RunLine]
    total: int
    offset: int


class Peer(Answer):
    """A peer, as the coordinator describes it."""

    id: str
    phase: str
    """`syncing`, `ready` or `absent`."""
    device: str
    """As the peer describes it."""
    version: str
    """Of the peer's software, as the peer says; empty if the coordinator does not tell."""
    owner: str
    """The person whom the peer names as its owner; empty if it names none."""
    anchor: bool
    paused: bool
    relayed: bool
    """Whether others reach it through a relay: it names one, and no public address of its own."""
    standing: str
    standing_reason: str
    score: float
    check_rate: float
    """Its part of the steps whose votes are checked; without checks (`trust`), this and the score are 0."""
    applied_step: int
    state_digest: str
    votes_accepted: int
    samples_per_second: float
    loss: float | None
    share: float
    """Its part of the samples that counted in the last 20 steps, 0 to 1."""
    last_step: int
    """The last step in which its votes counted; 0 if none did."""
    seen: float | None
    """When this process last saw it connected, in Unix seconds; null if it never did."""


class Happened(Answer):
    """An event of the feed."""

    number: int
    """Grows by one with each event of this process."""
    step: int
    kind: str
    text: str
    seen: float | None
    """When this process saw it; null for what it read in the log of earlier times."""


class Feed(Answer):
    """Events, oldest first."""

    events: list[Happened]


class Failure(Answer):
    """How many peers say that they could not join, for one reason, with one version. Nobody signs it."""

    reason: str
    """version, device, memory, tokenizer, data, model, state, refused or other."""
    version: str
    count: int
    """Since the coordinator started."""


class HeldOut(Answer):
    """The held-out loss of the state after `step`, as volunteers signed it."""

    step: int
    loss: float
    """The median of `peers` evaluations of the same samples."""
    peers: int
    spread: float
    """The largest difference between evaluations on one kind of device."""
    agrees: bool
    """Whether the spread is at most 0.001: the states are equal, so a larger one is a fault or a lie."""


class Written(Answer):
    """What the model wrote after the run's prompt, in the state after `step`. Nobody checks it: it is what one peer says."""

    step: int
    peer: str
    text: str


class Samples(Answer):
    """What the model wrote after the evaluated states, oldest first; of many, every n-th."""

    samples: list[Written]


class About(Answer):
    """What is trained, as the run's definition and its changed settings say. Texts are the operator's."""

    model: str
    """The model type of transformers, or `module:function`."""
    data: list[str]
    """`stdlib`, a path or an address of each source."""
    tokenizer: str
    context: int
    """Tokens a sample."""
    batch_samples: int
    """Samples a step."""
    optimizer: str
    """The method, the selection of votes and the base, in words."""
    schedule: str
    """Of the learning rate."""
    lr: float
    """Its peak."""


class Run(RunHead):
    """One run."""

    head: str
    """The hash of the coordinator's last entry."""
    tokens: int
    votes: int
    payload_bytes: int
    """Of all payloads that counted."""
    log_bytes: int
    """Of the signed entries that this page serves."""
    parameters: int | None
    payload_bytes_each: float | None
    """Mean bytes of one peer's votes in one step."""
    allreduce_bytes_each: int | None
    """Bytes that a peer sends in one step of an fp32 ring all-reduce."""
    steps_per_minute: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    anchored: bool
    admission: str
    snapshot_step: int | None
    fork_of: str | None
    """The run whose state this run began with."""
    about: About | None
    """Null until the coordinator has answered."""
    peers: list[Peer]
    """The connected ones first; at most 256."""
    peers_connected: int
    peers_known: int
    written: Written | None
    """The newest sample of the model's text; null in a run without `evaluation.sample_tokens`."""
    unconfirmed_steps: int
    """The newest steps after which no state digest is agreed, as the coordinator says."""
    unconfirmed: str
    """The same for people, and why; empty while it is usual."""
    in_line: int
    """Peers that wait for a place of a full run."""
    events: list[Happened]
    """The newest, oldest first; at most 64."""
    held_out: list[HeldOut]
    """Oldest first; of many, every n-th: at most 120."""
    failures: list[Failure]
    """The most frequent first."""
    looked: float | None
    """When the coordinator last answered."""


class Steps(Answer):
    """Columns: each row stands for the steps after the row before it, up to its `steps` value."""

    steps: list[int]
    loss: list[float | None]
    tokens: list[int]
    """Sum from step 1 on."""
    payload_bytes: list[int]
    """Sum from step 1 on."""
    peers: list[float]
    """Payloads that counted."""
    lr: list[float]
    seen: list[float | None]
    head: int
    """The last step of the run."""


class Sums(Answer):
    """What counted votes add up to."""

    votes_accepted: int
    samples: int
    tokens: int
    payload_bytes: int


class LedgerLine(Sums):
    """An identity's contribution, as the log proves it."""

    id: str
    first_step: int
    last_step: int
    uptime: float
    owner: str


class OwnerLine(Sums):
    """The sums of an owner's identities. The coordinator and the peers say who owns them; the log does not."""

    name: str
    identities: int


class ExcludedLine(Answer):
    """An exclusion that the log holds."""

    id: str
    step: int
    reason: str
    proven: bool
    payloads: tuple[str, ...]
    """Hashes of the two payloads that prove it; none without such a proof."""
    verdicts: int
    checkers: int
    by_operator: bool
    readmitted_step: int | None


class Ledger(Answer):
    """The leaderboard: the most votes first, one page of it at a time."""

    to_step: int
    identities: list[LedgerLine]
    total: int
    offset: int
    owners: list[OwnerLine]
    """The most votes first; at most 256."""
    exclusions: list[ExcludedLine]
    """The newest, oldest first; at most 256."""


class InviteLink(Answer):
    """The link to join, without a ticket. Only the page itself gets it, not other origins."""

    invite: str
    admits: bool
    """Whether the link admits new peers: not in the modes `invite` and `allow_list`."""
