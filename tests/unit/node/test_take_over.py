"""After a take-over, the reports of real outboxes decide the open step in any order, before its deadline."""

from itertools import permutations

import pytest

from coordinator.clock import holder_counts
from coordinator.clock.events import Connected, HeldPlaces, Reported
from node.swarm.outbox import Outbox
from protos.slices import mask_from_bytes
from tests.unit.coordinator.driver import Harness, claim_of, config, digest_of, joined, key, snapshot_at

PEERS = 3
ROUNDS_MAX = 8


def ready() -> Harness:
    """A run whose first step is open for three peers, which have all payloads; the coordinator that heard of them is gone."""
    harness = Harness(config(min_peers=PEERS))
    for number in range(PEERS):
        harness.feed(joined(number))
        harness.feed(Connected(key(number)))
        harness.feed(Reported(key(number), applied=((0, digest_of(0)),)))
    for number in range(PEERS):
        harness.feed(Reported(key(number), snapshots=(snapshot_at(0),)))
    harness.restart()
    return harness


def holding_all(harness: Harness, number: int) -> Outbox:
    tick, box = harness.ticks[-1], Outbox()
    box.open_step(tick)
    box.announce(tick.step, b"")
    for author in range(PEERS):
        box.hold(tick.step, key(author), claim_of(tick, author).payload_sha256)
    return box


def tell(harness: Harness, number: int, box: Outbox) -> bool:
    """One report of new facts, and its answer, as the coordinator's door and the reporter make them; whether there was one."""
    report = box.next_report()
    if report is None:
        return False
    (body, facts), held = report, None
    if body.HasField("held"):
        mask = mask_from_bytes(body.held.places)
        held = HeldPlaces(body.held.step, body.held.attempt, mask, body.held.payloads_sha256)
    named = tuple((it.step, it.public_key, it.payload_sha256) for it in body.holdings)
    claim = claim_of(harness.ticks[-1], number) if body.HasField("announcement") else None
    harness.feed(Reported(key(number), claim=claim, held=held, holdings=named))
    unheard = box.name(holder_counts.unclear(harness.run.step, key(number), held, anchor=False))
    box.sent([fact for fact in facts if fact not in unheard])
    return True


@pytest.mark.parametrize("order", list(permutations(range(PEERS))))
@pytest.mark.parametrize("together", [False, True], ids=["one after another", "in turns"])
def test_peers_that_come_back_decide_the_open_step(order: tuple[int, ...], together: bool) -> None:
    harness = ready()
    boxes = {number: holding_all(harness, number) for number in order}
    for number in order:
        harness.feed(joined(number))
        harness.feed(Connected(key(number)))
        rounds = 1 if together else ROUNDS_MAX
        while rounds and not harness.entries and tell(harness, number, boxes[number]):
            rounds -= 1
    for _ in range(ROUNDS_MAX):
        for number in order:
            if not harness.entries:
                tell(harness, number, boxes[number])
    assert [len(entry.contributions) for entry in harness.entries] == [PEERS], harness.run.reason
