"""Any event in any state moves to a known state or refuses; what was announced survives a crash between any two effects."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.clock import admission, holder_counts, rules, run_changes
from coordinator.clock.effects import (
    Effect,
    Equivocated,
    NoticeKind,
    SendAnnouncement,
    SendEntry,
    SendNotice,
    SendTick,
    SnapshotAgreed,
    SnapshotFact,
)
from coordinator.clock.events import (
    ChangeAsked,
    Claim,
    Connected,
    DecayAsked,
    Disconnected,
    Event,
    ExclusionAsked,
    FinishAsked,
    HeldPlaces,
    JoinAsked,
    PauseAsked,
    ReadmissionAsked,
    Reported,
    ResumeAsked,
    TimerFired,
)
from coordinator.clock.state import PeerPhase, Phase
from protos.assignment import Range
from protos.changes import settings_of
from protos.equivocation import Offence
from protos.log import Equivocation, Exclusion
from protos.optimizer_config import OptimizerConfig
from protos.run_config import EvaluationConfig
from protos.run_sections import OperatorsConfig
from protos.slices import digest_of as digest_over
from protos.slices import mask_of
from protos.tick import Tick
from tests.unit.coordinator.driver import (
    LAYOUT,
    RUN_ID,
    Harness,
    PlayedPeer,
    Swarm,
    claim_of,
    config,
    digest_of,
    joined,
    key,
    sha,
    snapshot_at,
)

PEERS = 4
number = st.integers(0, PEERS - 1)
small = st.integers(0, 3)


@st.composite
def happenings(draw: st.DrawFn) -> tuple[str, int, int, int, int]:
    """What happens (bound to the run's state when it does): kind, peer, two choices, ms that pass before."""
    kinds = [
        "join",
        "connect",
        "hang up",
        "leave",
        "claim",
        "hold",
        "places",
        "apply",
        "snapshot",
        "timer",
        "report",
        "good",
        "lost",
    ]
    kinds += ["exclude", "readmit", "pause", "run pause", "run resume", "run finish", "run decay", "run change"]
    return (
        draw(st.sampled_from([*kinds, "good", "good", "all good", "all good", "all good"])),
        draw(number),
        draw(small),
        draw(small),
        draw(st.sampled_from([0, 1, 50, 2_000, 61_000])),
    )


def event_of(harness: Harness, kind: str, peer: int, a: int, b: int) -> list[Event]:
    """Events that make sense now, nearly make sense, or do not."""
    run = harness.run
    step = run.step.tick.step if run.step else run.head_step + 1
    tick = harness.ticks[-1] if harness.ticks else None
    claim = claim_of(tick, peer) if tick else Claim(1, RUN_ID, sha(0), 1, 1, 1, 1.0, 0)
    if kind == "claim" and a == 3:
        claim = Claim(step + b - 1, RUN_ID, sha(b), 64, [1, 10**9, 0, 1 << 60][b], 7, 1.0, 0)
    held = tuple(
        (step - (a == 3), key(author), claim_of(tick, author, salt=b // 2).payload_sha256)
        for author in range(PEERS)
        if tick
    )
    digest = digest_of(run.head_step) if a else sha("wrong", b)
    match kind:
        case "join":
            return [joined(peer, LAYOUT if a else sha("other layout")), Connected(key(peer))][: 1 + (b > 0)]
        case "connect":
            return [Connected(key(peer))]
        case "hang up" | "leave":
            return [Disconnected(key(peer), leaving=kind == "leave")]
        case "claim":
            return [Reported(key(peer), claim=claim)]
        case "lost":
            return [Reported(key(n), abstained=(step, "lost"), lost=a > 0) for n in (range(PEERS) if b else [peer])]
        case "hold":
            return [Reported(key(peer), holdings=held)]
        case "places":
            return (
                [Reported(key(peer), held=places_held(tick, step - (a == 3), range(b + 1), salt=a // 2))]
                if tick
                else []
            )
        case "apply":
            return [Reported(key(peer), applied=((max(run.head_step + b - 2, 0), digest), (run.head_step, digest)))]
        case "snapshot":
            return [Reported(key(peer), snapshots=(SnapshotFact(max(run.head_step - a, 0), sha("root", b), 5),))]
        case "report":
            return [Reported(key(peer), claim, held, ((run.head_step, digest),), (snapshot_at(0, b),), ("/a",))]
        case "exclude":
            return [ExclusionAsked(key(peer), "spam")][: a > 0]  # not so often that nobody is left
        case "pause":
            return [Reported(key(peer), claim if a == 3 else None, paused=b % 2 == 0)]
        case "run pause":
            return [PauseAsked("why" * b)][: a > 1]  # most of the time the run goes on
        case "run finish":
            return [FinishAsked("")][: a > 2 and b > 1]  # not so often that nothing else happens
        case "run decay":
            return [DecayAsked(b + 1)]
        case "run change":
            values = {"clock.steps": a + b + 1, "clock.snapshot_every": b + 1, "clock.batch_samples": 8 + a}
            return [PauseAsked(""), ChangeAsked(settings_of(values)), ResumeAsked()][: 2 + (a > 0)]
        case "run resume":
            return [ResumeAsked()]
        case "readmit":
            return [ReadmissionAsked(key(peer))]
        case "good":
            return good(harness, peer)
        case "all good":
            return [event for n in range(PEERS) if n != peer or a for event in good(harness, n)]
    return [TimerFired()]


def places_held(tick: Tick, step: int, places: Iterable[int], salt: int = 0) -> HeldPlaces:
    """What a peer says that holds the payloads of the members at these places, perhaps of authors that never were."""
    numbers = {key(n): n for n in range(16)}
    names = [numbers[tick.roster[place].public_key] if place < len(tick.roster) else place for place in places]
    digest = digest_over(claim_of(tick, name, salt=salt).payload_sha256 for name in names)
    return HeldPlaces(step, tick.attempt, mask_of(places), digest)


def good(harness: Harness, peer: int) -> list[Event]:
    """What a well-behaved peer says next."""
    run = harness.run
    tick = run.step.tick if run.step else None
    said = Reported(
        key(peer),
        claim=claim_of(tick, peer) if tick else None,
        holdings=tuple((tick.step, key(n), claim_of(tick, n).payload_sha256) for n in range(PEERS)) if tick else (),
        applied=((run.head_step, digest_of(run.head_step)),),
        snapshots=(snapshot_at(run.head_step // 2 * 2),),
    )
    known = run.peers.get(key(peer))
    here = known is not None and known.phase is not PeerPhase.ABSENT
    return [said] if here else [joined(peer), Connected(key(peer)), said]


clocks = st.builds(
    lambda strict, min_peers, max_peers, batch: config(
        strict=strict, min_peers=min_peers, max_peers=max_peers, batch_samples=batch, steps=6, snapshot_every=2
    ).model_copy(update={"optimizer": OptimizerConfig(schedule="wsd", warmup_steps=0)}),
    st.booleans(),
    st.integers(1, 3),
    st.integers(3, 4),
    st.sampled_from([3, 16]),
)


def play(harness: Harness, events: list[tuple[str, int, int, int, int]]) -> None:
    for kind, peer, a, b, passed in events:
        harness.now += passed
        for event in event_of(harness, kind, peer, a, b):
            before = harness.run
            effects = harness.feed(event)
            for known in harness.run.peers.values():
                assert known.phase in PeerPhase
            present = sum(p.phase is not PeerPhase.ABSENT for p in harness.run.peers.values())
            assert present <= harness.settings.clock.max_peers
            assert harness.run.head_step >= before.head_step
            assert all(type(effect) in Effect.__args__ for effect in effects)


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(clock=clocks, events=st.lists(happenings(), max_size=60))
def test_any_event_in_any_state(clock: object, events: list[tuple[str, int, int, int, int]]) -> None:
    harness = Harness(clock)  # type: ignore[arg-type]
    play(harness, events)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(clock=clocks, events=st.lists(happenings(), min_size=10, max_size=50), cut=st.floats(0, 1))
def test_crash_between_any_two_effects(clock: object, events: list[tuple[str, int, int, int, int]], cut: float) -> None:
    whole = Harness(clock)  # type: ignore[arg-type]
    play(whole, events)
    length = round(cut * len(whole.journal))
    told = [effect for at, effect in whole.announced if at <= length]
    swarm = Swarm(whole.settings, 0)
    swarm.now = whole.now
    swarm.load(whole.journal[:length])
    run = swarm.run
    assert run.head_step >= max((e.step for e in told if isinstance(e, SendEntry)), default=0)
    ticks = [effect.tick for effect in told if isinstance(effect, SendTick)]
    if ticks and ticks[-1].step == run.head_step + 1:
        assert run.step.tick == ticks[-1]
    agreed = [e.snapshot for e in told if isinstance(e, SendNotice) and e.kind is NoticeKind.SNAPSHOT]
    if agreed:
        assert run.snapshot.step >= agreed[-1].step
    # It goes on to the end: with its old peers, whatever it was doing.
    swarm.feed(ResumeAsked())
    swarm.peers = [PlayedPeer(n) for n in range(PEERS) if key(n) not in swarm.out]
    if len(swarm.peers) < whole.settings.clock.min_peers:
        return
    members = {share.public_key for share in run.step.tick.roster} if run.step else set()
    swarm.peers.sort(key=lambda peer: key(peer.number) not in members)  # a strict step waits for its own
    del swarm.peers[whole.settings.clock.max_peers :]
    for peer in swarm.peers:
        try:
            swarm.connect(peer)
        except AssertionError:  # the run's layout is another one: these peers are told so
            assert run.layout_digest != LAYOUT
            return
    if run.layout_digest not in (b"", LAYOUT) or not set(run.agreed_digests.values()) <= {
        digest_of(step) for step in run.agreed_digests
    }:
        return  # hostile reporters alone were a majority: honest peers differ from what was agreed
    swarm.finish()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(clock=clocks, events=st.lists(happenings(), max_size=40))
def test_restored_equals_lived(clock: object, events: list[tuple[str, int, int, int, int]]) -> None:
    """What the journal keeps is the same whether it was lived through or read back."""
    harness = Harness(clock)  # type: ignore[arg-type]
    play(harness, events)
    lived = harness.run
    harness.restart()
    again = harness.run
    names = ["phase", "head_step", "head_hash", "roster", "next_sample", "returned_samples", "snapshot"]
    names += [
        "layout_digest",
        "parameters",
        "payload_bytes_total",
        "standings",
        "pause",
        "ended",
        "decay",
        "config",
        "changes",
    ]
    for name in names:
        assert getattr(lived, name) == getattr(again, name), name
    assert (lived.step and lived.step.tick) == (again.step and again.step.tick)


# ---- single rules of the machine -------------------------------------------------------------------------------------


def opened(peers: int = 3, **clock: object) -> Harness:
    """A run with `peers` ready peers whose first step is open."""
    harness = Harness(config(min_peers=peers, snapshot_every=2, **clock))
    for n in range(peers):
        harness.comes(n)
        harness.feed(Reported(key(n), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    assert harness.run.phase is Phase.OPEN
    assert len(harness.run.roster) == peers
    return harness


def opened_together(
    peers: int = 3,
    optimizer: OptimizerConfig | None = None,
    evaluation: EvaluationConfig | None = None,
    operators: OperatorsConfig | None = None,
    **clock: object,
) -> Harness:
    """The same where the run could go on with a peer less, or with `min_peers`."""
    settings = config(**{"min_peers": peers - 1, "snapshot_every": 2, **clock})
    sections = {"optimizer": optimizer, "evaluation": evaluation, "operators": operators}
    update = {name: section for name, section in sections.items() if section is not None}
    harness = Harness(settings.model_copy(update=update))
    harness.comes(*range(peers), at=0)
    for n in range(peers):
        harness.feed(Reported(key(n), snapshots=(snapshot_at(0),)))
    assert len(harness.run.roster) == peers
    return harness


def contribute(harness: Harness, *numbers: int, holders: tuple[int, ...] | None = None) -> None:
    """These peers publish, and these hold it all."""
    tick = harness.ticks[-1]
    claims = {n: claim_of(tick, n) for n in numbers}
    for n, claim in claims.items():
        harness.feed(Reported(key(n), claim=claim))
    held = tuple((tick.step, key(n), claim.payload_sha256) for n, claim in claims.items())
    for holder in numbers if holders is None else holders:
        harness.feed(Reported(key(holder), holdings=held))


def test_first_step_needs_an_agreed_initial_state() -> None:
    harness = Harness(config(min_peers=2))
    harness.comes(*range(2), at=0)
    assert harness.run.phase is Phase.WAITING
    assert "initial state" in harness.run.reason
    harness.feed(Reported(key(0), snapshots=(snapshot_at(0),)))
    assert harness.run.phase is Phase.WAITING
    harness.feed(Reported(key(1), snapshots=(snapshot_at(0),)))
    assert harness.run.phase is Phase.OPEN


def test_two_initial_states_wait_with_the_reason_until_one_has_a_majority() -> None:
    harness = Harness(config(min_peers=2))
    for n in range(2):
        harness.comes(n)
        harness.feed(Reported(key(n), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0, n),)))
    assert harness.run.snapshot is None, "no tie is broken"
    assert "2 different initial states" in harness.run.reason
    told = [e for _, e in harness.announced if isinstance(e, SendNotice) and e.kind is NoticeKind.WAITING and not e.to]
    assert [e.reason for e in told][-1:] == [harness.run.reason], "the peers' logs named the missing peers to the end"
    harness.comes(2)
    harness.feed(Reported(key(2), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0, 1),)))
    assert harness.run.snapshot == snapshot_at(0, 1)
    resyncs = [e for _, e in harness.announced if isinstance(e, SendNotice) and e.kind is NoticeKind.RESYNC]
    assert [e.to for e in resyncs] == [key(0)]
    assert harness.run.phase is Phase.OPEN


def test_the_layout_is_that_of_the_agreed_initial_state_not_of_the_first_to_join() -> None:
    harness = Harness(config(min_peers=2))
    harness.comes(9, layout=sha("somebody else's"))
    for n in range(2):
        harness.feed(joined(n))
        assert not harness.refusals
        harness.feed(Connected(key(n)))
        harness.feed(Reported(key(n), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    assert harness.run.layout_digest == LAYOUT
    assert harness.run.phase is Phase.OPEN
    assert harness.run.peers[key(9)].phase is PeerPhase.ABSENT
    harness.feed(joined(9, sha("somebody else's")))
    assert "layout" in harness.refusals[-1]


def test_who_is_paused_is_not_waited_for_and_is_back_in_the_next_step() -> None:
    harness = opened_together(4)
    harness.feed(Reported(key(3), paused=True))
    contribute(harness, 0, 1, 2)
    harness.applies(1, *range(3))
    assert harness.run.head_step == 1, "the open step waits for no peer that its owner paused"
    assert set(harness.run.step.tick.places) == {key(0), key(1), key(2)}
    assert (harness.run.peers[key(3)].missed, harness.run.peers[key(3)].pace) == (0.0, 1.0), "a wish is no fault"
    digest_1 = ((1, digest_of(1)),)
    harness.feed(Reported(key(3), applied=digest_1))
    harness.feed(Reported(key(3), paused=False))
    contribute(harness, 0, 1, 2)
    assert harness.run.head_step == 2
    assert key(3) in harness.run.step.tick.places


def test_who_goes_on_within_the_step_votes_in_it() -> None:
    harness = opened()
    harness.feed(Reported(key(2), paused=True))
    harness.feed(Reported(key(2), paused=False))
    contribute(harness, 0, 1)
    assert harness.run.head_step == 0, "the step waits for it again"
    contribute(harness, 2, holders=(0, 1, 2))
    assert harness.run.head_step == 1


def test_a_run_whose_peers_are_all_paused_says_so_and_goes_on_with_the_first_that_comes_back() -> None:
    harness = opened()
    for n in range(3):
        harness.feed(Reported(key(n), paused=True))
    assert "paused by their owners" in harness.run.reason
    assert "diverged" not in harness.run.reason
    harness.late()
    for n in range(3):
        harness.feed(Reported(key(n), paused=False))
    contribute(harness, 0, 1, 2)
    assert harness.run.head_step == 1


def test_in_a_full_run_a_long_pause_gives_its_place_to_a_peer_that_comes() -> None:
    harness = opened(3, max_peers=3)
    harness.feed(Reported(key(2), paused=True))
    harness.comes(3)
    assert key(3) not in harness.run.peers, "a short pause keeps the place"
    harness.now += admission.PAUSED_MS_MAX + 1
    harness.comes(3)
    assert harness.run.peers[key(3)].phase is PeerPhase.SYNCING
    assert harness.run.peers[key(2)].phase is PeerPhase.ABSENT


def test_holding_of_another_step_does_not_count() -> None:
    harness = opened()
    stale = tuple((7, key(n), sha("old", n, m)) for n in range(3) for m in range(3))
    for n in range(3):
        harness.feed(Reported(key(n), holdings=stale))
    assert not any(harness.run.step.held.values())
    assert not harness.run.step.named
    contribute(harness, 0, 1, 2)
    assert harness.run.head_step == 1


def test_a_liar_cannot_crowd_out_honest_holders() -> None:
    harness = opened(4)
    lies = tuple((1, key(n), sha("lie", n, m)) for m in range(5) for n in range(4))
    harness.feed(Reported(key(3), holdings=lies))
    contribute(harness, 0, 1, 2, holders=(0, 1, 2))
    harness.now = harness.run.step.deadline_at_ms if harness.run.step else 0
    harness.feed(TimerFired())
    assert harness.run.head_step == 1
    assert len(harness.entries[0].contributions) == 3


def test_an_author_whose_payload_too_few_held_is_told_how_many() -> None:
    harness = opened(4)
    contribute(harness, 0, 1, 2, holders=(0, 1, 2))
    contribute(harness, 3, holders=(3,))
    harness.now = harness.run.step.deadline_at_ms
    took = (harness.now - harness.run.step.opened_ms) / 1000
    harness.feed(TimerFired())
    [told] = [e for _, e in harness.announced if isinstance(e, SendNotice) and e.kind is NoticeKind.VOTE]
    assert (told.to, told.step) == (key(3), 1)
    assert told.reason == f"held by 1 of 4 peers, quorum 3, when the step was decided after {took:.1f} s"
    said = [effect for _, effect in harness.announced]
    ticked = [at for at, effect in enumerate(said) if isinstance(effect, SendTick)][-1]
    assert said.index(told) > ticked, (
        "a message to one in between would part the entry and the tick, which are one message"
    )


def test_an_author_of_another_s_payload_is_told_so() -> None:
    harness = opened(3)
    tick = harness.ticks[-1]
    first = claim_of(tick, 0)
    copied = replace(claim_of(tick, 1), payload_sha256=first.payload_sha256)
    for number, claim in ((0, first), (1, copied), (2, claim_of(tick, 2))):
        harness.feed(Reported(key(number), claim=claim))
    names = tuple((1, key(n), c.payload_sha256) for n, c in ((0, first), (1, copied), (2, claim_of(tick, 2))))
    for number in range(3):
        harness.feed(Reported(key(number), holdings=names))
    [told] = [e for _, e in harness.announced if isinstance(e, SendNotice) and e.kind is NoticeKind.VOTE]
    assert (told.to, told.reason) == (key(1), "another peer announced the same payload first")


def test_a_newcomer_that_is_too_slow_gets_less_and_less_holds_up_fewer_steps_and_has_its_chance() -> None:
    """Nobody has measured it: it was taken for as fast as the others for ever, and each step waited for it in vain."""
    harness = opened_together(3, batch_samples=64)
    shares, waited = [], []
    while len(shares) < 8:
        tick = harness.ticks[-1]
        shares.append(next(share.samples for share in tick.roster if share.public_key == key(2)))
        contribute(harness, 0, 1)
        waited.append(harness.run.head_step < tick.step)
        if waited[-1]:
            harness.late()
        harness.applies(tick.step, *range(3))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 64 // 3
    assert shares[6] == 1
    assert waited == [True] * 4 + [False, True, False, True]
    before = harness.run.peers[key(2)]
    contribute(harness, 2)
    contribute(harness, 0, 1, 2)
    after = harness.run.peers[key(2)]
    assert (after.missed, after.pace) == (before.missed - rules.MADE_UP, before.pace * rules.PACE_AGAIN)
    assert key(2) in {c.public_key for c in harness.entries[-1].contributions}


def test_who_comes_right_before_the_deadline_each_time_does_not_move_it() -> None:
    """The deadline followed the last payload, so one peer could lead the steps up to `deadline_ms_max`."""
    harness = opened_together(3, deadline_ms_min=100)
    took = []
    for _ in range(40):
        tick, began = harness.ticks[-1], harness.now
        harness.now += 400
        contribute(harness, 0, 1)
        harness.now = harness.run.step.deadline_at_ms - 1
        contribute(harness, 0, 1, 2)
        took.append(harness.now - began)
        assert key(2) in {c.public_key for c in harness.entries[-1].contributions}
        harness.applies(tick.step, *range(3))
    assert took[-1] == 600 - 1


def steps_of(harness: Harness, steps: int, arrivals: dict[int, int]) -> tuple[list[int], list[int]]:
    """(how long each step took in ms, how many votes it counted), with peers whose votes come so long after the tick.

    -1: one ms before the deadline; who is not named never votes.
    """
    took, votes = [], []
    for _ in range(steps):
        tick, began = harness.ticks[-1], harness.now
        deadline = harness.run.step.deadline_at_ms if harness.run.step else 0
        at = {n: deadline - 1 if ms < 0 else began + ms for n, ms in arrivals.items()}
        inside: list[int] = []
        for n in sorted(at, key=lambda n: at[n]):
            if at[n] < deadline and harness.run.head_step < tick.step:
                harness.now = at[n]
                inside.append(n)
                contribute(harness, *inside, holders=tuple(range(len(harness.run.roster))))
        if harness.run.head_step < tick.step:
            harness.now = deadline
            harness.feed(TimerFired())
        assert harness.run.head_step == tick.step
        took.append(harness.now - began)
        votes.append(len(harness.entries[-1].contributions))
        harness.applies(tick.step, *range(len(harness.run.peers)))
    return took, votes


def test_idle_peers_do_not_help_one_that_dawdles() -> None:
    """Four are fast, five never vote, one comes right before the deadline: never more than half of all are counted."""
    harness = opened_together(10, deadline_ms_min=100, batch_samples=64, min_peers=2)
    took, _ = steps_of(harness, 60, {0: 400, 1: 400, 2: 400, 3: 400, 9: -1})
    assert max(took[40:]) <= 600


def test_of_two_one_that_never_votes_does_not_lead_the_other_to_the_longest_deadline() -> None:
    """One alone is not most of two, so each whole step counted, and the deadline grew by half with each."""
    took, votes = steps_of(opened_together(2, deadline_ms_min=2000, steps=200), 80, {0: 400})
    assert max(took[10:]) <= 2000
    assert took[-32:].count(400) >= 30
    assert set(votes) == {1}


def test_the_deadline_grows_until_most_are_in_time() -> None:
    """Three need 400 ms and seven 1,000, whatever their share: a deadline that follows the three would shut the seven out."""
    harness = opened_together(10, deadline_ms_min=100, batch_samples=64, min_peers=2)
    harness.run = replace(harness.run, durations_ms=(400,) * 9)
    steps_of(harness, 1, dict.fromkeys(range(10), 400))
    _, votes = steps_of(harness, 150, {n: 400 if n < 3 else 1_000 for n in range(10)})
    assert min(votes[-20:]) >= 6
    assert max(votes[-20:]) == 10


def test_who_reports_its_own_offence_and_votes_in_one_breath_is_out() -> None:
    harness = opened_together(3)
    tick = harness.ticks[-1]
    claims = [claim_of(tick, n) for n in range(3)]
    harness.feed(Reported(key(0), claim=claims[0], offences=(offence_of(0),)))
    assert harness.run.standings[key(0)].excluded
    for n in (1, 2):
        harness.feed(Reported(key(n), holdings=((tick.step, key(0), claims[0].payload_sha256),)))
    contribute(harness, 1, 2)
    assert harness.run.head_step == 1
    assert {c.public_key for c in harness.entries[0].contributions} == {key(1), key(2)}
    assert [exclusion.public_key for exclusion in harness.entries[0].exclusions] == [key(0)]


@pytest.mark.parametrize("contributors", [(), (0,)])
def test_deadline_without_a_quorum_keeps_the_step_and_asks_again(contributors: tuple[int, ...]) -> None:
    harness = opened()
    contribute(harness, *contributors)
    for _ in range(3):
        harness.late()
    assert harness.run.head_step == 0
    assert harness.timer is not None
    contribute(harness, 0, 1, 2)
    assert harness.run.head_step == 1


def test_timer_that_fires_early_is_set_again() -> None:
    harness = opened()
    harness.now = harness.run.step.deadline_at_ms - 1
    harness.feed(TimerFired())
    assert harness.timer == harness.run.step.deadline_at_ms


def test_join_again_while_ready_waits_for_connect_and_keeps_the_step() -> None:
    harness = opened()
    harness.feed(joined(1))
    assert harness.run.peers[key(1)].phase is PeerPhase.ABSENT
    assert harness.run.phase is Phase.OPEN
    contribute(harness, 0, 2)
    assert harness.run.head_step == 0, "it said it comes back"
    harness.feed(Connected(key(1)))
    contribute(harness, 0, 1, 2)
    assert harness.run.head_step == 1


def test_second_stream_without_join_stays_ready() -> None:
    harness = opened()
    harness.feed(Connected(key(1)))
    assert harness.run.peers[key(1)].phase is PeerPhase.READY


def test_restart_first_peer_back_does_not_close_alone() -> None:
    harness = opened()
    tick = harness.ticks[-1]
    harness.restart()
    harness.comes(0)
    claim = claim_of(tick, 0)
    harness.feed(Reported(key(0), claim=claim, holdings=((1, key(0), claim.payload_sha256),)))
    assert harness.run.head_step == 0
    assert harness.ticks == [tick]


def test_restart_first_reporter_does_not_fix_the_digest() -> None:
    harness = opened()
    contribute(harness, 0, 1, 2)
    harness.restart()
    for n, digest in ((2, sha("damaged")), (0, digest_of(1)), (1, digest_of(1))):
        harness.comes(n)
        harness.feed(Reported(key(n), applied=((1, digest),)))
    assert harness.run.agreed_digests[1] == digest_of(1)
    resyncs = [e.to for _, e in harness.announced if isinstance(e, SendNotice) and e.kind is NoticeKind.RESYNC]
    assert resyncs == [key(2)]


def test_minority_digest_is_told_to_resync_and_comes_back() -> None:
    harness = opened()
    contribute(harness, 0, 1, 2)
    for n, digest in ((0, digest_of(1)), (2, sha("damaged")), (1, digest_of(1))):
        harness.feed(Reported(key(n), applied=((1, digest),)))
    assert harness.run.peers[key(2)].phase is PeerPhase.SYNCING
    assert harness.run.peers[key(2)].applied_step == -1
    harness.feed(Reported(key(2), applied=((1, digest_of(1)),)))
    assert harness.run.peers[key(2)].phase is PeerPhase.READY


def test_diverged_states_of_one_report_count_once() -> None:
    harness = opened()
    contribute(harness, 0, 1, 2)
    harness.applies(1, 0, 1)
    contribute(harness, 0, 1, 2)
    effects = harness.feed(Reported(key(2), applied=((1, sha("x")), (2, sha("y")))))
    assert [e.kind for e in effects if isinstance(e, SendNotice)] == [NoticeKind.RESYNC]
    assert harness.run.peers[key(2)].phase is PeerPhase.SYNCING


def test_strangers_do_not_vote_on_the_digest() -> None:
    harness = opened(3, max_peers=10)
    contribute(harness, 0, 1, 2)
    for n in (5, 6, 7, 8):
        harness.comes(n)
        harness.feed(Reported(key(n), applied=((1, sha("theirs")),)))
    harness.applies(1, 0, 1)
    assert harness.run.agreed_digests[1] == digest_of(1)


def test_the_disk_of_an_earlier_life_does_not_count_until_it_is_reported_again() -> None:
    """A peer was killed after its report and came back without the snapshot: two disks were asked for, and one had it."""
    harness = opened()
    for step in (1, 2):
        contribute(harness, 0, 1, 2)
        harness.applies(step, *range(3))
    harness.feed(Reported(key(0), snapshots=(snapshot_at(2),)))
    harness.feed(Disconnected(key(0)))
    harness.comes(0)
    harness.feed(Reported(key(1), snapshots=(snapshot_at(2),)))
    assert harness.run.snapshot == snapshot_at(0), "its root counts, and its disk does not"
    harness.feed(Reported(key(0), snapshots=(snapshot_at(2),)))
    assert harness.run.snapshot == snapshot_at(2)


def test_snapshot_is_agreed_by_a_majority_and_others_resync() -> None:
    harness = opened()
    for step in (1, 2):
        contribute(harness, 0, 1, 2)
        harness.applies(step, *range(3))
    harness.feed(Reported(key(2), snapshots=(snapshot_at(2, "other"),)))
    harness.feed(Reported(key(0), snapshots=(snapshot_at(2),)))
    assert harness.run.snapshot == snapshot_at(0)
    harness.feed(Reported(key(1), snapshots=(snapshot_at(2),)))
    assert harness.run.snapshot == snapshot_at(2)
    assert [r.snapshot for r in harness.journal if isinstance(r, SnapshotAgreed)][-1] == snapshot_at(2)
    assert harness.run.peers[key(2)].phase is PeerPhase.SYNCING
    assert harness.run.peers[key(0)].phase is PeerPhase.READY


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Reported(key(9)), "not connected"),
        (Connected(key(9)), "join first"),
        (JoinAsked(key(9), "cpu", 1, sha("other"), ()), "layout"),
        (Reported(key(0), applied=((5, digest_of(5)),)), "not committed yet"),
        (Reported(key(0), snapshots=(snapshot_at(4),)), "the head is 0"),
        (Reported(key(0), claim=Claim(2, RUN_ID, sha(1), 1, 1, 1, 1.0, 1)), "step 1 is open"),
        (Reported(key(0), claim=Claim(1, sha(0), sha(1), 1, 1, 1, 1.0, 1)), "another log"),
        (Reported(key(0), claim=Claim(1, RUN_ID, sha(1), 1, 10**9, 1, 1.0, 1)), "samples claimed"),
    ],
)
def test_refusals_say_why(event: Event, reason: str) -> None:
    harness = opened()
    before = harness.run.head_step
    harness.feed(event)
    assert len(harness.refusals) == 1
    assert reason in harness.refusals[0]
    assert harness.run.head_step == before


def test_snapshot_that_is_not_due_is_refused() -> None:
    harness = opened()
    contribute(harness, 0, 1, 2)
    harness.feed(Reported(key(0), snapshots=(snapshot_at(1),)))
    assert "none is due" in harness.refusals[-1]


def test_run_full_counts_at_join_and_at_connect() -> None:
    harness = Harness(config(max_peers=2))
    for n in range(4):
        harness.feed(joined(n))
    assert not harness.refusals
    for n in range(4):
        harness.feed(Connected(key(n)))
    assert [p.public_key for p in harness.run.with_phase(PeerPhase.SYNCING)] == [key(0), key(1)]
    assert all("full" in reason for reason in harness.refusals)
    harness.feed(joined(5))
    assert "full" in harness.refusals[-1]
    harness.comes(0)
    assert len(harness.refusals) == 3, "a peer that comes back has its place"


def test_two_payloads_of_one_author() -> None:
    harness = opened_together()
    tick = harness.ticks[-1]
    first, second = claim_of(tick, 0), claim_of(tick, 0, salt=1)
    harness.feed(Reported(key(0), claim=first))
    harness.feed(Reported(key(0), claim=second))
    assert "two payloads announced for step 1" in harness.refusals[-1]
    assert key(0) not in {peer.public_key for peer in harness.run.ready}
    assert isinstance(harness.journal[-1], Equivocated)
    contribute(harness, 1, 2)
    [exclusion] = harness.entries[0].exclusions
    assert exclusion.public_key == key(0)
    assert {c.public_key for c in harness.entries[0].contributions} == {key(1), key(2)}, "at once"


def offence_of(number: int, step: int = 1) -> Offence:
    return Offence(key(number), step, (sha(1), sha(2)), Equivocation(b"one", b"other"))


@pytest.mark.parametrize("strict", [False, True])
def test_a_proven_offender_is_out_at_once_with_the_evidence_in_the_log(strict: bool) -> None:
    harness = opened_together(strict=strict)
    tick = harness.ticks[-1]
    harness.feed(Reported(key(0), claim=claim_of(tick, 0), holdings=((1, key(0), claim_of(tick, 0).payload_sha256),)))
    for reporter in (1, 2, 1):
        harness.feed(Reported(key(reporter), offences=(offence_of(0),)))
    assert [type(record) for record in harness.journal].count(Equivocated) == 1, "whoever else reports it"
    harness.restart()
    harness.comes(1, 2, at=0)
    contribute(harness, 1, 2)
    [entry] = harness.entries
    assert entry.exclusions == (Exclusion(key(0), offence_of(0).reason, (), offence_of(0).equivocation),)
    assert {c.public_key for c in entry.contributions} == {key(1), key(2)}
    harness.refusals.clear()
    harness.comes(0)
    harness.feed(Reported(key(0)))
    assert harness.refusals == [offence_of(0).reason] * 3
    contribute(harness, 1, 2)
    assert harness.entries[1].exclusions == (), "once"
    assert harness.run.standings[key(0)].logged_step == 1
    before = harness.run.standings
    harness.restart()
    assert harness.run.standings == before


def test_evidence_against_strangers_fills_no_log() -> None:
    harness = opened()
    harness.feed(Reported(key(1), offences=(offence_of(9),)))
    assert "no peer of this run" in harness.refusals[-1]
    assert not harness.run.standings


def test_who_comes_back_in_an_open_step_hears_what_it_announced() -> None:
    """In a new home, with its key alone, it would announce another payload, and be excluded."""
    harness = opened_together()
    claim = replace(claim_of(harness.ticks[-1], 0), envelope=b"words")
    harness.feed(Reported(key(0), claim=claim))
    for attempt in (1, 2):
        assert harness.run.step is not None
        assert harness.run.step.tick.attempt == attempt
        assert (key(0) in harness.run.step.claims) == (attempt == 1)
        effects = [*harness.feed(joined(0)), *harness.feed(Connected(key(0)))]
        told = [effect for effect in effects if isinstance(effect, SendAnnouncement | SendTick)]
        assert told[0] == SendAnnouncement(b"words", to=key(0))
        assert isinstance(told[1], SendTick)
        harness.feed(Disconnected(key(0)))
        harness.now = harness.run.step.deadline_at_ms  # nobody votes: the step opens again, without it
        harness.feed(TimerFired())
    with_other = deepcopy(harness)
    contribute(harness, 1, 2)
    assert SendAnnouncement(b"words", to=key(0)) not in [*harness.feed(joined(0)), *harness.feed(Connected(key(0)))]
    with_other.comes(0, at=0)
    with_other.late()
    tick = with_other.ticks[-1]
    assert (tick.attempt, key(0) in tick.places) == (3, True)
    with_other.feed(Reported(key(0), claim=claim_of(tick, 0, salt=1)))
    assert "two payloads announced for step 1" in with_other.refusals[-1]


@pytest.mark.parametrize("strict", [False, True])
def test_votes_that_their_author_has_lost_are_not_waited_for(strict: bool) -> None:
    """A strict step waited until such a peer left."""
    harness = opened_together(strict=strict)
    tick = harness.ticks[-1]
    contribute(harness, 0, 1, 2, holders=())
    harness.feed(Disconnected(key(0)))
    harness.comes(0, at=0)
    held = tuple((1, key(n), claim_of(tick, n).payload_sha256) for n in (1, 2))
    for n in range(3):
        harness.feed(Reported(key(n), holdings=held))
    assert harness.run.head_step == 0
    harness.feed(Reported(key(0), abstained=(1, "lost")))
    [entry] = harness.entries
    assert {c.public_key for c in entry.contributions} == {key(1), key(2)}


def test_a_strict_step_that_a_member_left_as_its_deadline_passed_is_opened_for_the_others() -> None:
    """The reports that follow a tick that is sent again change nothing, and none of them looked at the step again."""
    harness = opened_together(strict=True)
    contribute(harness, 1, 2, holders=(1, 2))
    assert harness.run.step is not None
    harness.now = harness.run.step.deadline_at_ms
    harness.feed(Disconnected(key(0), leaving=True))
    contribute(harness, 1, holders=())
    assert (harness.ticks[-1].attempt, key(0) in harness.ticks[-1].places) == (2, False)


@pytest.mark.parametrize("strict", [False, True])
def test_a_step_whose_votes_are_all_lost_is_decided_without_any_at_its_deadline(strict: bool) -> None:
    """A power cut of all machines: a strict step waited until somebody left, the other for a new peer."""
    harness = opened_together(strict=strict)
    pool = harness.ticks[-1].pool
    for n in range(3):
        harness.feed(Reported(key(n), abstained=(1, "no text" if n == 2 else "lost"), lost=n < 2))
    harness.late()
    assert not harness.entries, "one has none yet"
    for n in range(3):
        paused = True if strict and n == 2 else None
        harness.feed(Reported(key(n), abstained=(1, "lost"), lost=not paused, paused=paused))
    assert not harness.entries, "votes may still be on their way"
    harness.late()
    [entry] = harness.entries
    assert (entry.contributions, harness.ticks[-1].step) == ((), 2)
    assert entry.returned_samples == pool == harness.ticks[-1].pool, "the samples are not lost"
    assert not any(peer.missed or peer.pace != 1 for peer in harness.run.peers.values()), "nobody was slow"


@pytest.mark.parametrize("again", [False, True])
def test_votes_that_others_hold_count_though_their_author_abstains_and_those_announced_again_are_awaited(
    again: bool,
) -> None:
    """Else nobody would vote in a step that has votes."""
    harness = opened_together()
    claim = claim_of(harness.ticks[-1], 0)
    held = ((1, key(0), claim.payload_sha256),)
    harness.feed(Reported(key(0), claim=claim, holdings=held))
    harness.feed(Reported(key(0), abstained=(1, "lost")))
    if again:
        harness.feed(Reported(key(0), claim=claim))
    for n in (1, 2):
        harness.feed(Reported(key(n), abstained=(1, "no text")))
    assert not harness.entries
    assert ("all 3 peers that are here abstain" in harness.run.reason) is not again
    harness.feed(Reported(key(1), holdings=held))
    [entry] = harness.entries
    assert [c.public_key for c in entry.contributions] == [key(0)]


def test_who_holds_another_payload_than_its_author_claims_hears_the_authors_words() -> None:
    harness = opened()
    tick = harness.ticks[-1]
    other = claim_of(tick, 0, salt=1).payload_sha256
    claim = replace(claim_of(tick, 0), envelope=b"words")
    harness.feed(Reported(key(1), holdings=((1, key(0), other),)))
    effects = harness.feed(Reported(key(0), claim=claim, holdings=((1, key(0), claim.payload_sha256),)))
    assert [e for e in effects if isinstance(e, SendAnnouncement)] == [SendAnnouncement(b"words", to=key(1))]
    effects = harness.feed(Reported(key(2), holdings=((1, key(0), other),)))
    assert [e for e in effects if isinstance(e, SendAnnouncement)] == [SendAnnouncement(b"words", to=key(2))]
    effects = harness.feed(Reported(key(2), holdings=((1, key(0), claim.payload_sha256),)))
    assert not [e for e in effects if isinstance(e, SendAnnouncement)]


def test_holdings_by_places_decide_a_step_as_names_do() -> None:
    harness = opened()
    tick = harness.ticks[-1]
    for n in range(3):
        harness.feed(Reported(key(n), claim=claim_of(tick, n)))
    for n in (0, 1):
        assert harness.run.head_step == 0
        harness.feed(Reported(key(n), held=places_held(tick, 1, range(3))))
    assert harness.run.head_step == 1
    assert len(harness.entries[0].contributions) == 3


def test_places_whose_authors_claimed_nothing_or_another_payload_are_not_taken() -> None:
    harness = opened()
    tick = harness.ticks[-1]
    for n in (0, 1):
        harness.feed(Reported(key(n), claim=claim_of(tick, n)))
    said = places_held(tick, 1, range(3))
    harness.feed(Reported(key(0), held=said))
    assert not any(harness.run.step.held.values())
    assert holder_counts.unclear(harness.run.step, key(0), said, anchor=False) == 0b100, "the one without a claim"
    said = places_held(tick, 1, range(2), salt=1)
    harness.feed(Reported(key(0), held=said))
    assert not any(harness.run.step.held.values())
    assert holder_counts.unclear(harness.run.step, key(0), said, anchor=False) == 0b011, (
        "one of them is another payload"
    )
    said = places_held(tick, 1, range(2))
    harness.feed(Reported(key(0), held=said))
    assert harness.run.step.held == {key(0): 0b011}
    assert holder_counts.unclear(harness.run.step, key(0), said, anchor=False) == 0


def test_a_mask_of_another_roster_counts_for_nothing() -> None:
    harness = opened()
    tick = harness.ticks[-1]
    for n in range(3):
        harness.feed(Reported(key(n), claim=claim_of(tick, n)))
    for said in (places_held(tick, 2, range(3)), replace(places_held(tick, 1, range(3)), attempt=2)):
        harness.feed(Reported(key(0), held=said))
        assert holder_counts.unclear(harness.run.step, key(0), said, anchor=False) == 0, (
            "it hears of the open step, and says again"
        )
    harness.feed(Reported(key(0), held=places_held(tick, 1, range(4))))
    assert "place 3 held of step 1, whose roster has 3 places" in harness.refusals[-1]
    assert not any(harness.run.step.held.values())


@given(st.lists(st.integers(0, 2**9 - 1), max_size=40), st.integers(1, 45))
def test_a_tally_counts_as_one_by_one(masks: list[int], needed: int) -> None:
    tally: tuple[int, ...] = ()
    for mask in masks:
        tally = holder_counts.added(tally, mask)
    for place in range(9):
        count = sum(mask >> place & 1 for mask in masks)
        assert sum((digit >> place & 1) << at for at, digit in enumerate(tally)) == count
        assert holder_counts.reaching(tally, needed) >> place & 1 == (count >= needed)


def test_memory_of_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_changes, "PEERS_KEPT", 6)
    harness = opened(2)
    contribute(harness, 0, 1)
    for n in range(10, 40):
        harness.comes(n)
        harness.feed(Reported(key(n), applied=((1, sha(n)),), snapshots=(snapshot_at(0, n),)))
        harness.feed(Disconnected(key(n)))
    assert len(harness.run.peers) <= 6
    assert {key(0), key(1)} <= harness.run.peers.keys()
    assert sum(len(r) for r in harness.run.reported_digests.values()) <= 6
    contribute(harness, 0, 1)
    assert harness.run.head_step == 2


def test_returned_samples_go_out_first() -> None:
    harness = opened()
    contribute(harness, 0, 1)
    harness.late()
    back = harness.entries[0].returned_samples
    assert sum(map(len, back)) > 0, "of the one that was missing"
    harness.applies(1, *range(3))
    pool = harness.ticks[-1].pool
    assert pool[: len(back)] == back
    assert pool[-1] == Range(16, 16 + 16 - sum(len(p) for p in back))


def test_returned_samples_wait_where_the_next_step_is_smaller() -> None:
    """Six peers took six samples and four of them vanish: a step of two takes two of the four that came back."""
    harness = opened(2, batch_samples=2, max_peers=9)
    harness.comes(*range(2, 6), at=0)
    contribute(harness, 0, 1)
    harness.applies(1, *range(6))
    assert len(harness.run.roster) == 6
    contribute(harness, 0, 1)
    for n in range(2, 6):
        harness.feed(Disconnected(key(n)))
    assert sum(map(len, harness.entries[1].returned_samples)) == 4
    assert len(harness.run.roster) == 2
    assert sum(map(len, harness.run.returned_samples)) == 2
    contribute(harness, 0, 1)
    assert sum(map(len, harness.entries[2].returned_samples)) == 2, "what no step has taken yet stays"


def test_a_new_life_holds_nothing_until_it_says_so() -> None:
    harness = opened()
    tick = harness.ticks[-1]
    payload = claim_of(tick, 0).payload_sha256
    harness.feed(Reported(key(0), claim=claim_of(tick, 0)))
    for n in (0, 1):
        harness.feed(Reported(key(n), holdings=((1, key(0), payload),)))
    assert harness.run.step.held == {key(0): 0b001, key(1): 0b001}
    harness.feed(joined(1))
    assert harness.run.step.held == {key(0): 0b001, key(1): 0}
    harness.feed(joined(0))
    assert harness.run.step.held == {key(0): 0b001, key(1): 0}, "its own word that it is its payload stands"
