"""Several identities name one payload as theirs: votes that were computed once would count many times."""

import asyncio
from dataclasses import dataclass

from tests.attack.base import Attack, Target
from tests.attack.fakes import Crowd, crowd_of, told


@dataclass(frozen=True)
class CopiedVotes:
    name: str = "copied_votes"
    what: str = "four identities announce one and the same payload in each step"

    def run(self, target: Target, seconds: float) -> str:
        """Announce it again and again."""
        return asyncio.run(self._run(target, seconds))

    async def _run(self, target: Target, seconds: float) -> str:
        crowd = Crowd(digests=True, snapshots=False, copies=True)
        async with crowd_of(target, 4, crowd):
            await asyncio.sleep(seconds)
        return told(crowd)


ATTACK: Attack = CopiedVotes()
