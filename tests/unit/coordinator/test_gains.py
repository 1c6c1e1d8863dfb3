"""What votes gain, on their author's samples and on others': it finds votes that fit every other figure and teach nothing."""

import statistics
from dataclasses import replace

import pytest

from coordinator.clock import trust
from coordinator.clock.findings import OTHER_GAIN_MARGIN, OWN_GAIN_PART, TYPICAL_KEPT, TYPICAL_NEEDED, RecentChecks
from coordinator.clock.trust import Standing
from protos.errors import Refusal
from protos.log import Verdict, verdict_body, verdict_from_body
from protos.run_config import TrustConfig
from tests.unit.coordinator.driver import key, sha

ON = TrustConfig(enabled=True, probation_steps=3)
PEERS = 6
BAD = 5


def recent(own: float = 0.9, other: float = 0.2, spread: float = 0.05, n: int = TYPICAL_NEEDED) -> RecentChecks:
    """Figures of honest checks, evenly spread: `spread` is a standard deviation."""
    steps = [spread * statistics.NormalDist().inv_cdf((place + 0.5) / n) for place in range(n)]
    return RecentChecks(
        (24.0,) * n, (1.0,) * n, {}, tuple(own + step / 4 for step in steps), tuple(other + step for step in steps)
    )


def verdict(checker: int, own_gain: float | None, other_gain: float | None, subject: int = BAD) -> Verdict:
    return Verdict(1, key(checker), key(subject), sha(subject), 60.0, 24.0, 0.2, b"", own_gain, other_gain)


def score(gains: list[tuple[float | None, float | None]], usual: RecentChecks, before: Standing | None = None) -> float:
    """A peer's score after one check by as many checkers."""
    standings = {key(n): Standing(counted=True) for n in range(PEERS)} | ({key(BAD): before} if before else {})
    said = [verdict(n, *pair) for n, pair in enumerate(gains)]
    return trust.judge(ON, standings, usual, said, [key(n) for n in range(PEERS)])[0][key(BAD)].score


@pytest.mark.parametrize(
    ("own", "other", "bad"),
    [
        (0.9, 0.2, False), (0.9, 0.01, False), (0.9, -0.01, True), (0.24, 0.2, False), (0.21, 0.2, True), (-0.3, 0.2, True),
        (0.9, -0.9, True),
    ],
)  # fmt: skip
def test_votes_that_gain_too_little_are_bad(own: float, other: float, bad: bool) -> None:
    assert score([(own, other)] * 3, recent()) == (trust.BAD if bad else 0.0)


def test_a_gain_on_others_samples_says_nothing_where_honest_ones_differ_much() -> None:
    wide = 0.2 / OTHER_GAIN_MARGIN * 1.1
    assert score([(0.9, -0.3)] * 3, recent(spread=wide)) == 0
    assert score([(0.1, -0.3)] * 3, recent(spread=wide)) == trust.BAD, "the own gain still tells"
    assert score([(0.9, -0.3)] * 3, recent(spread=wide / 1.3)) == trust.BAD


def test_too_few_checks_say_nothing() -> None:
    assert score([(0.1, -0.9)] * 3, recent(n=TYPICAL_NEEDED - 1)) == 0


def test_checkers_of_a_version_before_tell_no_gain() -> None:
    assert score([(None, None)] * 3, recent()) == 0
    assert score([(0.1, -0.9), (None, None), (None, None)], recent()) == 0, "one checker decides nothing"
    assert score([(0.1, -0.9), (0.1, -0.9), (None, None)], recent()) == trust.BAD


def test_a_minority_of_checkers_that_lie_changes_nothing() -> None:
    assert score([(0.9, 0.2), (0.9, 0.2), (-1.0, -1.0)], recent()) == 0
    assert score([(0.1, -0.9), (0.1, -0.9), (1.0, 1.0)], recent()) == trust.BAD


def test_a_check_of_a_part_of_a_large_share_asks_for_less() -> None:
    usual = replace(recent(), parts=(1.0,) * TYPICAL_NEEDED)
    assert usual.least_own_gain(1.0) == pytest.approx(OWN_GAIN_PART * 0.9)
    assert usual.least_own_gain(0.25) == pytest.approx(OWN_GAIN_PART * 0.9 / 4)


def test_harm_excludes_with_its_reason_and_is_not_typical() -> None:
    standings = {key(n): Standing(counted=True) for n in range(PEERS)}
    usual, arrival = recent(), [key(n) for n in range(PEERS)]
    said = [verdict(n, 0.9, -0.2) for n in range(3)]
    checks = 0
    while not standings[key(BAD)].excluded:
        standings, usual = trust.judge(ON, standings, usual, said, arrival)
        checks += 1
        assert checks < 10
    assert checks == ON.exclude_at
    assert "or help nobody's" in standings[key(BAD)].excluded
    assert standings[key(BAD)].evidence[-1].other_gain == -0.2, "the log shows what was found"
    assert sum(gain < 0 for gain in usual.other_gains) <= 1, "votes in doubt do not say what is typical"


def test_figures_are_bounded_and_those_of_others_are_checked() -> None:
    figures = recent()
    for _ in range(3 * TYPICAL_KEPT):
        figures = figures.more(24.0, 1.0, (0.9, 0.2))
    assert len(figures.own_gains) == len(figures.other_gains) == TYPICAL_KEPT
    body = verdict_body(verdict(0, 0.5, -0.5))
    assert verdict_from_body(body).other_gain == -0.5
    assert verdict_from_body(verdict_body(verdict(0, None, None))).own_gain is None
    for wrong in (1.5, float("nan"), float("-inf")):
        body.own_gain = wrong
        with pytest.raises(Refusal, match="gains"):
            verdict_from_body(body)


def test_gains_say_nothing_where_differences_say_nothing() -> None:
    """The simulator's model has two chunks: its few votes of old momentum had an honest peer excluded by their gains alone."""
    few = replace(recent(), differences=(2.0,) * TYPICAL_NEEDED)
    assert score([(0.1, -0.9)] * 3, few) == 0
