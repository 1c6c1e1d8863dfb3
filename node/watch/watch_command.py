"""`swarmentum watch <invite>`: follow a run from outside, check everything, print what is seen.

The loop takes values from one bounded queue and gives them to the view. The loop prints the view's events. The values come
from the overlay's thread and the coordinator's reader. The loop needs neither source while the other serves.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import signal
import sys
import time
from functools import partial
from typing import Any, TypeAlias

from node.watch.net import Gossiped, Overlay, OverlayStatus
from node.watch.reader import Away, Denied, LogPage, LogReader, WatchedRun
from node.watch.watched_run import AnnouncementSeen, EntrySeen, EntrySource, Event, Refused, Watch
from protos.errors import NetworkError, OperatorError, SwarmentumError
from protos.identity import peer_id
from protos.invite import Invite
from protos.orders import End
from protos.process import EXIT_INTERRUPTED
from protos.text import amount, print_json, printable

INBOX_MAX = 1024
PUT_SECONDS_MAX = 1.0
WAKE_SECONDS = 0.25
# The watcher gives up when neither the coordinator nor an overlay peer has answered for this long.
PATIENCE_SECONDS = 60.0
NEEDS_EXTRA = (
    "swarmentum watch needs the extra: pip install '.[watch]' in the folder of the repository "
    "(on Linux: gcc and libgmp-dev first)"
)

News: TypeAlias = Gossiped | OverlayStatus | WatchedRun | LogPage | Away | Denied


def run(invite_link: str, *, as_json: bool, steps: int | None, seconds: float | None) -> int:
    """Watch until the run is finished, `steps` entries were seen or `seconds` have passed: 0; on Ctrl-C: 130.

    Raises an error after the summary. OperatorError: the link is wrong, or the extra is not installed. NetworkError: nothing
    can be reached. RefusedError: the coordinator serves another run. DivergedError: the coordinator signed two histories.
    """
    invite = Invite.parse(invite_link)
    if importlib.util.find_spec("libp2p") is None:
        raise OperatorError(NEEDS_EXTRA)
    try:
        return _Follower(invite, as_json=as_json).run(steps, seconds)
    except BrokenPipeError:  # the reader of this output has gone, so the watcher ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def topic_of(run_id: bytes) -> str:
    """GossipSub topic of a run (docs/protocol.md)."""
    return f"swarmentum/v1/{run_id.hex()}"


class _Follower:
    """The loop, and its state between two values."""

    def __init__(self, invite: Invite, *, as_json: bool) -> None:
        self._invite, self._as_json = invite, as_json
        self._watch = Watch(invite.run_id, invite.coordinator_public_key)
        self._total_steps: int | None = None
        self._end: End | None = None
        self._status = OverlayStatus(0, 0)
        self._coordinator = "asking"
        self._inbox: queue.Queue[News] = queue.Queue(INBOX_MAX)
        self._overlay = Overlay(topic_of(invite.run_id), partial(self._put, seconds=0.0))
        self._reader = LogReader(invite, self._put)
        self._asked: int | None = None
        self._contact = time.monotonic()

    def _put(self, news: News, seconds: float = PUT_SECONDS_MAX) -> bool:
        try:
            self._inbox.put(news, timeout=seconds)
        except queue.Full:
            return False
        return True

    def run(self, steps: int | None, seconds: float | None) -> int:
        until = time.monotonic() + seconds if seconds is not None else None
        why, code = "stopped", 1
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a supervisor's stop acts as Ctrl-C
        self._overlay.dial(self._invite.bootstrap)
        self._overlay.start()
        self._reader.start()
        try:
            why, code = self._follow(steps, until), 0
        except KeyboardInterrupt:
            why, code = "interrupted", EXIT_INTERRUPTED
        except SwarmentumError as error:
            why, code = str(error), error.exit_code
            raise
        finally:
            self._overlay.stop()
            self._reader.stop()
            show_end(self._summary(why, code), as_json=self._as_json)
        return code

    def _follow(self, steps: int | None, until: float | None) -> str:
        """Watch until there is nothing more to watch. Returns why it ended."""
        while True:
            if self._total_steps is not None and self._watch.head[0] >= self._total_steps:
                return str(self._end) if self._end is not None else "the run is finished"
            if steps is not None and self._watch.tally.entries_all >= steps:
                return f"{steps} steps were seen"
            now = time.monotonic()
            if until is not None and now >= until:
                return "the time is over"
            if now - self._contact > PATIENCE_SECONDS:
                raise NetworkError(
                    f"neither the coordinator nor an overlay peer answers for {PATIENCE_SECONDS:.0f} s "
                    f"(coordinator: {self._coordinator}; overlay: {self._status.problem or 'no peers'})"
                )
            try:
                news = self._inbox.get(timeout=WAKE_SECONDS)
            except queue.Empty:
                continue
            for event in self._handle(news):
                show(event, self._total_steps, as_json=self._as_json)
            self._ask()

    def _handle(self, news: News) -> list[Event]:
        if isinstance(news, Gossiped):
            self._contact = time.monotonic()
            events = (
                self._watch.receive(news.data) if news.data is not None else self._watch.refuse_oversized(news.size)
            )
            return events + (self._watch.anchor() if self._coordinator.startswith("away") else [])
        if isinstance(news, OverlayStatus):
            self._handle_status(news)
            return []
        if isinstance(news, Denied):
            raise news.error
        if isinstance(news, Away):
            return self._handle_away(news)
        self._contact = time.monotonic()
        self._asked = None  # the watcher may ask again for entries that the last page lacked
        self._watch.told_head(news.head_step)
        if isinstance(news, WatchedRun):
            self._coordinator = news.reason or "answers"
            self._end = news.end
            self._total_steps = news.total_steps if news.end or news.total_steps else news.config.clock.steps
            self._overlay.dial(tuple(dict.fromkeys([*self._invite.bootstrap, *news.bootstrap])))
            return self._watch.begin(news.config.operators)
        return [event for entry in news.entries for event in self._watch.receive_listed(entry)]

    def _handle_status(self, status: OverlayStatus) -> None:
        if status.fatal and "cannot be imported" in status.problem:
            raise OperatorError(f"{NEEDS_EXTRA}; {status.problem}")
        if status.peers:
            self._contact = time.monotonic()
        if status != self._status:
            self._status = status
            show_overlay(status, as_json=self._as_json)

    def _handle_away(self, away: Away) -> list[Event]:
        if self._coordinator == "asking" and not self._invite.bootstrap:
            raise away.error  # nothing to start from
        self._coordinator = f"away ({away.error})"
        return self._watch.anchor()

    def _ask(self) -> None:
        """Have the reader fetch missing entries: one request, until the reader has answered it."""
        wanted = self._watch.wanted()
        if wanted is not None and wanted != self._asked:
            self._asked = wanted
            self._reader.ask(wanted)

    def _summary(self, why: str, code: int) -> dict[str, Any]:
        watch, tally = self._watch, self._watch.tally
        step, digest = watch.head
        return {
            "event": "summary",
            "why": why,
            "exit_code": code,
            "run": watch.run_id.hex(),
            "step": step,
            "head": digest.hex(),
            "steps": self._total_steps,
            "anchored_at": watch.anchored_at,
            "entries": tally.entries_all,
            "entries_gossip": tally.entries[EntrySource.GOSSIP],
            "entries_coordinator": tally.entries[EntrySource.COORDINATOR],
            "announcements": tally.announcements,
            "late": tally.late,
            "repeated": tally.repeated,
            "lost": self._overlay.lost,
            "refused": {reason.value: count for reason, count in tally.refused.items()},
            "overlay_peers": self._status.peers,
            "overlay_restarts": self._overlay.restarts,
            "peers": [
                {
                    "id": peer_id(key),
                    "announced_step": row.announced_step,
                    "payload_bytes": row.payload_bytes,
                    "payload_bytes_accepted": row.payload_bytes_accepted,
                    "votes_accepted": row.votes_accepted,
                    "loss": row.loss,
                    "late": row.late,
                }
                for key, row in watch.peers.items()
            ],
        }


# A watcher's output: JSON lines for programs, a line a step for people. Decides nothing.


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
        f"{summary['why']}: step {summary['step']}, {entries}, {summary['announcements']} announcements "
        f"({summary['late']} late), refused: {refused}. Every signature and the chain were checked"
        + (f" from step {summary['anchored_at']} on." if summary["anchored_at"] else " from the first step.")
    )
