"""Ticks: a step is open, for whom, on which samples, and who adds its votes up. The door through which they come.

A tick is no part of the log: the entry of its step is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from protos import limits
from protos.assignment import Range, SampleShare
from protos.envelope import Kind, open_envelope, parse, seal
from protos.identity import Identity
from protos.log import in_range, lr_from_bits, open_lr, open_ranges, ranges_body
from protos.v1 import envelope_pb2, log_pb2


@dataclass(frozen=True)
class Tick:
    """Step `step` is open for this roster on the state after `parent_hash`."""

    step: int
    parent_hash: bytes
    attempt: int
    roster: tuple[SampleShare, ...]
    pool: tuple[Range, ...]
    lr_bits: int
    aggregators: tuple[bytes, ...] = ()
    """The peers that add the votes up, in the order of the draw; none: every peer takes every payload."""
    ranges: tuple[bytes, ...] = ()
    """Of each range, the places of its own aggregators in `aggregators`; empty in a run of one range: they are of it all."""

    @cached_property
    def places(self) -> Mapping[bytes, int]:
        """Roster member -> its place in the roster's order."""
        return {share.public_key: place for place, share in enumerate(self.roster)}

    @cached_property
    def by_range(self) -> tuple[tuple[bytes, ...], ...]:
        """The aggregators of each range; none: every peer takes every payload."""
        if not self.ranges:
            return (self.aggregators,) if self.aggregators else ()
        return tuple(tuple(self.aggregators[place] for place in row) for row in self.ranges)

    def ranges_of(self, public_key: bytes) -> tuple[int, ...]:
        """The ranges whose votes this peer adds up."""
        return self._ranges_of.get(public_key, ())

    @cached_property
    def _ranges_of(self) -> Mapping[bytes, tuple[int, ...]]:
        found: dict[bytes, tuple[int, ...]] = {}
        for number, keys in enumerate(self.by_range):
            for key in keys:
                found[key] = (*found.get(key, ()), number)
        return found

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """Of each range, the places of its aggregators that are in the roster, as bits."""
        places = self.places
        return tuple(sum(1 << places[key] for key in keys if key in places) for keys in self.by_range)

    @cached_property
    def outside(self) -> tuple[bytes, ...]:
        """The aggregators that are not in the roster: anchors."""
        return tuple(key for key in self.aggregators if key not in self.places)

    @property
    def lr(self) -> float:
        """The learning rate of the step, exactly the one that its entry will carry."""
        return lr_from_bits(self.lr_bits)


def tick_body(tick: Tick) -> log_pb2.Tick:
    """A tick as protobuf."""
    return log_pb2.Tick(
        step=tick.step,
        parent_hash=tick.parent_hash,
        attempt=tick.attempt,
        roster=[log_pb2.RosterMember(public_key=s.public_key, samples=s.samples) for s in tick.roster],
        pool=ranges_body(tick.pool),
        lr_bits=tick.lr_bits,
        aggregators=tick.aggregators,
        ranges=tick.ranges,
    )


def seal_tick(identity: Identity, run_id: bytes, tick: Tick) -> envelope_pb2.SignedEnvelope:
    """Sign a tick as the run's coordinator."""
    return seal(identity, Kind.KIND_TICK, run_id, tick_body(tick))


def open_tick(data: bytes, *, run_id: bytes, coordinator: bytes) -> Tick:
    """Verify a tick's envelope and its ranges, or raise `Refusal`."""
    bound = limits.TICK_BYTES_MAX + limits.ENVELOPE_OVERHEAD_BYTES_MAX
    opened = open_envelope(data, kind=Kind.KIND_TICK, run_id=run_id, bytes_max=bound, signer=coordinator)
    return tick_from_body(parse(log_pb2.Tick, opened.body))


def tick_from_body(body: log_pb2.Tick) -> Tick:
    """Inverse of `tick_body`, checking ranges; raises `Refusal`."""
    in_range(1 <= body.step <= limits.STEP_MAX, f"step {body.step}")
    in_range(len(body.parent_hash) == limits.HASH_BYTES, "parent hash length")
    in_range(len(body.roster) <= limits.ROSTER_PEERS_MAX, f"{len(body.roster)} peers")
    keys = [member.public_key for member in body.roster]
    in_range(keys == sorted(set(keys)), "the roster is not sorted by public key, each peer once")
    for member in body.roster:
        in_range(len(member.public_key) == limits.PUBLIC_KEY_BYTES, "public key length")
        in_range(member.samples <= limits.SAMPLE_INDEX_MAX, f"{member.samples} samples")
    most = limits.AGGREGATORS_MAX * max(len(body.ranges), 1)
    in_range(len(body.ranges) <= limits.RANGES_MAX, f"{len(body.ranges)} ranges")
    in_range(len(body.aggregators) <= most, f"{len(body.aggregators)} aggregators")
    for row in body.ranges:
        in_range(0 < len(row) == len({*row}) and max(row) < len(body.aggregators), "the aggregators of a range")
    in_range(len({*body.aggregators}) == len(body.aggregators), "an aggregator is named twice")
    in_range(all(len(key) == limits.PUBLIC_KEY_BYTES for key in body.aggregators), "public key length")
    return Tick(
        step=body.step,
        parent_hash=body.parent_hash,
        attempt=body.attempt,
        roster=tuple(SampleShare(member.public_key, member.samples) for member in body.roster),
        pool=open_ranges(body.pool),
        lr_bits=open_lr(body.lr_bits),
        aggregators=tuple(body.aggregators),
        ranges=tuple(body.ranges),
    )
