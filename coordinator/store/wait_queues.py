"""The lines before full runs: first come, first served. The time comes with each question, in milliseconds. ADR 18.

A peer that asks to join a full run gets a place in the line, and keeps it by asking again. When the run has a place for the
peer, the line *calls* it: that place is kept while the peer builds its model. A peer that is silent, or that does not come when
it is called, loses its place. Identities are free, so a block of network addresses has a part of the line only. A ticket is
used by a join alone, so the peers that show one ticket have as many places as it has uses left.

A line is no part of a run: no entry depends on it. The journal keeps one row for each run, so that neither a restart nor a
take-over costs anybody a place. The hub writes it, at most once a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from coordinator.clock.admission import block_places, needs_ticket
from coordinator.clock.state import PeerPhase, Run
from coordinator.clock.value_copy import replace
from protos.invite import Ticket
from protos.limits import FULL
from protos.text import duration

SILENT_MS_MAX = 5 * 60_000
"""A peer asks every 20 s. A restart of the peer, or of the coordinator, takes less than this."""
CALLED_MS_MAX = 20 * 60_000
"""A peer that is called downloads a tokenizer and builds its model meanwhile."""
LINE_MAX = 256
MS = 1000
INVITE = "invite "
CALLS_KEPT = 16
"""The expected wait follows from the pace of so many last calls."""


@dataclass(frozen=True)
class QueuedPeer:
    """One peer of the line. `part`: what it shares with others that have a part of the line only, or empty (`part_of`)."""

    part: str
    asked_ms: int
    called_ms: int | None = None
    """Since when a place of the run is kept for it."""


@dataclass(frozen=True)
class QueuePace:
    """How fast a line moves: since when somebody waits in it, and when its last peers were called (at most CALLS_KEPT)."""

    since_ms: int
    called_ms: tuple[int, ...] = ()


Line = Mapping[bytes, QueuedPeer]
"""By public key, in the order in which they came."""


@dataclass(frozen=True)
class Turn:
    """What the line says to a peer. `place`: 0 if the peer may join now; else its place, counted from 1."""

    line: Line
    place: int
    length: int
    reason: str = ""


def part_of(run: Run, key: bytes, ticket: Ticket | None, network: str) -> tuple[str, int]:
    """(part of the line, its places) of a peer; an empty part has no limit.

    In an open run it is the block of network addresses, with as many places as it may have of the run itself, because each peer
    that is called keeps a place of the run. In a run by invite it is the ticket of a peer that has used none yet.
    """
    if run.config.admission.mode == "open":
        return network, block_places(run)
    if ticket is None or not needs_ticket(run, key):
        return "", LINE_MAX
    used = sum(came_with == ticket.ticket_id for came_with in run.guests.values())
    return f"{INVITE}{ticket.ticket_id.hex()}", ticket.uses - used


def asked(line: Line, key: bytes, part: str, free: int, part_max: int, now_ms: int) -> Turn:
    """A peer asks for a place of the run, which has `free` places for peers that are not in it.

    `line`: without peers that are gone (`waiting`). `part_max`: places of the line for one part (`part_of`).
    """
    here = dict(line)
    if key not in here and not here and free > 0:
        return Turn(here, 0, 0)
    mine = here.get(key)
    if mine is None:
        same = sum(bool(part) and other.part == part for other in here.values())
        if len(here) >= LINE_MAX or same >= part_max:
            whose = "with your invite" if part.startswith(INVITE) else "of your network"
            many = f"{len(here)} peers" if len(here) >= LINE_MAX else f"{same} peers {whose}"
            reason = f"{FULL}, and {many} wait in line, as many as there may be"
            return Turn(here, len(here) + 1, len(here), reason)
        mine = QueuedPeer(part, now_ms)
    mine = replace(mine, asked_ms=now_ms)
    here = {**here, key: mine}
    ahead = list(here).index(key)
    if ahead < free:
        return Turn({**here, key: replace(mine, called_ms=mine.called_ms or now_ms)}, 0, len(here))
    place = ahead - max(free, 0) + 1
    reason = f"{FULL}; this peer is number {place} of {len(here) - max(free, 0)} in line"
    return Turn({**here, key: replace(mine, called_ms=None)}, place, len(here), reason)


def moved(pace: QueuePace | None, before: Line, after: Line, now_ms: int) -> QueuePace | None:
    """The pace after a question that turned one line into another. An empty line has none."""
    if not after:
        return None
    pace = pace or QueuePace(now_ms)
    called = [key for key, it in after.items() if it.called_ms is not None]
    new = sum(key not in before or before[key].called_ms is None for key in called)
    return replace(pace, called_ms=(*pace.called_ms, *[now_ms] * new)[-CALLS_KEPT:])


def expected(pace: QueuePace, place: int, now_ms: int) -> str:
    """How long a peer at this place will wait, in words. Refuses to guess before anybody was called."""
    calls = len(pace.called_ms)
    if not calls:
        since = duration((now_ms - pace.since_ms) / MS)
        return f"the expected wait is not known: nobody has left the run in the {since} since the line began"
    begin = pace.since_ms if calls < CALLS_KEPT else pace.called_ms[0]
    wait = place * (now_ms - begin) / calls
    return f"expected wait: about {duration(wait / MS)}, at the pace of the last {calls} places that became free"


def may_come(line: Line, key: bytes, free: int) -> bool:
    """Whether a peer that joins takes no place that is kept for another peer. `line`: as in `asked`."""
    ahead = list(line).index(key) if key in line else len(line)
    return ahead < free


def waiting(line: Line, run: Run, now_ms: int) -> Line:
    """The line without the peers that are silent, that did not come when they were called, or that have a place of the run by
    now. A peer has one when it follows the log. A peer with accepted votes needs no turn (`admission.needs_turn`)."""
    return {key: it for key, it in line.items() if not (_gone(it, now_ms) or _is_in(run, key))}


def _is_in(run: Run, key: bytes) -> bool:
    peer = run.peers.get(key)
    return peer is not None and (peer.phase is not PeerPhase.ABSENT or peer.votes_accepted > 0)


def _gone(waiting: QueuedPeer, now_ms: int) -> bool:
    if waiting.called_ms is not None:
        return now_ms - waiting.called_ms > CALLED_MS_MAX
    return now_ms - waiting.asked_ms > SILENT_MS_MAX


FILE = "lines.json"
"""Where earlier versions kept the lines, in the coordinator's home."""
FILE_BYTES_MAX = 1 << 22
RETURN_MS_MAX = 60_000
"""After a start, the peers that were in the run come back within this time."""


