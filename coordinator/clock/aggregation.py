"""Aggregators: which peers add a step's votes up, and which of their sums counts. Pure; refuses to add votes up itself.

Anchors come first, then believed peers of the roster, drawn anew in each step by a hash that nobody could choose. The sum of
an anchor counts alone; the sums of two others count if they are equal. Identities are free in an open run, and in a run with
anchors these decide: there a step without an anchor has no aggregators, so every peer takes every payload. Sums that do not
decide cost no votes: the step asks other aggregators, and at last has none. ADR 33.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_

from coordinator.clock import rules
from coordinator.clock.effects import Arm, Effect, NoticeKind, Refuse, SendNotice, SendSumRequest
from coordinator.clock.events import Summed
from coordinator.clock.findings import SummedStep
from coordinator.clock.state import OpenStep, Outcome, Peer, PeerPhase, Run, Summing
from coordinator.clock.value_copy import replace
from protos.assignment import SampleShare
from protos.log import Contribution
from protos.slices import Aggregate, Slice, digest_of, slice_bytes_max, sum_in
from protos.tick import Tick

EQUAL_NEEDED = 2
"""Equal sums of peers that are no anchors."""
AGAIN = 3
"""So many peers make a sum again that nobody has."""
REST_STEPS = 100
"""A peer whose sum did not count, or did not come, adds up no votes for so long."""
RESTING_MAX = 4096


def worth(members: int, aggregators: int, cap: int) -> bool:
    """Whether a step moves fewer bytes with aggregators: a payload to each of them and one sum, not all payloads to all."""
    return members - 1 > aggregators + math.log2(2 * cap + 1)


def assigned(run: Run, tick: Tick) -> Tick:
    """The tick with its aggregators, and what each of them adds up."""
    rows = drawn(run, tick.roster, tick.attempt)
    several = tuple(dict.fromkeys(key for row in rows for key in row))
    ranges = tuple(bytes(map(several.index, row)) for row in rows) if len(rows) > 1 else ()
    return replace(tick, aggregators=several, ranges=ranges)


def drawn(run: Run, roster: Iterable[SampleShare], attempt: int) -> list[list[bytes]]:
    """The aggregators of each range of the next step for this roster; none if every peer takes every payload."""
    clock, members = run.config.clock, [share.public_key for share in roster]
    if not clock.aggregators or not worth(len(members), clock.aggregators, run.config.optimizer.cap):
        return []
    anchors = [key for key in run.anchors_here if run.peers[key].phase is PeerPhase.READY and not is_resting(run, key)]
    if not anchors and (run.anchored or run.config.admission.mode == "open"):
        return []
    able = [key for key in members if _is_able(run, run.peers.get(key))]
    seed = run.head_hash + attempt.to_bytes(4, "big")

    def order(keys: Sequence[bytes]) -> list[bytes]:
        return sorted(keys, key=lambda key: hashlib.sha256(b"swarmentum/v1/aggregators\0" + seed + key).digest())

    found = dealt(order(anchors), order(able), clock.ranges, clock.aggregators)
    return found if anchors or len(found[0]) >= EQUAL_NEEDED else []


def dealt(anchors: Sequence[bytes], able: Sequence[bytes], ranges: int, each: int) -> list[list[bytes]]:
    """So many aggregators for each range: an anchor in each, if there is one, and the other peers in turn."""
    found, turn = list[list[bytes]](), 0
    for number in range(ranges):
        own = list(anchors[number::ranges] or anchors[number % len(anchors) :][:1] if anchors else ())[:each]
        more = min(each - len(own), len(able))
        found.append([*own, *(able[(turn + at) % len(able)] for at in range(more))])
        turn += more
    return found


def are_lost(run: Run, step: OpenStep) -> bool:
    """Whether so many aggregators of the open step have hung up that the others cannot decide about a sum."""
    tick = step.tick
    if not (
        step.gone & reduce(or_, tick.masks) or any(key in run.peers and run.peers[key].gone for key in tick.outside)
    ):
        return False  # nobody left since the draw
    return any(_is_lost(run, keys) for keys in tick.by_range)


def _is_lost(run: Run, keys: Sequence[bytes]) -> bool:
    left = [key for key in keys if key not in run.peers or not run.peers[key].gone]
    return not run.anchors.intersection(left) and len(left) < EQUAL_NEEDED


def is_resting(run: Run, public_key: bytes) -> bool:
    """Whether this peer failed as an aggregator lately."""
    return run.resting.get(public_key, 0) > run.head_step


def _is_able(run: Run, peer: Peer | None) -> bool:
    """A believed peer that is here, and for which the steps wait."""
    if peer is None or not peer.is_here or peer.missed >= rules.PATIENCE_STEPS or is_resting(run, peer.public_key):
        return False
    return rules.is_believed(run, peer.public_key)


def asked(run: Run, contributions: tuple[Contribution, ...], trials: tuple[Contribution, ...], now_ms: int) -> Outcome:
    """The votes of the open step that count are decided: ask its aggregators for their sum."""
    current, clock = run.step, run.config.clock
    assert current is not None
    usual = statistics.median(run.durations_ms) if run.durations_ms else 0
    until = now_ms + min(max(clock.deadline_ms_min, math.ceil(usual)), clock.deadline_ms_max)
    summing = Summing(contributions, trials, _digest(contributions), until)
    run = replace(run, step=replace(current, summing=summing), reason="the votes are being added up")
    requests: list[Effect] = [request for key in current.tick.aggregators for request in request_for(run, key)]
    return run, [*requests, Arm(until)]


def request_for(run: Run, public_key: bytes) -> list[Effect]:
    """The open request for a sum, to one of the step's aggregators that has not answered."""
    current = run.step
    if current is None or current.summing is None or public_key not in current.tick.aggregators:
        return []
    if public_key in current.summing.sums:
        return []
    tick = current.tick
    return [SendSumRequest(tick.step, tick.attempt, current.summing.contributions, to=public_key)]


