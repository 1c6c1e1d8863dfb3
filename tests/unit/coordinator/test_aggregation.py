"""Who adds a step's votes up, whose sum counts, and what happens where they lie, are silent, or go."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from coordinator.clock import aggregation
from coordinator.clock.effects import NoticeKind, SendNotice, SendSumRequest
from coordinator.clock.events import (
    Connected,
    Disconnected,
    ExclusionAsked,
    HeldPlaces,
    JoinAsked,
    Reported,
    Summed,
    TimerFired,
)
from coordinator.clock.state import Run
from protos.identity import Identity, peer_id
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, RunConfig, TrustConfig
from protos.run_sections import AdmissionConfig
from protos.slices import Aggregate
from protos.slices import digest_of as digest_over
from tests.unit.coordinator.driver import LAYOUT, Harness, Swarm, claim_of, digest_of, joined, key, sha, snapshot_at

ANCHOR = Identity.from_seed(b"a" * 32).public_key
RIGHT, WRONG = (Aggregate(sha(name), 64) for name in ("right", "wrong"))


def named_sum(aggregate: Aggregate | None) -> Aggregate:
    """The sum that an entry names, as its aggregators sent it."""
    assert aggregate.payloads_sha256, "the entry has one hash for all payloads"
    return replace(aggregate, payloads_sha256=b"")


def settings(peers: int, *, mode: Any = "allow_list", anchored: bool = False, **clock: object) -> RunConfig:
    """Of a run whose votes add up, with three aggregators."""
    usual: dict[str, object] = {"steps": 50, "batch_samples": 16, "snapshot_every": 10, "deadline_ms_min": 1_000}
    return RunConfig(
        optimizer=OptimizerConfig(selection="random"),
        clock=ClockConfig.model_validate({**usual, "aggregators": 3, **clock}),
        admission=AdmissionConfig(
            mode=mode, allowed=[peer_id(key(number)) for number in range(peers)] if mode == "allow_list" else []
        ),
        trust=TrustConfig(anchors=[peer_id(ANCHOR)]) if anchored else TrustConfig(),
    )


def opened(peers: int = 8, *, anchored: bool = False, **more: Any) -> Harness:
    """A run whose first step is open for all of these peers."""
    harness = Harness(settings(peers, anchored=anchored, **{"min_peers": peers - 1, **more}))  # type: ignore[arg-type]
    if anchored:
        harness.feed(JoinAsked(ANCHOR, "cpu", 100, LAYOUT, (), anchor=True))
        harness.feed(Connected(ANCHOR))
    for number in range(peers):
        harness.comes(number, at=0)
    for number in range(peers):
        harness.feed(Reported(key(number), snapshots=(snapshot_at(0),)))
    if anchored:
        harness.feed(Reported(ANCHOR, applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    assert len(harness.run.roster) == peers
    return harness


def vote(harness: Harness, *numbers: int) -> list[SendSumRequest]:
    """These peers publish, and the step's aggregators hold it all. Returns what they are asked for, if they are."""
    tick = harness.ticks[-1]
    claims = [claim_of(tick, number) for number in numbers]
    held = tuple((tick.step, key(n), claim.payload_sha256) for n, claim in zip(numbers, claims, strict=True))
    for number, claim in zip(numbers, claims, strict=True):
        harness.feed(Reported(key(number), claim=claim))
    said = HeldPlaces(tick.step, tick.attempt, 0, b"")  # aggregators of ranges say of which attempt they speak
    effects = [effect for who in tick.aggregators for effect in harness.feed(Reported(who, holdings=held, held=said))]
    return [effect for effect in effects if isinstance(effect, SendSumRequest)]


def answer(harness: Harness, request: SendSumRequest, aggregate: Aggregate, who: bytes | None = None) -> None:
    """An aggregator's sum."""
    digest = digest_over(c.payload_sha256 for c in request.contributions)
    summed = Summed(request.step, request.attempt, digest, aggregate)
    harness.feed(Reported(who or request.to, summed=summed))


def run_of(harness: Harness) -> Run:
    return harness.run


