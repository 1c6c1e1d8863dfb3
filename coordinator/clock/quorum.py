"""When a payload of the open step counts as held, and when the step can be decided.

A payload is held when enough of the deciders report that they hold it, or when an anchor does. Deciders are the live members of
the roster; in a run with checks only believed peers, because newcomers decide nothing and keep no peer out. In a step with
aggregators these hold the payloads, by the same rule. Refuses to change a run; verdicts come with their reason.
"""

from __future__ import annotations

import math
import statistics
from functools import lru_cache, reduce
from operator import or_

from coordinator.clock import electorate, holder_counts
from coordinator.clock.holder_counts import everyone
from coordinator.clock.state import OpenStep, Peer, Quorum, Run
from coordinator.clock.value_copy import replace
from protos.identity import short
from protos.start import RUN_DIGITS_SHOWN

# How long a step waits for newcomers once all votes that count are there, as a part of the usual time of a step.
NEWCOMERS_WAIT = 0.1
NEWCOMERS_WAIT_MS_MIN = 5
NAMES_SHOWN_MAX = 4
# Of the learning rate that a run diverged with: what its operator is told to try.
LOWER_LR = 0.5


def quorum_of(quorum: float, members: int) -> int:
    """How many of `members` are more than the part `quorum`, at least 1."""
    return max(1, min(members, math.floor(quorum * members) + 1))


def live_mask(step: OpenStep, now_ms: int) -> int:
    """Bit mask of the roster members that the step waits for: all that have not hung up.

    After the deadline, only connected members: all others had time to come back after a restart of the coordinator.
    """
    return step.here if now_ms >= step.deadline_at_ms else everyone(step) & ~step.gone


def deciders(run: Run, step: OpenStep, now_ms: int) -> int:
    """Bit mask of the members whose reports and votes decide the step: live peers, in a run with checks live believed peers.

    Before any peer is believed, all live members decide. In strict runs all members decide, connected or not.
    """
    live = everyone(step) if run.config.clock.strict else live_mask(step, now_ms)
    if not electorate.founded(run):
        return live
    believed = 0
    for key, place in step.tick.places.items():
        believed |= electorate.is_believed(run, key) << place
    return live & believed


def quorum(run: Run, step: OpenStep, now_ms: int) -> Quorum:
    """The quorum that has to hold a payload. The quorum includes an anchor if one is connected.

    An anchor that holds no payload of the deciders by the deadline counts as away. It does so in the next step, too, until
    it reports a payload.
    """
    if run.config.clock.strict and not step.tick.aggregators:
        return Quorum(everyone(step), len(step.tick.roster))
    within = deciders(run, step, now_ms)
    if step.tick.aggregators:
        within = reduce(or_, step.tick.masks) & step.here
    says = bool(within & step.anchored) or any(within & step.bit(author) for author, _ in step.anchor_named)
    silent = not says and (run.anchor_late or now_ms >= step.deadline_at_ms)
    anchor = not silent and anchor_here(run)
    rule = Quorum(within, quorum_of(run.config.clock.quorum, within.bit_count()), anchor)
    if not step.tick.ranges:
        return rule
    here = frozenset(key for key in step.tick.outside if anchor and _is_anchor_here(run.peers.get(key)))
    ranges = frozenset(number for key in here for number in step.tick.ranges_of(key))
    return replace(rule, ranges=_of_ranges(step.tick.masks, step.here, run.config.clock.quorum, ranges))


@lru_cache(maxsize=64)
def _of_ranges(masks: tuple[int, ...], here: int, part: float, anchored: frozenset[int]) -> tuple[Quorum, ...]:
    """The quorum of each range; `anchored`: those with an anchor that is here. Most reports change nothing of it."""
    own = [mask & here for mask in masks]
    return tuple(Quorum(it, quorum_of(part, it.bit_count()), number in anchored) for number, it in enumerate(own))


def _is_anchor_here(peer: Peer | None) -> bool:
    return peer is not None and peer.anchor and peer.is_here


def anchor_here(run: Run) -> bool:
    """Whether an anchor is connected."""
    return run.anchored and any(peer.anchor and peer.is_here for peer in run.peers.values())


def counted(run: Run, step: OpenStep, now_ms: int) -> OpenStep:
    """The open step with its mask of authors whose payload is held, counted anew if the quorum changed."""
    now = quorum(run, step, now_ms)
    if now == step.counted_by:
        return step
    step = replace(step, counted_by=now, tally=holder_counts.tallied(step, now.within), masks=())
    return holder_counts.recounted(step)


