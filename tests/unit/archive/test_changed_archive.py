"""Settings that the operator changed, in an archive: `verify` says them, and finds those that a run cannot have."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from node.archive.verify import text
from protos.changes import Settings, settings_of
from protos.identity import peer_id
from tests.unit.archive.test_archive import COORDINATOR, Life


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path)
    made.steps(2)
    yield made
    made.recorder.close()


def test_changes_are_said_with_the_step_since_which_they_count(life: Life) -> None:
    life.settings = settings_of({"clock.steps": 8})
    life.steps(2)
    life.settings = settings_of({"clock.steps": 9, "optimizer.lr": 0.5})
    life.steps(1)
    found = life.verify()
    assert found.ok, found.reason
    assert found.changes == [{"step": 3, "clock.steps": 8}, {"step": 5, "clock.steps": 9, "optimizer.lr": 0.5}]
    assert "from step 3 on: clock.steps = 8; from step 5 on: clock.steps = 9, optimizer.lr = 0.5." in text(found)


@pytest.mark.parametrize(
    ("settings", "then", "words"),
    [
        (settings_of({"clock.steps": 3}), settings_of({"clock.steps": 3}), "the run has 3 steps"),
        (settings_of({"clock.steps": 9}), (), "clock.steps was changed, and is not named any more"),
        (
            settings_of({"clock.min_peers": 500}),
            settings_of({"clock.min_peers": 500}),
            "min_peers 500 exceeds max_peers",
        ),
    ],
)
def test_settings_that_the_run_cannot_have_do_not_hold(
    life: Life, settings: Settings, then: Settings, words: str
) -> None:
    life.settings = settings
    life.step()
    life.settings = then
    life.step()
    found = life.verify()
    assert (found.ok, found.signed_by) == (False, peer_id(COORDINATOR.public_key))
    assert words in found.reason
