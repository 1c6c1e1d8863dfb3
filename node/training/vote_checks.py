"""A check measures how another peer's votes fit that peer's own samples, and whether the votes repeat another peer's votes.

Pure functions of payloads and gradients, in the transform's domain. One transformed gradient serves any number of payloads.
Refuses to judge a peer: coordinator/clock/trust.py decides what the figures mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from node.data.samples import Samples
from node.optim.demo import DeMoConfig
from node.optim.exact import transforms
from node.optim.exact.transforms import Transform
from node.optim.layout import CHUNK_ELEMENTS, TILE_CHUNKS_CPU, Layout
from node.optim.votes.payload import Format
from node.optim.votes.places import Draw
from node.swarm.api import Swarm
from node.swarm.facts import Committed
from node.training.recovery import Stopping
from node.training.replica import Replica
from protos.assignment import Range, assign
from protos.checks import checked_samples, drawn, looked_at
from protos.log import Entry, SignedEntry, Verdict
from protos.run_config import TrustConfig
from protos.tick import Tick

TICKS_KEPT = 4


class NoGradient(Exception):  # noqa: N818 - nothing failed: this checker has nothing to say
    """This peer has no gradient on these samples: the gradient is not finite, or this peer is about to stop."""


@dataclass(frozen=True)
class Seen:
    """A payload's votes: `where` int64 [chunks, votes], coefficients; `values` fp32 [chunks, votes], signed, 0 if silent."""

    where: Tensor
    values: Tensor

    @property
    def count(self) -> int:
        """How many votes are not silent: a silent vote fits no gradient and repeats no vote."""
        return int(self.values.count_nonzero())


def newest(ticks: Mapping[int, Tick], opened: Tick) -> dict[int, Tick]:
    """The newest ticks by step, with one more.

    A step's tick comes with the entry before it (ADR 8). A peer that is about to check that entry's votes still needs the
    entry's own tick.
    """
    kept = {step: tick for step, tick in ticks.items() if step > opened.step - TICKS_KEPT}
    return {**kept, opened.step: opened}


def due(me: bytes, trust: TrustConfig, tick: Tick, signed: SignedEntry) -> list[bytes]:
    """The peers that the entry draws `me` to check; none if this is not the first attempt of the step that `tick` opened."""
    if tick.attempt != 1 or tick.step != signed.entry.step:
        return []
    return [subject for subject, who in drawn(signed.hash, signed.entry, trust.checkers).items() if me in who]


def verdicts(
    me: bytes,
    mine: Sequence[bytes],
    trust: TrustConfig,
    tick: Tick,
    signed: SignedEntry,
    votes: Mapping[bytes, Seen],
    gradient: Callable[[tuple[Range, ...]], Tensor],
) -> tuple[Verdict, ...]:
    """The verdicts of `me` on the peers that are `due`. `gradient(samples)`: transformed, at the state before the entry.

    The gradient is the plain one with local steps, too: honest local steps end near it, and each peer has an AdamW of its own.
    A check costs a gradient over some of the subject's samples (`looked_at`). There are CHECKS_MAX checks at most, and one
    more gradient, over as many of the checker's own. All checks together take twice 4 bytes a parameter.
    """
    # Every payload that counts is here, unless the door refused it. Refused votes are no work of any peer. Where aggregators
    # add votes up, only some payloads are here, and the aggregators have refused invalid ones.
    summed = signed.entry.aggregate is not None
    invalid = set() if summed else {c.public_key for c in signed.entry.contributions} - votes.keys()
    mine = [subject for subject in mine if subject in votes or subject in invalid]
    shares = assign(tick.pool, tick.roster)
    hashes = {c.public_key: c.payload_sha256 for c in (*signed.entry.contributions, *signed.entry.trials)}
    tried = {c.public_key for c in signed.entry.trials}

    def seen(key: bytes) -> int:
        have, own = sum(map(len, shares[key])), sum(map(len, shares[me]))
        return looked_at(trust.check_samples, have, own, tried=key in tried)

    def of(key: bytes, count: int) -> Tensor:
        return gradient(checked_samples(signed.hash, key, shares[key], count))

    counts = {subject: seen(subject) for subject in mine if subject not in invalid}
    other = of(me, max(counts.values())) if counts else None
    found = []
    for subject in mine:
        f = NOTHING
        if subject in counts and other is not None:
            f = find(subject, earlier(signed.entry, votes, subject), of(subject, counts[subject]), other)
        figures = f.own, f.difference, f.overlap, f.like, f.own_gain, f.other_gain
        found.append(Verdict(tick.step, me, subject, hashes[subject], *figures))
    return tuple(found)


