"""A watcher's output: JSON lines for programs, a line a step for pipes, a live table for people. Decides nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.watch.supervisor import OverlayStatus
from node.watch.watched_run import AnnouncementSeen, EntrySeen, Event, Refused, Watch
from protos.end import End
from protos.identity import peer_id, short
from protos.json_line import print_json
from protos.text import printable

ROWS_MAX = 24
REFRESHES_PER_SECOND = 4


@dataclass
class Scene:
    """The values to show."""

    name: str
    watch: Watch
    total_steps: int | None = None
    end: End | None = None
    overlay: OverlayStatus = OverlayStatus(0, 0)  # noqa: RUF009 - frozen
    coordinator: str = "asking"


class Screen(Protocol):
    """One way of printing."""

    def show(self, event: Event) -> None: ...

    def overlay(self, status: OverlayStatus) -> None: ...

    def tick(self) -> None: ...

    def end(self, summary: dict[str, Any]) -> None: ...


def choose(scene: Scene, *, as_json: bool) -> Screen:
    """JSON on request, a live table on a terminal, otherwise plain lines."""
    if as_json:
        return JsonScreen()
    console = Console()
    return LiveScreen(scene, console) if console.is_terminal else PlainScreen(scene)


def volume(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


class JsonScreen:
    """One object a line: `entry`, `announcement`, `refused`, `overlay`, and `summary` as the last."""

    def show(self, event: Event) -> None:
        self._print(_as_json(event))

    def overlay(self, status: OverlayStatus) -> None:
        told = {"peers": status.peers, "restarts": status.restarts, "problem": status.problem}
        self._print({"event": "overlay", **told})

    def tick(self) -> None:
        """Lines need no drawing."""

    def end(self, summary: dict[str, Any]) -> None:
        self._print(summary)

    def _print(self, fields: dict[str, Any]) -> None:
        print_json(fields)


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


def _line(scene: Scene, event: EntrySeen) -> str:
    entry = event.signed.entry
    size = sum(c.payload_bytes for c in entry.contributions)
    return (
        f"step {entry.step}/{scene.total_steps or '?'}  loss {event.loss:.4f}  peers {len(entry.contributions)}  "
        f"votes {volume(size)}  lr {entry.lr:.2e}  entry {event.signed.hash.hex()[:12]}  by {event.source.value}"
    )


def _closing(summary: dict[str, Any]) -> str:
    refused = ", ".join(f"{count} {reason}" for reason, count in summary["refused"].items()) or "nothing"
    entries = f"{summary['entries']} entries ({summary['entries_gossip']} by gossip)"
    return (
        f"{summary['why']}: step {summary['head_step']}, {entries}, {summary['announcements']} announcements "
        f"({summary['late']} late), refused: {refused}. Every signature and the chain were checked"
        + (f" from step {summary['anchored_at']} on." if summary["anchored_at"] else " from the first step.")
    )


class PlainScreen:
    """A line a step. For each reason, it prints the first refusal and then the refusals at powers of two."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def show(self, event: Event) -> None:
        if isinstance(event, EntrySeen):
            print(_line(self._scene, event), flush=True)
        elif isinstance(event, Refused) and event.count & (event.count - 1) == 0:
            print(f"refused ({event.count} so far): {event.reason.value}: {printable(event.detail)}", flush=True)

    def overlay(self, status: OverlayStatus) -> None:
        why = f" ({printable(status.problem)})" if status.problem else ""
        print(f"overlay: {status.peers} peers, {status.restarts} restarts{why}", flush=True)

    def tick(self) -> None:
        """Lines need no drawing."""

    def end(self, summary: dict[str, Any]) -> None:
        print(_closing(summary), flush=True)


class LiveScreen:
    """A table drawn from the scene, at most REFRESHES_PER_SECOND times a second."""

    def __init__(self, scene: Scene, console: Console) -> None:
        self._scene, self._console = scene, console
        self._drawn = 0.0
        self._live = Live(_picture(scene), console=console, auto_refresh=False)
        self._live.start()

    def show(self, event: Event) -> None:
        """Do nothing: `tick` draws the scene."""

    def overlay(self, status: OverlayStatus) -> None:
        """Do nothing: `tick` draws the scene."""

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._drawn >= 1 / REFRESHES_PER_SECOND:
            self._drawn = now
            self._live.update(_picture(self._scene), refresh=True)

    def end(self, summary: dict[str, Any]) -> None:
        self._live.update(_picture(self._scene), refresh=True)
        self._live.stop()
        self._console.print(_closing(summary), highlight=False, markup=False)


def _picture(scene: Scene) -> Group:
    watch = scene.watch
    head = Text(_line(scene, watch.last) if watch.last else "waiting for the first entry", style="bold")
    refused = ", ".join(f"{n} {reason.value}" for reason, n in watch.tally.refused.items()) or "nothing"
    coordinator = printable(scene.coordinator)
    note = Text(
        f"overlay: {scene.overlay.peers} peers, {scene.overlay.restarts} restarts | coordinator: {coordinator} | "
        f"{watch.tally.announcements} announcements, {watch.tally.late} late | refused: {refused}",
        style="dim",
    )
    table = Table(
        "peer",
        "announced",
        "payload",
        "loss",
        "compute",
        "votes accepted",
        "late",
        title=Text(f"Run {printable(scene.name)}"),
    )
    rows = sorted(watch.peers.items(), key=lambda item: -item[1].votes_accepted)
    for key, row in rows[:ROWS_MAX]:
        table.add_row(
            short(key),
            str(row.announced_step or "-"),
            volume(row.payload_bytes),
            f"{row.loss:.4f}",
            f"{row.compute_ms / 1000:.1f} s",
            str(row.votes_accepted),
            str(row.late),
        )
    if len(rows) > ROWS_MAX:
        table.caption = f"and {len(rows) - ROWS_MAX} more"
    return Group(head, table, note)
