"""`python -m tests.system.lying_aggregator INVITE HOME`: a peer as `swarmentum join` starts it, whose sums leave all votes but
one out."""

import sys
from collections.abc import Sequence
from pathlib import Path

from node.app import join
from node.assemble import LateDoor
from node.config import PeerSettings
from node.wire.codec import Update
from protos.console import configure_logging, exit_with

honest = LateDoor.aggregate


def aggregate(door: LateDoor, updates: Sequence[Update], step: int) -> bytes:
    """The first payload alone."""
    return honest(door, updates[:1], step)


def main() -> None:
    configure_logging(as_json=True)
    join(sys.argv[1], PeerSettings(home=Path(sys.argv[2]), listen="127.0.0.1:0", threads=1, allow=["code", "data"]))


if __name__ == "__main__":
    LateDoor.aggregate = aggregate  # type: ignore[method-assign]
    exit_with(main)
