"""What `tests.bench size` takes as the plan is what `join` plans with; a real swarm is measured by the command alone."""

from pathlib import Path

import pytest

from tests.bench import copies, loop, size


@pytest.mark.parametrize(("mode", "state"), [("full", 28), ("small", 6.5), ("host", 8.5), ("stream", 7)])
def test_the_plan_of_a_mode_is_that_of_a_peer_on_a_cpu(mode: str, state: float) -> None:
    model, parameters = loop.model_of(1_000_000)
    text = loop.run_toml(model, Path("/nowhere"), 8, 2).replace("BOOTSTRAP", "")
    planned = size.planned_bytes(mode, text, "cpu") / parameters
    assert state < planned < state + 8, "besides, activations of four samples"


def test_the_peak_of_a_command_is_its_own_and_a_failed_one_says_why(tmp_path: Path) -> None:
    assert copies.peak_of(("version",), tmp_path / "log") > 10_000_000
    with pytest.raises(AssertionError, match="nowhere"):
        copies.peak_of(("ledger", str(tmp_path / "nowhere")), tmp_path / "log")
