"""Addresses that are none, that lead to somebody else, or that fill the list of every joiner."""

import asyncio
from contextlib import AsyncExitStack

from protos.errors import SwarmentumError
from protos.identity import Identity
from tests.attack.base import Target
from tests.attack.joining import follow_until_cut, joined

PEERS = 8
GARBAGE = (
    "/ip4/999.1.1.1/tcp/1/p2p/{id}", "/ip4/127.0.0.1/tcp/99999/p2p/{id}", "\x1b]0;owned\x07", "", "/", "/p2p/{id}",
    "/ip4/127.0.0.1/tcp/1", "/unix/tmp/x/p2p/{id}", "[/x]", "/dns4/" + "a" * 200 + "/tcp/1/p2p/{id}",
    "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp",
)  # fmt: skip


class GarbageAddresses:
    name = "garbage_addresses"
    what = f"joins as {PEERS} peers with addresses that are none, then looks at what a joiner is told"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_join(target, seconds))


async def _join(target: Target, seconds: float) -> str:
    identities, tasks, refused = [Identity.generate() for _ in range(PEERS)], list[asyncio.Task[None]](), 0
    async with AsyncExitStack() as stack:
        for number, identity in enumerate(identities):
            many = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{{id}}" for port in range(9000 + 20 * number, 9005 + 20 * number)]
            try:
                client, _ = await stack.enter_async_context(
                    joined(target, addresses=[*GARBAGE, *many], identity=identity)
                )
            except SwarmentumError:
                refused += 1
                continue
            tasks.append(asyncio.ensure_future(follow_until_cut(client)))
        until = asyncio.get_running_loop().time() + seconds
        await asyncio.sleep(min(1.0, seconds))
        told = list((await target.run_now()).bootstrap)
        await asyncio.sleep(max(until - asyncio.get_running_loop().time(), 0))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    theirs = [address for address in told if any(address.endswith(identity.peer_id) for identity in identities)]
    garbage = [address for address in told if address.replace("\x1b", "") in GARBAGE or not address.startswith("/")]
    said = f"a joiner is told {len(told)} addresses, {len(theirs)} of them theirs, {len(garbage)} garbage"
    return f"{refused} of {PEERS} refused; {said}"


ATTACK = GarbageAddresses()
