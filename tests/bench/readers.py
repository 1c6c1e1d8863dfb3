"""Attackers that read the rules: they know the figures of a check before they announce, and vote against the loss within them.

An attacker computes its own gradient, as an honest peer does, and those of the other peers, because samples are public. It does
not know which peers will check it: the draw follows from all payloads of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from coordinator.clock.findings import OWN_GAIN_PART
from node.optim.layout import CHUNK_ELEMENTS
from node.optim.votes import groups as votes
from node.training.vote_checks import Seen, agreement, difference, gain

READERS: Final = ("half", "contrary", "against", "fewer", "careful", "sleeper", "score")
AWAKE: Final = 60
"""`sleeper` is honest until this step."""
SCORE_KEPT: Final = 3.0
"""`score` turns its votes while its public score is at most this, so that two bad checks more exclude nobody."""
OWN_KEPT, DIFFERENCE_KEPT, OWN_GAIN_KEPT, OTHER_GAIN_KEPT = 5.0, 0.4, 0.28, 0.02
"""What an attacker keeps of each figure: the rule's limits are 3, 1/4 and 1/4 of the typical, and 0."""
FAINT: Final = 1e-6
"""Of a coefficient that does not contradict the consensus: taken if a group has no other."""
PARTS: Final = tuple(part / 20 for part in range(12, -1, -1))


@dataclass(frozen=True)
class Known:
    """What an attacker knows when it forges its votes."""

    step: int
    own: Tensor
    """Its gradient, [chunks, 64, 64], as votes see it."""
    others: Sequence[Tensor]
    """Those of all other peers."""
    consensus: Tensor
    """What the log has moved lately, downhill positive."""
    usual_difference: float
    least_own_gain: float
    """The least that the rule asks for; -1 if it asks for nothing."""
    least_other_gain: float
    score: float
    group_size: int | None
    """None if an author does not choose its places."""


def forged(kind: str, honest: Seen, known: Known) -> Seen:
    """The votes of an attacker in place of its honest ones: one in each group of coefficients, as the format has it."""
    turned = Seen(honest.where, -honest.values)
    if kind == "sleeper":
        return turned if known.step > AWAKE else honest
    if kind == "score":
        return turned if known.score <= SCORE_KEPT else honest
    if known.group_size is None:
        covers = excused(honest, known)
    else:
        covers = cover(known, known.group_size, known.own.abs() if kind != "against" else known.consensus.abs())
    if kind in ("contrary", "against"):
        return covers
    if kind == "fewer":
        return _most(honest, honest, known, lambda seen: _passes(seen, known, with_gains=True))
    return _most(honest, covers, known, lambda seen: _passes(seen, known, with_gains=kind == "careful")) or honest


def excused(honest: Seen, known: Known) -> Seen:
    """At places that nobody chooses: the own sign where it contradicts the consensus, and silence elsewhere."""
    own, consensus = (it.reshape(-1, CHUNK_ELEMENTS).gather(1, honest.where) for it in (known.own, known.consensus))
    return Seen(honest.where, torch.where(consensus.sign() * own.sign() < 0, own.sign(), 0.0))


def cover(known: Known, group_size: int, strength: Tensor) -> Seen:
    """In each group the strongest coefficient at which the own gradient contradicts the consensus: it fits no other samples."""
    table = votes.coefficients(group_size, known.own.device).view(group_size, -1).T  # [groups, coefficients]
    own, strong, consensus = (it.reshape(-1, CHUNK_ELEMENTS)[:, table] for it in (known.own, strength, known.consensus))
    against = torch.where(consensus.sign() * own.sign() < 0, strong, strong * FAINT)
    place = against.argmax(2, keepdim=True)
    where = table[None].expand(len(own), -1, -1).gather(2, place).squeeze(2)
    return Seen(where, own.gather(2, place).squeeze(2).sign())


def _most(honest: Seen, rest: Seen, known: Known, passes: Callable[[Seen], bool]) -> Seen:
    """As many of the strongest honest votes turned as still pass; the others are `rest`, or honest if those do not pass."""
    strength = known.own.reshape(-1, CHUNK_ELEMENTS).gather(1, honest.where).abs().reshape(-1)
    order = strength.argsort(descending=True)
    for other in (rest, honest):
        for part in PARTS:
            where, values = other.where.clone(), other.values.sign()
            turned = order[: int(part * len(order))]
            where.view(-1)[turned] = honest.where.reshape(-1)[turned]
            values.view(-1)[turned] = -honest.values.sign().reshape(-1)[turned]
            if passes(made := Seen(where, values)):
                return made
    return honest


def _passes(seen: Seen, known: Known, *, with_gains: bool) -> bool:
    if agreement(seen, known.own) < OWN_KEPT:
        return False
    apart = [difference(seen, known.own, other) for other in known.others[:3]]
    if sorted(apart)[1] < DIFFERENCE_KEPT * known.usual_difference:
        return False
    if not with_gains:
        return True
    if gain(seen, known.own) < known.least_own_gain * OWN_GAIN_KEPT / OWN_GAIN_PART:
        return False
    found = sorted(gain(seen, other) for other in known.others)
    return found[len(found) // 2] >= known.least_other_gain + OTHER_GAIN_KEPT
