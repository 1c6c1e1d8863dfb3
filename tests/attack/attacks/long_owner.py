"""Joins that name an owner of a million characters whose marks stand in the worst order for Unicode's forms. One such name
stopped the clock for minutes."""

import asyncio
import time

from node.link.client import CoordinatorClient
from protos.errors import SwarmentumError
from protos.identity import Identity
from protos.v1 import coordinator_pb2 as pb
from tests.attack.base import Target

NAME = "a" + "\u0301" * 250_000 + "\u0316" * 250_000


class LongOwner:
    name = "long_owner"
    what = "asks to join under owners' names of a megabyte that take quadratic time to normalise"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_join(target, seconds))


async def _join(target: Target, seconds: float) -> str:
    until, sent, said = time.monotonic() + seconds, 0, ""
    while time.monotonic() < until:
        client = CoordinatorClient(target.invite, Identity.generate())
        try:
            await client.connect()
            await client.join(pb.JoinBody(layout_digest=bytes(32), owner=pb.Owner(name=NAME)))
        except SwarmentumError as error:
            sent, said = sent + 1, str(error)[:100]
        finally:
            await client.close()
    return f"{sent} such names; the last answer was {said!r}"


ATTACK = LongOwner()
