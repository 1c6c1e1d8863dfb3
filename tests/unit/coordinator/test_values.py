"""A changed copy is what `dataclasses.replace` makes of the same value."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import pytest

from coordinator.clock.state import OpenStep, Peer, Run
from coordinator.clock.value_copy import replace
from protos.assignment import Range, SampleShare
from protos.run_config import RunConfig
from protos.tick import Tick

RUN = Run(bytes(32), RunConfig())
TICK = Tick(1, bytes(32), 1, (SampleShare(b"a" * 32, 4),), (Range(0, 4),), 0)


def test_it_is_the_value_with_some_fields_changed() -> None:
    changed = replace(RUN, head_step=3, reason="because")
    assert changed == dataclasses.replace(RUN, head_step=3, reason="because")
    assert (RUN.head_step, type(changed)) == (0, Run)
    assert replace(OpenStep(TICK, 0, 9), here=1) == dataclasses.replace(OpenStep(TICK, 0, 9), here=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.head_step = 4  # type: ignore[misc]


def test_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="Peer has no field speed"):
        replace(Peer(b"a"), speed=1)  # type: ignore[call-arg]


def test_what_follows_from_the_fields_is_computed_again() -> None:
    assert TICK.places == {b"a" * 32: 0}
    assert replace(TICK, roster=(SampleShare(b"b" * 32, 4),)).places == {b"b" * 32: 0}


def test_a_class_that_checks_its_fields_still_does() -> None:
    with pytest.raises(AssertionError):
        replace(Range(0, 4), stop=-1)


def test_a_property_that_is_not_computed_yet_does_no_harm() -> None:
    @dataclass(frozen=True)
    class Pair:
        first: int
        second: int = 2

        @cached_property
        def total(self) -> int:
            return self.first + self.second

    pair = Pair(1)
    assert replace(pair, first=5).total == 7
    assert pair.total == 3
    assert replace(pair, second=5).total == 6
