"""Facts about runs, made safe to show: of a coordinator that is asked, and of a public list, a JSON file that anybody can host.

A hostile coordinator, or one of a newer version, ends no command. An answer may have 23 MB, so a reader takes as many rows as
an honest coordinator sends, and leaves out rows whose keys are none. Refuses nothing: words and numbers that this version does
not know are shown as `unknown`. Why peers could not join is told by strangers, so nothing follows from it. ADR 21.

`{"swarmentum_runs": 1, "runs": [...]}`: each run is a SignedEnvelope of KIND_LISTED_RUN in base64, by that run's own
coordinator, so lists of several coordinators can be joined. `open_runs` is the door. An entry has the run's genesis, whose hash
is the run id, and the genesis names the key: nobody else can say what the run trains. Refuses to believe what a host writes
beside the entries.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from protos import limits
from protos.accounts import Owner
from protos.changes import in_force
from protos.envelope import Kind, open_envelope, parse, seal
from protos.errors import OperatorError, Reason, Refusal
from protos.identity import Identity, peer_id
from protos.invite import Invite
from protos.limits import DEVICE_CHARACTERS_MAX, PUBLIC_KEY_BYTES
from protos.log import run_id_of
from protos.run_config import RunConfig, config_from_json
from protos.text import finite, printable
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2
from protos.version import VERSION_CHARACTERS_MAX

# The phase of a run in one word, the same in `status`, `run list`, the page and the metrics.

PAUSED = "paused"
ARCHIVED = "archived"
UNKNOWN = "unknown"
_WORDS = {pb.Phase.PHASE_WAITING: "waiting", pb.Phase.PHASE_OPEN: "open", pb.Phase.PHASE_FINISHED: "finished"}


def phase_word(facts: pb.GetRunResponse) -> str:
    """`waiting`, `open`, `paused`, `finished` or `archived`; `unknown` for a phase that this version does not know.

    A paused run whose open step is not decided yet is `open`.
    """
    if facts.archived:
        return ARCHIVED
    word = _WORDS.get(facts.phase, UNKNOWN)
    return PAUSED if facts.paused and word == "waiting" else word


STATUS_PEERS_MAX: Final = 1024
STATUS_EXCLUSIONS_MAX: Final = 256
ROWS_MAX: Final = 256
"""Of each other list: an honest coordinator sends fewer."""
UNCONFIRMED_STEPS_SHOWN: Final = 8
"""Peers report a digest a step or two after the entry; more steps without one are worth a line."""
_PHASES: Final[Mapping[int, str]] = {
    pb.PeerPhase.PEER_PHASE_SYNCING: "syncing",
    pb.PeerPhase.PEER_PHASE_READY: "ready",
    pb.PeerPhase.PEER_PHASE_ABSENT: "absent",
}


def peer_phase_word(phase: int) -> str:
    """A peer's phase in one word; `unknown` for one that this version does not know."""
    return _PHASES.get(phase, UNKNOWN)


def bounded(facts: pb.GetRunResponse) -> pb.GetRunResponse:
    """The same facts, in place, with the rows that an honest coordinator would send."""
    for rows in (facts.changed, facts.withdrawn, facts.failures, facts.bootstrap, facts.evaluations, facts.earlier):
        del rows[ROWS_MAX:]
    del facts.peers[STATUS_PEERS_MAX:]
    del facts.exclusions[:-STATUS_EXCLUSIONS_MAX]  # the newest come last
    for keyed in (facts.peers, facts.exclusions):
        for place in reversed(range(len(keyed))):
            if len(keyed[place].public_key) != PUBLIC_KEY_BYTES:
                del keyed[place]
    return facts


STANDING_CHARACTERS_MAX: Final = 32


def run_values(facts: pb.GetRunResponse, config: RunConfig, run_id: bytes) -> dict[str, Any]:
    """What a run is and where it is, under the keys of docs/json.md."""
    return {
        "run": run_id.hex(),
        "name": printable(config.name),
        "phase": phase_word(facts),
        "reason": printable(facts.reason),
        "step": facts.head_step,
        "steps": facts.total_steps,
        "loss": facts.loss if facts.head_step else None,
    }


def peer_values(peer: pb.PeerStatus, owner: Owner) -> dict[str, Any]:
    """A peer of a run under the keys of docs/json.md. Without checks (`trust`), score and rate are 0."""
    return {
        "id": peer_id(peer.public_key),
        "phase": peer_phase_word(peer.phase),
        "device": printable(peer.device, DEVICE_CHARACTERS_MAX),
        "version": printable(peer.software_version, VERSION_CHARACTERS_MAX),
        "owner": owner.name,
        "anchor": peer.anchor,
        "paused": peer.paused,
        "relayed": peer.relayed,
        "standing": printable(peer.standing, STANDING_CHARACTERS_MAX),
        "standing_reason": printable(peer.standing_reason),
        "score": finite(peer.score) or 0.0,
        "check_rate": peer.check_permille / 1000,
        "applied_step": peer.applied_step,
        "state_digest": peer.state_digest.hex(),
        "votes_accepted": peer.votes_accepted,
        "samples_per_second": finite(peer.samples_per_second) or 0.0,
        "loss": finite(peer.loss) if peer.votes_accepted else None,
    }


