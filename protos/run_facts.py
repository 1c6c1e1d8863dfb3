"""A coordinator's facts about a run, made safe to show: a hostile coordinator, or one of a newer version, ends no command.

An answer may have 23 MB, so a reader takes as many rows as an honest coordinator sends, and leaves out rows whose keys are
none. Refuses nothing: words and numbers that this version does not know are shown as `unknown`.

Why peers could not join is told by strangers, so nothing follows from it. ADR 21.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from protos.accounts import Owner
from protos.identity import peer_id
from protos.limits import DEVICE_CHARACTERS_MAX, PUBLIC_KEY_BYTES
from protos.run_config import RunConfig
from protos.text import finite, printable
from protos.v1 import coordinator_pb2 as pb
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
