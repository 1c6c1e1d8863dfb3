"""A journal that lost its end: the entries come back, and nothing is decided twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.clock import machine
from coordinator.clock.effects import EndStream, EntryCommitted, Refuse, SendEntry, SendTick, TickOpened
from coordinator.clock.events import EntriesReturned, Reported
from coordinator.clock.state import PeerPhase, Phase
from protos.log import Exclusion, entry_body, entry_hash
from protos.run_config import RunConfig, TrustConfig
from tests.unit.coordinator.driver import RUN_ID, Harness, PlayedPeer, Swarm, config, digest_of, joined, key, sha
from tests.unit.coordinator.test_machine import clocks, happenings, play

LOGGED = ["head_step", "head_hash", "next_sample", "returned_samples", "payload_bytes_total", "loss", "agreed_digests"]


def played(steps: int = 8, peers: int = 3, trust: bool = False) -> Swarm:
    """A run that has come so far."""
    swarm = Swarm(config(min_peers=2, steps=20, snapshot_every=4), peers)
    if trust:
        checked = TrustConfig(enabled=True, probation_steps=2)
        swarm = Swarm(swarm.settings.model_copy(update={"trust": checked}), peers)
    swarm.play(lambda: swarm.run.head_step == steps)
    return swarm


def committed(harness: Harness) -> list[EntryCommitted]:
    return [record for record in harness.journal if isinstance(record, EntryCommitted)]


def cut_to(whole: Harness, length: int) -> Swarm:
    """The same coordinator, started with the first records of its journal."""
    short = Swarm(whole.settings, 0)
    short.now = whole.now
    short.load(whole.journal[:length])
    return short


def give_back(harness: Harness, whole: Harness, page: int = 3) -> None:
    lost = committed(whole)[harness.run.head_step :]
    for first in range(0, len(lost), page):
        harness.feed(EntriesReturned(key(0), tuple(lost[first : first + page]), len(committed(whole))))


def check_same_log(harness: Harness, whole: Harness) -> None:
    length = max(n for n, record in enumerate(whole.journal, 1) if isinstance(record, EntryCommitted))
    if not any(isinstance(record, TickOpened) for record in whole.journal[length:]):
        length = len(
            whole.journal
        )  # otherwise the log alone: without the samples of a step that opened and has no entry
    everything = machine.restore(machine.new_run(whole.run_id, whole.settings), whole.journal[:length], 0)
    for name in LOGGED:
        assert getattr(harness.run, name) == getattr(everything, name), name
    lived = harness.run
    harness.restart()
    for name in [*LOGGED, "roster", "voted", "standings", "checks", "phase"]:
        assert getattr(harness.run, name) == getattr(lived, name), f"{name} is not restored as it was lived"


@pytest.mark.parametrize("trust", [False, True])
def test_the_run_goes_on_from_the_log_that_its_peers_have(trust: bool) -> None:
    whole = played(trust=trust)
    entries = [n for n, record in enumerate(whole.journal, 1) if isinstance(record, EntryCommitted)]
    for length in (entries[2], entries[2] + 1, entries[0] - 1):  # between two steps, in an open one, before the first
        short = cut_to(whole, length)
        give_back(short, whole)
        assert "had lost its end" in short.run.reason or "peers needed are ready" in short.run.reason
        check_same_log(short, whole)
        short.peers = [PlayedPeer(n) for n in range(3)]
        for peer in short.peers:
            short.connect(peer)
        short.finish()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    clock=clocks, events=st.lists(happenings(), min_size=10, max_size=50), cut=st.floats(0, 1), page=st.integers(1, 4)
)
@example(
    clock=config(min_peers=1, max_peers=3, batch_samples=3, steps=6, snapshot_every=2),
    events=[*[("join", 0, 0, 0, 0)] * 7, ("good", 0, 0, 0, 0), ("report", 0, 0, 0, 0), ("run finish", 0, 3, 2, 0)],
    cut=0.0,
    page=1,
)
def test_whatever_was_lost_comes_back(
    clock: RunConfig, events: list[tuple[str, int, int, int, int]], cut: float, page: int
) -> None:
    whole = Harness(clock)
    play(whole, events)
    short = cut_to(whole, round(cut * len(whole.journal)))
    lost = short.run.head_step < whole.run.head_step
    give_back(short, whole, page)
    if lost:
        check_same_log(short, whole)


def test_no_step_opens_before_the_log_is_there_again() -> None:
    whole = played()
    short = cut_to(whole, next(n for n, r in enumerate(whole.journal, 1) if isinstance(r, EntryCommitted)))
    for number in range(3):  # peers that have no more than the coordinator
        short.comes(number)
    lost = committed(whole)[1:]
    short.feed(EntriesReturned(key(9), tuple(lost[:2]), 8))
    assert (short.run.head_step, short.run.lost_until) == (3, 8)
    for number in range(3):
        effects = short.feed(Reported(key(number), applied=((3, digest_of(3)),)))
        assert not [effect for effect in effects if isinstance(effect, SendTick)]
    assert "waiting for a peer that gives back entries 4 to 8" in short.run.reason
    effects = short.feed(EntriesReturned(key(9), tuple(lost), 8))
    assert [effect.step for effect in effects if isinstance(effect, SendEntry)] == [4, 5, 6, 7, 8]
    assert {peer.phase for peer in short.run.peers.values()} == {PeerPhase.SYNCING}
    for number in range(3):
        short.feed(Reported(key(number), applied=((8, digest_of(8)),)))
    assert short.run.phase is Phase.OPEN


def test_what_does_not_follow_the_head_is_refused() -> None:
    whole = played()
    short = cut_to(whole, next(n for n, r in enumerate(whole.journal, 1) if isinstance(r, EntryCommitted)))
    lost = committed(whole)[1:]
    gap = short.feed(EntriesReturned(key(0), (lost[1],), 8))
    assert isinstance(gap[0], Refuse)
    other = replace(lost[0].entry, parent_hash=sha("other"))
    body = entry_body(other)
    fork = short.feed(EntriesReturned(key(0), (EntryCommitted(other, body, entry_hash(body)),), 8))
    assert isinstance(fork[0], Refuse)
    assert (short.run.head_step, short.run.lost_until) == (1, 0), "who has no entry after the head stops nothing"


def test_an_exclusion_that_comes_back_ends_the_peers_stream() -> None:
    short = played()
    short.feed(joined(2))
    head = committed(short)[-1]
    entry = replace(
        head.entry,
        step=head.entry.step + 1,
        parent_hash=head.hash,
        exclusions=(Exclusion(key(2), "for a reason", by_operator=True),),
        contributions=tuple(c for c in head.entry.contributions if c.public_key != key(2)),
        next_sample=short.run.next_sample,
        returned_samples=short.run.returned_samples,
    )
    body = entry_body(entry)
    effects = short.feed(EntriesReturned(key(0), (EntryCommitted(entry, body, entry_hash(body)),), entry.step))
    assert EndStream(key(2)) in effects
    assert short.run.standings[key(2)].excluded == "for a reason"


def test_the_last_entry_comes_back() -> None:
    whole = Swarm(config(min_peers=2, steps=5, snapshot_every=4), 2)
    whole.finish()
    entries = [n for n, record in enumerate(whole.journal, 1) if isinstance(record, EntryCommitted)]
    short = cut_to(whole, entries[2])
    give_back(short, whole)
    assert short.run.phase is Phase.FINISHED
    assert short.timer is not None
    short.peers = [PlayedPeer(n) for n in range(2)]
    for peer in short.peers:
        short.connect(peer)
    short.finish()
    assert short.run.run_id == RUN_ID
