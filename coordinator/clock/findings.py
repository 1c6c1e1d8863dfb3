"""What checks of the last steps found, as values: the figures of honest votes nowadays, and doubts about sums.

Figures (ADR 16): refuses to say what is typical while too few checks are known, or where honest checks differ much.

Doubts (ADR 33): peers add a range up again, and say that its sum is not that of its votes. One claim alone blames nobody: it
makes every peer add that range up again. More than half of the entry's electors, and of the peers that take part, have to find
the same. Refuses claims about other steps, and of peers that are no electors.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from coordinator.clock.value_copy import replace
from protos.checks import AUDIT_STEPS
from protos.identity import short

TYPICAL_KEPT = 32
TYPICAL_NEEDED = 16
SUBJECTS_NEEDED = 3
TELLING_MIN = 6.0
"""`difference` says something only where it is typically so large, and where honest checks differ less than they would have to
differ to be bad (`RecentChecks.difference`). It is small early in a run, and for few samples of a large batch."""
QUARTILE_DEVIATION = 0.59
"""From the median of the checks that are not bad to their upper quartile, in standard deviations of all, where a fifth of
normally distributed checks is bad."""
LAZY_PART = 1 / 4
"""Below this part of the typical difference a check is bad."""
OWN_GAIN_PART, OWN_GAIN_MARGIN = 0.25, 2.0
"""Below this part of the typical gain on the author's samples a check is bad, if that is so many deviations below it."""
OTHER_GAIN_MARGIN = 1.5
"""A gain on others' samples below zero is bad if zero is so many deviations below the typical gain."""
QUARTER = 0.674
"""From the median to the upper quartile of a normal distribution, in standard deviations."""
COPIED_WAY = 1 / 2
"""How far from the typical overlap to a whole copy. If differences tell nothing, votes that repeat more of an earlier
payload than this are bad. With 32 samples a peer, honest ones went 0.2 of the way at most, copies with 30 % made up 0.6
(docs/security.md)."""


@dataclass(frozen=True)
class RecentChecks:
    """The figures of each of the last checks, at most TYPICAL_KEPT. `parts`: of a subject's samples, those that a check saw."""

    differences: tuple[float, ...] = ()
    parts: tuple[float, ...] = ()
    overlaps: Mapping[bytes, float] = field(default_factory=dict)
    """The last with an earlier payload, by subject: who is checked more often than others weighs no more. Of counted peers."""
    own_gains: tuple[float, ...] = ()
    other_gains: tuple[float, ...] = ()

    def difference(self, part: float) -> float:
        """That honest votes make nowadays where a check looks at `part` of their samples, as most checks say; 0 if that tells
        nothing.

        The more other samples there are in the gradient that a peer voted with, the less those that a check looks at move it:
        the difference falls with the part that it looks at (docs/security.md). So a peer with a larger share than most makes a
        smaller difference without any fault. It is not asked for more with a smaller share.

        Honest checks differ among each other, too: some samples fit everybody's votes. If one that is a standard deviation
        below the typical one would be bad, they tell nothing. The deviation is taken from the upper half of the checks that are
        not bad, so that idle peers do not make it larger.
        """
        if len(self.differences) < TYPICAL_NEEDED or (middle := statistics.median(self.differences)) < TELLING_MIN:
            return 0.0
        good = [difference for difference in self.differences if difference >= LAZY_PART * middle]
        half, upper = statistics.quantiles(good, n=4, method="inclusive")[1:]
        if (1.0 - LAZY_PART) * middle < (upper - half) / QUARTILE_DEVIATION:
            return 0.0
        expected = min(part / statistics.median(self.parts), 1.0) * middle
        return expected if expected >= TELLING_MIN else 0.0

    def least_own_gain(self, part: float) -> float:
        """The least gain of honest votes on their own samples, where a check looks at `part` of them; -1 if that tells nothing.

        An author that turns its strongest votes, and makes up for them with many weak ones, has far less.
        """
        middle, deviation = _spread(self.own_gains)
        if len(self.own_gains) < TYPICAL_NEEDED or (1.0 - OWN_GAIN_PART) * middle < OWN_GAIN_MARGIN * deviation:
            return -1.0
        return OWN_GAIN_PART * min(part / statistics.median(self.parts), 1.0) * middle

    @property
    def least_other_gain(self) -> float:
        """The least gain of honest votes on the samples of others; -1 if that tells nothing.

        An author knows its own gradient, and can satisfy any figure of it. It does not know which peers will check it, and has
        a gain on the samples of most of them only with votes that help. The gain falls as a model learns, and samples differ.
        """
        middle, deviation = _spread(self.other_gains)
        return 0.0 if len(self.other_gains) >= TYPICAL_NEEDED and middle >= OTHER_GAIN_MARGIN * deviation > 0 else -1.0

    @property
    def copied_overlap(self) -> float:
        """From which overlap with an earlier payload on votes are copies; more than a whole one while too few are known."""
        if len(self.overlaps) < SUBJECTS_NEEDED:
            return 2.0
        middle = statistics.median(self.overlaps.values())
        return middle + COPIED_WAY * (1.0 - middle)

    def more(self, difference: float, part: float, gains: tuple[float, float] | None = None) -> RecentChecks:
        """With one more check. `gains`: on the author's samples and on others'; None if too few of its checkers tell them."""
        own, other = self.own_gains, self.other_gains
        if gains is not None:
            own, other = (*own, gains[0]), (*other, gains[1])
        return replace(
            self,
            differences=(*self.differences, difference)[-TYPICAL_KEPT:],
            parts=(*self.parts, part)[-TYPICAL_KEPT:],
            own_gains=own[-TYPICAL_KEPT:],
            other_gains=other[-TYPICAL_KEPT:],
        )

    def alike(self, overlaps: Mapping[bytes, float]) -> RecentChecks:
        """With the overlap of one more check, by subject."""
        kept = {key: value for key, value in self.overlaps.items() if key not in overlaps} | dict(overlaps)
        for key in list(kept)[: max(len(kept) - TYPICAL_KEPT, 0)]:
            del kept[key]
        return replace(self, overlaps=kept)


def _spread(values: tuple[float, ...]) -> tuple[float, float]:
    """The median, and the standard deviation as the upper half tells it: votes of attackers do not make it larger."""
    if len(values) < 2:
        return 0.0, 0.0
    _, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (upper - middle) / QUARTER


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
