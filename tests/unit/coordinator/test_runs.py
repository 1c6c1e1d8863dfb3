"""Whole runs of the pure machine, in virtual time: it always goes on to the end, whatever peers and network do."""

import pytest

from coordinator.clock.effects import EntryCommitted, PeerLeft, SendEntry, SendNotice, SendTick, SnapshotAgreed
from coordinator.clock.state import PeerPhase, Phase
from tests.unit.coordinator.driver import RUN_ID, PlayedPeer, Swarm, config, digest_of, key, snapshot_at


@pytest.mark.parametrize("peers", [1, 2, 4, 9])
@pytest.mark.parametrize("strict", [False, True])
def test_fifty_steps_with_everyone(peers: int, strict: bool) -> None:
    swarm = Swarm(config(min_peers=peers, strict=strict), peers)
    swarm.finish()
    assert all(len(entry.contributions) == peers for entry in swarm.entries)
    assert swarm.run.returned_samples == ()
    assert swarm.run.next_sample == 50 * 16
    assert swarm.run.snapshot == snapshot_at(50)
    assert {entry.parent_state_digest for entry in swarm.entries[1:]} == {digest_of(s) for s in range(1, 50)}
    assert swarm.run.agreed_digests[50] == digest_of(50)
    assert swarm.now < 60_000, "no step waited for a deadline"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("strict", [False, True])
def test_thirty_percent_loss(seed: int, strict: bool) -> None:
    swarm = Swarm(config(min_peers=2, steps=20, strict=strict), 4, seed=seed, loss=0.3)
    swarm.finish()
    assert sum(len(entry.contributions) for entry in swarm.entries) >= 20


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("strict", [False, True])
def test_coordinator_crashes_at_any_moment(seed: int, strict: bool) -> None:
    swarm = Swarm(config(min_peers=3, steps=20, strict=strict), 3, seed=seed)
    for _ in range(6):
        at = swarm.now + swarm.random.randrange(50, 900)
        swarm.after(at - swarm.now, lambda: None)
        swarm.play(lambda at=at: swarm.now >= at)  # type: ignore[misc]
        swarm.crash()
        swarm.play(lambda: swarm.up)
    swarm.finish()
    assert all(len(entry.contributions) == 3 for entry in swarm.entries), "a restart lost somebody's votes"


def test_crash_in_every_phase() -> None:
    swarm = Swarm(config(min_peers=2, steps=3), 2)
    for phase in (Phase.OPEN, Phase.FINISHED):
        swarm.play(lambda phase=phase: swarm.run.phase is phase)  # type: ignore[misc]
        swarm.crash()
        swarm.play(lambda: swarm.up)
    swarm.finish()
    assert swarm.run.agreed_digests[3] == digest_of(3)
    swarm.crash()
    for peer in swarm.peers:
        peer.finished = False
    swarm.play(lambda: all(peer.finished for peer in swarm.peers))


def test_crash_while_waiting() -> None:
    swarm = Swarm(config(min_peers=2, steps=6), 2)
    swarm.play(lambda: swarm.run.head_step == 2)
    swarm.kill(swarm.peers[1])
    swarm.crash()
    swarm.play(lambda: swarm.up)
    swarm.peers[1].alive = True
    swarm.after(5_000, lambda: swarm.connect(swarm.peers[1]))
    swarm.finish()


def test_a_step_whose_peer_stays_away_after_a_crash_says_for_whom_it_waits_while_others_are_ready() -> None:
    swarm = Swarm(config(min_peers=1, steps=5), 1)
    swarm.play(lambda: swarm.run.head_step == 2)
    swarm.crash()
    swarm.peers[0].alive = False
    swarm.peers.append(PlayedPeer(4))
    swarm.after(2_000, lambda: swarm.connect(swarm.peers[-1]))
    swarm.play(lambda: swarm.up and swarm.run.ready_count == 1)
    said = "0 of 1 peers needed from the roster of step 3 are connected; it waits for them until its deadline"
    assert swarm.run.reason == said
    swarm.finish()
    assert {c.public_key for c in swarm.entries[-1].contributions} == {key(4)}


