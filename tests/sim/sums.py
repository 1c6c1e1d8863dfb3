"""Sums of votes in the simulated world: small swarms have aggregators here, too, and every sum is the one of its payloads."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

from node.wire.codec import payload_hash
from node.wire.validate import UpdateDoor, aggregate
from protos.errors import Refusal
from protos.limits import HASH_BYTES
from protos.log import Entry
from tests.sim.world import World


def with_aggregators() -> Any:
    """A few peers move no fewer bytes with aggregators: the coordinator does not look at that here."""
    return mock.patch("coordinator.clock.aggregation.worth", return_value=True)


def check_sums(world: World, entries: Iterable[Entry]) -> None:
    """Compare each sum in the log with the payloads that any peer ever had, whoever made the sum."""
    replica = next(peer.replica for peer in world.peers if peer.replica is not None)
    demo = replica.demo
    door = UpdateDoor(replica.run_id, replica.layout_digest, demo.layout.chunks, demo.form, world.config.optimizer.cap)
    summed = 0
    for entry in entries:
        if entry.aggregate is None:
            continue
        summed += 1
        hashes = world.payloads[entry.aggregate.payloads_sha256]
        found = [world.payloads[hashes[at : at + HASH_BYTES]] for at in range(0, len(hashes), HASH_BYTES)]
        updates = []
        for contribution, raw in zip(entry.contributions, found, strict=True):
            try:
                updates.append(door.open(raw, entry.step, contribution.payload_bytes))
            except Refusal:
                continue  # counts as nothing
        data = aggregate(door, updates, entry.step)
        assert payload_hash(data) == entry.aggregate.sha256, f"the sum of step {entry.step} is not that of its votes"
        assert len(data) == entry.aggregate.total_bytes
    if world.config.clock.aggregators:
        world.note(f"{summed} entries have the sum of their votes; aggregators lied {world.lies} times")