def test_few_peers_take_all_payloads_and_so_do_strangers() -> None:
    assert not opened(6).ticks[-1].aggregators, "five payloads are no more than three and a sum"
    assert len(opened(8).ticks[-1].aggregators) == 3
    assert not opened(8, mode="open").ticks[-1].aggregators, "whoever likes would add up"
    assert not opened(8, aggregators=0).ticks[-1].aggregators
    assert aggregation.worth(1000, 3, 2)


def test_anchors_add_up_before_peers_also_in_an_open_run() -> None:
    for mode in ("open", "allow_list"):
        tick = opened(8, anchored=True, mode=mode).ticks[-1]
        assert tick.aggregators[0] == ANCHOR
        assert len(tick.aggregators) == 3


def test_the_draw_is_another_one_in_each_step_and_from_who_is_there() -> None:
    swarm = Swarm(settings(9, steps=12), 9)
    swarm.finish()
    drawn = [tick.aggregators for tick in swarm.ticks if len(tick.roster) == 9]
    assert len(set(drawn)) > 5
    assert {who for several in drawn for who in several} == {key(number) for number in range(9)}
    assert sum(entry.aggregate is not None for entry in swarm.entries) >= len(drawn)


def test_two_equal_sums_decide_and_one_does_not() -> None:
    harness = opened()
    requests = vote(harness, *range(8))
    assert [request.to for request in requests] == list(harness.ticks[-1].aggregators)
    answer(harness, requests[0], RIGHT)
    assert not harness.entries
    answer(harness, requests[0], RIGHT)
    assert not harness.entries, "it said so twice"
    answer(harness, requests[1], RIGHT)
    assert named_sum(harness.entries[0].aggregate) == RIGHT
    assert len(harness.entries[0].contributions) == 8


def test_a_sum_that_nobody_has_is_made_again_by_others_at_each_deadline() -> None:
    harness = opened(anchored=True)
    for request in vote(harness, *range(8)):
        if request.to == ANCHOR:
            answer(harness, request, RIGHT)
    entry, votes = harness.entries[0], harness.run.added
    assert {c.public_key for c in votes} == {c.public_key for c in entry.contributions}
    assert all(c.payload_sha256 for c in votes), "the entry does not name them"
    harness.feed(Disconnected(ANCHOR))

    def at_the_deadline() -> list[SendSumRequest]:
        assert harness.run.step is not None
        harness.now = harness.run.step.deadline_at_ms
        return [it for it in harness.feed(TimerFired()) if isinstance(it, SendSumRequest)]

    drawn = [at_the_deadline() for _ in range(4)]
    for requests in drawn:
        assert len(requests) == aggregation.AGAIN
        assert {(it.step, it.attempt, it.contributions) for it in requests} == {(1, 0, votes)}
    assert len({frozenset(it.to for it in requests) for requests in drawn}) > 1, "others each time"
    harness.feed(Reported(key(3), applied=((1, digest_of(1)),)))
    assert at_the_deadline(), "one that says that it has it may lie"
    for number in range(4, 8):
        harness.feed(Reported(key(number), applied=((1, digest_of(1)),)))
    assert not at_the_deadline(), "most have it, and give it to the others"


def test_an_anchors_sum_counts_alone_and_against_two() -> None:
    harness = opened(anchored=True)
    requests = {request.to: request for request in vote(harness, *range(8))}
    one, other = (who for who in requests if who != ANCHOR)
    answer(harness, requests[one], WRONG)
    answer(harness, requests[ANCHOR], RIGHT)
    assert named_sum(harness.entries[0].aggregate) == RIGHT
    assert aggregation.is_resting(harness.run, one)
    assert not aggregation.is_resting(harness.run, other)


def test_without_its_anchor_a_run_with_anchors_believes_two_and_the_next_step_has_none() -> None:
    harness = opened(anchored=True)
    requests = {request.to: request for request in vote(harness, *range(8))}
    harness.feed(Disconnected(ANCHOR))
    assert not harness.entries
    for who in requests.keys() - {ANCHOR}:
        answer(harness, requests[who], RIGHT)
    assert named_sum(harness.entries[0].aggregate) == RIGHT
    assert not harness.ticks[-1].aggregators