def seen_votes(form: Format, payload: bytes, size: int, chunks: int, draw: Draw | None = None) -> Seen:
    """Decode a payload on the CPU; `draw` is the step's. Raises `VotesError` for bytes that are no votes."""
    ballot = form.decode(payload, size, chunks, torch.device("cpu"), draw)
    return Seen(ballot.where, ballot.values.to(torch.float32))


def transformed(layout: Layout, gradients: Sequence[Tensor | None], transform: str | Transform = "dct") -> Tensor:
    """Gradients by parameter in the transform's domain: fp32 [chunks, 64, 64], the only buffer of that size that it makes.

    Raises `NoGradient` if one is not finite.
    """
    gathered = layout.gather(gradients, layout.empty("cpu"))
    by = transform if isinstance(transform, Transform) else transforms.named(transform)
    for first in range(0, layout.chunks, TILE_CHUNKS_CPU):
        part = gathered[first : first + TILE_CHUNKS_CPU]
        if not bool(by.forward(part, out=part).isfinite().all()):
            raise NoGradient("the gradient is not finite")
    return gathered


@dataclass(frozen=True)
class Finding:
    """The result of a check of one payload: the figures of a verdict (protos/v1/log.proto)."""

    own: float
    difference: float
    overlap: float
    like: bytes
    own_gain: float
    other_gain: float


NOTHING = Finding(own=0.0, difference=0.0, overlap=0.0, like=b"", own_gain=0.0, other_gain=0.0)
"""The finding for bytes that are no votes."""


def earlier(entry: Entry, votes: Mapping[bytes, Seen], subject: bytes) -> dict[bytes, Seen]:
    """A subject's votes, and the votes that the coordinator heard of before: the subject could have copied those."""
    places = {c.public_key: c.arrival for c in (*entry.contributions, *entry.trials)}
    return {key: seen for key, seen in votes.items() if key == subject or 0 < places.get(key, 0) < places[subject]}


def find(subject: bytes, payloads: Mapping[bytes, Seen], own: Tensor, other: Tensor) -> Finding:
    """Check a peer's votes of a step, given the gradients on its own samples and on the checker's, and earlier votes."""
    seen = payloads[subject]
    alike = sorted((overlap(seen, other_seen), key) for key, other_seen in payloads.items() if key != subject)
    most, like = alike[-1] if alike else (0.0, b"")
    return Finding(agreement(seen, own), difference(seen, own, other), most, like, gain(seen, own), gain(seen, other))


def agreement(seen: Seen, gradient: Tensor) -> float:
    """How many votes have the gradient's sign, in standard deviations of random votes (mean 0, deviation 1).

    Only signs count, because a few samples with large gradients would otherwise outweigh all others.
    """
    return float(_same(seen, gradient).sum()) / math.sqrt(max(seen.count, 1))


def difference(seen: Seen, own: Tensor, other: Tensor) -> float:
    """How much better votes fit one gradient than another, in standard deviations: McNemar's test (Psychometrika 12, 1947).

    The test counts votes that fit only one of the two gradients. If their author knows neither gradient better, as many votes
    fit the one as the other. The common part of the gradients does not count; early in a run, it is most of both gradients.
    """
    apart = _same(seen, own) - _same(seen, other)
    discordant = int((apart != 0).sum())
    return float(apart.sign().sum()) / math.sqrt(max(discordant, 1))


