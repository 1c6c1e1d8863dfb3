"""The decisions of the clock, each a function of values: deadlines, shares, the peers that a step waits for, and electors.

Verdicts come with their reason. Refuses to change a run, and to decide which peers may take part (`admission.py`) or are
believed (`trust.py`). ADR 23.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from typing import TypeVar

from coordinator.clock.effects import DecayStarted
from coordinator.clock.events import Claim
from coordinator.clock.state import Electors, OpenStep, Peer, PeerPhase, Run
from coordinator.clock.trust import Standing
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
    """The value that more than half of the electors reported, with the reason; or None."""
    members = len(electors)
    if 2 * len(reports) > members:  # at most of the reports of a state there is nothing to count yet
        counts = Counter(value for key, value in reports.items() if key in electors)
        for value, count in counts.most_common(1):
            if count * 2 > members:
                return value, f"{count} of {members} peers"
    return None, f"no more than half of {members} peers"


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
    if not founded(run):
        one = places(run, [peer.public_key for peer in ready])
        return ready if len(one) == 1 else [peer for peer in ready if peer.public_key in one]
    believed = [peer for peer in ready if is_believed(run, peer.public_key)]
    newcomers = [peer for peer in ready if not is_believed(run, peer.public_key)]
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
        part = peer.pace * (1.0 if is_believed(run, peer.public_key) else NEWCOMER_PART)
        speeds.append((peer.public_key, min(peer.samples_per_second or usual, most) ** EVENING * part))
    return shares(samples, speeds)


def measured_speed(before: float, claim: Claim, elapsed_ms: int = 0) -> float:
    """Samples a second after one more step. `elapsed_ms`: since the tick, by the coordinator's clock; a claim is no faster."""
    now = claim.samples / max(claim.compute_ms / 1000.0, elapsed_ms / 1000.0, 1e-3)
    return now if before <= 0 else before + SPEED_EMA * (now - before)


# Electors: the peers whose reports on states and snapshots count. Identities are free in an open run, so peers are never
# simply counted. In a run with anchors (the operator's own processes that only apply), only anchors are electors. Without
# anchors, the electors of a step are the peers whose votes its entry counted. In an open run they need a tenure, and each
# block of network addresses has one elector. Reports of a peer that is merely ready do not count: they cost nothing. ADR 26.


# Snapshot periods in which an entry must have counted a peer's votes, in a run that is old enough.
TENURE_PERIODS = 3


def period_of(run: Run, step: int) -> int:
    """Which snapshot period a step is in, from 0."""
    return (step - 1) // run.config.clock.snapshot_every


def served(run: Run, peer: Peer, step: int) -> Peer:
    """The peer after an entry that counts its votes."""
    period = period_of(run, step)
    if period == peer.last_period:
        return peer
    return replace(peer, tenure=peer.tenure + 1, last_period=period)


def electors(run: Run, step: int) -> Set[bytes]:
    """The public keys of the peers whose reports on the state after `step` count; more than half of them have to agree.

    The set is empty if no such peer is left. Then nothing is agreed, and the run goes on.
    """
    if run.anchored:
        return eligible(run, step)
    known = run.electors
    if (
        known is not None
        and known.step == step
        and known.voted is run.voted.get(step)
        and known.standings is run.standings
        and known.config is run.config
    ):
        return known.keys
    return places(run, eligible(run, step))


def with_electors(run: Run, step: int) -> Run:
    """The run, which knows the electors of `step` from now on. Each report of a state asks for them: in a run with 500 peers,
    they took half of the clock's time. ADR 57."""
    if run.anchored:
        return run
    found = electors(run, step)
    if run.electors is not None and run.electors.keys is found:
        return run
    known = Electors(step, frozenset(found), run.voted.get(step), run.standings, run.config)
    return replace(run, electors=known)


def changes_electors(before: Peer | None, peer: Peer) -> bool:
    """Whether a peer that has changed may be an elector now, or no elector any more."""
    return before is None or (before.phase, before.gone, before.anchor, before.network, before.tenure) != (
        peer.phase,
        peer.gone,
        peer.anchor,
        peer.network,
        peer.tenure,
    )


def eligible(run: Run, step: int) -> set[bytes]:
    """The electors, and the peers that would be electors if no other peer had the place of their network addresses.

    A snapshot needs keepers among these: a new identity may say that it keeps pieces, and keep none.
    """
    if run.anchored:
        return run.anchors_here
    if step == 0:
        return {peer.public_key for peer in run.trainers}
    voted = run.voted.get(step)
    if voted is None:
        return set()
    here = [key for key in voted.counted if key not in run.peers or not run.peers[key].gone]
    if run.config.trust.enabled:
        here = [key for key in here if run.standings.get(key, Standing()).counted]
    if run.config.admission.mode != "open":
        return set(here)
    needed = min(period_of(run, step) + 1, TENURE_PERIODS)
    return {key for key in here if key in run.peers and run.peers[key].tenure >= needed}


def founded(run: Run) -> bool:
    """Whether a run with checks has believed peers. From then on only these decide, and the run waits while all are away."""
    return run.config.trust.enabled and any(it.counted and not it.excluded for it in run.standings.values())


def places(run: Run, keys: Iterable[bytes]) -> set[bytes]:
    """One peer of each block of network addresses: the one with the longest tenure. Private networks are no blocks."""
    if run.config.admission.mode != "open":
        return set(keys)
    found: dict[object, Peer] = {}
    for peer in sorted((run.peers[key] for key in keys), key=lambda peer: (-peer.tenure, peer.public_key)):
        found.setdefault(peer.network or peer.public_key, peer)
    return {peer.public_key for peer in found.values()}


def is_believed(run: Run, public_key: bytes) -> bool:
    """Whether a peer's votes count: it is not on probation, or the run has no checks."""
    if not run.config.trust.enabled:
        return True
    standing = run.standings.get(public_key, Standing())
    return standing.counted and not standing.excluded
