"""Holders of the open step's payloads, counted for all authors at once.

A reporter's holdings are one bit mask over the roster's places. The number of holders of each author's payload is kept in
binary digits: `tally[d]` has the digit 2**d of every author's count. One report then costs a few operations on whole masks,
however many authors it names.

Holdings count for the payload that its author claimed. A payload that no claim names yet is kept by name until one does.
Refuses to decide how many holders are enough (`entry_decision.py`). ADR 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import and_, or_

from coordinator.clock.events import HeldPlaces
from coordinator.clock.state import OpenStep, Quorum
from coordinator.clock.value_copy import replace
from protos.slices import digest_of, places_of

Name = tuple[bytes, bytes]
"""(author, payload hash)."""
ANCHORS_HELD_MAX = 16
"""Anchors whose holdings of one step are kept, with those that add votes up. One anchor is enough for a payload to count."""
ANCHORED_A_MEMBER_MAX = 4
"""Payloads that an anchor may name for a step before their authors do, as a multiple of the roster."""


def added(tally: tuple[int, ...], mask: int) -> tuple[int, ...]:
    """The counts, one more for each place in the mask."""
    digits, carry = list(tally), mask
    for at, digit in enumerate(digits):
        if not carry:
            break
        digits[at], carry = digit ^ carry, digit & carry
    return (*digits, carry) if carry else tuple(digits)


def reaching(tally: tuple[int, ...], needed: int) -> int:
    """Bit mask of the places that count `needed` or more; at least 1 is needed."""
    assert needed >= 1, needed
    more, equal = 0, -1
    for at in reversed(range(max(len(tally), needed.bit_length()))):
        digit = tally[at] if at < len(tally) else 0
        if needed >> at & 1:
            equal &= digit
        else:
            more |= equal & digit
            equal &= ~digit
    return more | equal


def count_of(tally: tuple[int, ...], place: int) -> int:
    """How many hold the payload of the author at this place."""
    return sum((digit >> place & 1) << at for at, digit in enumerate(tally))


def tallied(step: OpenStep, within: int) -> tuple[int, ...]:
    """How many of the members in the mask `within` hold each author's payload."""
    tally: tuple[int, ...] = ()
    for reporter, mask in step.held.items():
        if within >> step.tick.places[reporter] & 1:
            tally = added(tally, mask)
    return tally


def hold(step: OpenStep, reporter: bytes, mask: int, *, anchor: bool = False) -> OpenStep:
    """A member of the roster, or an anchor, holds the payloads that the authors in the mask claimed."""
    if anchor and _has_room(step, step.by_anchor, reporter) and mask & ~step.by_anchor.get(reporter, 0):
        step = replace(step, by_anchor={**step.by_anchor, reporter: step.by_anchor.get(reporter, 0) | mask})
    place = step.tick.places.get(reporter)
    before = step.held.get(reporter, 0)
    new, rule = mask & ~before, step.counted_by
    if place is not None and new:
        step = replace(step, held={**step.held, reporter: before | new})
        if rule is not None and rule.within >> place & 1:
            step = recounted(replace(step, tally=added(step.tally, new)), reporter)
    if anchor and rule is not None and rule.anchor:
        step = recounted(step, reporter)
    return step


def recounted(step: OpenStep, reporter: bytes | None = None) -> OpenStep:
    """The step with its mask of the authors whose payload the quorum holds: each slice of it, if its aggregators take slices.
    `reporter`: nobody else has said anything since."""
    rule = step.counted_by
    assert rule is not None, "the step has its rule first"
    if not rule.ranges:
        return replace(step, counted=step.anchored if rule.anchor else reaching(step.tally, rule.needed))
    masks = list(step.masks)
    for number in range(len(rule.ranges)) if reporter is None or not masks else step.tick.ranges_of(reporter):
        masks[number : number + 1] = [_held_of(step, number, rule.ranges[number])]
    return replace(step, masks=tuple(masks), counted=reduce(and_, masks))


def _held_of(step: OpenStep, number: int, rule: Quorum) -> int:
    """Mask of the authors whose slice an anchor of the range holds, or enough of its aggregators."""
    keys = step.tick.by_range[number]
    if rule.anchor:
        return reduce(or_, (step.by_anchor.get(key, 0) for key in keys), 0)
    tally: tuple[int, ...] = ()
    for key in keys:
        if rule.within & step.bit(key):
            tally = added(tally, step.held.get(key, 0))
    return reaching(tally, rule.needed)


def _has_room(step: OpenStep, by_anchor: Mapping[bytes, object], anchor: bytes) -> bool:
    """Whether the holdings of this anchor are kept: of the step's aggregators, and of ANCHORS_HELD_MAX others at most."""
    if anchor in by_anchor or anchor in step.tick.aggregators:
        return True
    return len(by_anchor) < ANCHORS_HELD_MAX


def named_by(step: OpenStep, anchor: bytes, names: frozenset[Name]) -> OpenStep:
    """An anchor holds payloads that no claim names yet. If these are too many with its earlier ones, none is kept."""
    before = step.named_by_anchor.get(anchor, frozenset())
    after = before | names
    if after == before or not _has_room(step, step.named_by_anchor, anchor):
        return step
    if len(after) > ANCHORED_A_MEMBER_MAX * len(step.tick.roster):
        return step
    return replace(step, named_by_anchor={**step.named_by_anchor, anchor: after})