def test_sums_that_differ_cost_an_attempt_and_their_makers_the_next_steps() -> None:
    harness = opened()
    requests = vote(harness, *range(8))
    effects = []
    for number, request in enumerate(requests):
        answer(harness, request, Aggregate(sha(number), 64))
        effects += [effect for _, effect in harness.announced if isinstance(effect, SendNotice)]
    assert not harness.entries
    again = harness.ticks[-1]
    assert again.attempt == 2
    assert again.roster == harness.ticks[-2].roster
    assert not {*again.aggregators} & {request.to for request in requests}
    told = {effect.to for effect in effects if effect.kind is NoticeKind.WAITING and "no sum" in effect.reason}
    assert told == {request.to for request in requests}
    claims = harness.run.step.claims if harness.run.step else {}
    assert len(claims) == 8, "the votes of the first attempt stay"
    assert [request.to for request in vote(harness, *range(8))] == list(again.aggregators)


def test_when_nobody_is_left_to_add_up_everybody_takes_everything() -> None:
    harness = opened(8)
    for _ in range(4):
        if not harness.ticks[-1].aggregators:
            break
        for number, request in enumerate(vote(harness, *range(8))):
            answer(harness, request, Aggregate(sha(number), 64))
    assert not harness.ticks[-1].aggregators
    tick = harness.ticks[-1]
    held = tuple((1, key(n), claim_of(tick, n).payload_sha256) for n in range(8))
    for n in range(8):
        harness.feed(Reported(key(n), holdings=held))
    assert harness.entries, harness.run.reason
    assert harness.entries[0].aggregate is None
    assert len(harness.entries[0].contributions) == 8


def test_aggregators_that_say_nothing_in_time_are_replaced() -> None:
    harness = opened()
    requests = vote(harness, *range(8))
    answer(harness, requests[0], RIGHT)
    harness.now += 500
    harness.feed(TimerFired())
    assert harness.ticks[-1].attempt == 1, "the timer was early"
    harness.now += 60_000
    harness.feed(TimerFired())
    assert harness.ticks[-1].attempt == 2
    assert not {*harness.ticks[-1].aggregators} & {request.to for request in requests}


def test_aggregators_that_hold_nothing_at_the_deadline_are_replaced() -> None:
    harness = opened()
    for number in range(8):
        harness.feed(Reported(key(number), claim=claim_of(harness.ticks[-1], number)))
    before = harness.ticks[-1].aggregators
    assert harness.timer is not None
    harness.now = harness.timer
    harness.feed(TimerFired())
    assert harness.ticks[-1].attempt == 2
    assert not {*harness.ticks[-1].aggregators} & {*before}


def test_two_that_leave_are_replaced_at_once_and_one_is_not() -> None:
    harness = opened(9)
    first, second, _ = harness.ticks[-1].aggregators
    harness.feed(Disconnected(first))
    assert harness.ticks[-1].attempt == 1
    harness.feed(Disconnected(second))
    assert harness.ticks[-1].attempt == 2
    assert not {*harness.ticks[-1].aggregators} & {first, second}


def test_who_is_excluded_while_its_votes_are_added_up_is_in_no_sum() -> None:
    harness = opened(9)
    requests = vote(harness, *range(9))
    out = next(number for number in range(9) if key(number) not in harness.ticks[-1].aggregators)
    effects = harness.feed(ExclusionAsked(key(out), "spam"))
    anew = [effect for effect in effects if isinstance(effect, SendSumRequest)]
    assert [request.to for request in anew] == [request.to for request in requests]
    assert key(out) not in {c.public_key for c in anew[0].contributions}
    for request in requests[:2]:
        answer(harness, request, WRONG)
    assert not harness.entries, "those are sums of other votes"
    for request in anew[:2]:
        answer(harness, request, RIGHT)
    assert named_sum(harness.entries[0].aggregate) == RIGHT
    assert key(out) not in {c.public_key for c in harness.entries[0].contributions}


def test_an_aggregator_that_comes_back_is_asked_again_and_a_stranger_never() -> None:
    harness = opened()
    requests = vote(harness, *range(8))
    who = requests[0].to
    harness.feed(Disconnected(who))
    harness.feed(joined(who[0] - 1))
    effects = harness.feed(Connected(who))
    assert [effect for effect in effects if isinstance(effect, SendSumRequest)] == [requests[0]]
    other = next(number for number in range(8) if key(number) not in harness.ticks[-1].aggregators)
    answer(harness, requests[0], WRONG, who=key(other))
    assert "of which you are no aggregator" in harness.refusals[-1]
    assert run_of(harness).step is not None