def most_counted(run: Run, step: OpenStep, now_ms: int) -> bool:
    """Whether more than half of the peers that the step waits for are counted."""
    asked = everyone(step) & ~step.gone & ~step.rarely
    asked = asked & deciders(run, step, now_ms) if run.config.trust.enabled else asked
    return 2 * (step.counted & asked).bit_count() > asked.bit_count()


def newcomers_until_ms(run: Run, step: OpenStep) -> int:
    """Until when a step that could close waits for newcomers: a little longer than steps take."""
    usual = statistics.median(run.durations_ms) if run.durations_ms else 0.0
    wait = max(math.ceil(usual * (1.0 + NEWCOMERS_WAIT)), NEWCOMERS_WAIT_MS_MIN)
    return min(step.opened_ms + wait, step.deadline_at_ms)


def should_close(run: Run, step: OpenStep, now_ms: int) -> tuple[bool, str]:
    """Whether the open step, counted, can be decided now."""
    clock, roster, connected = run.config.clock, step.tick.roster, step.here.bit_count()
    if connected < min(clock.min_peers, len(roster)) and not clock.strict:
        return False, f"{connected} of {clock.min_peers} peers needed are connected"
    abstained = sum(1 << step.tick.places[key] for key in step.abstained if key not in step.claims)
    asked = deciders(run, step, now_ms) & ~abstained
    if not asked and abstained:
        return False, _all_abstain(run, step)
    prompt = asked & ~step.rarely
    least = min(clock.min_peers, asked.bit_count() if run.config.trust.enabled else len(roster))
    enough = prompt.bit_count() >= least and not clock.strict
    awaited = (prompt if enough else asked) & ~step.counted
    votes, deciding = step.counted.bit_count(), (step.counted & asked).bit_count()
    if not awaited and deciding:
        newcomers = everyone(step) & ~(asked | abstained | step.gone | step.rarely | step.counted)
        if newcomers and now_ms < newcomers_until_ms(run, step):
            return False, f"waiting a moment for newcomers: {_names(step, newcomers)}"
        late = f", but for {_names(step, slow)}: too slow lately" if (slow := step.rarely & ~step.counted) else ""
        return True, f"all {votes} payloads are held{late}"
    names = _names(step, awaited)
    if clock.strict:
        gone = f"; {len(run.left)} of them left: waiting for {clock.min_peers} ready peers" if run.left else ""
        return False, f"strict: waiting for {names}{gone}"
    if now_ms >= step.deadline_at_ms and deciding:
        return True, f"deadline: {votes} payloads are held, without {names}"
    return False, f"{votes} of {len(roster)} payloads are held; waiting for {names or 'a payload'}"


def _all_abstain(run: Run, step: OpenStep) -> str:
    """The reason if no peer has votes: the run has most likely diverged, unless owners have paused their peers."""
    paused = sum(key in run.peers and run.peers[key].is_paused for key in step.abstained)
    if paused == len(step.abstained):
        return f"all {paused} peers of step {step.tick.step} that are here are paused by their owners"
    reason = next(iter(step.abstained.values()))
    return (
        f"all {len(step.abstained)} peers that are here abstain from step {step.tick.step} ({reason}): the run has diverged. "
        f"{_way_back(run)}"
    )


def _way_back(run: Run) -> str:
    """The command with which the operator of a diverged run goes back to its newest agreed state."""
    if run.snapshot is None or run.snapshot.step == 0:
        return "It has no agreed snapshot to go back to: its operator can make a new run with a lower optimizer.lr or clip_norm"
    lower = f"{run.config.optimizer.lr * LOWER_LR:g}"
    return (
        f"Its operator can go back to step {run.snapshot.step} with a lower learning rate: swarmentum-coordinator run fork "
        f"{run.run_id.hex()[:RUN_DIGITS_SHOWN]} --from-step {run.snapshot.step} optimizer.lr={lower} (an earlier step, if "
        "the loss had grown by then)"
    )


def _names(step: OpenStep, members: int) -> str:
    """The first few of a mask's members, for people."""
    shown: list[str] = []
    more = members.bit_count() > NAMES_SHOWN_MAX
    while members and len(shown) < NAMES_SHOWN_MAX:
        place = (members & -members).bit_length() - 1
        shown.append(short(step.tick.roster[place].public_key))
        members &= members - 1
    return ", ".join(shown) + (" ..." if more else "")
