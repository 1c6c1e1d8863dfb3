"""The decisions of the clock, each a function of values: deadlines, shares, and the peers that a step waits for.

Verdicts come with their reason. Refuses to change a run, and to decide which peers may take part (`admission.py`) or are
believed (`trust.py`). ADR 23.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from coordinator.clock import electorate
from coordinator.clock.effects import DecayStarted
from coordinator.clock.events import Claim
from coordinator.clock.state import OpenStep, Peer, PeerPhase, Run
from coordinator.clock.value_copy import replace
from protos.assignment import Range, SampleShare, assign, merge, shares
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig
from protos.tick import Tick

V = TypeVar("V", bound=Hashable)

# A decay of a fifth of the steps ends as low as a cosine over all of them (arXiv 2405.18392, section 3).
DECAY_PART = 0.2
# Half of an update a step: a peer's speed follows a real change within a few steps, and one outlier fades as fast.
SPEED_EMA = 0.5
# Shares follow speed to this power. If few samples do not fill a GPU, a step takes equal peers the same time whatever their
# share. The peer with fewer samples then seems slower. At 1.0 nothing would make the shares equal again after noise. At
# 0.95 a peer that is a hundred times slower takes a quarter longer than the others, which is within a deadline.
EVENING = 0.95
# A miss halves a peer's share, at most so often; a step that counts its votes gives back a quarter of it.
PACE_MISSED = 0.5
PACE_AGAIN = 1.25
PACE_MIN = 2.0**-20
# After this number of misses only every 2nd step waits for a peer, then every 4th, 8th, 16th, 32nd. Each step that accepts
# the peer's votes takes MADE_UP off its count of misses. So a peer can delay at most every 4th step in the long run. A
# smaller value would give up on distant peers that miss only one step in ten.
PATIENCE_STEPS = 4
MISSED_MAX = PATIENCE_STEPS + 4
MADE_UP = 1 / 4
# The part of the usual time of most peers that a step may take beyond it.
DEADLINE_SLACK = 0.5
# The most that a peer's speed counts for, in times the median. So neither a false figure nor a giant gets most of the data.
SPEED_TIMES_MEDIAN_MAX = 4.0
# In a run with checks, a roster has at most half as many newcomers as believed peers, but always room for one. A newcomer gets
# a part of the usual share.
NEWCOMERS_PER_BELIEVED = 1 / 2
NEWCOMER_PART = 1 / 2


def learning_rate(optimizer: OptimizerConfig, steps: int, step: int, decay: DecayStarted | None = None) -> float:
    """Learning rate of step 1..steps: linear warm-up, then the schedule. `decay`: the operator's, after a rate that stays.

    The decay of `wsd`, and the operator's, has the shape 1 - sqrt, which ended best of those in arXiv 2405.18392. ADR 44.
    """
    if step <= optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    begins, last = optimizer.warmup_steps, steps
    if optimizer.schedule in ("wsd", "constant"):
        if decay is not None:
            begins, last = decay.after_step, decay.last_step
        elif optimizer.schedule == "constant":
            return optimizer.lr
        else:
            begins = decay_begins(optimizer, steps)
    progress = min(max(step - begins, 0) / max(last - begins, 1), 1.0)
    if not progress:
        return optimizer.lr
    if optimizer.schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        left = 1.0 - (progress if optimizer.schedule == "linear" else math.sqrt(progress))
    final = optimizer.lr * optimizer.lr_final_ratio
    return final + (optimizer.lr - final) * left


def decay_begins(optimizer: OptimizerConfig, steps: int) -> int:
    """The last step before the decay of a `wsd` schedule."""
    return max(steps - (optimizer.decay_steps or max(int(steps * DECAY_PART), 1)), optimizer.warmup_steps)


def deadline_ms(clock: ClockConfig, durations_ms: Sequence[int], checks_due: int = 0) -> int:
    """How long a step may take, within bounds: half as long again as most peers usually need, or k * MAD more.

    `checks_due`: the most that the entry before asks of one peer. Each is a gradient over up to a step's samples, and so is the
    one that they are compared with: a checker's votes come so much later, and still count.
    """
    if len(durations_ms) < 3:
        return clock.deadline_ms_max
    median = statistics.median(durations_ms)
    spread = statistics.median(abs(value - median) for value in durations_ms)
    most = median + max(clock.deadline_mad_factor * spread, DEADLINE_SLACK * median)
    gradients = 2 + checks_due if checks_due else 1
    return int(min(max(most, clock.deadline_ms_min) * gradients, clock.deadline_ms_max))


def seen(step: OpenStep, peers: Mapping[bytes, Peer]) -> OpenStep:
    """The open step with its masks of who is here and who hung up, from all peers; `met` keeps them up to date."""
    here = gone = 0
    for public_key, place in step.tick.places.items():
        peer = peers.get(public_key)
        here |= (peer is not None and peer.phase is not PeerPhase.ABSENT) << place
        gone |= (peer is not None and peer.gone) << place
    return replace(step, here=here, gone=gone)


def met(step: OpenStep, peer: Peer) -> OpenStep:
    """`seen` for one peer that has changed."""
    place = step.tick.places.get(peer.public_key)
    if place is None:
        return step
    bit = 1 << place
    here = step.here | bit if peer.phase is not PeerPhase.ABSENT else step.here & ~bit
    gone = step.gone | bit if peer.gone else step.gone & ~bit
    return step if (here, gone) == (step.here, step.gone) else replace(step, here=here, gone=gone)


def heard(run: Run, author: bytes, claim: Claim) -> bool:
    """Whether the author's claim is the one that counts for the open step, or the step is decided."""
    if run.step is None or claim.step <= run.head_step:
        return claim.step <= run.head_step
    held = run.step.claims.get(author)
    return held is not None and (held.step, held.payload_sha256) == (claim.step, claim.payload_sha256)


