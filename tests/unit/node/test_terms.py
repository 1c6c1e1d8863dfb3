"""The settings of a run in its present step, as a peer follows them from entry to entry. ADR 44."""

import pytest

from node.training.progress import EffectiveSettings, LastStep
from protos.changes import settings_of
from protos.errors import RefusedError
from protos.run_config import ClockConfig, RunConfig


def made() -> EffectiveSettings:
    config = RunConfig(clock=ClockConfig(steps=100, snapshot_every=10))
    return EffectiveSettings(config, LastStep(config.clock.steps))


def test_a_peer_that_replays_older_entries_goes_back_to_their_settings_and_on_again() -> None:
    terms = made()
    changed = settings_of({"clock.steps": 200, "clock.snapshot_every": 5})
    terms.told(changed, 80, quiet=True)
    assert (terms.last.step, terms.clock.snapshot_every) == (200, 5)
    terms.told((), 41)
    assert (terms.last.step, terms.clock.snapshot_every) == (100, 10)
    terms.told(changed, 42)
    assert (terms.last.step, terms.clock.snapshot_every) == (200, 5)


def test_settings_that_a_peer_cannot_follow_end_it_with_the_reason() -> None:
    terms = made()
    with pytest.raises(
        RefusedError, match=r"entry 7 has settings that this peer cannot follow: .*optimizer.beta.*update"
    ):
        terms.told((("optimizer.beta", "0.5"),), 7)
    assert terms.last.step == 100