def asked_again(run: Run, now_ms: int) -> list[Effect]:
    """Most peers lack the sum in the newest entry: its aggregators may be gone for good. Others make it again, of the votes
    that the authors still have; every peer knows it by its hash. One word that it is there stops nobody."""
    here = [peer for peer in run.peers.values() if peer.is_here]
    if not run.added or 2 * sum(peer.applied_step >= run.head_step for peer in here) > len(here):
        return []
    seed = run.head_hash + now_ms.to_bytes(8, "big")
    able = [peer.public_key for peer in here if not peer.anchor and rules.is_believed(run, peer.public_key)]
    drawn = sorted(able, key=lambda key: hashlib.sha256(seed + key).digest())[:AGAIN]
    return [SendSumRequest(run.head_step, 0, run.added, to=key) for key in drawn]


def summed(run: Run, reporter: bytes, said: Summed) -> Outcome:
    """An aggregator's sum of the votes that it was asked for. Its first sum counts; sums of other votes are too late."""
    current = run.step
    if current is None or current.summing is None or reporter in current.summing.sums:
        return run, []
    tick, summing = current.tick, current.summing
    if (said.step, said.attempt, said.payloads) != (tick.step, tick.attempt, summing.digest):
        return run, []
    if reporter not in tick.aggregators:
        return run, [Refuse(reporter, f"a sum of step {said.step}, of which you are no aggregator")]
    own = len(tick.ranges_of(reporter))
    if bool(said.aggregate.slices) != bool(tick.ranges) or len(said.aggregate.parts) != own:
        return run, [Refuse(reporter, f"a sum of step {said.step} in other slices than yours: you add up {own} ranges")]
    most = slice_bytes_max(len(tick.by_range))
    if any(part.total_bytes > most for part in said.aggregate.parts):
        return run, [Refuse(reporter, f"a sum of step {said.step} has a range of more bytes than fit: at most {most}")]
    summing = replace(summing, sums={**summing.sums, reporter: said.aggregate})
    return replace(run, step=replace(current, summing=summing)), []


def stands(step: OpenStep) -> bool:
    """Whether each of the votes that are being added up is still its author's: nobody was excluded meanwhile."""
    assert step.summing is not None
    claims = step.claims
    return all(
        c.public_key in claims and claims[c.public_key].payload_sha256 == c.payload_sha256
        for c in step.summing.contributions
    )


def verdict(run: Run, step: OpenStep, now_ms: int) -> tuple[Aggregate | None, str]:
    """The sum that counts, or None: with the reason, if no sum can count any more (else empty)."""
    summing = step.summing
    assert summing is not None
    found = [it for it in _decided(run, step) if it is not None]
    if len(found) == len(step.tick.by_range):
        return sum_in(found) if step.tick.ranges else Aggregate(found[0].sha256, found[0].total_bytes), ""
    here = [key for key in step.tick.aggregators if key in run.peers and run.peers[key].is_here]
    silent = [key for key in here if key not in summing.sums]
    if now_ms >= summing.until_ms:
        return None, f"{len(silent)} aggregators sent no sum in time, and the others' sums do not decide"
    if not silent:
        return None, f"{len(summing.sums)} aggregators sent sums that do not decide, and no other is here"
    return None, ""


