"""Sums of votes from strangers: two equal ones would count, if they came from aggregators."""

import asyncio
from dataclasses import dataclass

from tests.attack.base import Attack, Target
from tests.attack.fakes import Crowd, crowd_of, told


@dataclass(frozen=True)
class FalseSums:
    name: str = "false_sums"
    what: str = (
        "eight identities send the same sum of votes in each step, doubt all others, and hold payloads that nobody has"
    )

    def run(self, target: Target, seconds: float) -> str:
        """Send them again and again."""
        return asyncio.run(self._run(target, seconds))

    async def _run(self, target: Target, seconds: float) -> str:
        crowd = Crowd(snapshots=False, sums=True)
        async with crowd_of(target, 8, crowd):
            await asyncio.sleep(seconds)
        return told(crowd)


ATTACK: Attack = FalseSums()
