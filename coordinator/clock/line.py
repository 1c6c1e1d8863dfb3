"""The line before a full run: first come, first served. Pure: the time comes with each question, in milliseconds.

A peer that asks to join a full run gets a place in the line, and keeps it by asking again. When the run has a place for the
peer, the line *calls* it: that place is kept while the peer builds its model. A peer that is silent, or that does not come when
it is called, loses its place. Identities are free, so a block of network addresses has a part of the line only. ADR 48.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.clock.state import PeerPhase, Run
from coordinator.clock.values import replace

SILENT_MS_MAX = 5 * 60_000
"""A peer asks every 20 s. A restart of the peer, or of the coordinator, takes less than this."""
CALLED_MS_MAX = 20 * 60_000
"""A peer that is called downloads a tokenizer and builds its model meanwhile."""
LINE_MAX = 256


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


def asked(line: Line, key: bytes, network: str, free: int, block_max: int, now_ms: int) -> Turn:
    """A peer asks for a place of the run, which has `free` places for peers that are not in it.

    `line`: without peers that are gone (`waiting`). `block_max`: places of the line for one block of network addresses. It is
    that of the run itself, because each peer that is called keeps a place of the run.
    """
    here = dict(line)
    if key not in here and not here and free > 0:
        return Turn(here, 0, 0)
    mine = here.get(key)
    if mine is None:
        block = sum(bool(network) and other.network == network for other in here.values())
        if len(here) >= LINE_MAX or block >= block_max:
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


def may_come(line: Line, key: bytes, free: int) -> bool:
    """Whether a peer that joins takes no place that is kept for another peer. `line`: as in `asked`."""
    ahead = list(line).index(key) if key in line else len(line)
    return ahead < free


def waiting(line: Line, run: Run, now_ms: int) -> Line:
    """The line without the peers that are silent, that did not come when they were called, or that have a place of the run by
    now. A peer has one when it follows the log."""
    return {key: it for key, it in line.items() if not (_gone(it, now_ms) or _is_in(run, key))}


def _is_in(run: Run, key: bytes) -> bool:
    peer = run.peers.get(key)
    return peer is not None and peer.phase is not PeerPhase.ABSENT


def _gone(waiting: Waiting, now_ms: int) -> bool:
    if waiting.called_ms is not None:
        return now_ms - waiting.called_ms > CALLED_MS_MAX
    return now_ms - waiting.asked_ms > SILENT_MS_MAX