def claimed(step: OpenStep, author: bytes, payload: bytes) -> OpenStep:
    """The author claims this payload. The reporters that named it before hold it; other payloads of this author are dropped."""
    reporters = step.named.get((author, payload), 0)
    bit, anchors = step.bit(author), [key for key, names in step.named_by_anchor.items() if (author, payload) in names]
    step = replace(
        step,
        claimed=step.claimed | bit,
        checked=(0, b""),
        named={name: mask for name, mask in step.named.items() if name[0] != author} if step.named else step.named,
        named_by_anchor=_without_author(step.named_by_anchor, author),
        by_anchor={**step.by_anchor, **{key: step.by_anchor.get(key, 0) | bit for key in anchors}},
        counted_by=None if anchors else step.counted_by,
    )
    for place in places_of(reporters):
        step = hold(step, step.tick.roster[place].public_key, bit)
    return step


def compare_mask(step: OpenStep, said: HeldPlaces) -> tuple[OpenStep, bool]:
    """Whether every payload in a report's mask is the one that its author claimed. The step remembers the last mask."""
    if not said.mask or said.mask & ~step.claimed:
        return step, False
    if step.checked[0] != said.mask:
        names = (step.tick.roster[place].public_key for place in places_of(said.mask))
        step = replace(step, checked=(said.mask, digest_of(step.claims[name].payload_sha256 for name in names)))
    return step, step.checked[1] == said.digest


def unclear(step: OpenStep | None, reporter: bytes, said: HeldPlaces | None, *, anchor: bool) -> int:
    """Mask of the authors whose payloads a reporter should name. 0 if the step is decided, or open for another roster."""
    if step is None or said is None or (said.step, said.attempt) != (step.tick.step, step.tick.attempt):
        return 0
    if reporter not in step.tick.places and not anchor:
        return 0
    held = step.held.get(reporter, 0)
    if anchor:
        held |= step.by_anchor.get(reporter, 0) if _has_room(step, step.by_anchor, reporter) else step.anchored
    missing = said.mask & ~held & everyone(step)
    return (missing & ~step.claimed) or missing


def everyone(step: OpenStep) -> int:
    """Bit mask of the whole roster."""
    return (1 << len(step.tick.roster)) - 1


def lost(step: OpenStep, reporter: bytes) -> OpenStep:
    """A new life of a peer has lost its payloads. The peer's own claim stands, and so do the holdings of all other anchors."""
    bit = step.bit(reporter)
    held = {**step.held, reporter: step.held.get(reporter, 0) & bit} if reporter in step.held else step.held
    return replace(
        step,
        held=held,
        named=_held_names((name, mask if name[0] == reporter else mask & ~bit) for name, mask in step.named.items()),
        by_anchor={key: mask for key, mask in step.by_anchor.items() if key != reporter},
        named_by_anchor={key: names for key, names in step.named_by_anchor.items() if key != reporter},
        counted_by=None,
    )


def without(step: OpenStep, author: bytes) -> OpenStep:
    """An author is out, so no holder of its payload counts. Its reports about others stand, as long as it counts there."""
    bit = step.bit(author)
    return replace(
        step,
        claimed=step.claimed & ~bit,
        checked=(0, b""),
        held={reporter: mask & ~bit for reporter, mask in step.held.items()},
        named={name: mask for name, mask in step.named.items() if name[0] != author},
        by_anchor={key: mask & ~bit for key, mask in step.by_anchor.items()},
        named_by_anchor=_without_author(step.named_by_anchor, author),
        counted_by=None,
    )


def carried_over(before: OpenStep, opened: OpenStep) -> OpenStep:
    """The same step with another roster. A member that is still in it keeps its holdings of authors that are still in it.

    Not those of aggregators that took slices: they may have other ranges now, and say again what they hold.
    """
    if before.tick.ranges:
        before = replace(before, held={}, named={}, by_anchor={}, named_by_anchor={})
    new = opened.tick.places
    moves = [
        (1 << old, 1 << new[share.public_key])
        for old, share in enumerate(before.tick.roster)
        if share.public_key in new
    ]
    moved: dict[int, int] = {}

    def at(mask: int) -> int:
        if mask not in moved:  # most have the same
            moved[mask] = sum(to for bit, to in moves if mask & bit)
        return moved[mask]

    return replace(
        opened,
        claimed=at(before.claimed),
        held={reporter: at(mask) for reporter, mask in before.held.items() if reporter in new},
        named=_held_names((name, at(mask)) for name, mask in before.named.items() if name[0] in new),
        by_anchor={key: at(mask) for key, mask in before.by_anchor.items()},
        named_by_anchor={
            key: frozenset(name for name in names if name[0] in new) for key, names in before.named_by_anchor.items()
        },
    )


def _held_names(named: Iterable[tuple[Name, int]]) -> dict[Name, int]:
    """Without the names that no member holds any more: a peer with many lives would leave some behind with each."""
    return {name: mask for name, mask in named if mask}


def _without_author(named: Mapping[bytes, frozenset[Name]], author: bytes) -> Mapping[bytes, frozenset[Name]]:
    """The names that anchors hold, without an author's; an anchor without any name has no place in it."""
    left = {key: frozenset(name for name in names if name[0] != author) for key, names in named.items()}
    return {key: names for key, names in left.items() if names}
