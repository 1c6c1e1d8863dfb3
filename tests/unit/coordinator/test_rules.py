"""The clock's decisions, one by one."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.clock import entry_decision, rules
from coordinator.clock.effects import DecayStarted, SnapshotFact
from coordinator.clock.events import Claim
from coordinator.clock.state import OpenStep, Peer, PeerPhase, Run
from protos.assignment import Range, SampleShare, assign, merge
from protos.optimizer_config import OptimizerConfig
from protos.tick import Tick
from tests.unit.coordinator.driver import LAYOUT, RUN_ID, config, key, sha

READY, SYNCING, ABSENT = PeerPhase.READY, PeerPhase.SYNCING, PeerPhase.ABSENT


@pytest.mark.parametrize(("members", "part", "needed"), [
    (1, 0.5, 1), (2, 0.5, 2), (3, 0.5, 2), (4, 0.5, 3), (9, 0.5, 5), (4, 1.0, 4), (10, 0.01, 1), (0, 0.5, 1),
])  # fmt: skip
def test_quorum_is_more_than_the_part(members: int, part: float, needed: int) -> None:
    assert entry_decision.quorum_of(part, members) == needed


@pytest.mark.parametrize(("durations", "deadline"), [
    ([], 60_000), ([5, 5], 60_000), ([5_000] * 9, 7_500), ([100] * 9, 2_000), ([90_000] * 9, 60_000),
    ([4_000, 5_000, 6_000], 5_000 + 6 * 1_000), ([5_000, 5_000, 50_000], 7_500),
])  # fmt: skip
def test_deadline_is_median_and_spread_within_bounds(durations: list[int], deadline: int) -> None:
    assert rules.deadline_ms(config().clock, durations) == deadline


def test_a_checker_has_the_time_that_its_checks_take() -> None:
    usual, clock = [5_000] * 9, config().clock
    assert rules.deadline_ms(clock, usual, checks_due=1) == 3 * rules.deadline_ms(clock, usual)
    assert rules.deadline_ms(clock, usual, checks_due=3) == 5 * rules.deadline_ms(clock, usual)
    assert rules.deadline_ms(clock, [50_000] * 9, checks_due=4) == clock.deadline_ms_max


@pytest.mark.parametrize(("reports", "members", "value"), [
    ("", 3, None), ("a", 1, "a"), ("a", 2, None), ("aab", 3, "a"), ("ab", 2, None), ("aabb", 4, None), ("abb", 5, None),
    ("aaabb", 5, "a"), ("abbb", 1, "a"), ("aaa", 0, None),
])  # fmt: skip
def test_more_than_half_of_those_whose_word_counts_agree(reports: str, members: int, value: str | None) -> None:
    """Electors are the first `members`; the others may say what they like. No tie is broken."""
    said = {key(n): letter.encode() for n, letter in enumerate(reports)}
    agreed, reason = rules.agree(said, {key(n) for n in range(members)})
    assert agreed == (value.encode() if value else None)
    assert reason


def test_root_and_size_of_a_snapshot_are_one_value() -> None:
    a, big = SnapshotFact(5, b"a", 1), SnapshotFact(5, b"a", 1 << 40)
    three = {key(0), key(1), key(2)}
    assert rules.agree({key(0): big, key(1): a, key(2): a}, three)[0] == a
    assert rules.agree({key(0): big, key(1): a}, three)[0] is None


def test_a_stable_rate_that_decays_at_the_end_or_by_hand() -> None:
    wsd = OptimizerConfig(lr=1e-2, warmup_steps=10, lr_final_ratio=0.1, schedule="wsd")
    lrs = [rules.learning_rate(wsd, 100, step) for step in range(1, 101)]
    assert set(lrs[9:80]) == {1e-2}, "stable to four fifths"
    assert lrs[80] == pytest.approx(1e-3 + 9e-3 * (1 - math.sqrt(1 / 20)))
    assert lrs[84] == pytest.approx(5.5e-3), "1 - sqrt falls fast: half of the way after a quarter of the steps"
    assert lrs[79:] == sorted(lrs[79:], reverse=True)
    assert lrs[-1] == pytest.approx(1e-3)
    short = wsd.model_copy(update={"decay_steps": 5})
    assert [rules.learning_rate(short, 100, step) for step in (95, 100)] == [1e-2, pytest.approx(1e-3)]
    for schedule in ("wsd", "constant"):
        by_hand = wsd.model_copy(update={"schedule": schedule})
        decayed = [rules.learning_rate(by_hand, 100, step, DecayStarted(40, 20)) for step in (5, 40, 45, 60)]
        assert decayed == [5e-3, 1e-2, pytest.approx(5.5e-3), pytest.approx(1e-3)]
    long = wsd.model_copy(update={"decay_steps": 1000})
    assert rules.learning_rate(long, 100, 10) == 1e-2, "the warm-up comes first"


def test_a_linear_decay() -> None:
    linear = OptimizerConfig(lr=1e-2, warmup_steps=0, lr_final_ratio=0.0, schedule="linear")
    assert [rules.learning_rate(linear, 100, step) for step in (1, 50, 100)] == pytest.approx([9.9e-3, 5e-3, 0.0])


def test_learning_rate_shape() -> None:
    cosine = OptimizerConfig(lr=1e-2, warmup_steps=10, lr_final_ratio=0.1)
    lrs = [rules.learning_rate(cosine, 100, step) for step in range(1, 101)]
    assert lrs[0] == pytest.approx(1e-3)
    assert lrs[9] == 1e-2
    assert lrs[10:] == sorted(lrs[10:], reverse=True)
    assert lrs[-1] == pytest.approx(1e-3)
    assert lrs[54] == pytest.approx(5.5e-3)
    constant = OptimizerConfig(lr=1e-2, schedule="constant", warmup_steps=0)
    assert {rules.learning_rate(constant, 100, step) for step in range(1, 101)} == {1e-2}


@given(
    lr=st.floats(1e-6, 0.99),
    warmup=st.integers(0, 200),
    ratio=st.floats(0, 1),
    steps=st.integers(1, 150),
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    decay=st.integers(0, 200),
)
@settings(derandomize=True, deadline=None)
def test_learning_rate_is_always_usable(
    lr: float, warmup: int, ratio: float, steps: int, schedule: str, decay: int
) -> None:
    values = {"lr": lr, "warmup_steps": warmup, "lr_final_ratio": ratio, "schedule": schedule, "decay_steps": decay}
    optimizer = OptimizerConfig.model_validate(values)
    for step in (1, steps // 2 + 1, steps):
        value = rules.learning_rate(optimizer, steps, step)
        assert 0 <= value <= lr * (1 + 1e-12)
        assert math.isfinite(value)


ranges = st.lists(st.integers(0, 20), max_size=12).map(
    lambda gaps: merge(Range(sum(gaps[:i]) + i, sum(gaps[: i + 1]) + i) for i in range(0, len(gaps), 2))
)


@given(returned=ranges, samples=st.integers(1, 60))
@settings(derandomize=True, deadline=None)
def test_draw_loses_and_doubles_nothing(returned: tuple[Range, ...], samples: int) -> None:
    pool, left, following = rules.draw(returned, 1_000, samples)
    assert sum(map(len, pool)) == samples
    fresh = (Range(1_000, following),) if following > 1_000 else ()
    assert merge([*pool, *left]) == merge([*returned, *fresh])
    assert not (left and following > 1_000), "fresh samples while returned ones are left"


@given(whole=ranges, samples=st.integers(0, 60))
@settings(derandomize=True, deadline=None)
def test_subtract_is_the_inverse_of_merge(whole: tuple[Range, ...], samples: int) -> None:
    taken = assign(whole, [SampleShare(b"", samples)])[b""]
    left = rules.subtract(whole, taken)
    assert merge([*left, *taken]) == merge(whole)


def test_subtract_refuses_what_was_not_there() -> None:
    with pytest.raises(AssertionError, match="not there"):
        rules.subtract([Range(0, 5)], [Range(3, 8)])


def test_bounded_keeps_the_longest_in_order() -> None:
    parts = (Range(0, 1), Range(5, 9), Range(10, 12), Range(20, 21))
    assert rules.bounded(parts, 4) == parts
    assert rules.bounded(parts, 2) == (Range(5, 9), Range(10, 12))


def run_of(*phases: PeerPhase, speeds: tuple[float, ...] = (), **clock: object) -> Run:
    peers = {
        key(n): Peer(key(n), phase, samples_per_second=speeds[n] if speeds else 0.0) for n, phase in enumerate(phases)
    }
    return replace(Run(RUN_ID, config(**clock), layout_digest=LAYOUT), peers=peers)


def test_roster_shares_follow_speed_and_strict_ones_are_equal() -> None:
    run = run_of(READY, READY, SYNCING, speeds=(30.0, 10.0, 99.0))
    assert [s.samples for s in rules.roster_of(run, run.ready, 42)] == [31, 11]
    strict = run_of(READY, READY, READY, speeds=(30.0, 10.0, 99.0), strict=True)
    assert [s.samples for s in rules.roster_of(strict, strict.ready, 16)] == [6, 5, 5]
    unmeasured = run_of(READY, READY, READY, speeds=(30.0, 10.0, 0.0))
    assert [s.samples for s in rules.roster_of(unmeasured, unmeasured.ready, 63)][2] == 21


def test_noise_does_not_set_equal_peers_far_apart() -> None:
    """Each step takes all of them the same time, give or take 20 %, whatever their share is."""
    random, ratio = Random(0), 1.0
    run = run_of(*[READY] * 8)
    for _ in range(500):
        peers = {}
        for share in rules.roster_of(run, run.ready, 256):
            claim = Claim(1, RUN_ID, sha(0), 1, share.samples, 1, 1.0, random.randrange(800, 1_200))
            before = run.peers[share.public_key]
            speed = rules.measured_speed(before.samples_per_second, claim)
            peers[share.public_key] = replace(before, samples_per_second=speed)
        run = replace(run, peers=peers)
        counts = [share.samples for share in rules.roster_of(run, run.ready, 256)]
        ratio = max(ratio, max(counts) / min(counts))
    assert ratio < 3.5, "about 4 without the pull to the mean"


def test_measured_speed_moves_half_way() -> None:
    claim = Claim(1, RUN_ID, sha(0), 1, 50, 1, 1.0, 1_000)
    assert rules.measured_speed(0.0, claim) == 50.0
    assert rules.measured_speed(30.0, claim) == 40.0
    assert math.isfinite(rules.measured_speed(30.0, replace(claim, compute_ms=0)))


def open_step(run: Run, held: dict[int, list[int]]) -> OpenStep:
    members = sorted(run.peers)
    tick = Tick(1, RUN_ID, 1, tuple(SampleShare(k, 1) for k in members), (Range(0, len(members)),), 0)
    claims = {key(n): Claim(1, RUN_ID, sha(n), 1, 1, 1, 1.0, 1) for n in held}
    by = {key(m): sum(1 << n for n, who in held.items() if m in who) for m in range(len(members))}
    return OpenStep(tick, 0, 1_000, claims=claims, claimed=sum(1 << n for n in held), held=by)


EVERYONE = {n: [0, 1, 2] for n in range(3)}


def decided(run: Run, step: OpenStep, now: int) -> tuple[bool, str]:
    return entry_decision.should_close(run, entry_decision.counted(run, rules.seen(step, run.peers), now), now)


@pytest.mark.parametrize(("phases", "held", "now", "clock", "closes", "reason"), [
    ([READY] * 3, EVERYONE, 0, {}, True, "all 3 payloads"),
    ([READY] * 3, {0: [0, 1], 1: [0, 1], 2: [2]}, 0, {}, False, "waiting for"),
    ([READY] * 3, {0: [0, 1], 1: [0, 1], 2: [2]}, 1_000, {}, True, "deadline: 2 payloads"),
    ([READY] * 3, {0: [0], 1: [1], 2: [2]}, 1_000, {}, False, "0 of 3"),
    ([READY] * 3, {}, 1_000, {}, False, "0 of 3"),
    ([READY, READY, ABSENT], {0: [0, 1], 1: [0, 1]}, 0, {}, False, "waiting for"),
    ([READY, READY, ABSENT], {0: [0, 1], 1: [0, 1]}, 1_000, {}, True, "all 2 payloads"),
    ([READY, READY, SYNCING], {0: [0, 1], 1: [0, 1]}, 0, {}, False, "waiting for"),
    ([READY, ABSENT, ABSENT], {0: [0]}, 1_000, {"min_peers": 2}, False, "1 of 2 peers needed"),
    ([READY] * 3, {0: [0, 1, 2], 1: [0, 1, 2], 2: [1, 2]}, 0, {"strict": True}, False, "strict: waiting"),
    ([READY] * 3, {0: [0, 1, 2], 1: [0, 1, 2]}, 99_999, {"strict": True}, False, "strict: waiting"),
    ([READY] * 3, EVERYONE, 0, {"strict": True}, True, "all 3 payloads"),
    ([READY] * 3, {n: [n, (n + 1) % 3] for n in range(3)}, 0, {"quorum": 0.9}, False, "0 of 3"),
])  # fmt: skip
def test_should_close(
    phases: list[PeerPhase], held: dict[int, list[int]], now: int, clock: dict[str, object], closes: bool, reason: str
) -> None:
    run = run_of(*phases, **clock)
    verdict, why = decided(run, open_step(run, held), now)
    assert verdict == closes, why
    assert reason in why


def test_who_keeps_missing_steps_is_waited_for_ever_more_rarely() -> None:
    peer, waited = Peer(key(0)), []
    for step in range(1, 161):
        awaited = rules.is_awaited(peer.missed, step)
        waited += [step] if awaited else []
        peer = rules.paced(peer, counted=False, awaited=awaited)
    assert waited == [1, 2, 3, 4, 6, 8, 16, 32, 64, 96, 128, 160]
    assert peer.pace == rules.PACE_MIN
    for _ in range(100):
        peer = rules.paced(peer, counted=True, awaited=True)
    assert (peer.pace, peer.missed) == (1.0, 0)


@pytest.mark.parametrize("below", range(1, rules.MISSED_MAX + 1))
def test_who_votes_just_often_enough_holds_up_few_steps(below: int) -> None:
    """It is missing whenever it is waited for and has made up for enough, and held up every second step for ever."""
    peer, waited = Peer(key(0)), list[int]()
    for step in range(1, 3001):
        awaited = rules.is_awaited(peer.missed, step)
        holds_up = awaited and peer.missed < below
        waited += [step] if holds_up else []
        peer = rules.paced(peer, counted=not holds_up, awaited=awaited)
    assert sum(step > 1000 for step in waited) <= 2000 / 4 + 1


@pytest.mark.parametrize(("misses", "counts"), [(0.05, 0.93), (0.1, 0.86), (0.15, 0.7)])
def test_who_is_last_of_all_and_misses_a_few_steps_is_waited_for_all_the_same(misses: float, counts: float) -> None:
    """It never comes in a step that does not wait for it: it must not fall behind for good."""
    chance, counted = Random(0), 0
    peer = Peer(key(0))
    for step in range(1, 20_001):
        awaited = rules.is_awaited(peer.missed, step)
        here = awaited and chance.random() >= misses
        counted += here
        peer = rules.paced(peer, counted=here, awaited=awaited)
    assert counted / 20_000 >= counts


def test_who_stalled_for_long_and_is_last_of_all_is_soon_waited_for_again() -> None:
    peer, step = Peer(key(0), missed=rules.MISSED_MAX), 0
    while peer.missed >= rules.PATIENCE_STEPS:
        step += 1
        awaited = rules.is_awaited(peer.missed, step)
        if awaited:
            peer = rules.paced(peer, counted=True, awaited=True)
    assert step <= 62


def test_however_many_are_too_slow_they_are_waited_for_at_the_same_steps() -> None:
    peers = {n: Peer(key(n), missed=0) for n in range(40)}
    waited = set()
    for step in range(1, 500):
        for n, peer in peers.items():
            if step <= n:
                continue  # they come one after the other
            awaited = rules.is_awaited(peer.missed, step)
            waited |= {step} if awaited and step > 200 else set()
            peers[n] = rules.paced(peer, counted=False, awaited=awaited)
    assert len(waited) <= 300 // 32 + 1


def test_a_step_does_not_wait_for_who_is_too_slow_unless_too_few_would_be_left() -> None:
    run = run_of(READY, READY, READY, min_peers=2)
    slow = replace(run, peers={**run.peers, key(2): replace(run.peers[key(2)], missed=8)})
    step = open_step(slow, {0: [0, 1], 1: [0, 1]})
    rarely = rules.rarely_awaited(run.config.clock, step.tick, slow.peers)
    assert rarely == 0b100
    closes, why = decided(slow, replace(step, rarely=rarely), 0)
    assert closes
    assert "too slow lately" in why
    everybody = {n: replace(peer, missed=5 + n[-1] % 2) for n, peer in run.peers.items()}
    assert rules.rarely_awaited(run.config.clock, step.tick, everybody).bit_count() == 1, "two are needed"
    lone = replace(run.peers[key(0)], phase=ABSENT, gone=True)
    left = replace(slow, peers={**slow.peers, key(0): lone})
    alone = replace(open_step(left, {1: [1, 2]}), rarely=rarely)
    assert not decided(left, alone, 0)[0], "with one prompt peer left, a run that needs two waits for the slow one"
    assert not decided(slow, replace(open_step(slow, {}), rarely=rarely), 0)[0], "nobody has voted"
    strict = run_of(READY, READY, READY, strict=True)
    assert not decided(strict, replace(step, rarely=rarely), 0)[0]


def test_who_hung_up_is_not_waited_for() -> None:
    run = run_of(READY, READY, ABSENT)
    run = replace(run, peers={**run.peers, key(2): replace(run.peers[key(2)], gone=True)})
    assert decided(run, open_step(run, {0: [0, 1], 1: [0, 1]}), 0)[0]
