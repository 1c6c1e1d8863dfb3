"""Standings: the results of checks add up until they decide whether a peer is believed or excluded. A peer that signed two
payloads for one step is excluded at once. Pure functions of values.

A check is good or bad by the verdicts of most of its checkers, each with its own weight. Bad checks add to a peer's score,
and good ones take from it, down to 0. This is Page's cumulative sum (Biometrika 41, 1954), which repeats Wald's sequential
test. Its steps are fixed, so no checker's figures weigh more than another's. To compare own samples with others' is
Gauntlet's idea (arXiv 2505.21684). Refuses to exclude a peer on one checker's verdict, and refuses verdicts of checkers that
the log did not draw.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.clock.findings import LAZY_PART, RecentChecks
from coordinator.clock.value_copy import replace
from protos import checks
from protos.checks import CHECK_ALWAYS, VERDICTS_NEEDED, looked_at
from protos.equivocation import Offence
from protos.limits import ENTRY_CONTRIBUTIONS_MAX, EVIDENCE_MAX, EXCLUSIONS_MAX, READMITTED_MAX
from protos.log import Entry, Equivocation, Exclusion, Verdict
from protos.orders import EXCLUDED
from protos.run_config import TrustConfig

STANDINGS_KEPT = 8 * ENTRY_CONTRIBUTIONS_MAX
REMOVED_MAX = STANDINGS_KEPT // 2
"""Peers that the operator may have excluded at a time: so many exclusions are never forgotten."""
CHECK_PERMILLE_MIN = 16
"""With any history, about one step in 60 is checked. So a peer that turns bad is found, if later."""
WEIGHT_MIN = 1 / 16
WEIGHT_BACK = 0.1
WEIGHT_NEEDED = 1.5
"""A check counts only with so much weight behind it: two checkers that were not caught lying."""
WORST, BAD, GOOD = 2.0, 1.0, -1.0
"""A check adds one of these to a score. WORST is for votes that do not lower the loss; honest peers cast none.
Up to a seventh of the honest checks are bad for some time, and three quarters of those of idle peers (ADR 16)."""
COPY_PART = 1 / 2
"""As LAZY_PART, for votes that repeat an earlier payload."""


@dataclass(frozen=True)
class Standing:
    """One identity. `score`: evidence against it; `good`: good checks since the last bad one; `counted`: not on probation."""

    score: float = 0.0
    good: int = 0
    passed: int = 0
    counted: bool = False
    weight: float = 1.0
    evidence: tuple[Verdict, ...] = ()
    excluded: str = ""
    """The reason, once the peer is excluded."""
    equivocation: Equivocation | None = None
    """Both announcements, if these are the reason."""
    by_operator: bool = False
    """The operator decided so."""
    logged_step: int = 0
    """The step of the entry with the exclusion; 0: in no entry yet."""
    log_excludes: bool = False
    """The log's last word is that it is excluded. If it is not any more, the next entry is to say that it is readmitted."""

    @property
    def check_permille(self) -> int:
        """How likely its next votes are checked: 1 / n after n good ones; always while there is a score, and on probation."""
        if not self.counted or self.score > 0:
            return CHECK_ALWAYS
        return max(CHECK_ALWAYS // max(self.good, 1), CHECK_PERMILLE_MIN)

    @property
    def name(self) -> str:
        """For people."""
        return "excluded" if self.excluded else "counted" if self.counted else "probation"

    def progress(self, needed: int) -> str:
        """Of a peer on probation, for people; empty for any other. `needed`: the good checks that end a probation."""
        if self.counted or self.excluded:
            return ""
        doubt = ", and a bad one is not made good yet" if self.score > 0 else ""
        return f"{min(self.passed, needed)} of {needed} checks passed{doubt}"


@dataclass(frozen=True)
class StepChecks:
    """The checks of one committed step, until they are judged."""

    drawn: Mapping[bytes, tuple[bytes, ...]]
    payloads: Mapping[bytes, bytes]
    arrival: tuple[bytes, ...] = ()
    samples: tuple[int, ...] = ()
    """Of the authors in `arrival`."""
    verdicts: Mapping[tuple[bytes, bytes], Verdict] = field(default_factory=dict)

    @property
    def most_of_one(self) -> int:
        """The most checks that one peer is to make."""
        return max(Counter(key for checkers in self.drawn.values() for key in checkers).values(), default=0)

    def with_verdict(self, verdict: Verdict) -> StepChecks:
        """With one more verdict; the same if it was not drawn, is of another payload or is not the checker's first.

        A summed entry names no payloads: there the checker alone says of which payload it speaks, as it says what it found.
        """
        name = verdict.checker, verdict.subject
        if name in self.verdicts or verdict.checker not in self.drawn.get(verdict.subject, ()):
            return self
        if self.payloads[verdict.subject] not in (b"", verdict.payload_sha256):
            return self
        return replace(self, verdicts={**self.verdicts, name: verdict})


def checks_of(trust: TrustConfig, entry: Entry, entry_hash: bytes) -> StepChecks:
    """The checks that an entry draws."""
    parts = sorted((*entry.contributions, *entry.trials), key=lambda c: c.arrival)
    payloads = {c.public_key: c.payload_sha256 for c in parts}
    arrival = tuple(c.public_key for c in parts if c.arrival)
    samples = tuple(c.samples for c in parts if c.arrival)
    return StepChecks(checks.drawn(entry_hash, entry, trust.checkers), payloads, arrival, samples)


def suspicion(trust: TrustConfig, verdict: Verdict, recent: RecentChecks, part: float, *, copied: bool) -> float:
    """WORST for votes that do not lower the loss, BAD for those of somebody who did not work on these samples, else GOOD.

    `part`: of the votes' samples, those that the checker saw. `copied`: see `repeats`.
    """
    if verdict.own < trust.agreement_min:
        return WORST
    usual = recent.difference(part)
    if copied and not usual and verdict.overlap >= recent.copied_overlap:
        return BAD  # where differences tell something, they tell copies, and whose work it was
    limit = COPY_PART if copied else LAZY_PART
    return BAD if usual and verdict.difference < limit * usual else GOOD


def judge(
    trust: TrustConfig,
    standings: Mapping[bytes, Standing],
    recent: RecentChecks,
    verdicts: Sequence[Verdict],
    arrival: Sequence[bytes],
    samples: Sequence[int] = (),
    *,
    shared: bool = False,
) -> tuple[dict[bytes, Standing], RecentChecks]:
    """(standings, recent checks) after the verdicts on one step. All are judged by the weights and figures of before.

    `samples`: of the authors in `arrival`; empty: not known. `shared`: all peers vote for the same coefficients, so that honest
    votes agree on most signs. Then a copy is a payload that agrees with an earlier one more than honest payloads do (ADR 33).
    """
    copy_from = recent.copied_overlap if shared else trust.overlap_max
    after, figures = dict(standings), recent
    sizes = dict(zip(arrival, samples, strict=False))
    for subject in sorted({verdict.subject for verdict in verdicts}):
        said = [verdict for verdict in verdicts if verdict.subject == subject]
        weights = [standings.get(verdict.checker, Standing()).weight for verdict in said]
        if len(said) < VERDICTS_NEEDED or sum(weights) < WEIGHT_NEEDED:
            continue
        copied = repeats(copy_from, subject, said, weights, arrival)
        before = after.get(subject, Standing())
        parts = [_part_seen(trust, sizes, verdict, tried=not before.counted) for verdict in said]
        found = [
            suspicion(trust, verdict, recent, part, copied=copied) for verdict, part in zip(said, parts, strict=True)
        ]
        if before.counted and not before.excluded:
            figures = _typical(figures, before, said, weights, parts)
        middle = weighted_median(found, weights)
        part = weighted_median(parts, weights)
        least = recent.least_own_gain(part), recent.least_other_gain
        # where differences tell nothing, a payload has too few votes, or samples differ too little, for gains to tell anything
        harmed = recent.difference(part) > 0 and harms(gains_of(said, weights), least)
        for verdict, one in zip(said, found, strict=True):
            checker = after.get(verdict.checker, Standing())
            weight = (
                min(checker.weight + WEIGHT_BACK, 1.0)
                if (one > 0) == (middle > 0)
                else max(checker.weight / 2, WEIGHT_MIN)
            )
            after[verdict.checker] = replace(checker, weight=weight)
        bad = [v for v, one in zip(said, found, strict=True) if one > 0 or (harmed and harms(_gains(v), least))]
        after[subject] = _moved(trust, before, max(middle, BAD) if harmed else middle, bad, copied=copied)
    return after, figures


def gains_of(said: Sequence[Verdict], weights: Sequence[float]) -> tuple[float, float] | None:
    """The gains of votes on their author's samples and on others', as most of the checkers' weight says.

    None if too few checkers tell them: those of a version before do not.
    """
    told = [(gains, weight) for v, weight in zip(said, weights, strict=True) if (gains := _gains(v)) is not None]
    if len(told) < VERDICTS_NEEDED or sum(weight for _, weight in told) < WEIGHT_NEEDED:
        return None
    own, other = ([gains[of] for gains, _ in told] for of in range(2))
    heavy = [weight for _, weight in told]
    return weighted_median(own, heavy), weighted_median(other, heavy)


def _gains(verdict: Verdict) -> tuple[float, float] | None:
    if verdict.own_gain is None or verdict.other_gain is None:
        return None
    return verdict.own_gain, verdict.other_gain


def harms(gains: tuple[float, float] | None, least: tuple[float, float]) -> bool:
    """Whether votes gain too little on their author's samples or on others'. `least`: what honest votes gain at least."""
    return gains is not None and (gains[0] < least[0] or gains[1] < least[1])


def _part_seen(trust: TrustConfig, sizes: Mapping[bytes, int], verdict: Verdict, *, tried: bool) -> float:
    """The part of the subject's samples that the checker saw; 1 if the subject's number is not known (an old journal)."""
    subject, checker = sizes.get(verdict.subject, 0), sizes.get(verdict.checker, 0)
    return looked_at(trust.check_samples, subject, checker, tried=tried) / subject if subject else 1.0


def _typical(
    figures: RecentChecks, subject: Standing, said: Sequence[Verdict], weights: Sequence[float], parts: Sequence[float]
) -> RecentChecks:
    """The figures with a check of a peer whose votes count. Differences of one in doubt, which is checked in each step, do not
    count: neither newcomers nor idle peers say what is typical, however many they are."""
    if any(verdict.like for verdict in said):
        figures = figures.alike({said[0].subject: weighted_median([verdict.overlap for verdict in said], weights)})
    if subject.score:
        return figures
    difference = weighted_median([verdict.difference for verdict in said], weights)
    return figures.more(difference, weighted_median(parts, weights), gains_of(said, weights))


def _moved(trust: TrustConfig, before: Standing, by: float, bad: Sequence[Verdict], *, copied: bool) -> Standing:
    if before.excluded:
        return before
    score = max(0.0, before.score + by)
    if by <= 0:
        passed = before.passed + 1
        counted = before.counted or (passed >= trust.probation_steps and score == 0)
        return replace(before, score=score, good=before.good + 1, passed=passed, counted=counted)
    evidence = (*before.evidence, *bad)[-EVIDENCE_MAX:]
    checkers = len({verdict.checker for verdict in evidence})
    moved = replace(before, score=score, good=0, evidence=evidence)
    if score < trust.exclude_at or checkers < VERDICTS_NEEDED:
        return moved
    return replace(moved, excluded=_reason(trust, evidence, checkers, score, copied=copied), logged_step=0)


def _reason(trust: TrustConfig, evidence: Sequence[Verdict], checkers: int, score: float, *, copied: bool) -> str:
    own = statistics.median(verdict.own for verdict in evidence)
    if copied:
        what = "your votes repeat another peer's"
    elif own < trust.agreement_min:
        what = f"your votes do not lower the loss on your own samples ({own:.1f}, at least {trust.agreement_min:g} expected)"
    else:
        what = "your votes fit your own samples no better than anybody's, or help nobody's"
    return (
        f"excluded from the run: {what}, as {checkers} peers found in repeated checks (score {score:.1f}); see the log"
    )


def repeats(
    copy_from: float, subject: bytes, said: Sequence[Verdict], weights: Sequence[float], arrival: Sequence[bytes]
) -> bool:
    """Whether most of the checkers' weight says that so many of these votes are in a payload that was announced earlier.

    A copy is announced later than its original, because a peer shows its payload only after the coordinator has its
    announcement.
    """
    places = {key: place for place, key in enumerate(arrival)}
    mine = places.get(subject, -1)
    sure = [v.overlap >= copy_from and places.get(v.like, mine) < mine for v in said]
    return 2 * sum(weight for weight, found in zip(weights, sure, strict=True) if found) > sum(weights)


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The lower one: in doubt for the accused."""
    half, reached = sum(weights) / 2, 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += weight
        if reached >= half:
            return value
    raise AssertionError("no values")


def exclusions(standings: Mapping[bytes, Standing]) -> tuple[Exclusion, ...]:
    """The exclusions of the next entry, sorted by public key."""
    due = sorted(key for key, standing in standings.items() if standing.excluded and not standing.logged_step)
    found = [(key, standings[key]) for key in due[:EXCLUSIONS_MAX]]
    return tuple(Exclusion(key, it.excluded, it.evidence, it.equivocation, it.by_operator) for key, it in found)


def readmissions(standings: Mapping[bytes, Standing]) -> tuple[bytes, ...]:
    """The peers that the next entry readmits, because earlier entries exclude them. Sorted by public key."""
    return tuple(sorted(key for key, standing in standings.items() if readmission_due(standing))[:READMITTED_MAX])


def readmission_due(standing: Standing) -> bool:
    """Whether the log still says that the peer is excluded, and it is not."""
    return standing.log_excludes and not standing.excluded


def convicted(standings: Mapping[bytes, Standing], offence: Offence) -> dict[bytes, Standing]:
    """The standings after a proven offence. The author's own signatures decide, not a score or a vote of checkers."""
    before = standings.get(offence.author, Standing())
    proof = offence.equivocation
    guilty = replace(before, excluded=offence.reason, evidence=(), equivocation=proof, by_operator=False, logged_step=0)
    return bounded({**standings, offence.author: guilty}, keep={offence.author})


def removed(standings: Mapping[bytes, Standing], public_key: bytes, reason: str) -> dict[bytes, Standing]:
    """The standings after the operator excluded a peer. No evidence: it is the operator's run."""
    says = standings.get(public_key, Standing()).log_excludes
    out = Standing(excluded=f"{EXCLUDED}{reason}", by_operator=True, log_excludes=says)
    return bounded({**standings, public_key: out}, keep={public_key})


def readmitted(standings: Mapping[bytes, Standing], public_key: bytes) -> dict[bytes, Standing]:
    """The standings after the operator ended an exclusion: as if the peer had just come, so that checks begin anew."""
    anew = Standing(log_excludes=standings[public_key].log_excludes)
    return _settled({**standings, public_key: anew}, [public_key])


def _settled(standings: dict[bytes, Standing], keys: Iterable[bytes]) -> dict[bytes, Standing]:
    """The standings without those that equal the default: a peer without an entry has the default standing."""
    for key in keys:
        if standings[key] == Standing():
            del standings[key]
    return standings


def logged(standings: Mapping[bytes, Standing], entry: Entry, roster: Sequence[bytes]) -> dict[bytes, Standing]:
    """The standings after an entry: what it says of exclusions are facts; the roster of the first one is on no probation.

    Its authors alone would not do: where a slow first step has one, that one could check nobody. `roster`: of the step, as
    it was opened last; empty in a run without checks, which has no other standings.
    """
    after = dict(standings)
    for key in entry.readmitted:
        before = after.get(key, Standing())
        # still excluded: the journal lost the operator's word, and a peer gave this entry back
        after[key] = Standing() if before.excluded else replace(before, log_excludes=False)
    after = _settled(after, entry.readmitted)
    for exclusion in entry.exclusions:
        before = after.get(exclusion.public_key, Standing())
        after[exclusion.public_key] = replace(
            before,
            excluded=exclusion.reason,
            evidence=exclusion.evidence,
            equivocation=exclusion.equivocation,
            by_operator=exclusion.by_operator,
            logged_step=entry.step,
            log_excludes=True,
        )
    if entry.step == 1:
        for key in roster:
            after[key] = replace(after.get(key, Standing()), counted=True)
    return bounded(after, keep={c.public_key for c in (*entry.contributions, *entry.trials)})


def bounded(standings: dict[bytes, Standing], keep: Iterable[bytes]) -> dict[bytes, Standing]:
    """At most STANDINGS_KEPT: those that say least go first, the excluded last, and of those the operator's."""
    kept = set(keep)
    spare = sorted(
        standings.keys() - kept,
        key=lambda key: (_worth(standings[key]), standings[key].score, standings[key].good, key),
    )
    for key in spare[: max(len(standings) - STANDINGS_KEPT, 0)]:
        del standings[key]
    return standings


def _worth(standing: Standing) -> int:
    """The worth of remembering a standing: facts that must not be forgotten are worth most."""
    if standing.by_operator or readmission_due(standing):
        return 3
    return 2 if standing.excluded else 1 if standing.counted else 0
