"""Whether a run fits a machine: with its whole state, with a smaller one, or not at all, and what the person is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from node.admission import fit
from node.config import PeerSettings
from node.model.device import DeviceMemory
from node.training.need import Memory
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
MODES: tuple[Memory, ...] = ("full", "small", "host", "stream")


def settings(tmp_path: Path, **given: Any) -> PeerSettings:
    return PeerSettings(home=tmp_path, **given)


def machine(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(fit, "room_of", lambda *_: DeviceMemory(free, 2 * free))
    monkeypatch.setattr(fit, "main_memory", lambda: DeviceMemory(free, 2 * free))


def bytes_of(memory: Memory) -> int:
    """What the state takes on a CPU, and a sample."""
    found = fit.counted(CONFIG, PeerSettings())
    return found.need(CONFIG, memory=memory).on("cpu").memory(1)


def test_a_machine_without_room_for_the_whole_state_keeps_a_smaller_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, small = bytes_of("full"), bytes_of("small")
    model = fit.counted(CONFIG, PeerSettings())
    # second moment, half the momentum, the copies, gradients and holes but sums and the largest
    assert whole - small == (4 + 2 + 12 + 4 + 1 - 3) * model.size.parameters - 4 * model.size.largest
    machine(monkeypatch, whole)
    assert fit.check(CONFIG, settings(tmp_path), tmp_path, CPU) == (1, "full")
    machine(monkeypatch, small)
    assert fit.check(CONFIG, settings(tmp_path), tmp_path, CPU) == (1, "small")
    found = fit.fitted(CONFIG, settings(tmp_path), tmp_path, CPU)
    assert found.why.endswith(", memory small (no faster one fits)")
    machine(monkeypatch, small - 1)
    with pytest.raises(OperatorError, match="does not fit"):
        fit.check(CONFIG, settings(tmp_path), tmp_path, CPU)


def test_the_owner_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 100 * bytes_of("full"))
    assert fit.check(CONFIG, settings(tmp_path, memory="small"), tmp_path, CPU)[1] == "small"
    assert fit.why("small", settings(tmp_path, memory="small")) == "as set"
    assert fit.why("small", settings(tmp_path)) == "no faster one fits"
    assert fit.why("full", settings(tmp_path)) == "the fastest"
    assert fit.check(CONFIG, settings(tmp_path), tmp_path, CPU)[1] == "full"
    machine(monkeypatch, bytes_of("small"))
    with pytest.raises(OperatorError, match=r"does not fit.*, or set memory to auto"):
        fit.check(CONFIG, settings(tmp_path, memory="full"), tmp_path, CPU)


def test_the_model_is_counted_once_whatever_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, calls = bytes_of("small"), []
    machine(monkeypatch, small)
    monkeypatch.setattr(fit, "size_of", lambda spec, real=fit.size_of: (calls.append(1), real(spec))[1])
    assert fit.check(CONFIG, settings(tmp_path), tmp_path, CPU)[1] == "small"
    assert len(calls) == 1


def test_a_setting_that_does_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 100 * bytes_of("full"))
    plain = CONFIG.model_copy(update={"optimizer": CONFIG.optimizer.model_copy(update={"beta2": 0.0})})
    words = "memory = small has no effect: the run has no second moment (beta2 of its optimizer)"
    for config, memory, said in ((plain, "small", True), (plain, "auto", False), (CONFIG, "small", False)):
        found = fit.fitted(config, settings(tmp_path, memory=memory), tmp_path, CPU)
        assert found.why.endswith(words) is said
    with structlog.testing.capture_logs() as logs:
        for own in (True, False):
            fit.check(plain, settings(tmp_path, memory="small"), tmp_path, CPU, own=own)
    assert logs[0] == {"event": "settings have no effect", "why": words, "log_level": "warning", "step": "-"}
    assert words in logs[2]["memory"]


def test_a_peer_of_several_devices_and_a_run_without_a_second_moment_have_one_way(tmp_path: Path) -> None:
    plain = CONFIG.model_copy(update={"optimizer": CONFIG.optimizer.model_copy(update={"beta2": 0.0})})
    assert fit.memories_of(plain, settings(tmp_path, memory="small"), CPU) == ("full",)
    assert fit.memories_of(CONFIG, settings(tmp_path), CPU, ranks=2) == ("full",)
    for memory in ("small", "host", "stream"):
        with pytest.raises(OperatorError, match=f"memory = {memory}: a peer of several devices"):
            fit.memories_of(CONFIG, settings(tmp_path, memory=memory), CPU, ranks=2)


def card(monkeypatch: pytest.MonkeyPatch, free: int, main: int, *, short: bool = True) -> torch.device:
    """A GPU with so many free bytes, in a machine with so many."""
    rooms = {"cuda": DeviceMemory(free, 2 * free), "cpu": DeviceMemory(main, 2 * main)}
    monkeypatch.setattr(fit, "room_of", lambda device, _: rooms[device.type])
    monkeypatch.setattr(fit, "main_memory", lambda: rooms["cpu"])
    monkeypatch.setattr(fit, "computes_short", lambda device: short or device.type == "cpu")
    return torch.device("cuda")


def test_a_card_takes_the_first_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fit.counted(CONFIG, PeerSettings())
    needs = {memory: model.need(CONFIG, memory=memory).on("cuda") for memory in MODES}
    plenty = 100 * needs["full"].memory(1)
    for memory, need in needs.items():
        device = card(monkeypatch, need.memory(1), plenty)
        assert fit.check(CONFIG, settings(tmp_path), tmp_path, device) == (1, memory)
    found = fit.fitted(CONFIG, settings(tmp_path), tmp_path, device)
    assert found.why.endswith(" main memory, memory stream (no faster one fits)")
    card(monkeypatch, need.memory(1) - 1, plenty)
    with pytest.raises(OperatorError, match=r"one sample does not fit.*cuda") as refused:
        fit.check(CONFIG, settings(tmp_path), tmp_path, device)
    assert "activation_checkpointing" not in str(refused.value), "stream computes blocks again by itself"
    card(monkeypatch, needs["host"].memory(1), need.main(1) - 1)
    with pytest.raises(OperatorError, match="the peer's state does not fit: with memory = host or stream"):
        fit.check(CONFIG, settings(tmp_path), tmp_path, device)


def test_auto_takes_host_only_where_the_device_has_memory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CONFIG.model_copy(update={"optimizer": CONFIG.optimizer.model_copy(update={"beta2": 0.0})})
    cuda = card(monkeypatch, 1, 1)
    for config, device, found in (
        (CONFIG, CPU, ("full", "small")),
        (CONFIG, torch.device("mps"), ("full", "small")),
        (CONFIG, cuda, MODES),
        (plain, cuda, ("full", "host", "stream")),
    ):
        assert fit.memories_of(config, settings(tmp_path), device) == found
    assert fit.memories_of(CONFIG, settings(tmp_path, precision="fp32"), cuda) == ("full", "small")
    assert fit.memories_of(CONFIG, settings(tmp_path), cuda, own=True) == ("full", "small")
    card(monkeypatch, 1, 1, short=False)
    assert fit.memories_of(CONFIG, settings(tmp_path), cuda) == ("full", "small")


def test_auto_passes_over_stream_where_it_cannot_be_and_the_person_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = card(monkeypatch, 1 << 40, 1 << 40)
    size = fit.counted(CONFIG, PeerSettings()).size
    for its, given, words in (
        (size, {"compile": True}, "it does not go with compile"),
        (replace(size, no_stream="no blocks"), {}, "no blocks"),
    ):
        assert fit.memories_of(CONFIG, settings(tmp_path, **given), cuda, size=its) == ("full", "small", "host")
        with pytest.raises(OperatorError, match=f"memory = stream: {words}; set memory to host or auto"):
            fit.memories_of(CONFIG, settings(tmp_path, memory="stream", **given), cuda, size=its)
    assert fit.check(CONFIG, settings(tmp_path, memory="stream"), tmp_path, CPU)[1] == "stream"


@pytest.mark.parametrize(
    ("given", "own", "short", "words"),
    [
        ({"precision": "fp32"}, False, True, "the device gets bf16 weights, and precision = fp32"),
        ({}, True, True, "a program's own loop"),
        ({}, False, False, "cuda has no bf16 units"),
    ],
)
def test_where_host_cannot_be_the_person_is_told(
    given: dict[str, Any], own: bool, short: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = card(monkeypatch, 1 << 40, 1 << 40, short=short)
    wanted = settings(tmp_path, memory="host", **given)
    with pytest.raises(OperatorError, match=f"memory = host: {words}.*; set memory to small or auto"):
        fit.check(CONFIG, wanted, tmp_path, device, own=own)
    assert fit.check(CONFIG, settings(tmp_path, memory="host"), tmp_path, CPU)[1] == "host"