def test_killed_peer_costs_at_most_two_steps_and_comes_back() -> None:
    swarm = Swarm(config(min_peers=1, steps=60), 4)
    swarm.play(lambda: swarm.run.head_step == 10)
    swarm.kill(swarm.peers[2])
    head = swarm.run.head_step
    swarm.play(lambda: swarm.run.head_step == head + 10)
    assert all(len(entry.contributions) >= 3 for entry in swarm.entries[head:])
    assert swarm.now < 60_000
    swarm.peers[2].alive = True
    swarm.connect(swarm.peers[2])
    back = swarm.run.head_step
    swarm.play(lambda: swarm.run.head_step == back + 4)
    assert len(swarm.entries[back + 2].contributions) == 4
    swarm.finish()


def test_late_joiner_takes_part_within_two_steps() -> None:
    swarm = Swarm(config(min_peers=2, steps=30), 2)
    swarm.play(lambda: swarm.run.head_step == 12)
    late = PlayedPeer(5)
    swarm.peers.append(late)
    swarm.connect(late)
    at = swarm.run.head_step
    swarm.play(lambda: swarm.run.head_step >= at + 3)
    assert any(c.public_key == key(5) for entry in swarm.entries[at : at + 3] for c in entry.contributions)
    swarm.finish()


def test_whole_swarm_vanishes_and_another_one_goes_on() -> None:
    swarm = Swarm(config(min_peers=2, steps=20), 2)
    swarm.play(lambda: swarm.run.head_step == 5)
    for peer in swarm.peers:
        swarm.kill(peer)
    for number in (6, 7):
        swarm.peers.append(PlayedPeer(number))
        swarm.connect(swarm.peers[-1])
    begun = swarm.now
    swarm.play(lambda: swarm.run.head_step == 7)
    assert swarm.now - begun < 5_000, "the step of those who are gone was waited for"
    swarm.finish()


def test_half_the_roster_vanishes_below_min_peers() -> None:
    swarm = Swarm(config(min_peers=2, steps=20), 2)
    swarm.play(lambda: swarm.run.head_step == 5)
    swarm.kill(swarm.peers[0])
    swarm.peers.append(PlayedPeer(6))
    swarm.connect(swarm.peers[-1])
    begun = swarm.now
    swarm.play(lambda: swarm.run.head_step == 8)
    assert swarm.now - begun < 5_000
    swarm.finish()


def test_slow_peer_does_not_drive_the_deadline_up() -> None:
    swarm = Swarm(config(min_peers=1, steps=120), 4)
    swarm.play(lambda: swarm.run.head_step == 20)
    swarm.peers[3].silent = True
    swarm.finish()
    assert swarm.now < 120 * 3_000, "every step waited longer than the one before"


def test_fewer_samples_than_peers() -> None:
    swarm = Swarm(config(min_peers=2, batch_samples=2, steps=10), 6)
    swarm.finish()
    rosters = [len(tick.roster) for tick in swarm.ticks]
    assert rosters[-1] == 6
    assert all(share.samples >= 1 for tick in swarm.ticks for share in tick.roster)


def test_strict_waits_for_the_absent() -> None:
    swarm = Swarm(config(min_peers=2, strict=True, steps=10), 3)
    swarm.play(lambda: swarm.run.head_step == 3)
    roster = swarm.ticks[-1].roster
    swarm.kill(swarm.peers[1])
    for other in (0, 2):  # hours later
        swarm.now += 3_600_000
        swarm.tell(swarm.peers[other], applied=((3, digest_of(3)),))
    assert swarm.run.head_step == 3
    assert swarm.ticks[-1].roster == roster
    swarm.peers[1].alive = True
    swarm.connect(swarm.peers[1])
    swarm.finish()


@pytest.mark.parametrize("crash", [False, True])
def test_strict_lets_go_of_a_peer_that_left(crash: bool) -> None:
    swarm = Swarm(config(min_peers=2, strict=True, steps=10), 2)
    swarm.play(lambda: swarm.run.head_step == 3)
    swarm.leave(swarm.peers[1])
    assert [r for r in swarm.journal if isinstance(r, PeerLeft)] == [PeerLeft(4, key(1))]
    assert swarm.run.phase is Phase.OPEN
    if crash:
        swarm.crash()
        swarm.play(lambda: swarm.up)
    swarm.peers.append(PlayedPeer(4))
    swarm.after(3_000, lambda: swarm.connect(swarm.peers[-1]))
    swarm.finish()
    assert {c.public_key for c in swarm.entries[-1].contributions} == {key(0), key(4)}


