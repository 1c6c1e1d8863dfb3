"""An author's claim about its payload of the open step: limited to figures that the coordinator can check, or refused.

Refuses claims of another step, log or roster. Each figure is limited: samples to the author's share, tokens to the tokens of
these samples, the loss to a range. A claimed time can only make its author seem slower.
"""

from __future__ import annotations

from coordinator.clock import holder_counts, memory, rules, transitions
from coordinator.clock.effects import Append, Effect, Refuse, SendAnnouncement
from coordinator.clock.events import Claim
from coordinator.clock.records import Equivocated
from coordinator.clock.state import OpenStep, Outcome, Run
from coordinator.clock.value_copy import replace
from protos.equivocation import Offence
from protos.log import Equivocation

# Nats a token: that of a model that knows nothing is the logarithm of its vocabulary, some 12.
LOSS_MAX = 1e4


def claimed(run: Run, public_key: bytes, claim: Claim, now_ms: int) -> Outcome:
    """One claim of a connected peer."""
    current, problem = run.step, _problem(run, public_key, claim)
    if current is None or problem:
        return run, [Refuse(public_key, problem)]
    claim, before = _within(run, current, public_key, claim), current.claims.get(public_key)
    if before is not None and before.payload_sha256 != claim.payload_sha256:
        payloads, said = (before.payload_sha256, claim.payload_sha256), Equivocation(before.envelope, claim.envelope)
        record = Equivocated(Offence(public_key, claim.step, payloads, said))
        return memory.remember(run, record, 0), [Append(record), Refuse(public_key, record.offence.reason)]
    step = replace(current, claims={**current.claims, public_key: claim})
    run = replace(run, step=holder_counts.claimed(step, public_key, claim.payload_sha256))
    peer = run.peers[public_key]
    speed = peer.samples_per_second
    if before is None:
        speed = rules.measured_speed(speed, claim, now_ms - current.opened_ms)
    return transitions.with_peer(run, replace(peer, samples_per_second=speed, loss=claim.loss)), _contradict(
        current, public_key, claim
    )


def _problem(run: Run, public_key: bytes, claim: Claim) -> str:
    """The reason to refuse a claim; empty if there is none."""
    current = run.step
    if current is None or claim.step != current.tick.step:
        is_open = "none is open" if current is None else f"step {current.tick.step} is open"
        return f"payload of step {claim.step}: {is_open}"
    if claim.parent_hash != current.tick.parent_hash:
        return f"payload of step {claim.step} was computed on another log than this coordinator's"
    if public_key not in current.tick.places:
        return f"you are not in the roster of step {claim.step}; the next tick may include you"
    samples = sum(len(part) for part in current.tick.pool)
    if claim.samples > samples:
        return f"{claim.samples} samples claimed; step {claim.step} has {samples}"
    return ""


def _within(run: Run, current: OpenStep, public_key: bytes, claim: Claim) -> Claim:
    """The claim with its figures limited to the author's own share and to a possible loss.

    With overlap, or when a step was opened again, an honest author's samples are those of another share: nothing is refused.
    """
    share = current.tick.roster[current.tick.places[public_key]].samples
    samples = min(claim.samples, share)
    tokens = min(claim.tokens, samples * run.config.data.context)
    return replace(claim, samples=samples, tokens=tokens, loss=min(max(claim.loss, -LOSS_MAX), LOSS_MAX))


def _contradict(current: OpenStep, author: bytes, claim: Claim) -> list[Effect]:
    """A peer that holds another payload of this author received another announcement. Such a peer gets this one too, and
    then has both."""
    heard = (mask for name, mask in current.named.items() if name[0] == author and name[1] != claim.payload_sha256)
    own = current.bit(author)
    for mask in heard:
        if others := mask & current.here & ~own:
            witness = current.tick.roster[(others & -others).bit_length() - 1].public_key
            return [SendAnnouncement(claim.envelope, to=witness)]
    return []
