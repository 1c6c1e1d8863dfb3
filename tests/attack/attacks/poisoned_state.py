"""Fake identities elect a state and a snapshot that nobody computed (the first two findings of the red team's report)."""

import asyncio
from dataclasses import dataclass

from tests.attack.base import Attack, Target
from tests.attack.fakes import Crowd, crowd_of, told

FAKES = 8


@dataclass(frozen=True)
class PoisonedState:
    name: str = "poisoned_state"
    what: str = "fakes that compute nothing report one made-up state and snapshot, sooner than anybody can"

    def run(self, target: Target, seconds: float) -> str:
        """Lie about states, snapshots and votes."""
        return asyncio.run(self._run(target, seconds))

    async def _run(self, target: Target, seconds: float) -> str:
        crowd = Crowd()
        async with crowd_of(target, FAKES, crowd):
            await asyncio.sleep(seconds)
        return told(crowd)


ATTACK: Attack = PoisonedState()
