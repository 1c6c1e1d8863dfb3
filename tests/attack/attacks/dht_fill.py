"""Thousands of invented keys in a node of the DHT, for ten years: memory that nobody gives back."""

import asyncio
import hashlib
import tempfile
import time
from pathlib import Path

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time

from node.overlay.host import Host
from node.overlay.settings import OverlaySettings
from protos.envelope import Kind, seal
from protos.identity import Identity
from protos.v1 import update_pb2
from tests.attack.base import Target

KEYS_A_CALL = 50
TEN_YEARS_SECONDS = 10 * 365 * 86400.0
PADDING = "/ip4/192.0.2.1/tcp/1/p2p/{id}"


class DhtFill:
    name = "dht_fill"
    what = "stores as many records as it can under invented keys and runs in the DHT of every bootstrap peer"

    def run(self, target: Target, seconds: float) -> str:
        addresses = [*target.invite.bootstrap, *asyncio.run(target.run_now()).bootstrap]
        return asyncio.run(fill(addresses, seconds))


def records(identity: Identity, number: int, seconds: float) -> list[tuple[DHTID, bytes, float]]:
    """A call full of records that each say another run, under that run's own key: all that a relay could take."""
    found = []
    for one in range(number, number + KEYS_A_CALL):
        run_id = hashlib.sha256(one.to_bytes(8, "big")).digest()
        key = f"swarmentum/v1/{run_id.hex()}/peers" if one % 2 else f"invented/{one}"
        record = update_pb2.PeerRecord(addresses=[PADDING.replace("{id}", identity.peer_id)] * 16, sequence=one)
        value = seal(identity, Kind.KIND_PEER_RECORD, run_id, record).SerializeToString(deterministic=True)
        found.append((DHTID.generate(source=key), MSGPackSerializer.dumps(value), get_dht_time() + seconds))
    return found


async def fill(addresses: list[str], seconds: float) -> str:
    """Say how many records were taken of how many."""
    targets = {address.rpartition("/p2p/")[2]: address for address in addresses}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        identity = Identity.load_or_create(path)
        host = Host(identity, path, OverlaySettings("127.0.0.1"))
        await host.start(tuple(targets.values()))
        protocol = await DHTProtocol.create(host.p2p, DHTID.generate(), 20, 5, 5, 10.0, client_mode=True)
        asked, taken, until = 0, 0, time.monotonic() + seconds
        try:
            while time.monotonic() < until and targets:
                for name in targets:
                    lives = TEN_YEARS_SECONDS if asked % 4 == 0 else 240.0
                    keys, values, expires = zip(*records(identity, asked, lives), strict=True)
                    answers = await protocol.call_store(
                        PeerID.from_base58(name), keys, values, list(expires), [identity.peer_id] * len(keys)
                    )
                    asked, taken = asked + len(keys), taken + sum(bool(answer) for answer in answers or ())
        finally:
            await protocol.shutdown()
            await host.stop()
    return f"{taken} of {asked} records taken by {len(targets)} nodes in {seconds:.0f} s"


ATTACK = DhtFill()
