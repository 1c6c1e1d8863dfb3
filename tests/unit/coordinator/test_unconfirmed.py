"""Steps without an agreed state digest: counted for `status`, the page and the metrics, however many they are."""

import pytest

from coordinator.clock.events import Disconnected
from coordinator.clock.state import DIGEST_STEPS_KEPT
from coordinator.serving.metrics import Metrics
from tests.unit.coordinator.driver import config, key
from tests.unit.coordinator.test_strangers import ANCHOR, applies, begun, comes, step

HONEST = (0, 1, 2)


@pytest.mark.parametrize("silent", [0, 1, 94])
def test_steps_that_nobody_confirms_are_counted_beyond_what_is_kept(silent: int) -> None:
    """94 steps in a row had no digest while an anchor was away, and nothing said so."""
    harness = begun(*HONEST, anchor=True, settings=config(min_peers=3, snapshot_every=2, steps=200))
    for _ in range(3):
        step(harness, *HONEST, also=(ANCHOR,))
        applies(harness, *HONEST, ANCHOR)
    harness.feed(Disconnected(key(ANCHOR)))
    for _ in range(silent):
        step(harness, *HONEST)
        applies(harness, *HONEST)
    assert harness.run.unconfirmed_steps == silent
    assert len(harness.run.agreed_digests) <= DIGEST_STEPS_KEPT + 2
    metrics = Metrics()
    metrics.observe(harness.run)
    run = harness.run.run_id.hex()[:16]
    assert metrics.registry.get_sample_value("swarmentum_unconfirmed_steps", {"run": run}) == silent
    comes(harness, ANCHOR, anchor=True)
    applies(harness, ANCHOR)
    assert harness.run.unconfirmed_steps == 0, "the anchor is back"


def test_a_run_without_a_step_has_none() -> None:
    assert begun(*HONEST).run.unconfirmed_steps == 0