def gain(seen: Seen, gradient: Tensor) -> float:
    """The part of what votes at these places could gain on a gradient that they gain, from -1 to 1.

    It is the first-order change of the loss on the gradient's samples, over the largest that votes at these places can make. A
    strong vote counts for more than a weak one here, and not in `agreement`.
    """
    there = gradient.reshape(-1, CHUNK_ELEMENTS).gather(1, seen.where)
    most = float(there.abs()[seen.values != 0].sum())
    gained = float((there * seen.values.sign()).sum())
    return max(-1.0, min(1.0, gained / most)) if most > 0 and math.isfinite(most) else 0.0


def _same(seen: Seen, gradient: Tensor) -> Tensor:
    """1 for a vote with the gradient's sign, -1 for a vote with the other sign, 0 if either has none: fp32 [chunks, votes]."""
    return (seen.values * gradient.reshape(-1, CHUNK_ELEMENTS).gather(1, seen.where)).sign_()


def overlap(one: Seen, other: Seen) -> float:
    """The part of the smaller payload's votes that the other payload has, too: the same coefficient with the same sign."""
    marks = torch.zeros(one.where.shape[0], CHUNK_ELEMENTS, dtype=torch.int8)
    marks.scatter_(1, one.where, one.values.sign().to(torch.int8))
    same = int((marks.gather(1, other.where) * other.values.sign().to(torch.int8) > 0).sum())
    return same / max(min(one.count, other.count), 1)


class Checker:
    """This peer's checks of other peers' votes, as the log draws them: on the plain gradient, which changes nothing. ADR
    16.

    One peer's, of a run with checks. `me`: this peer's public key. See `Trainer` for the other arguments.
    """

    def __init__(
        self,
        me: bytes,
        trust: TrustConfig,
        replica: Replica,
        samples: Samples,
        swarm: Swarm,
        micro_batch: int,
        autocast: Any,
        stopping: Stopping,
        log: Any,
    ) -> None:
        self._me, self._trust, self._replica, self._samples, self._swarm = me, trust, replica, samples, swarm
        self._micro_batch, self._autocast, self._stopping, self._log = micro_batch, autocast, stopping, log
        self.ticks: dict[int, Tick] = {}  # by step

    def opened(self, tick: Tick) -> None:
        """A step is open, perhaps before the entry of the step before is applied."""
        self.ticks = newest(self.ticks, tick)

    def check(self, event: Committed) -> None:
        """Check other peers' votes, if the entry draws this peer, at the state on which they were computed."""
        demo = self._replica.demo
        tick = self.ticks.get(event.signed.entry.step)
        mine = [] if tick is None else due(self._me, self._trust, tick, event.signed)
        if tick is None or not mine:
            return
        own = demo.config
        assert isinstance(own, DeMoConfig), "`RunConfig` refuses checks of other votes"

        def gradient(ranges: tuple[Range, ...]) -> Tensor:
            if away := self._samples.away(ranges):
                raise NoGradient(away)
            by = self._replica.maker.checker
            over = self._replica.mean_gradient(
                self._samples, ranges, self._micro_batch, self._autocast, self._stopping, by
            )
            if over.samples < sum(map(len, ranges)):
                raise NoGradient("this peer is about to stop")
            return transformed(demo.layout, self._replica.whole_gradients(), own.transform)

        try:
            step, seed = event.signed.entry.step, own.seed
            votes = {
                key: seen_votes(own.form, update.votes, update.size, demo.layout.chunks, Draw(seed, step, (key,)))
                for key, update in event.by_author.items()
            }
            found = verdicts(self._me, mine, self._trust, tick, event.signed, votes, gradient)
        except NoGradient as error:
            self._log.info(
                "skipping the check of other peers' votes: this peer cannot compute the gradient",
                step=event.signed.entry.step,
                why=str(error),
            )
            return
        if found:
            self._swarm.found(found)
            self._log.info("checked", step=event.signed.entry.step, peers=len(found))
