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
from collections.abc import Iterable, Mapping, Sequence

from coordinator.clock import electorate, rules
from coordinator.clock.effects import Arm, Effect, NoticeKind, Refuse, SendNotice, SendSumRequest
from coordinator.clock.events import Summed
from coordinator.clock.state import OpenStep, Outcome, Peer, PeerPhase, Run, Summing
from coordinator.clock.value_copy import replace
from protos.assignment import SampleShare
from protos.holdings import digest_of
from protos.log import Contribution
from protos.slices import Aggregate

EQUAL_NEEDED = 2
"""Equal sums of peers that are no anchors."""
REST_STEPS = 100
"""A peer whose sum did not count, or did not come, adds up no votes for so long."""
RESTING_MAX = 4096


def worth(members: int, aggregators: int, cap: int) -> bool:
    """Whether a step moves fewer bytes with aggregators: a payload to each of them and one sum, not all payloads to all."""
    return members - 1 > aggregators + math.log2(2 * cap + 1)


def drawn(run: Run, roster: Iterable[SampleShare], attempt: int) -> tuple[bytes, ...]:
    """The aggregators of the next step for this roster; none if every peer takes every payload."""
    clock, members = run.config.clock, [share.public_key for share in roster]
    if not clock.aggregators or not worth(len(members), clock.aggregators, run.config.optimizer.cap):
        return ()
    anchors = [key for key in run.anchors_here if run.peers[key].phase is PeerPhase.READY and not is_resting(run, key)]
    if not anchors and (run.anchored or run.config.admission.mode == "open"):
        return ()
    able = [key for key in members if _is_able(run, run.peers.get(key))]
    seed = run.head_hash + attempt.to_bytes(4, "big")

    def order(keys: Sequence[bytes]) -> list[bytes]:
        return sorted(keys, key=lambda key: hashlib.sha256(b"swarmentum/v1/aggregators\0" + seed + key).digest())

    found = [*order(anchors), *order(able)][: clock.aggregators]
    return tuple(found) if anchors or len(found) >= EQUAL_NEEDED else ()


def are_lost(run: Run, step: OpenStep) -> bool:
    """Whether so many aggregators of the open step have hung up that the others cannot decide about a sum."""
    left = [key for key in step.tick.aggregators if key not in run.peers or not run.peers[key].gone]
    return not run.anchors.intersection(left) and len(left) < EQUAL_NEEDED


def is_resting(run: Run, public_key: bytes) -> bool:
    """Whether this peer failed as an aggregator lately."""
    return run.resting.get(public_key, 0) > run.head_step


def _is_able(run: Run, peer: Peer | None) -> bool:
    """A believed peer that is here, and for which the steps wait."""
    if peer is None or not peer.is_here or peer.missed >= rules.PATIENCE_STEPS or is_resting(run, peer.public_key):
        return False
    return electorate.is_believed(run, peer.public_key)


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
    found = _most({key: it for key, it in summing.sums.items() if key in run.anchors}, 1)
    found = found or _most(summing.sums, EQUAL_NEEDED)
    if found is not None:
        return found, ""
    here = [key for key in step.tick.aggregators if key in run.peers and run.peers[key].is_here]
    silent = [key for key in here if key not in summing.sums]
    if now_ms >= summing.until_ms:
        return None, f"{len(silent)} aggregators sent no sum in time, and the others' sums do not decide"
    if not silent:
        return None, f"{len(summing.sums)} aggregators sent sums that do not decide, and no other is here"
    return None, ""


def _most(sums: Mapping[bytes, Aggregate], needed: int) -> Aggregate | None:
    """The sum that more of these aggregators sent than any other, and at least so many."""
    counts: dict[Aggregate, int] = {}
    for aggregate in sums.values():
        counts[aggregate] = counts.get(aggregate, 0) + 1
    most = max(counts.values(), default=0)
    best = [aggregate for aggregate, count in counts.items() if count == most]
    return best[0] if most >= needed and len(best) == 1 else None


def rested(run: Run, step: OpenStep, aggregate: Aggregate | None) -> Outcome:
    """Aggregators whose sum is another than the one that counts have a rest; without one, all of them."""
    sums = {} if step.summing is None else step.summing.sums
    wrong = [key for key in step.tick.aggregators if aggregate is None or sums.get(key, aggregate) != aggregate]
    if not wrong:
        return run, []
    until = run.head_step + REST_STEPS
    kept = {key: at for key, at in run.resting.items() if at > run.head_step}
    run = replace(run, resting=dict([*kept.items(), *((key, until) for key in wrong)][-RESTING_MAX:]))
    text = f"this peer's sum of the votes of step {step.tick.step} differs from the one that counts"
    if aggregate is None:
        text = f"no sum of the votes of step {step.tick.step} counts"
    why = f"{text}; it adds no votes up for {REST_STEPS} steps"
    return run, [SendNotice(NoticeKind.WAITING, why, to=key) for key in wrong]


def _digest(contributions: Iterable[Contribution]) -> bytes:
    return digest_of(c.payload_sha256 for c in contributions)