def agree(reports: Mapping[bytes, V], electors: Collection[bytes]) -> tuple[V | None, str]:
    """The value that more than half of the electors reported, or None; with the reason."""
    counts = Counter(value for key, value in reports.items() if key in electors)
    members = len(electors)
    if not counts:
        return None, "no elector has reported"
    value, count = counts.most_common(1)[0]
    if count * 2 > members:
        return value, f"{count} of {members} peers"
    return None, f"{count} of {members} peers, more than half needed"


def draw(
    returned: tuple[Range, ...], next_sample: int, samples: int
) -> tuple[tuple[Range, ...], tuple[Range, ...], int]:
    """Samples for a step: (pool, returned samples that are left, next fresh sample). Returned ones go first."""
    pool = assign(returned, [SampleShare(b"", samples)])[b""]
    left = subtract(returned, pool)
    missing = samples - sum(len(part) for part in pool)
    if missing:
        pool = (*pool, Range(next_sample, next_sample + missing))
    return pool, left, next_sample + missing


def subtract(ranges: Sequence[Range], taken: Sequence[Range]) -> tuple[Range, ...]:
    """`ranges` without `taken`, which must be parts of them."""
    points: Counter[int] = Counter()
    for part in ranges:
        points[part.start] += 1
        points[part.stop] -= 1
    for part in taken:
        points[part.start] -= 1
        points[part.stop] += 1
    left, depth, since = [], 0, 0
    for point in sorted(points):
        if depth == 1:
            left.append(Range(since, point))
        depth, since = depth + points[point], point
        assert depth in (0, 1), "samples were taken that were not there"
    return merge(left)


def bounded(ranges: tuple[Range, ...], ranges_max: int) -> tuple[Range, ...]:
    """At most `ranges_max` of the ranges, the longest: the samples of the crumbs are given up rather than the limit."""
    if len(ranges) <= ranges_max:
        return ranges
    return tuple(sorted(sorted(ranges, key=lambda part: (-len(part), part))[:ranges_max]))


def paced(peer: Peer, *, counted: bool, awaited: bool) -> Peer:
    """A roster member after a step that counted its votes or not, and that waited for it or not.

    Each miss halves the peer's share, whatever speed it claims. The share grows again with the steps that count its votes.
    After steps that waited in vain (`awaited`), fewer steps wait for the peer. A counted step takes MADE_UP off its misses,
    or a whole miss if few steps wait for the peer and this one did.
    """
    if counted:
        made_up = 1.0 if awaited and peer.missed >= PATIENCE_STEPS + 1 else MADE_UP
        return replace(peer, pace=min(peer.pace * PACE_AGAIN, 1.0), missed=max(peer.missed - made_up, 0.0))
    missed = min(peer.missed + awaited, float(MISSED_MAX))
    return replace(peer, pace=max(peer.pace * PACE_MISSED, PACE_MIN), missed=missed)


