"""Doubts about sums of the last steps: peers add a range up again, and say that its sum is not that of its votes.

One claim alone blames nobody: it makes every peer add that range up again. More than half of the entry's electors, and of the
peers that take part, have to find the same. Values only. Refuses claims about other steps, and of peers that are no electors.
ADR 33.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from protos.checks import AUDIT_STEPS
from protos.identity import short

QUIET_STEPS = 1000
"""A peer's claim makes all others add a range up once in so many steps: a peer that makes false claims costs them that much."""
QUIET_MAX = 4096
FORGED = "aggregators forged a sum"
"""The first words of a pause that no operator asked for."""


class Doubt(Enum):
    """What follows from one more claim."""

    NOTHING = "nothing"
    ASK_ALL = "ask all"
    FORGED = "forged"


@dataclass(frozen=True)
class SummedStep:
    """A decided step: whose claims count, and of each range who sent the sum that counts, and who sent another."""

    electors: frozenset[bytes]
    signers: tuple[tuple[bytes, ...], ...]
    others: tuple[tuple[bytes, ...], ...]
    found: Mapping[int, frozenset[bytes]] = field(default_factory=dict)
    """Of a range, who found its sum false."""
    asked: frozenset[int] = frozenset()
    """The ranges that all were asked to add up again."""


@dataclass(frozen=True)
class Doubts:
    """One run's. `quiet`: until which step a peer's claim alone makes nobody add up."""

    steps: Mapping[int, SummedStep] = field(default_factory=dict)
    quiet: Mapping[bytes, int] = field(default_factory=dict)

    def kept(self, step: int, summed: SummedStep) -> Doubts:
        """This step's sums may be doubted from now on, and those of AUDIT_STEPS steps before no more."""
        steps = {at: it for at, it in self.steps.items() if at > step - AUDIT_STEPS}
        return replace(self, steps=steps | {step: summed})

    def heard(self, who: bytes, step: int, number: int, head_step: int, members: int) -> tuple[Doubts, Doubt]:
        """One more peer found the sum of this range false. `members`: peers that take part now; most of them have to, too."""
        summed = self.steps.get(step)
        if summed is None or who not in summed.electors or number >= len(summed.signers):
            return self, Doubt.NOTHING
        before = summed.found.get(number, frozenset())
        if who in before:
            return self, Doubt.NOTHING
        found, quiet, verdict = before | {who}, self.quiet, Doubt.NOTHING
        of = max(len(summed.electors), members)
        if 2 * len(before) <= of < 2 * len(found):
            verdict, quiet = Doubt.FORGED, {key: at for key, at in quiet.items() if key not in found}
        elif number not in summed.asked and quiet.get(who, 0) <= head_step:
            verdict, summed = Doubt.ASK_ALL, replace(summed, asked=summed.asked | {number})
            still = [(key, at) for key, at in quiet.items() if at > head_step and key != who]
            quiet = dict([*still, (who, head_step + QUIET_STEPS)][-QUIET_MAX:])
        summed = replace(summed, found={**summed.found, number: found})
        return replace(self, steps={**self.steps, step: summed}, quiet=quiet), verdict

    def words(self, step: int, number: int) -> str:
        """Why the run is paused."""
        summed = self.steps[step]
        names = ", ".join(map(short, summed.signers[number]))
        said = f"{len(summed.found[number])} of {len(summed.electors)} peers"
        return (
            f"{FORGED}: that of range {number} of step {step} is not the sum of its votes, as {said} computed. It came from "
            f"{names}. The operator can exclude them and resume the run, or fork it from a step before"
        )
