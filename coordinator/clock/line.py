"""The line before a full run: first come, first served. Pure: the time comes with each question, in milliseconds.

A peer that asks to join a full run gets a place in the line, and keeps it by asking again. When the run has a place for the
peer, the line *calls* it: that place is kept while the peer builds its model. A peer that is silent, or that does not come when
it is called, loses its place. Identities are free, so a block of network addresses has a part of the line only. ADR 48.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.clock.state import PeerPhase, Run

SILENT_MS_MAX = 5 * 60_000
"""A peer asks every 20 s. A restart of the peer, or of the coordinator, takes less than this."""
CALLED_MS_MAX = 20 * 60_000
"""A peer that is called downloads a tokenizer and builds its model meanwhile."""
LINE_MAX = 256
BLOCK_MAX = 32
"""Places of the line that one block of network addresses may take."""


@dataclass(frozen=True)
class Waiting:
    """One peer of the line. `network`: its block of network addresses, or empty."""

    network: str
    asked_ms: int
    called_ms: int | None = None
    """Since when a place of the run is kept for it."""


Line = Mapping[bytes, Waiting]
"""By public key, in the order in which they came."""


@dataclass(frozen=True)
class Turn:
    """What the line says to a peer. `place`: 0 if the peer may join now; else its place, counted from 1."""

    line: Line
    place: int
    length: int
    reason: str = ""


def asked(line: Line, key: bytes, network: str, free: int, now_ms: int) -> Turn:
    """A peer asks for a place of the run, which has `free` places for peers that are not in it."""
    here = fresh(line, now_ms)
    if key not in here and not here and free > 0:
        return Turn(here, 0, 0)
    mine = here.get(key)
    if mine is None:
        block = sum(bool(network) and other.network == network for other in here.values())
        if len(here) >= LINE_MAX or block >= BLOCK_MAX:
            many = (
                f"{len(here)} peers wait in line"
                if len(here) >= LINE_MAX
                else f"{block} peers of your network wait in line"
            )
            return Turn(here, len(here) + 1, len(here), f"the run is full, and {many}, as many as there may be")
        mine = Waiting(network, now_ms)
    mine = replace(mine, asked_ms=now_ms)
    here = {**here, key: mine}
    ahead = list(here).index(key)
    if ahead < free:
        return Turn({**here, key: replace(mine, called_ms=mine.called_ms or now_ms)}, 0, len(here))
    place = ahead - max(free, 0) + 1
    reason = f"the run is full; this peer is number {place} of {len(here) - max(free, 0)} in line"
    return Turn({**here, key: replace(mine, called_ms=None)}, place, len(here), reason)


def may_come(line: Line, key: bytes, free: int, now_ms: int) -> bool:
    """Whether a peer that joins takes no place that is kept for another peer."""
    here = fresh(line, now_ms)
    ahead = list(here).index(key) if key in here else len(here)
    return ahead < free


def outside(line: Line, run: Run) -> Line:
    """The line without the peers that have a place of the run by now. A peer has one when it follows the log."""
    return {key: it for key, it in line.items() if key not in run.peers or run.peers[key].phase is PeerPhase.ABSENT}


def fresh(line: Line, now_ms: int) -> dict[bytes, Waiting]:
    """The line without the peers that are silent, or that did not come when they were called."""
    return {key: waiting for key, waiting in line.items() if not _gone(waiting, now_ms)}


def _gone(waiting: Waiting, now_ms: int) -> bool:
    if waiting.called_ms is not None:
        return now_ms - waiting.called_ms > CALLED_MS_MAX
    return now_ms - waiting.asked_ms > SILENT_MS_MAX
