"""A public list of runs: a JSON file that anybody can host. Each run in it is signed by that run's own coordinator.

`{"swarmentum_runs": 1, "runs": [...]}`: each run is a SignedEnvelope of KIND_LISTED_RUN in base64, so lists of several
coordinators can be joined. `open_runs` is the door. An entry has the run's genesis, whose hash is the run id, and the genesis
names the key: nobody else can say what the run trains. Refuses to believe what a host writes beside the entries.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from protos import limits
from protos.changes import in_force
from protos.envelope import Kind, open_envelope, parse, seal
from protos.errors import OperatorError, Reason, Refusal
from protos.identity import Identity
from protos.invite import Invite
from protos.log import run_id_of
from protos.run_config import RunConfig, config_from_json
from protos.run_facts import phase_word
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2

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
