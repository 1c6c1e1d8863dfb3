"""`python -m tests.system.lying_aggregator INVITE HOME [KEY KEY]`: a peer as `swarmentum join` starts it, whose sums leave all
votes but one out. With the public keys of two peers (hex), only where both add up the same range: then their sum counts."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.app import join
from node.building import LateDoor
from node.config import PeerSettings
from node.swarm.vote_sums import Aggregator
from protos.console import configure_logging, exit_with
from protos.slices import Update

honest, honest_part, honest_work = LateDoor.aggregate, LateDoor.part, Aggregator._add_up
forgers = {bytes.fromhex(key) for key in sys.argv[3:]}
false_ranges: set[int] = set()


def aggregate(door: LateDoor, updates: Sequence[Update], step: int) -> bytes:
    """The first payload alone."""
    lies = not forgers or vars(door).get("number", 0) in false_ranges
    return honest(door, updates[:1] if lies else updates, step)


def part(door: LateDoor, number: int) -> LateDoor:
    found = honest_part(door, number)
    vars(found)["number"] = number
    return found


async def add_up(peer: Aggregator, step: int, *rest: Any) -> None:
    rows = peer._view.by_range(step)
    false_ranges.clear()
    false_ranges.update(number for number, keys in enumerate(rows) if forgers <= {*keys})
    await honest_work(peer, step, *rest)


def main() -> None:
    configure_logging(as_json=True)
    join(sys.argv[1], PeerSettings(home=Path(sys.argv[2]), listen="127.0.0.1:0", threads=1, allow=["code", "data"]))


if __name__ == "__main__":
    LateDoor.aggregate, LateDoor.part = aggregate, part  # type: ignore[method-assign]
    Aggregator._add_up = add_up  # type: ignore[method-assign]
    exit_with(main)
