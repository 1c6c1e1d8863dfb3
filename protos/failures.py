"""Why peers could not join a run, in the words of people and metrics. Strangers tell it, so nothing follows from it. ADR 21."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from protos.text import printable
from protos.v1 import coordinator_pb2 as pb
from protos.version import VERSION_CHARACTERS_MAX

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
ROWS_MAX: Final = 128


def failure_values(found: Iterable[pb.JoinFailures]) -> list[dict[str, Any]]:
    """The counts as JSON values, at most ROWS_MAX."""
    return [
        {
            "reason": REASONS.get(it.reason, "other"),
            "version": printable(it.software_version, VERSION_CHARACTERS_MAX),
            "count": it.count,
        }
        for it in list(found)[:ROWS_MAX]
    ]


def failure_words(rows: Iterable[dict[str, Any]]) -> str:
    """The counts for people, on one line; empty without any."""
    return ", ".join(f"{row['count']} for {row['reason']} (version {row['version']})" for row in rows)