class WaitQueues:
    """By run id, as they were when this coordinator began to act (`kept`), and since."""

    def __init__(self, now_ms: int = -RETURN_MS_MAX, kept: Mapping[bytes, bytes] | None = None) -> None:
        self._lines: dict[bytes, Line] = {}
        self._paces: dict[bytes, QueuePace | None] = {}
        self._read_ms = now_ms
        self._changed: set[bytes] = set()
        for run_id, body in (kept or {}).items():
            if line := _read(body, now_ms):
                self._lines[run_id] = line

    def of(self, run_id: bytes) -> Line:
        """The line before a run."""
        return self._lines.get(run_id, {})

    def waits_for_members(self, now_ms: int) -> bool:
        """Whether the coordinator started so recently that places that look free may belong to peers that come back."""
        return now_ms - self._read_ms < RETURN_MS_MAX

    def keep(self, run_id: bytes, line: Line, now_ms: int) -> QueuePace | None:
        """The line is this now. Returns the line's pace since this start."""
        before = self.of(run_id)
        if _rows(before) != _rows(line):
            self._changed.add(run_id)
        pace = self._paces[run_id] = moved(self._paces.get(run_id), before, line, now_ms)
        self._lines[run_id] = line
        if not line:
            del self._lines[run_id], self._paces[run_id]
        return pace

    @property
    def changed(self) -> list[bytes]:
        """The runs of which the journal has another line."""
        return sorted(self._changed)

    def taken(self, run_id: bytes) -> bytes:
        """The line for the journal, which counts as written unless `unwritten` follows; empty if nobody is in it."""
        self._changed.discard(run_id)
        line = self.of(run_id)
        return json.dumps(_rows(line)).encode() if line else b""

    def unwritten(self, run_id: bytes) -> None:
        """The journal did not take this line."""
        self._changed.add(run_id)


def _rows(line: Line) -> list[list[object]]:
    return [[key.hex(), waiting.part, waiting.called_ms is not None] for key, waiting in line.items()]


def _read(body: bytes, now_ms: int) -> Line:
    """Times begin anew: the time while no coordinator acted does not count. Bytes that are no line cost the places in it."""
    try:
        return {
            bytes.fromhex(key): QueuedPeer(str(part), now_ms, now_ms if called and called[0] else None)
            for key, part, *called in json.loads(body)[:LINE_MAX]
        }
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        log = structlog.get_logger("coordinator")
        log.warning("the line before a full run cannot be read; it begins anew", step=0, peer="-", why=str(error))
        return {}


def from_file(data: bytes) -> dict[bytes, bytes]:
    """The lines of a file of an earlier version; a file that cannot be read has none."""
    try:
        return {bytes.fromhex(run_id): json.dumps(line).encode() for run_id, line in json.loads(data).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
