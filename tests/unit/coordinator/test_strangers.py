"""Free identities against a run: what they may say, and that it decides nothing. Each test is an attack that once worked."""

from dataclasses import replace

import pytest

from coordinator.clock import admission, holder_counts, rules
from coordinator.clock.effects import EndStream, NoticeKind, SendNotice, SendTick, SnapshotFact
from coordinator.clock.events import Claim, Connected, Disconnected, Reported, TicketAsked, TimerFired, WithdrawalAsked
from coordinator.clock.state import Peer, PeerPhase, Phase
from coordinator.clock.trust import Standing
from coordinator.serving import following
from protos.identity import peer_id
from protos.invite import Ticket
from protos.run_config import RunConfig, TrustConfig
from protos.run_sections import AdmissionConfig
from tests.unit.coordinator.driver import (
    LAYOUT,
    Harness,
    claim_of,
    config,
    digest_of,
    joined,
    key,
    sha,
    snapshot_at,
)

ANCHOR = 40
TICKET = Ticket(b"a" * 16, 0, 4, "anchor", anchor=True)
POISON = sha("poison")


def comes(harness: Harness, *numbers: int, network: str = "", anchor: bool = False) -> None:
    """Join, follow, and say that the head is applied."""
    for n in numbers:
        event = replace(joined(n), network=network, anchor=anchor, ticket=TICKET if anchor else None, unix_ms=1)
        harness.feed(event)
        harness.feed(Connected(key(n)))


def applies(harness: Harness, *numbers: int, digest: bytes | None = None) -> None:
    at = harness.run.head_step
    for n in numbers:
        harness.feed(Reported(key(n), applied=((at, digest_of(at) if digest is None else digest),)))


