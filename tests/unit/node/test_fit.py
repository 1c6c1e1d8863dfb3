"""Whether a run fits a machine: with its whole state, with a smaller one, or not at all, and what the person is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from node.admission import fit
from node.config import PeerSettings
from node.model.room import DeviceMemory
from protos.errors import OperatorError
from protos.run_config import RunConfig

CONFIG = RunConfig.model_validate({
    "name": "fit",
    "model": {"config": {"model_type": "llama", "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 4,
                         "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}},
    "data": {"source": "text.txt", "context": 32},
    "clock": {"steps": 10},
})  # fmt: skip
CPU = torch.device("cpu")


def settings(tmp_path: Path, **given: Any) -> PeerSettings:
    return PeerSettings(home=tmp_path, **given)


def machine(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(fit, "room_of", lambda *_: DeviceMemory(free, 2 * free))
    monkeypatch.setattr(fit, "main_memory", lambda: DeviceMemory(free, 2 * free))


def bytes_of(second: fit.Kind) -> int:
    """What the state takes on a CPU, and a sample."""
    found = fit.counted(CONFIG, PeerSettings())
    assert found is not None
    return found.need(CONFIG, second=second).on("cpu").memory(1)


def test_a_machine_without_room_for_the_whole_state_keeps_a_smaller_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, small = bytes_of("whole"), bytes_of("factored")
    model = fit.counted(CONFIG, PeerSettings())
    assert model is not None
    # second moment, half the momentum, the copies, gradients but sums and the largest, heap
    assert whole - small == (4 + 2 + 12 + 4 - 3 - 0.5) * model.size.parameters - 4 * model.size.largest
    machine(monkeypatch, whole)
    assert fit.check(CONFIG, settings(tmp_path), tmp_path, CPU) == (1, "whole")
    machine(monkeypatch, small)
    assert fit.check(CONFIG, settings(tmp_path), tmp_path, CPU) == (1, "factored")
    found = fit.fitted(CONFIG, settings(tmp_path), tmp_path, CPU)
    assert found is not None
    assert found.why.endswith(", memory small (full does not fit)")
    machine(monkeypatch, small - 1)
    with pytest.raises(OperatorError, match="does not fit"):
        fit.check(CONFIG, settings(tmp_path), tmp_path, CPU)


def test_the_owner_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 100 * bytes_of("whole"))
    assert fit.check(CONFIG, settings(tmp_path, memory="small"), tmp_path, CPU)[1] == "factored"
    assert fit.check(CONFIG, settings(tmp_path), tmp_path, CPU)[1] == "whole"
    machine(monkeypatch, bytes_of("factored"))
    with pytest.raises(OperatorError, match=r"does not fit.*, or set memory to auto"):
        fit.check(CONFIG, settings(tmp_path, memory="full"), tmp_path, CPU)


def test_the_model_is_counted_once_whatever_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, calls = bytes_of("factored"), []
    machine(monkeypatch, small)
    monkeypatch.setattr(fit, "size_of", lambda spec, real=fit.size_of: (calls.append(1), real(spec))[1])
    assert fit.check(CONFIG, settings(tmp_path), tmp_path, CPU)[1] == "factored"
    assert len(calls) == 1


def test_a_setting_that_does_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 100 * bytes_of("whole"))
    plain = CONFIG.model_copy(update={"optimizer": CONFIG.optimizer.model_copy(update={"beta2": 0.0})})
    words = "memory = small has no effect: the run has no second moment (beta2 of its optimizer)"
    for config, memory, said in ((plain, "small", True), (plain, "auto", False), (CONFIG, "small", False)):
        found = fit.fitted(config, settings(tmp_path, memory=memory), tmp_path, CPU)
        assert found is not None
        assert found.why.endswith(words) is said
    with structlog.testing.capture_logs() as logs:
        for own in (True, False):
            fit.check(plain, settings(tmp_path, memory="small"), tmp_path, CPU, own=own)
    assert logs[0] == {"event": words, "log_level": "warning", "step": "-"}
    assert words in logs[2]["event"]


def test_a_peer_of_several_devices_and_a_run_without_a_second_moment_have_one_way(tmp_path: Path) -> None:
    plain = CONFIG.model_copy(update={"optimizer": CONFIG.optimizer.model_copy(update={"beta2": 0.0})})
    assert fit.kinds_of(plain, settings(tmp_path, memory="small")) == ("whole",)
    assert fit.kinds_of(CONFIG, settings(tmp_path), ranks=2) == ("whole",)
    with pytest.raises(OperatorError, match="memory = small: a peer of several devices"):
        fit.kinds_of(CONFIG, settings(tmp_path, memory="small"), ranks=2)
