"""Sums of votes in the simulated world: small swarms have aggregators here, too, and every sum is the one of its payloads."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from node.optim.votes.sums import cut
from node.wire import UpdateDoor, aggregate
from protos.errors import Refusal
from protos.limits import HASH_BYTES
from protos.log import Entry
from protos.slices import Aggregate, Update, hash_of, open_list, slice_of, split, sum_in
from tests.sim.world import World


def with_aggregators() -> Any:
    """A few peers move no fewer bytes with aggregators: the coordinator does not look at that here."""
    return mock.patch("coordinator.clock.aggregation.worth", return_value=True)


def summed(door: UpdateDoor, updates: Sequence[Update], step: int) -> bytes:
    """The sum of whole votes as its aggregators make it, each of the slices of its range."""
    if door.ranges == 1:
        return aggregate(door, updates, step)
    cuts = [cut(update.votes, update.size, door.chunks, door.ranges) for update in updates]
    slices = [
        aggregate(part, [replace(update, votes=it[at]) for update, it in zip(updates, cuts, strict=True)], step)
        for at, part in enumerate(door.parts)
    ]
    return sum_in([slice_of(data) for data in slices]).slices + b"".join(slices)


def sum_named(data: bytes, ranges: int) -> Aggregate:
    """As an entry names the sum with these bytes."""
    parts = [slice_of(it) for it in split(data, ranges)]
    return sum_in(parts) if ranges > 1 else Aggregate(parts[0].sha256, parts[0].total_bytes)


def _whole(world: World, name: bytes) -> bytes:
    """A payload's bytes, from the blobs that any peer ever had."""
    head = world.payloads[name]
    try:
        return head + b"".join(world.payloads[it.sha256] for it in open_list(head))
    except Refusal:
        return head  # of one range, or no payload


def check_sums(world: World, entries: Iterable[Entry]) -> None:
    """Compare each sum in the log with the payloads that any peer ever had, whoever made the sum."""
    replica = next(peer.replica for peer in world.peers if peer.replica is not None)
    demo = replica.demo
    config, of = world.config, (replica.run_id, replica.layout_digest, demo.layout.chunks, demo.form)
    door = UpdateDoor(*of, config.optimizer.cap, config.clock.ranges)
    count = 0
    for entry in entries:
        if entry.aggregate is None:
            continue
        count += 1
        hashes = world.payloads[entry.aggregate.payloads_sha256]
        found = [_whole(world, hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]
        updates = []
        for contribution, raw in zip(entry.contributions, found, strict=True):
            try:
                updates.append(door.open(raw, entry.step, contribution.payload_bytes))
            except Refusal:
                continue  # counts as nothing
        data = summed(door, updates, entry.step)
        assert hash_of(data, door.ranges) == entry.aggregate.sha256, (
            f"the sum of step {entry.step} is not that of its votes"
        )
        assert len(data) == entry.aggregate.total_bytes
    if world.config.clock.aggregators:
        world.note(f"{count} entries have the sum of their votes; aggregators lied {world.lies} times")