def test_strict_payload_that_died_with_its_author_is_replaced() -> None:
    swarm = Swarm(config(min_peers=2, strict=True, steps=5), 2)
    swarm.play(lambda: swarm.run.step is not None and key(1) in swarm.run.step.claims)
    swarm.queue = [item for item in swarm.queue if item[0] > swarm.now + 20]  # nobody hears of it
    swarm.kill(swarm.peers[1])
    swarm.peers[1].alive = True
    swarm.connect(swarm.peers[1])
    swarm._publish(swarm.peers[0], swarm.ticks[-1])
    swarm.finish()


def test_finish_with_everyone_gone_ends() -> None:
    swarm = Swarm(config(min_peers=2, steps=4), 2)
    swarm.play(lambda: swarm.run.phase is Phase.FINISHED)
    for peer in swarm.peers:
        swarm.kill(peer)
    assert swarm.run.finished_told


def test_finish_with_a_peer_that_never_applies_ends_at_the_deadline() -> None:
    swarm = Swarm(config(min_peers=2, steps=4, deadline_ms_max=30_000), 2)
    stuck = PlayedPeer(5, stream=99)
    swarm.play(lambda: swarm.run.head_step == 3)
    swarm.comes(5)
    swarm.finish()
    assert stuck.number == 5
    assert swarm.run.peers[key(5)].phase is PeerPhase.SYNCING


@pytest.mark.parametrize("seed", range(6))
def test_peers_come_and_go(seed: int) -> None:
    swarm = Swarm(config(min_peers=2, steps=40), 5, seed=seed, loss=0.05)
    for _ in range(12):
        at = swarm.now + swarm.random.randrange(100, 1500)
        swarm.after(at - swarm.now, lambda: None)
        swarm.play(lambda at=at: swarm.now >= at)  # type: ignore[misc]
        peer = swarm.random.choice(swarm.peers)
        action = swarm.random.randrange(4)
        if not peer.alive:
            peer.alive = True
            swarm.connect(peer)
        elif action == 0:
            swarm.kill(peer)
        elif action == 1:
            swarm.leave(peer)
        elif action == 2:
            swarm.break_stream(peer)
        elif swarm.up:
            swarm.crash(300)
            swarm.play(lambda: swarm.up)
    for peer in swarm.peers:
        if not peer.alive:
            peer.alive = True
            swarm.connect(peer)
    swarm.finish()


@pytest.mark.parametrize("strict", [False, True])
def test_every_prefix_of_the_journal_goes_on_to_the_same_end(strict: bool) -> None:
    """Killed after any journal write: what was announced is there, nothing is there twice, and the run ends."""
    whole = Swarm(config(min_peers=2, steps=6, snapshot_every=2, strict=strict), 2)
    whole.finish()
    for length in range(len(whole.journal) + 1):
        swarm = Swarm(whole.settings, 0)
        swarm.load(whole.journal[:length])
        told = [effect for at, effect in whole.announced if at <= length]
        run = swarm.run
        entries = [effect.step for effect in told if isinstance(effect, SendEntry)]
        assert run.head_step >= max(entries, default=0)
        ticks = [effect.tick for effect in told if isinstance(effect, SendTick)]
        if ticks and ticks[-1].step == run.head_step + 1:
            assert run.step.tick == ticks[-1]
        snapshots = [e.snapshot for e in told if isinstance(e, SendNotice) and e.snapshot is not None]
        assert not snapshots or run.snapshot is not None
        assert run.snapshot == next(
            (r.snapshot for r in reversed(swarm.journal) if isinstance(r, SnapshotAgreed)), None
        )
        swarm.peers = [PlayedPeer(number) for number in range(2)]
        for peer in swarm.peers:
            swarm.connect(peer)
        swarm.finish()
        hashes = [r.hash for r in swarm.journal if isinstance(r, EntryCommitted)]
        assert len(hashes) == len(set(hashes)) == 6
        assert run.run_id == RUN_ID