def begun(*numbers: int, anchor: bool = False, settings: RunConfig | None = None) -> Harness:
    """A run whose first step is open for these peers."""
    harness = Harness(settings or config(min_peers=len(numbers), snapshot_every=2))
    if anchor:
        harness.feed(TicketAsked(TICKET, 1))
        comes(harness, ANCHOR, anchor=True)
        harness.feed(Reported(key(ANCHOR), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    comes(harness, *numbers)
    for n in numbers:
        harness.feed(Reported(key(n), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    assert harness.run.phase is Phase.OPEN
    return harness


def step(harness: Harness, *numbers: int, also: tuple[int, ...] = ()) -> None:
    """These peers vote, hold everything and apply; `also` are honest holders that do not vote (an anchor)."""
    tick = harness.ticks[-1]
    held = tuple((tick.step, key(n), claim_of(tick, n).payload_sha256) for n in numbers)
    harness.now += 100
    for n in numbers:
        harness.feed(Reported(key(n), claim=claim_of(tick, n)))
    for n in (*numbers, *also):
        harness.feed(Reported(key(n), holdings=held))
    if harness.run.head_step < tick.step:
        harness.now = max(harness.now, harness.timer or 0)
        harness.feed(TimerFired())
    assert harness.run.head_step == tick.step, harness.run.reason


def stores(harness: Harness, *numbers: int, fact: SnapshotFact | None = None) -> None:
    at = harness.run.head_step
    for n in numbers:
        harness.feed(Reported(key(n), snapshots=(fact or snapshot_at(at),)))


def resynced(harness: Harness) -> list[bytes | None]:
    return [e.to for _, e in harness.announced if isinstance(e, SendNotice) and e.kind is NoticeKind.RESYNC]


HONEST, FAKES = (0, 1, 2), (10, 11, 12, 13)


def test_a_peer_that_is_merely_ready_does_not_choose_the_snapshot() -> None:
    """Four identities that never voted destroyed a run for good in 0.6 s."""
    harness = begun(*HONEST)
    step(harness, *HONEST)
    applies(harness, *HONEST)
    comes(harness, *FAKES)
    applies(harness, *FAKES, digest=POISON)
    step(harness, *HONEST)
    applies(harness, *FAKES, digest=POISON)
    stores(harness, *FAKES, fact=SnapshotFact(2, POISON, 7))
    assert harness.run.snapshot == snapshot_at(0), "nobody whose word counts has stored anything"
    assert 2 not in harness.run.agreed_digests
    applies(harness, *HONEST)
    stores(harness, *HONEST)
    assert harness.run.snapshot == snapshot_at(2)
    assert harness.run.agreed_digests[2] == digest_of(2)
    assert not set(resynced(harness)) & {key(n) for n in HONEST}


@pytest.mark.parametrize("periods", [3, 5])
def test_holders_of_the_agreed_snapshot_are_known_however_long_the_anchor_is_away(periods: int) -> None:
    """After four snapshots that nobody agreed on, joiners were sent to nobody for the one that is agreed."""
    harness = begun(*HONEST, anchor=True)
    for _ in range(2):
        step(harness, *HONEST, also=(ANCHOR,))
        applies(harness, *HONEST, ANCHOR)
    stores(harness, *HONEST, ANCHOR)
    assert harness.run.snapshot == snapshot_at(2)
    harness.feed(Disconnected(key(ANCHOR)))
    for _ in range(2 * periods):
        step(harness, *HONEST)
        applies(harness, *HONEST)
        if harness.run.head_step % 2 == 0:
            stores(harness, *HONEST)
    assert harness.run.snapshot == snapshot_at(2), "the anchor has stored no other"
    holders = following.snapshot_ref(harness.run, snapshot_at(2)).holders
    assert sorted(holders) == sorted(map(key, HONEST))
    comes(harness, ANCHOR, anchor=True)
    applies(harness, ANCHOR)
    stores(harness, ANCHOR)
    assert harness.run.snapshot == snapshot_at(harness.run.head_step)


@pytest.mark.parametrize("anchor", [False, True])
def test_a_stranger_that_says_it_keeps_a_snapshot_is_no_keeper(anchor: bool) -> None:
    """A false claim made peers forget payloads that a joiner needed, while nobody kept the pieces."""
    harness = begun(*HONEST, anchor=anchor)
    for _ in range(2):
        step(harness, *HONEST, also=(ANCHOR,) * anchor)
        applies(harness, *HONEST, *(ANCHOR,) * anchor)
    comes(harness, *FAKES)
    applies(harness, *FAKES)
    stores(harness, *FAKES)
    elsewhere = replace(snapshot_at(2), kept=False)
    stores(harness, *HONEST, *(ANCHOR,) * anchor, fact=elsewhere)
    assert harness.run.snapshot == snapshot_at(0), "only strangers say that they keep it"
    stores(harness, *((ANCHOR,) if anchor else HONEST[:1]))
    assert (harness.run.snapshot == snapshot_at(2)) is anchor, (
        "one anchor is all that there is; peers need a second one"
    )
    stores(harness, *HONEST[1:])
    assert harness.run.snapshot == snapshot_at(2)


def test_peers_of_one_house_keep_a_snapshot_with_one_vote_on_it() -> None:
    """All have a tenure. Their block of addresses has one place among the electors, and each disk counts."""
    harness = Harness(config(min_peers=4, snapshot_every=2))
    for n, network in enumerate(("198.51.100.0/24", *("203.0.113.0/24",) * 3)):
        comes(harness, n, network=network)
    for n in range(4):
        harness.feed(Reported(key(n), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    for _ in range(2):
        members = [n for n in range(4) if key(n) in harness.ticks[-1].places]
        step(harness, *members)
        applies(harness, *range(4))
    assert len(members) == 4
    assert len(rules.electors(harness.run, 2)) == 2
    stores(harness, 0, 1, fact=replace(snapshot_at(2), kept=False))
    stores(harness, 2, 3)
    assert harness.run.snapshot == snapshot_at(2)


def test_votes_alone_give_no_say_without_a_tenure() -> None:
    """Fakes in the roster, as many as they like, were the majority; their votes cost them nothing."""
    harness = begun(*HONEST)
    for _ in range(6):
        step(harness, *HONEST)
        applies(harness, *HONEST)
    comes(harness, *FAKES)
    applies(harness, *FAKES)
    step(harness, *HONEST)
    applies(harness, *HONEST, *FAKES)
    step(harness, *HONEST, *FAKES)
    assert len(harness.entries[-1].contributions) == 7
    applies(harness, *FAKES, digest=POISON)
    applies(harness, *HONEST)
    assert harness.run.agreed_digests[harness.run.head_step] == digest_of(harness.run.head_step)


@pytest.mark.parametrize(("networks", "wins"), [(("203.0.113.0/24",) * 4, True), (("", "", "", ""), False)])
def test_one_block_of_addresses_has_one_place(networks: tuple[str, ...], wins: bool) -> None:
    """Two honest peers of two blocks against four of one, all with a tenure; four of a private network count each."""
    harness = Harness(config(min_peers=6, snapshot_every=2))
    for n, network in enumerate(("198.51.100.0/24", "192.0.2.0/24", *networks)):
        comes(harness, n, network=network)
    for n in range(6):
        harness.feed(Reported(key(n), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    step(harness, *range(6))
    applies(harness, 2, 3, 4, 5, digest=POISON)
    applies(harness, 0, 1)
    assert harness.run.agreed_digests.get(1) == (digest_of(1) if wins else POISON)


def test_less_than_a_quorum_agrees_on_nothing_and_the_run_goes_on() -> None:
    """Zeros won every tie: one liar of two took the digest."""
    harness = begun(0, 1)
    step(harness, 0, 1)
    applies(harness, 0)
    applies(harness, 1, digest=bytes(32))
    assert 1 not in harness.run.agreed_digests
    step(harness, 0, 1)
    assert harness.entries[-1].parent_state_digest == b""
    assert not resynced(harness)


def test_only_anchors_say_what_counts_and_while_they_are_away_nothing_is_agreed() -> None:
    harness = begun(*HONEST, anchor=True)
    assert harness.run.layout_digest == LAYOUT, "the first anchor fixed it"
    assert key(ANCHOR) not in harness.ticks[-1].places, "it does not train"
    step(harness, *HONEST, also=(ANCHOR,))
    applies(harness, *HONEST, digest=POISON)  # all peers lie
    assert 1 not in harness.run.agreed_digests
    applies(harness, ANCHOR)
    assert harness.run.agreed_digests[1] == digest_of(1)
    assert set(resynced(harness)) == {key(n) for n in HONEST}
    applies(harness, *HONEST)
    harness.feed(Disconnected(key(ANCHOR)))
    step(harness, *HONEST)
    applies(harness, *HONEST)
    stores(harness, *HONEST)
    assert harness.run.snapshot == snapshot_at(0)
    assert 2 not in harness.run.agreed_digests
    before = harness.run
    harness.restart()
    assert harness.run.anchored, "a restart forgets no anchor"
    assert harness.run.anchors == before.anchors


def test_an_anchor_that_is_late_still_says_what_counts() -> None:
    harness = begun(*HONEST, anchor=True)
    for _ in range(3):
        step(harness, *HONEST, also=(ANCHOR,))
        applies(harness, *HONEST)
    harness.feed(Reported(key(ANCHOR), applied=((1, digest_of(1)), (2, digest_of(2))), snapshots=(snapshot_at(2),)))
    assert harness.run.agreed_digests[2] == digest_of(2)
    assert harness.run.snapshot == snapshot_at(2)


def test_nobody_makes_itself_an_anchor() -> None:
    harness = begun(*HONEST)
    for ticket in (None, Ticket(b"a" * 16, 0, 4), TICKET):
        harness.feed(replace(joined(9), anchor=True, ticket=ticket, unix_ms=1))
        assert "anchor" in harness.refusals[-1] or "has not made this invite" in harness.refusals[-1]
    assert not harness.run.anchored


def test_a_key_that_the_configuration_names_is_an_anchor_without_a_ticket() -> None:
    trust = TrustConfig(anchors=[peer_id(key(ANCHOR))])
    harness = Harness(RunConfig(clock=config(min_peers=1).clock, trust=trust))
    comes(harness, 0)
    harness.feed(Reported(key(0), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    assert "waiting for an anchor" in harness.run.reason
    harness.feed(replace(joined(ANCHOR), anchor=True))
    harness.feed(Connected(key(ANCHOR)))
    harness.feed(Reported(key(ANCHOR), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    assert harness.run.phase is Phase.OPEN


def test_an_anchors_word_is_enough_that_a_payload_is_held_and_it_is_needed() -> None:
    """A majority of fakes said that it held what nobody could fetch: the log named it, and all honest peers stood still."""
    harness = begun(0, 1, *FAKES, anchor=True, settings=config(min_peers=2, snapshot_every=2))
    tick = harness.ticks[-1]
    for _ in range(2):  # all are in the roster of the second step
        step(harness, *(n for n in (0, 1, *FAKES) if key(n) in tick.places), also=(ANCHOR,))
        applies(harness, 0, 1, *FAKES, ANCHOR)
        tick = harness.ticks[-1]
    fakes = tuple((tick.step, key(n), claim_of(tick, n).payload_sha256) for n in FAKES)
    for n in (0, 1, *FAKES):
        harness.feed(Reported(key(n), claim=claim_of(tick, n)))
    for n in FAKES:
        harness.feed(Reported(key(n), holdings=fakes))
    assert harness.run.step.counted == 0
    honest = tuple((tick.step, key(n), claim_of(tick, n).payload_sha256) for n in (0, 1))
    harness.feed(Reported(key(ANCHOR), holdings=honest))
    harness.late()
    assert [c.public_key for c in harness.entries[-1].contributions] == [key(0), key(1)]


def test_an_anchor_that_holds_nothing_by_the_deadline_is_taken_to_be_away() -> None:
    harness = begun(*HONEST, anchor=True)
    tick = harness.ticks[-1]
    held = tuple((tick.step, key(n), claim_of(tick, n).payload_sha256) for n in HONEST)
    for n in HONEST:
        harness.feed(Reported(key(n), claim=claim_of(tick, n), holdings=held))
    for n in HONEST:
        harness.feed(Reported(key(n), holdings=held))
    assert harness.run.head_step == 0
    harness.late()
    assert harness.run.head_step == 1


@pytest.mark.parametrize("claimed_before", [True, False])
def test_an_anchor_that_joins_again_takes_nothing_from_another_anchor(claimed_before: bool) -> None:
    """Its new life emptied what all anchors hold, so a restart loop of one anchor made each step wait for its deadline."""
    harness = begun(*HONEST, anchor=True)
    comes(harness, ANCHOR - 1, anchor=True)
    applies(harness, ANCHOR - 1)
    tick, last = harness.ticks[-1], HONEST[-1]
    held = tuple((tick.step, key(n), claim_of(tick, n).payload_sha256) for n in HONEST)
    for n in HONEST[:-1] if claimed_before else ():
        harness.feed(Reported(key(n), claim=claim_of(tick, n), holdings=held))
    harness.feed(Reported(key(ANCHOR), holdings=held))
    comes(harness, ANCHOR - 1, anchor=True)
    for n in HONEST[-1:] if claimed_before else HONEST:
        assert harness.run.head_step == 0
        harness.feed(Reported(key(n), claim=claim_of(tick, n), holdings=held))
    assert harness.run.head_step == 1, harness.run.reason
    assert key(last) in {c.public_key for c in harness.entries[-1].contributions}


def test_an_anchor_that_joins_again_has_lost_its_own_payloads() -> None:
    harness = begun(*HONEST, anchor=True)
    comes(harness, ANCHOR - 1, anchor=True)
    tick = harness.ticks[-1]
    harness.feed(Reported(key(HONEST[0]), claim=claim_of(tick, HONEST[0])))
    held = tuple((tick.step, key(n), claim_of(tick, n).payload_sha256) for n in HONEST)
    harness.feed(Reported(key(ANCHOR), holdings=held))
    assert (harness.run.step.anchored, len(harness.run.step.anchor_named)) == (1, len(HONEST) - 1)
    comes(harness, ANCHOR, anchor=True)
    assert (harness.run.step.anchored, harness.run.step.anchor_named) == (0, frozenset())


def test_holdings_of_anchors_are_bounded() -> None:
    harness = begun(*HONEST, anchor=True)
    opened = harness.run.step
    assert opened is not None
    most = holder_counts.ANCHORED_A_MEMBER_MAX * len(HONEST)
    names = frozenset((key(HONEST[0]), sha(number)) for number in range(most))
    for number in range(2 * holder_counts.ANCHORS_HELD_MAX):
        opened = holder_counts.hold(opened, key(number), 1, anchor=True)
        opened = holder_counts.named_by(opened, key(number), names)
        opened = holder_counts.named_by(opened, key(number), frozenset({(key(HONEST[0]), sha("one more"))}))
    assert len(opened.by_anchor) == len(opened.named_by_anchor) == holder_counts.ANCHORS_HELD_MAX
    assert {len(kept) for kept in opened.named_by_anchor.values()} == {most}


def test_the_same_payload_counts_once_whoever_names_it_too() -> None:
    """Four identities had 305 accepted votes each by naming an honest payload."""
    harness = begun(*HONEST)
    tick = harness.ticks[-1]
    original = claim_of(tick, 0)
    for n in HONEST:
        harness.feed(Reported(key(n), claim=replace(original, samples=1)))
    held = tuple((1, key(n), original.payload_sha256) for n in HONEST)
    for n in HONEST:
        harness.feed(Reported(key(n), holdings=held))
    assert [c.public_key for c in harness.entries[0].contributions] == [key(0)]
    assert [harness.run.peers[key(n)].votes_accepted for n in HONEST] == [1, 0, 0]


def test_figures_count_only_as_far_as_the_coordinator_knows() -> None:
    """0 ms for all samples gave a liar 61 of 64; tokens and loss of one peer set the run's loss to 9e29."""
    harness = begun(*HONEST)
    tick = harness.ticks[-1]
    lie = Claim(1, tick.parent_hash, sha("lie"), 64, 16, 1 << 60, 9e29, 0)
    harness.now += 500
    for n in HONEST:
        harness.feed(Reported(key(n), claim=lie if n == 2 else claim_of(tick, n)))
    held = tuple((1, key(n), lie.payload_sha256 if n == 2 else claim_of(tick, n).payload_sha256) for n in HONEST)
    for n in HONEST:
        harness.feed(Reported(key(n), holdings=held))
    liar = next(c for c in harness.entries[0].contributions if c.public_key == key(2))
    assert liar.samples <= max(share.samples for share in tick.roster)
    assert liar.tokens == liar.samples * 128
    assert harness.run.loss <= 4.0
    speeds = [harness.run.peers[key(n)].samples_per_second for n in HONEST]
    assert max(speeds) / min(speeds) < 1.5


def test_no_speed_counts_as_more_than_four_times_the_median() -> None:
    peers = [Peer(key(n), PeerPhase.READY, samples_per_second=1e9 if n == 9 else 10.0) for n in range(10)]
    run = replace(begun(0).run, peers={peer.public_key: peer for peer in peers})
    shares = [share.samples for share in rules.roster_of(run, peers, 130)]
    assert shares[-1] <= 4 * 130 / 13


def test_a_step_that_all_abstain_from_is_asked_for_again() -> None:
    """All had no text yet, or their programs skipped the step: the run waited for ever."""
    harness = begun(*HONEST)
    for n in HONEST:
        harness.feed(Reported(key(n), abstained=(1, "shard 0 is at 40 %")))
    harness.now = harness.run.step.deadline_at_ms
    told = harness.feed(TimerFired())
    assert [effect.tick.step for effect in told if isinstance(effect, SendTick)] == [1]
    assert any(isinstance(effect, SendNotice) and "shard 0 is at 40 %" in effect.reason for effect in told)
    step(harness, *HONEST)
    assert harness.run.head_step == 1


def test_a_run_whose_peers_all_have_nan_says_so() -> None:
    """It said for ever that no payload is held by a quorum."""
    harness = begun(*HONEST)
    for n in HONEST:
        harness.feed(Reported(key(n), abstained=(1, "the gradient is not finite")))
    assert "all 3 peers that are here abstain from step 1 (the gradient is not finite)" in harness.run.reason
    harness.late()
    assert "diverged" in harness.run.reason
    text = begun(*HONEST)
    for n in HONEST:
        text.feed(Reported(key(n), abstained=(1, "shard 0 is at 40 %"), not_finite=False))
    assert "(shard 0 is at 40 %)" in text.run.reason
    assert "diverged" not in text.run.reason, "peers that have no text yet have nothing to go back from"
    for others, words in enumerate(["if that of the others is not, the", "if that of the others is not, the", "the"]):
        text.feed(Reported(key(others), abstained=(1, "the loss is nan"), not_finite=True))
        why = f"{others + 1} of them because the loss or gradient is not finite (the loss is nan)"
        assert f"{why}: {words} run has diverged" in text.run.reason, "one machine's NaN is not the run's"
    rests = begun(*HONEST)
    rests.feed(Reported(key(2), abstained=(1, "the loss is nan"), not_finite=True))
    step(rests, 0, 1)
    rests.feed(Reported(key(2), paused=True))
    for n in (0, 1):
        rests.feed(Reported(key(n), abstained=(2, "shard 0 is at 40 %"), not_finite=False))
    assert "abstain from step 2" in rests.run.reason
    assert "not finite" not in rests.run.reason, "nor is that of a step before"
    one = begun(*HONEST)
    one.feed(Reported(key(2), abstained=(1, "the gradient is not finite")))
    step(one, 0, 1)
    assert one.now < one.settings.clock.deadline_ms_min, "nobody waits for it"


# ---- checks -----------------------------------------------------------------------------------------------------------

CHECKED = RunConfig(clock=config(min_peers=3, snapshot_every=2).clock, trust=TrustConfig(enabled=True))


def checked(*newcomers: int) -> Harness:
    """Three believed peers after a step, and newcomers that are ready."""
    harness = begun(*HONEST, settings=CHECKED)
    step(harness, *HONEST)
    comes(harness, *newcomers)
    applies(harness, *HONEST, *newcomers)
    step(harness, *HONEST)  # of the step that was open before they came
    applies(harness, *HONEST, *newcomers)
    return harness


def test_newcomers_that_abstain_do_not_have_a_step_asked_for_again_and_again() -> None:
    """Without a believed peer each report was answered with the step, which a newcomer without its text answers at once."""
    harness = checked(*FAKES)
    for n in HONEST:
        harness.feed(Disconnected(key(n), leaving=True))
    tick = harness.ticks[-1]
    newcomer = next(n for n in FAKES if key(n) in tick.places)
    harness.now += CHECKED.clock.deadline_ms_min
    assert harness.now < harness.run.step.deadline_at_ms
    for _ in range(3):
        told = harness.feed(Reported(key(newcomer), abstained=(tick.step, "shard 0 is at 40 %")))
        assert not [effect for effect in told if isinstance(effect, SendTick | SendNotice)]
    harness.now = harness.run.step.deadline_at_ms
    told = harness.feed(TimerFired())
    assert [effect.kind for effect in told if isinstance(effect, SendNotice)] == [NoticeKind.WAITING], "once a deadline"
    assert not [effect for effect in told if isinstance(effect, SendTick)], "nobody's vote would decide"
    comes(harness, *HONEST)
    applies(harness, *HONEST)
    step(harness, *HONEST)


def test_newcomers_votes_do_not_count_in_a_step_whose_deciders_have_all_lost_theirs() -> None:
    """With none of a believed peer, all held votes counted, unchecked; and each newcomer in turn had the step opened again."""
    harness = checked(*FAKES)
    tick = harness.ticks[-1]
    newcomer = next(n for n in FAKES if key(n) in tick.places)
    claim = claim_of(tick, newcomer)
    harness.feed(Reported(key(newcomer), claim=claim))
    for n in HONEST:
        held = ((tick.step, key(newcomer), claim.payload_sha256),)
        harness.feed(Reported(key(n), holdings=held, abstained=(tick.step, "lost"), lost=True))
    harness.late()
    entry = harness.entries[-1]
    assert (entry.step, entry.contributions, entry.trials) == (tick.step, (), ())
    why = [
        notice.reason
        for _, notice in harness.announced
        if isinstance(notice, SendNotice) and notice.to == key(newcomer)
    ]
    assert why[-1].startswith("all peers that decide had lost their votes when the step was decided after")
    step(harness, *HONEST)


def test_a_step_without_votes_leaves_the_anchor_and_the_electors_as_they_were() -> None:
    """The next step did without the anchor, and a last state that follows such a step was agreed by nobody."""
    for anchored in (True, False):
        harness = begun(*HONEST, anchor=anchored)
        also = (ANCHOR,) if anchored else ()
        step(harness, *HONEST, also=also)
        applies(harness, *HONEST, *also)
        for n in HONEST:
            harness.feed(Reported(key(n), abstained=(2, "lost"), lost=True))
        harness.late()
        assert harness.entries[-1].contributions == ()
        assert not harness.run.anchor_late
        applies(harness, *HONEST, *also)
        stores(harness, *HONEST, *also)
        assert harness.run.snapshot == snapshot_at(2)


def test_newcomers_on_probation_are_at_most_a_third_and_take_turns() -> None:
    harness = checked(*FAKES)
    seen: set[bytes] = set()
    for _ in range(8):
        members = set(harness.ticks[-1].places)
        assert {key(n) for n in HONEST} <= members
        new = members - {key(n) for n in HONEST}
        assert len(new) == 1
        seen |= new
        step(harness, *HONEST)
        applies(harness, *HONEST, *FAKES)
    assert seen == {key(n) for n in FAKES}


def test_newcomers_on_probation_keep_no_believed_vote_out_and_decide_nothing() -> None:
    """Four newcomers that held only their own payloads had an entry with theirs, and with none of three believed peers."""
    settings = RunConfig(clock=CHECKED.clock, trust=CHECKED.trust)
    harness = begun(*HONEST, settings=settings)
    step(harness, *HONEST)
    roster = (*HONEST, *FAKES)
    comes(harness, *FAKES)
    applies(harness, *roster)
    standings = {key(n): Standing(counted=True) for n in HONEST}
    assert harness.run.standings == standings
    step(harness, *HONEST)
    applies(harness, *roster)
    tick = harness.ticks[-1]
    newcomer = next(n for n in FAKES if key(n) in tick.places)
    mine = ((tick.step, key(newcomer), claim_of(tick, newcomer).payload_sha256),)
    harness.feed(Reported(key(newcomer), claim=claim_of(tick, newcomer), holdings=mine))
    held = tuple((tick.step, key(n), claim_of(tick, n).payload_sha256) for n in HONEST)
    for n in HONEST:
        harness.feed(Reported(key(n), claim=claim_of(tick, n), holdings=held))
    for n in HONEST:
        harness.feed(Reported(key(n), holdings=held))
    harness.now += 5_000
    harness.feed(TimerFired())
    assert [c.public_key for c in harness.entries[-1].contributions] == [key(n) for n in HONEST]
    applies(harness, newcomer, digest=POISON)
    applies(harness, *HONEST)
    assert harness.run.agreed_digests[tick.step] == digest_of(tick.step)


def test_believed_from_the_start_is_one_peer_of_each_block() -> None:
    """Eight fakes of one block that came before the first step excluded all three honest peers by step 9."""
    harness = Harness(CHECKED)
    for n, network in enumerate(("198.51.100.0/24", "192.0.2.0/24", "203.0.113.0/24", *("203.0.114.0/24",) * 8)):
        comes(harness, n, network=network)
    for n in (0, *range(3, 11), 1, 2):
        assert not harness.ticks or n == 2, "one honest peer and eight of one block are two"
        harness.feed(Reported(key(n), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    members = harness.ticks[0].places
    assert {key(0), key(1)} <= set(members)
    assert len(members) == 3


def test_a_run_waits_for_believed_peers_rather_than_go_on_with_newcomers() -> None:
    """All streams broke; three fakes that were back first decided a step alone, in 50 ms, with payloads that nobody has."""
    harness = checked(*FAKES)
    for n in (*HONEST, *FAKES):
        harness.feed(Disconnected(key(n)))
    comes(harness, *FAKES)
    applies(harness, *FAKES)
    head, tick = harness.run.head_step, harness.ticks[-1]
    held = tuple((tick.step, key(n), claim_of(tick, n).payload_sha256) for n in FAKES)
    for n in FAKES:
        harness.feed(Reported(key(n), claim=claim_of(tick, n), holdings=held))
    for _ in range(5):
        harness.now += 61_000
        harness.feed(TimerFired())
    assert harness.run.head_step == head
    assert len([t for t in harness.ticks if t.step == tick.step]) <= 2
    comes(harness, *HONEST)
    applies(harness, *HONEST)
    for _ in range(2):  # the step is open for whoever was back first
        step(harness, *(n for n in HONEST if key(n) in harness.ticks[-1].places))
        applies(harness, *HONEST)
    assert {c.public_key for c in harness.entries[-1].contributions} == {key(n) for n in HONEST}


def test_every_newcomer_has_its_turn_however_many_come_and_go() -> None:
    harness = checked(*FAKES, 20)
    turns = 0
    for at in range(30):
        turns += key(20) in harness.ticks[-1].places
        step(harness, *HONEST)
        applies(harness, *HONEST, *FAKES, 20)
        for n in (30, 31) if at % 2 else ():
            comes(harness, n)
            applies(harness, n)
            harness.feed(Disconnected(key(n)))
    assert turns >= 4


# ---- anchors that are late --------------------------------------------------------------------------------------------


def votes_held(harness: Harness, *numbers: int) -> tuple[tuple[int, bytes, bytes], ...]:
    """These vote and hold it all; the holdings, for an anchor."""
    tick = harness.ticks[-1]
    held = tuple((tick.step, key(n), claim_of(tick, n).payload_sha256) for n in numbers)
    for n in numbers:
        harness.feed(Reported(key(n), claim=claim_of(tick, n), holdings=held))
    for n in numbers:
        harness.feed(Reported(key(n), holdings=held))
    return held


def test_an_anchors_first_word_at_the_deadline_is_heard() -> None:
    """It came before the timer of the same moment: the step stood still for ever."""
    harness = begun(*HONEST, anchor=True)
    held = votes_held(harness, *HONEST)
    harness.now = harness.run.step.deadline_at_ms
    harness.feed(Reported(key(ANCHOR), holdings=held))
    assert harness.run.head_step == 1


def test_an_anchor_that_reaches_only_a_newcomers_payload_holds_nothing_up_for_good() -> None:
    harness = begun(*HONEST, anchor=True, settings=CHECKED)
    step(harness, *HONEST, also=(ANCHOR,))
    comes(harness, 10)
    applies(harness, *HONEST, ANCHOR, 10)
    step(harness, *HONEST, also=(ANCHOR,))
    applies(harness, *HONEST, ANCHOR, 10)
    tick = harness.ticks[-1]
    assert key(10) in tick.places
    harness.feed(Reported(key(10), claim=claim_of(tick, 10)))
    votes_held(harness, *HONEST)
    harness.feed(Reported(key(ANCHOR), holdings=((tick.step, key(10), claim_of(tick, 10).payload_sha256),)))
    harness.late()
    assert harness.run.head_step == tick.step


def test_a_stuck_anchor_costs_one_deadline_not_one_a_step() -> None:
    """Each step waited for it, and the deadline grew to its bound."""
    harness = begun(*HONEST, anchor=True)
    for _ in range(4):
        step(harness, *HONEST, also=(ANCHOR,))
        applies(harness, *HONEST, ANCHOR)
    began = harness.now
    for _ in range(10):
        step(harness, *HONEST)
        applies(harness, *HONEST)
    assert harness.now - began < 10 * 100 + 2 * harness.settings.clock.deadline_ms_min
    step(harness, *HONEST, also=(ANCHOR,))
    applies(harness, *HONEST, ANCHOR)
    votes_held(harness, *HONEST)
    assert harness.run.head_step < harness.ticks[-1].step, "it is back, and its word is needed again"


# ---- places -----------------------------------------------------------------------------------------------------------


def test_one_block_of_addresses_does_not_fill_the_run() -> None:
    """264 fakes from one address took all 256 places in 7 s."""
    harness = begun(0, settings=config(min_peers=1, max_peers=64))
    comes(harness, *range(10, 74), network="203.0.113.0/24")
    here = sum(peer.is_here for peer in harness.run.peers.values())
    assert here == 1 + 8
    assert any("network block" in refusal for refusal in harness.refusals)
    comes(harness, 1, network="198.51.100.0/24")
    assert harness.run.peers[key(1)].is_here


def test_a_peer_with_accepted_votes_takes_the_place_of_one_without() -> None:
    harness = begun(0, 1, settings=config(min_peers=2, max_peers=2))
    step(harness, 0, 1)
    applies(harness, 0, 1)
    harness.feed(Disconnected(key(1)))
    comes(harness, 10)
    assert harness.run.peers[key(10)].is_here
    comes(harness, 11)
    assert "full" in harness.refusals[-2]
    harness.feed(joined(1))
    assert EndStream(key(10)) in harness.feed(Connected(key(1)))
    assert harness.run.peers[key(1)].is_here
    assert not harness.run.peers[key(10)].is_here


def test_a_place_is_not_held_for_ever_by_who_never_gets_the_state() -> None:
    harness = begun(0, settings=config(min_peers=1, max_peers=2))
    comes(harness, 10)
    comes(harness, 11)
    assert "full" in harness.refusals[-2]
    harness.now += admission.SYNCING_MS_MAX + 1
    comes(harness, 11)
    assert harness.run.peers[key(11)].is_here
    assert not harness.run.peers[key(10)].is_here


def test_a_peer_that_contradicts_what_counts_on_and_on_loses_its_place() -> None:
    harness = begun(*HONEST, anchor=True)
    for _ in range(12):
        step(harness, *HONEST[:2] if not harness.run.peers[key(2)].is_here else HONEST, also=(ANCHOR,))
        applies(harness, ANCHOR)
        applies(harness, 0, 1)
        if harness.run.peers[key(2)].is_here:
            applies(harness, 2, digest=POISON)
        harness.now += 10_000
    assert not harness.run.peers[key(2)].is_here
    assert len(resynced(harness)) == 8


# ---- the operator takes back ------------------------------------------------------------------------------------------


def test_a_withdrawn_snapshot_is_gone_and_the_one_before_counts() -> None:
    harness = begun(*HONEST)
    for _ in range(4):
        step(harness, *HONEST)
        applies(harness, *HONEST)
        if harness.run.head_step % 2 == 0:
            stores(harness, *HONEST)
    assert [fact.step for fact in harness.run.snapshots] == [0, 2, 4]
    for wrong in (0, 9):
        harness.feed(WithdrawalAsked(wrong))
        assert harness.refusals
    harness.feed(WithdrawalAsked(4))
    assert harness.run.snapshot == snapshot_at(2)
    assert harness.run.is_withdrawn(4)
    assert not harness.run.is_withdrawn(3)
    assert 4 not in harness.run.agreed_digests
    run = harness.run
    harness.restart()
    assert (harness.run.snapshots, harness.run.withdrawn) == (run.snapshots, run.withdrawn)
    comes(harness, *HONEST)
    applies(harness, *HONEST)
    stores(harness, *HONEST)
    assert harness.run.snapshot == snapshot_at(2), "what is withdrawn is not agreed again"
    step(harness, *HONEST)
    applies(harness, *HONEST)
    step(harness, *HONEST)
    applies(harness, *HONEST)
    stores(harness, *HONEST)
    assert harness.run.snapshot == snapshot_at(6)


def test_only_an_anchors_word_withdraws_a_snapshot_by_itself() -> None:
    harness = begun(*HONEST, anchor=True)
    for _ in range(2):
        step(harness, *HONEST, also=(ANCHOR,))
        applies(harness, *HONEST, ANCHOR)
    stores(harness, ANCHOR)
    harness.feed(Reported(key(0), bad_snapshots=(snapshot_at(2),)))
    assert harness.run.snapshot == snapshot_at(2)
    assert "noted" in harness.refusals[-1]
    harness.feed(Reported(key(ANCHOR), bad_snapshots=(snapshot_at(2),)))
    assert harness.run.snapshot == snapshot_at(0)


def test_identities_that_are_not_free_need_no_tenure() -> None:
    listed = config(min_peers=2, snapshot_every=2).model_copy(update={"admission": AdmissionConfig(mode="invite")})
    ticket = Ticket(b"t" * 16, 0, 4)
    harness = Harness(listed)
    harness.feed(TicketAsked(ticket, 1))
    for n in (0, 1):
        harness.feed(replace(joined(n), ticket=ticket, unix_ms=1, network="203.0.113.0/24"))
        harness.feed(Connected(key(n)))
        harness.feed(Reported(key(n), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    assert harness.run.snapshot == snapshot_at(0), "two of one house"
    assert harness.run.phase is Phase.OPEN
