"""What an author claims of its payload of the open step: taken within what the coordinator itself knows, or refused.

Refuses claims of another step, log or roster. Figures count only as far as they can be true: samples up to the author's own
share, tokens up to those of its samples, a loss in its range; and what a claim says of its time only makes its author slower.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator import memory, rules, transitions
from coordinator.events import Append, Claim, Effect, Equivocated, Refuse, SendAnnouncement
from coordinator.state import OpenStep, Outcome, Run
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
    holders = {
        name: mask for name, mask in current.holders.items() if name[0] != public_key or name[1] == claim.payload_sha256
    }
    claims = {**current.claims, public_key: claim}
    # The payload may be held by many already, or be another one than before: count anew.
    run = replace(run, step=replace(current, claims=claims, holders=holders, counted_by=None))
    peer = run.peers[public_key]
    speed = peer.samples_per_second
    if before is None:
        speed = rules.measured_speed(speed, claim, now_ms - current.opened_ms)
    return transitions.with_peer(run, replace(peer, samples_per_second=speed, loss=claim.loss)), _contradict(
        current, public_key, claim
    )


def _problem(run: Run, public_key: bytes, claim: Claim) -> str:
    """What is wrong with a claim; empty: nothing."""
    current = run.step
    if current is None or claim.step != current.tick.step:
        is_open = "none is open" if current is None else f"step {current.tick.step} is open"
        return f"payload of step {claim.step}: {is_open}"
    if claim.parent_hash != current.tick.parent_hash:
        return f"payload of step {claim.step} was computed on another log"
    if public_key not in current.tick.places:
        return f"not in the roster of step {claim.step}; the next tick takes you in"
    samples = sum(len(part) for part in current.tick.pool)
    if claim.samples > samples:
        return f"{claim.samples} samples claimed; step {claim.step} has {samples}"
    return ""


def _within(run: Run, current: OpenStep, public_key: bytes, claim: Claim) -> Claim:
    """The claim with figures that the coordinator can vouch for: of at most the author's own share, a loss that can be.

    With overlap, or when a step was opened again, an honest author's samples are those of another share: nothing is refused.
    """
    share = current.tick.roster[current.tick.places[public_key]].samples
    samples = min(claim.samples, share)
    tokens = min(claim.tokens, samples * run.config.data.context)
    return replace(claim, samples=samples, tokens=tokens, loss=min(max(claim.loss, -LOSS_MAX), LOSS_MAX))


def _contradict(current: OpenStep, author: bytes, claim: Claim) -> list[Effect]:
    """Who holds another payload of this author has heard another announcement, and hears this one: then it has both."""
    heard = (mask for name, mask in current.holders.items() if name[0] == author and name[1] != claim.payload_sha256)
    own = current.bit(author)
    for mask in heard:
        if others := mask & current.here & ~own:
            witness = current.tick.roster[(others & -others).bit_length() - 1].public_key
            return [SendAnnouncement(claim.envelope, to=witness)]
    return []