def _by_range(step: OpenStep) -> list[dict[bytes, Slice]]:
    """The sums of each range that have come, by aggregator."""
    found: list[dict[bytes, Slice]] = [{} for _ in step.tick.by_range]
    for key, aggregate in () if step.summing is None else step.summing.sums.items():
        for number, part in zip(step.tick.ranges_of(key), aggregate.parts, strict=True):
            found[number][key] = part
    return found


def _decided(run: Run, step: OpenStep) -> list[Slice | None]:
    """The sum of each range that counts, as far as the sums decide."""
    return [
        _most({key: it for key, it in sums.items() if key in run.anchors}, 1) or _most(sums, EQUAL_NEEDED)
        for sums in _by_range(step)
    ]


def _most(sums: Mapping[bytes, Slice], needed: int) -> Slice | None:
    """The sum that more of these aggregators sent than any other, and at least so many."""
    counts: dict[Slice, int] = {}
    for aggregate in sums.values():
        counts[aggregate] = counts.get(aggregate, 0) + 1
    most = max(counts.values(), default=0)
    best = [aggregate for aggregate, count in counts.items() if count == most]
    return best[0] if most >= needed and len(best) == 1 else None


def summed_step(step: OpenStep, aggregate: Aggregate, electors: Collection[bytes]) -> SummedStep:
    """What is kept of a decided step, in case somebody doubts a sum."""
    pairs = list(zip(_by_range(step), aggregate.parts, strict=True))
    signers = tuple(tuple(key for key, it in sums.items() if it == right) for sums, right in pairs)
    others = tuple(tuple(key for key, it in sums.items() if it != right) for sums, right in pairs)
    return SummedStep(frozenset(electors), signers, others)


def rested(run: Run, step: OpenStep) -> Outcome:
    """Aggregators whose sum is another than the one that counts have a rest, and so have those whose range has none."""
    none, wrong = _blamed(run, step), set[bytes]()
    for keys, sums, right in zip(step.tick.by_range, _by_range(step), _decided(run, step), strict=True):
        wrong.update(key for key in keys if right is not None and sums.get(key, right) != right)
    if not wrong and not none:
        return run, []
    until, at = run.head_step + REST_STEPS, step.tick.step
    resting = [key for key in step.tick.aggregators if key in wrong | none]
    kept = {key: at for key, at in run.resting.items() if at > run.head_step}
    run = replace(run, resting=dict([*kept.items(), *((key, until) for key in resting)][-RESTING_MAX:]))
    why = {True: f"this peer's sum of the votes of step {at} differs from the one that counts"}
    why[False] = f"no sum of the votes of step {at} counts"
    rest = f"; it adds no votes up for {REST_STEPS} steps"
    return run, [SendNotice(NoticeKind.WAITING, why[key in wrong] + rest, to=key) for key in resting]


def _blamed(run: Run, step: OpenStep) -> set[bytes]:
    """Whom the evidence names where a range has no sum: who sent none, all that sent sums if these differ, and who has left."""
    rows = step.tick.by_range
    if step.summing is not None:
        undecided = [
            (keys, sums)
            for keys, sums, right in zip(rows, _by_range(step), _decided(run, step), strict=True)
            if right is None
        ]
        return {key for keys, sums in undecided for key in keys if key not in sums or len(sums) > 1}
    if lost := [keys for keys in rows if _is_lost(run, keys)]:
        return {key for keys in lost for key in keys if key in run.peers and run.peers[key].gone}
    return _hold_too_little(step)


def _hold_too_little(step: OpenStep) -> set[bytes]:
    """The aggregators of a range that lack what others hold. A payload that its author alone has is the author's fault, unless
    most of the roster say so: then nobody has taken any."""
    held = {key: step.held.get(key, 0) | step.by_anchor.get(key, 0) for key in step.tick.aggregators}
    shown = reduce(or_, (mask & ~step.bit(key) for key, mask in held.items()), 0) & step.claimed
    if not shown and 2 * step.claimed.bit_count() > len(step.tick.roster):
        shown = step.claimed
    masks = step.masks if step.tick.ranges else [step.counted]
    return {
        key
        for keys, mask in zip(step.tick.by_range, masks, strict=True)
        for key in keys
        if shown & ~mask & ~held[key] & ~step.bit(key)
    }


def _digest(contributions: Iterable[Contribution]) -> bytes:
    return digest_of(c.payload_sha256 for c in contributions)
