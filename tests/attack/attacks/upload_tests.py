"""Measurements of an upload that nobody needs: identities are free, and a peer that takes test bytes pays for them (ADR 50)."""

import asyncio
import time

from node.blobs import testbytes
from node.overlay.host import Host
from protos.errors import NetworkError, OperatorError
from protos.identity import public_key_of
from tests.attack.base import Target
from tests.attack.hosts import strangers

IDENTITIES = 10
SILENT = 3  # of them open a measurement and send nothing


class UploadTests:
    name = "upload_tests"
    what = f"as {IDENTITIES} strangers, asks every peer to take test bytes, again and again; {SILENT} of them send none"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_measure(target, seconds))


async def _measure(target: Target, seconds: float) -> str:
    facts = await target.run_now()
    addresses = tuple(facts.bootstrap)
    keys = [public_key_of(peer) for peer in dict.fromkeys(it.rpartition("/p2p/")[2] for it in addresses)]
    asked = taken = size = held = 0
    async with strangers(IDENTITIES, addresses) as hosts:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for host in hosts[:SILENT]:
                held += sum([await _hold(host, key) for key in keys])
            for host in hosts[SILENT:]:
                for found in await asyncio.gather(*(testbytes.measure(host.open, key) for key in keys)):
                    asked, taken = asked + 1, taken + (found is not None)
                    size += 0 if found is None else found.size
    return (
        f"{asked} measurements asked of {len(keys)} peers, {taken} taken, {size} bytes; {held} opened and left silent"
    )


async def _hold(host: Host, key: bytes) -> bool:
    """Open a measurement and send nothing. Whether the peer had room for it."""
    try:
        reader, _ = await host.open(key, testbytes.PROTOCOL)
        async with asyncio.timeout(testbytes.ANSWER_SECONDS_MAX):
            return await reader.readexactly(1) == testbytes.YES
    except (NetworkError, OperatorError, OSError, EOFError, TimeoutError):
        return False


ATTACK = UploadTests()