def test_a_coordinator_that_starts_again_asks_again() -> None:
    harness = opened()
    before = vote(harness, *range(8))
    harness.restart()
    for number in range(8):
        harness.comes(number, at=0)
    again = vote(harness, *range(8))
    assert harness.ticks[-1].attempt == 1, "who has not come back yet has not left"
    assert again[0].contributions == before[0].contributions
    for request in again[:2]:
        answer(harness, request, RIGHT)
    assert named_sum(harness.entries[0].aggregate) == RIGHT


def sums_of_liars(peers: int, seed: int, **clock: object) -> list[Aggregate]:
    """The sums of a run in which two lie, each in its own way; peers and the coordinator are killed; messages are lost."""
    swarm = Swarm(settings(peers, steps=30, **clock), peers, seed=seed, loss=0.02 * (seed % 3))
    for peer in swarm.random.sample(swarm.peers, 2):
        peer.lies = True
    for at in (5, 11, 17):
        swarm.play(lambda at=at: swarm.run.head_step >= at)  # type: ignore[misc]
        if at == 11:
            swarm.crash()
        else:
            swarm.kill(next(peer for peer in swarm.peers if peer.alive and not peer.lies))
    swarm.finish()
    found = [entry.aggregate for entry in swarm.entries if entry.aggregate is not None]
    assert len(found) > 10
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_swarm_with_liars_and_crashes_comes_to_its_end(seed: int) -> None:
    for found in sums_of_liars(9, seed):
        assert found == Aggregate(sha("sum", found.payloads_sha256), 64, found.payloads_sha256)


def test_a_steps_retries_are_bounded_by_the_peers() -> None:
    """All lie: every attempt has others, until there are none."""
    swarm = Swarm(settings(12, steps=3), 12)
    for peer in swarm.peers:
        peer.lies = True
    swarm.finish()
    assert max(tick.attempt for tick in swarm.ticks) <= 1 + 12 // 2
    assert all(entry.aggregate is None for entry in swarm.entries[1:])


def test_a_rest_ends() -> None:
    harness = opened()
    with mock.patch.object(aggregation, "REST_STEPS", 1):
        requests = vote(harness, *range(8))
        answer(harness, requests[0], WRONG)
        for request in requests[1:]:
            answer(harness, request, RIGHT)
    assert not aggregation.is_resting(harness.run, requests[0].to), "the step after is the first without it"


@pytest.mark.parametrize("what", ["comes back", "stays away", "is all that is left"])
def test_the_end_waits_a_moment_for_the_anchor_that_keeps_the_last_state(what: str) -> None:
    """It was away when the last step was decided: all peers left at once, and the last state with them."""
    harness = opened(3, anchored=True, aggregators=0, steps=1)
    harness.feed(Disconnected(ANCHOR))
    tick = harness.ticks[-1]
    held = tuple((1, key(number), claim_of(tick, number).payload_sha256) for number in range(3))
    for number in range(3):
        harness.feed(Reported(key(number), claim=claim_of(tick, number), holdings=held[: number + 1]))
    for number in range(3):
        harness.feed(Reported(key(number), holdings=held))
    assert harness.run.head_step == 1
    harness.applies(1, *range(3))
    assert not harness.run.finished_told
    assert "waits a moment for an anchor" in harness.run.reason
    if what == "comes back":
        harness.feed(JoinAsked(ANCHOR, "cpu", 100, LAYOUT, (), anchor=True))
        harness.feed(Connected(ANCHOR))
        assert not harness.run.finished_told, "it replays"
        harness.feed(Reported(ANCHOR, applied=((1, digest_of(1)),)))
    elif what == "is all that is left":
        for number in range(3):
            harness.feed(Disconnected(key(number), leaving=True))
    else:
        harness.now = harness.run.finish_by_ms
        harness.feed(TimerFired())
    assert harness.run.finished_told