def unconfirmed_words(steps: int, *, anchored: bool) -> str:
    """What `status` and the page say of a run whose newest states no digest confirms; empty if that is usual."""
    if steps < UNCONFIRMED_STEPS_SHOWN:
        return ""
    why = (
        "no anchor reports; look whether it runs"
        if anchored
        else "fewer than half of the electors report the same state"
    )
    return f"the last {steps} steps have no agreed state digest: {why}. An archive of these steps alone proves nothing"


REASONS: Final[Mapping[int, str]] = {
    pb.JoinFailure.JOIN_FAILURE_VERSION: "version",
    pb.JoinFailure.JOIN_FAILURE_DEVICE: "device",
    pb.JoinFailure.JOIN_FAILURE_MEMORY: "memory",
    pb.JoinFailure.JOIN_FAILURE_TOKENIZER: "tokenizer",
    pb.JoinFailure.JOIN_FAILURE_DATA: "data",
    pb.JoinFailure.JOIN_FAILURE_MODEL: "model",
    pb.JoinFailure.JOIN_FAILURE_STATE: "state",
    pb.JoinFailure.JOIN_FAILURE_REFUSED: "refused",
    pb.JoinFailure.JOIN_FAILURE_OTHER: "other",
}
"""The reason as one word."""
FAILURE_ROWS_MAX: Final = 128


def failure_values(found: Iterable[pb.JoinFailures]) -> list[dict[str, Any]]:
    """The counts as JSON values, at most FAILURE_ROWS_MAX."""
    return [
        {
            "reason": REASONS.get(it.reason, "other"),
            "version": printable(it.software_version, VERSION_CHARACTERS_MAX),
            "count": it.count,
        }
        for it in list(found)[:FAILURE_ROWS_MAX]
    ]


def failure_words(rows: Iterable[dict[str, Any]]) -> str:
    """The counts for people, on one line; empty without any."""
    return ", ".join(f"{row['count']} for {row['reason']} (version {row['version']})" for row in rows)


KEY: Final = "swarmentum_runs"
FORMAT: Final = 1
LIST_BYTES_MAX: Final = 4 << 20
RUNS_MAX: Final = 256
AHEAD_SECONDS: Final = 300
"""A time that is further ahead of the reader's was signed with a wrong clock, or is read with one."""
ENTRY_BYTES_MAX: Final = limits.CONFIG_JSON_BYTES_MAX + limits.INVITE_BYTES_MAX + (1 << 16)
FIELDS: Final = (
    "genesis", "phase", "head_step", "total_steps", "loss", "paused", "parameters", "in_line", "changed", "archived",
)  # fmt: skip
"""Of the coordinator's facts: nothing about a peer is published."""


@dataclass(frozen=True)
class PublicRun:
    """A run of a list, as its coordinator signed it. `config`: the settings in force."""

    invite: Invite
    config: RunConfig
    facts: pb.GetRunResponse
    peers: int

    @property
    def places_free(self) -> int:
        """Places that no peer has; 0 in a run that is over."""
        return 0 if self.facts.phase == pb.Phase.PHASE_FINISHED else max(self.config.clock.max_peers - self.peers, 0)

    def values(self) -> dict[str, Any]:
        """As JSON values."""
        config, facts = self.config, self.facts
        model = config.model.factory or (config.model.config or {}).get("model_type", "llama")
        return {
            "run": self.invite.run_id.hex(),
            "name": printable(config.name),
            "phase": phase_word(facts),
            "step": facts.head_step,
            "steps": facts.total_steps,
            "loss": facts.loss if facts.head_step else None,
            "model": printable(str(model)),
            "parameters": facts.parameters or facts.genesis.parameters or None,
            "data": [printable(source) for source, _, _ in config.data.sources()],
            "context": config.data.context,
            "peers": self.peers,
            "places": config.clock.max_peers,
            "places_free": self.places_free,
            "in_line": facts.in_line,
            "admission": config.admission.mode,
            "as_of": facts.unix_ms / 1000,
            "invite": self.invite.link(),
        }


