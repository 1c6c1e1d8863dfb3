"""The phase of a run in one word, the same in `status`, `run list`, the page and the metrics."""

from __future__ import annotations

from protos.v1 import coordinator_pb2 as pb

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
