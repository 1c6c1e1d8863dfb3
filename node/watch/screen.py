"""A watcher's output: JSON lines for programs, a line a step for people. Decides nothing."""

from __future__ import annotations

from typing import Any

from node.watch.net import OverlayStatus
from node.watch.watched_run import AnnouncementSeen, EntrySeen, Event, Refused
from protos.amounts import amount
from protos.identity import peer_id
from protos.json_line import print_json
from protos.text import printable


def show(event: Event, total_steps: int | None, *, as_json: bool) -> None:
    """Print an event. People get entries, and of each reason the first refusal and those at powers of two."""
    if as_json:
        print_json(_as_json(event))
    elif isinstance(event, EntrySeen):
        print(_line(event, total_steps), flush=True)
    elif isinstance(event, Refused) and event.count & (event.count - 1) == 0:
        print(f"refused ({event.count} so far): {event.reason.value}: {printable(event.detail)}", flush=True)


def show_overlay(status: OverlayStatus, *, as_json: bool) -> None:
    if as_json:
        told = {"peers": status.peers, "restarts": status.restarts, "problem": status.problem}
        print_json({"event": "overlay", **told})
        return
    why = f" ({printable(status.problem)})" if status.problem else ""
    print(f"overlay: {status.peers} peers, {status.restarts} restarts{why}", flush=True)


def show_end(summary: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        print(_closing(summary), flush=True)


def _as_json(event: Event) -> dict[str, Any]:
    if isinstance(event, EntrySeen):
        entry = event.signed.entry
        return {
            "event": "entry",
            "step": entry.step,
            "hash": event.signed.hash.hex(),
            "parent_hash": entry.parent_hash.hex(),
            "parent_state_digest": entry.parent_state_digest.hex(),
            "lr": entry.lr,
            "loss": event.loss,
            "source": event.source.value,
            "announced": event.announced,
            "contributions": [
                {
                    "peer": peer_id(c.public_key),
                    "payload_sha256": c.payload_sha256.hex(),
                    "payload_bytes": c.payload_bytes,
                    "samples": c.samples,
                    "tokens": c.tokens,
                    "loss": c.loss,
                }
                for c in entry.contributions
            ],
        }
    if isinstance(event, AnnouncementSeen):
        return {
            "event": "announcement",
            "step": event.step,
            "peer": peer_id(event.author),
            "payload_sha256": event.payload_sha256.hex(),
            "payload_bytes": event.payload_bytes,
            "samples": event.samples,
            "tokens": event.tokens,
            "loss": event.loss,
            "compute_ms": event.compute_ms,
            "late": event.late,
        }
    return {"event": "refused", "reason": event.reason.value, "detail": event.detail, "count": event.count}


def _line(event: EntrySeen, total_steps: int | None) -> str:
    entry = event.signed.entry
    size = sum(c.payload_bytes for c in entry.contributions)
    return (
        f"step {entry.step}/{total_steps or '?'}  loss {event.loss:.4f}  peers {len(entry.contributions)}  "
        f"votes {amount(size)}  lr {entry.lr:.2e}  entry {event.signed.hash.hex()[:12]}  by {event.source.value}"
    )


def _closing(summary: dict[str, Any]) -> str:
    refused = ", ".join(f"{count} {reason}" for reason, count in summary["refused"].items()) or "nothing"
    entries = f"{summary['entries']} entries ({summary['entries_gossip']} by gossip)"
    return (
        f"{summary['why']}: step {summary['head_step']}, {entries}, {summary['announcements']} announcements "
        f"({summary['late']} late), refused: {refused}. Every signature and the chain were checked"
        + (f" from step {summary['anchored_at']} on." if summary["anchored_at"] else " from the first step.")
    )