def sealed_run(identity: Identity, invite: Invite, facts: pb.GetRunResponse, unix_ms: int) -> bytes:
    """A run as its coordinator publishes it. `invite`: the link for peers; its ticket does not get into the list."""
    public = pb.GetRunResponse(unix_ms=unix_ms)
    for name in FIELDS:
        if name == "changed":
            public.changed.extend(facts.changed)
        elif name == "genesis":
            public.genesis.CopyFrom(facts.genesis)
        else:
            setattr(public, name, getattr(facts, name))
    peers = sum(1 for peer in facts.peers if peer.phase != pb.PeerPhase.PEER_PHASE_ABSENT and not peer.anchor)
    body = pb.ListedRun(invite=invite.without_ticket().link(), facts=public, peers=peers)
    return seal(identity, Kind.KIND_LISTED_RUN, invite.run_id, body).SerializeToString(deterministic=True)


def list_text(entries: Iterable[bytes]) -> str:
    """The file of these entries."""
    runs = [base64.b64encode(entry).decode("ascii") for entry in entries]
    return json.dumps({KEY: FORMAT, "runs": runs}, indent=1) + "\n"


def open_runs(data: bytes, now: float) -> tuple[list[PublicRun], list[str]]:
    """The runs of a list, in its order, each once and the newest that is signed; and why each other entry is left out.

    A log only grows, so the entry of the highest step is the newest, and of one step the latest: one that is ahead of `now`
    (Unix seconds) would hide all others for as long as that. Raises Refusal for a file that is no list.
    """
    told_ms = 1000 * (now + AHEAD_SECONDS)

    def age(run: PublicRun) -> tuple[int, bool, int]:
        return run.facts.head_step, run.facts.unix_ms <= told_ms, run.facts.unix_ms

    found: dict[bytes, PublicRun] = {}
    left_out: list[str] = []
    for number, text in enumerate(_entries(data), 1):
        try:
            run = open_run(text)
        except Refusal as refusal:
            left_out.append(f"entry {number} is left out: {refusal.detail}")
            continue
        before = found.get(run.invite.run_id)
        if before is None or age(before) < age(run):
            found[run.invite.run_id] = run
    return list(found.values()), left_out


def _entries(data: bytes) -> list[object]:
    if len(data) > LIST_BYTES_MAX:
        raise Refusal(Reason.TOO_LARGE, f"a list of runs has at most {LIST_BYTES_MAX} bytes")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(Reason.MALFORMED, "it is no list of runs: it is no JSON") from error
    form = values.get(KEY) if isinstance(values, dict) else None
    if type(form) is not int or not isinstance(values.get("runs"), list):
        raise Refusal(Reason.MALFORMED, f'it is no list of runs: expected {{"{KEY}": {FORMAT}, "runs": [...]}}')
    if form != FORMAT:
        raise Refusal(
            Reason.MALFORMED, f"it is a list of format {form}, and this version reads {FORMAT}: update swarmentum"
        )
    runs: list[object] = values["runs"]
    if len(runs) > RUNS_MAX:
        raise Refusal(Reason.TOO_MANY, f"it has {len(runs)} runs, and a list has at most {RUNS_MAX}")
    return runs


def open_run(text: object) -> PublicRun:
    """One entry of a list. Raises Refusal for one that is not its coordinator's."""
    if not isinstance(text, str) or len(text) > ENTRY_BYTES_MAX * 4 // 3:
        raise Refusal(Reason.TOO_LARGE, f"expected text of at most {ENTRY_BYTES_MAX * 4 // 3} characters")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise Refusal(Reason.MALFORMED, "it is no base64") from error
    run_id = parse(envelope_pb2.SignedEnvelope, data).run_id
    opened = open_envelope(data, kind=Kind.KIND_LISTED_RUN, run_id=run_id, bytes_max=ENTRY_BYTES_MAX)
    body = parse(pb.ListedRun, opened.body)
    facts, genesis = body.facts, body.facts.genesis
    named = f"run {run_id.hex()[:16]}"
    if run_id_of(genesis) != run_id:
        raise Refusal(Reason.WRONG_RUN, f"it says that it is {named}, and defines another run")
    if genesis.coordinator_public_key != opened.public_key:
        raise Refusal(Reason.UNKNOWN_SIGNER, f"{named}: another key than its coordinator's signed it")
    try:
        invite = Invite.parse(body.invite)
    except OperatorError as error:
        raise Refusal(Reason.MALFORMED, f"{named}: {error}") from error
    if (invite.run_id, invite.coordinator_public_key) != (run_id, opened.public_key):
        raise Refusal(Reason.WRONG_RUN, f"{named}: its link is of another run")
    numbers = (facts.head_step, facts.total_steps, facts.unix_ms)
    most = (limits.STEP_MAX, limits.STEP_MAX, limits.UNIX_MS_MAX)
    if any(number > bound for number, bound in zip(numbers, most, strict=True)) or not math.isfinite(facts.loss):
        raise Refusal(Reason.OUT_OF_RANGE, f"{named}: a figure is out of range")
    config = in_force(config_from_json(genesis.config_json), facts.changed)
    return PublicRun(invite.without_ticket(), config, facts, body.peers)