def is_awaited(missed: float, step: int) -> bool:
    """Whether a step waits for a peer for which so many waited in vain: the first few do, then every 2nd, 4th ... 32nd.

    So peers that cannot keep up delay only a few steps, the same ones for all. Each gets further chances, and by then its
    share may be small enough.
    """
    return missed < PATIENCE_STEPS or step % (2 << (min(int(missed), MISSED_MAX) - PATIENCE_STEPS)) == 0


def rarely_awaited(clock: ClockConfig, tick: Tick, peers: Mapping[bytes, Peer]) -> int:
    """Bit mask of the roster members that this step does not wait for: the worst ones, so that `min_peers` are left, and most.

    If most members are too slow, the deadline has to grow instead. Of two members, one may be left out.
    """
    slow = [peer for key in tick.places if (peer := peers.get(key)) and not is_awaited(peer.missed, tick.step)]
    members = len(tick.roster)
    spare = max(min(members - clock.min_peers, max(members - 1, 2) // 2), 0)
    worst = sorted(slow, key=lambda peer: (-peer.missed, peer.public_key))[:spare]
    return sum(1 << tick.places[peer.public_key] for peer in worst)


def members_of(run: Run) -> list[Peer]:
    """The peers of the next tick: all that are ready. With checks, at most half as many newcomers as believed peers, or one.

    The peers of the first step are believed from then on. So in an open run each block of public addresses has one of them,
    unless all come from one block (a house). The newcomer whose last turn was longest ago is next. While no believed peer is
    ready, the tick has no peers.
    """
    ready = run.ready
    if not run.config.trust.enabled:
        return ready
    if not electorate.founded(run):
        one = electorate.places(run, [peer.public_key for peer in ready])
        return ready if len(one) == 1 else [peer for peer in ready if peer.public_key in one]
    believed = [peer for peer in ready if electorate.is_believed(run, peer.public_key)]
    newcomers = [peer for peer in ready if not electorate.is_believed(run, peer.public_key)]
    most = max(int(len(believed) * NEWCOMERS_PER_BELIEVED), 1) if believed else 0
    newcomers.sort(key=lambda peer: (peer.last_turn, peer.syncing_since_ms, peer.public_key))
    return sorted([*believed, *newcomers[:most]], key=lambda peer: peer.public_key)


def roster_of(run: Run, peers: Sequence[Peer], samples: int) -> tuple[SampleShare, ...]:
    """The next tick's roster: these peers, with shares by measured speed and pace (strict: equal).

    A peer that was not measured is taken to be as fast as the mean of those that were. No speed counts as more than
    SPEED_TIMES_MEDIAN_MAX times the median. A newcomer on probation gets a smaller share: the step does not wait for it.
    """
    known = [peer.samples_per_second for peer in peers if peer.samples_per_second > 0]
    most = SPEED_TIMES_MEDIAN_MAX * statistics.median(known) if known else 1.0
    usual = statistics.fmean(min(speed, most) for speed in known) if known else 1.0
    if run.config.clock.strict:
        return shares(samples, [(peer.public_key, 1.0) for peer in peers])
    speeds = []
    for peer in peers:
        part = peer.pace * (1.0 if electorate.is_believed(run, peer.public_key) else NEWCOMER_PART)
        speeds.append((peer.public_key, min(peer.samples_per_second or usual, most) ** EVENING * part))
    return shares(samples, speeds)


def measured_speed(before: float, claim: Claim, elapsed_ms: int = 0) -> float:
    """Samples a second after one more step. `elapsed_ms`: since the tick, by the coordinator's clock; a claim is no faster."""
    now = claim.samples / max(claim.compute_ms / 1000.0, elapsed_ms / 1000.0, 1e-3)
    return now if before <= 0 else before + SPEED_EMA * (now - before)
