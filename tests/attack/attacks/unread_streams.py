"""Blob streams that ask and never read: they held every serving slot of a peer."""

import asyncio
import time
from collections.abc import Sequence

from node.blobs.blobs import PROTOCOL
from node.overlay.host import Host
from protos.errors import NetworkError, OperatorError
from protos.identity import public_key_of
from protos.v1 import update_pb2
from tests.attack.base import Target
from tests.attack.hosts import strangers

IDENTITIES = 3
STREAMS = 64  # of each identity, to each peer
REQUESTS = 60  # on each stream
ROUND_SECONDS = 10.0


class UnreadStreams:
    name = "unread_streams"
    what = f"as {IDENTITIES} strangers, opens {STREAMS} blob streams each to every peer, asks {REQUESTS} times reads nothing"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_ask_for_the_snapshot(target, seconds))


async def _ask_for_the_snapshot(target: Target, seconds: float) -> str:
    facts = await target.run_now()
    blob = facts.snapshot.root if facts.HasField("snapshot") else bytes(32)
    return await hold(list(facts.bootstrap), blob, seconds)


async def hold(addresses: Sequence[str], blob: bytes, seconds: float) -> str:
    """Hold streams open for so long, again and again."""
    opened = 0
    async with strangers(IDENTITIES, addresses) as hosts:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            writers = await _round(hosts, addresses, blob)
            opened += len(writers)
            await asyncio.sleep(min(ROUND_SECONDS, max(until - time.monotonic(), 0)))
            for writer in writers:
                writer.close()
    return f"{opened} streams that nobody reads were opened to {len(set(map(_peer, addresses)))} peers"


def _peer(address: str) -> str:
    return address.rpartition("/p2p/")[2]


async def _round(hosts: Sequence[Host], addresses: Sequence[str], blob: bytes) -> list[asyncio.StreamWriter]:
    frame = update_pb2.BlobRequest(sha256=blob).SerializeToString()
    asked, writers = (len(frame).to_bytes(4, "big") + frame) * REQUESTS, list[asyncio.StreamWriter]()
    for host in hosts:
        for peer in dict.fromkeys(map(_peer, addresses)):
            for _ in range(STREAMS):
                try:
                    _, writer = await host.open(public_key_of(peer), PROTOCOL)
                except (NetworkError, OperatorError):
                    break
                writer.write(asked)
                writers.append(writer)
    return writers


ATTACK = UnreadStreams()
