"""The agreed snapshot, pulled as fast as it comes: serving it took a peer's core and link from the members' votes."""

import asyncio
import time

from node.blobs.blobs import PROTOCOL, read_frame, write_frame
from node.overlay.host import Host
from node.snapshot.pieces import open_manifest
from protos.errors import NetworkError, OperatorError, Refusal
from protos.identity import public_key_of
from protos.v1 import update_pb2
from tests.attack.base import Target
from tests.attack.hosts import strangers

IDENTITIES = 10
STREAMS = 4  # of each identity, to each peer


class SnapshotPulls:
    name = "snapshot_pulls"
    what = f"as {IDENTITIES} strangers, pulls the agreed snapshot from every peer on {STREAMS} streams each, again and again"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_pull(target, seconds))


async def _pull(target: Target, seconds: float) -> str:
    facts = await target.run_now()
    addresses = tuple(facts.bootstrap)
    keys = [public_key_of(peer) for peer in dict.fromkeys(it.rpartition("/p2p/")[2] for it in addresses)]
    newest = [facts.snapshot.root]
    async with strangers(IDENTITIES, addresses) as hosts:
        until = time.monotonic() + seconds
        pulls = [_one(host, key, newest, until) for host in hosts for key in keys for _ in range(STREAMS)]
        _, *sizes = await asyncio.gather(_follow(target, newest, until), *pulls)
    return f"{sum(sizes) / 1e6:.1f} MB of {len(keys)} peers in {seconds:.0f} s on {len(pulls)} streams"


async def _follow(target: Target, newest: list[bytes], until: float) -> None:
    """Peers keep the newest snapshots alone: ask for the one that is agreed now."""
    while time.monotonic() < until:
        newest[0] = (await target.run_now()).snapshot.root
        await asyncio.sleep(0.5)


async def _one(host: Host, key: bytes, newest: list[bytes], until: float) -> int:
    """Bytes that one stream after the other brought until this time."""
    size = 0
    while time.monotonic() < until:
        try:
            async with asyncio.timeout(until - time.monotonic()):
                reader, writer = await host.open(key, PROTOCOL)
                try:
                    manifest = await _blob(reader, writer, newest[0])
                    size += len(manifest)
                    for piece in open_manifest(manifest).piece_hashes:
                        size += len(await _blob(reader, writer, piece))
                finally:
                    writer.close()
        except (NetworkError, OperatorError, Refusal, OSError, asyncio.IncompleteReadError, TimeoutError):
            await asyncio.sleep(0.05)
    return size


async def pull_again(host: Host, key: bytes, blob: bytes) -> None:
    """Pull a blob over and over, and open another stream when one ends, until cancelled."""
    while True:
        try:
            reader, writer = await host.open(key, PROTOCOL)
            try:
                while True:
                    await _blob(reader, writer, blob)
            finally:
                writer.close()
        except (NetworkError, OperatorError, OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.05)


async def _blob(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sha256: bytes) -> bytes:
    await write_frame(writer, update_pb2.BlobRequest(sha256=sha256).SerializeToString())
    answer = update_pb2.BlobResponse.FromString(await read_frame(reader))
    return await reader.readexactly(answer.remaining_bytes)


ATTACK = SnapshotPulls()
