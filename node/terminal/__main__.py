"""`python -m node.terminal --home HOME --life FD --peer PID`: a peer starts this for its terminal view; people do not."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> int:
    """Show the view until the peer ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--peer", type=int, required=True)
    given = parser.parse_args()
    from node.terminal.peer_view import PeerView

    return PeerView(given.home, peer=given.peer, life=given.life).show()


if __name__ == "__main__":
    raise SystemExit(main())
