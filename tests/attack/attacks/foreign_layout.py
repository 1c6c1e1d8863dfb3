"""A stranger joins first, with a parameter layout that no model has: everybody else would be refused for good."""

import asyncio
from dataclasses import dataclass

from node.link.client import CoordinatorClient
from protos.errors import RefusedError
from protos.identity import Identity
from protos.v1 import coordinator_pb2 as pb
from tests.attack.base import Attack, Target


@dataclass(frozen=True)
class ForeignLayout:
    name: str = "foreign_layout"
    what: str = "a stranger joins with a parameter layout of its own, again and again"

    def run(self, target: Target, seconds: float) -> str:
        """Join as long as there is time."""
        return asyncio.run(self._run(target, seconds))

    async def _run(self, target: Target, seconds: float) -> str:
        until, admitted, refused = asyncio.get_running_loop().time() + seconds, 0, 0
        while asyncio.get_running_loop().time() < until:
            client = CoordinatorClient(target.invite, Identity.generate())
            try:
                await client.connect()
                await client.join(pb.JoinBody(layout_digest=b"\1" * 32, parameters=10, device="cpu"))
                admitted += 1
            except RefusedError:
                refused += 1
            finally:
                await client.close()
        return f"{admitted} joins admitted, {refused} refused"


ATTACK: Attack = ForeignLayout()
