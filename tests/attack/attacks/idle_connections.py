"""TCP connections that say nothing: each takes a descriptor of the coordinator until its handshake is given up."""

import asyncio
import time
from contextlib import suppress

from tests.attack.base import Target

CONNECTIONS = 900  # with one descriptor each at this end, of the usual 1,024


class IdleConnections:
    name = "idle_connections"
    what = f"keeps {CONNECTIONS} TCP connections to the coordinator that say nothing, and opens new ones for those that end"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_hold(target, seconds))


async def _hold(target: Target, seconds: float) -> str:
    host, _, port = target.invite.coordinators[0].rpartition(":")
    until, lives, opened, refused = time.monotonic() + seconds, list[float](), 0, 0

    async def hold() -> None:
        nonlocal opened, refused
        while time.monotonic() < until:
            try:
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            except OSError:
                refused += 1
                await asyncio.sleep(0.1)
                continue
            opened, began = opened + 1, time.monotonic()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(max(until - time.monotonic(), 0)):
                    await reader.read()
                lives.append(time.monotonic() - began)
            writer.close()

    await asyncio.gather(*(hold() for _ in range(CONNECTIONS)))
    longest = (
        f"closed by the coordinator after {max(lives):.1f} s at most" if lives else "none closed by the coordinator"
    )
    return f"{opened} idle connections opened, {refused} refused, {longest}"


ATTACK = IdleConnections()
