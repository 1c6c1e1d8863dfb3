"""A model is counted before it is built: its numbers, what a sample keeps, and the memory that is free."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from node.model.device import KIB, DeviceMemory, main_memory, room_of
from node.model.gradients import loss
from node.model.size import activation_bytes, measured, size_of
from node.model.spec import SMALL_LLAMA, ModelError, ModelSpec, build, build_meta, parameter_count
from tests.unit.model.test_spec import TINY, Plain

CONTEXT = 64


def looks_at_numbers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(int(width.item()), 8) for width in torch.full((2,), 8.0)])


def two_views() -> nn.Module:
    model, whole = nn.Module(), torch.zeros(8)
    model.one, model.other = nn.Parameter(whole[:5]), nn.Parameter(whole[3:])
    return model


@pytest.mark.parametrize("config", [None, TINY, {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2}])
def test_numbers_are_those_of_the_model_that_is_built(config: dict[str, object] | None) -> None:
    model, size = build(ModelSpec(config), 0), size_of(ModelSpec(config))
    assert size.parameters == parameter_count(model)
    assert size.model_bytes == 4 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))


def kept_by(model: nn.Module, samples: int) -> int:
    """What autograd really keeps for the backward pass."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(model, torch.zeros(samples, CONTEXT + 1, dtype=torch.int64))
    return sum(size for place, size in kept.items() if place not in own)


@pytest.mark.parametrize("config", [TINY, {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2}])
def test_activations_are_what_a_forward_pass_keeps(config: dict[str, object]) -> None:
    told = activation_bytes(ModelSpec(config), CONTEXT)
    real = kept_by(build(ModelSpec(config), 0).train(), 4) / 4
    assert told is not None
    assert real <= told <= 1.25 * real


def test_checkpointing_keeps_less() -> None:
    plain, less = (activation_bytes(ModelSpec(), CONTEXT, checkpointing=on) for on in (False, True))
    assert plain is not None
    assert less is not None
    assert less < plain / 3


def test_a_factory_is_counted_by_its_shapes_and_its_activations_are_not_known() -> None:
    """Two parameters on the meta device have no addresses: they were taken for one memory."""
    spec = ModelSpec(factory=f"{Plain.__module__}:Plain")
    size = size_of(spec)
    assert size.parameters == parameter_count(Plain())
    assert (still := measured(Plain().requires_grad_(requires_grad=False))).frozen == size.parameters
    assert (still.parameters, still.largest, still.model_bytes) == (0, 0, size.model_bytes)
    assert activation_bytes(spec, CONTEXT) is None
    assert size_of(ModelSpec(factory=f"{__name__}:looks_at_numbers")) is None
    with pytest.raises(ModelError, match="lie in the same memory"):
        build_meta(ModelSpec(factory=f"{__name__}:two_views"))


def test_five_trillion_parameters_are_counted_in_a_moment_and_in_little_memory() -> None:
    build_meta(ModelSpec())  # transformers loads its own modules once
    wide = {"hidden_size": 1 << 17, "intermediate_size": 1 << 19, "num_hidden_layers": 20}
    began = time.process_time()
    size = size_of(ModelSpec({**SMALL_LLAMA, **wide, "num_attention_heads": 128, "num_key_value_heads": 128}))
    assert time.process_time() - began < 5
    assert size.parameters > 5e12


def test_free_memory_is_the_machines_within_its_containers(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    600 kB\n")
    groups = tmp_path / "groups"
    assert main_memory(meminfo, groups, tmp_path) == DeviceMemory(600 * KIB, 1000 * KIB)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert main_memory(meminfo, groups, tmp_path) == DeviceMemory(600 * KIB, 1000 * KIB)
    (tmp_path / "memory.max").write_text("300000\n")
    (tmp_path / "memory.current").write_text("250000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 20000\nactive_file 30000\n")
    assert main_memory(meminfo, groups, tmp_path) == DeviceMemory(100_000, 300_000)
    here = room_of(torch.device("cpu"))
    assert 0 < here.free <= here.total


GROUPS_OF_A_MACHINE = (
    ("0::/user.slice/peer.service\n", {"user.slice/peer.service": {"max": 200_000, "high": "max", "current": 50_000}}),
    ("0::/job_7/step_0\n", {"job_7": {"max": 200_000, "current": 50_000}, "job_7/step_0": {"max": "max", "current": 9}}),
    ("0::/a\n", {"a": {"max": 900_000, "high": 200_000, "current": 50_000}}),
    ("4:cpu:/x\n5:memory:/job_7/step_0\n", {"memory/job_7": {"limit_in_bytes": 200_000, "usage_in_bytes": 50_000},
     "memory/job_7/step_0": {"limit_in_bytes": 9223372036854771712, "usage_in_bytes": 9}}),
    ("5:hugetlb,memory:/d\n", {"memory": {"limit_in_bytes": 200_000, "usage_in_bytes": 50_000}}),
)  # fmt: skip


@pytest.mark.parametrize(("own", "files"), GROUPS_OF_A_MACHINE)
def test_the_limit_of_a_service_or_a_job_is_the_machines_memory(
    tmp_path: Path, own: str, files: dict[str, dict[str, object]]
) -> None:
    """Only a container's was read: in Slurm, or a unit with MemoryMax, a plan of the whole machine was killed each time."""
    meminfo, groups = tmp_path / "meminfo", tmp_path / "groups"
    meminfo.write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    groups.write_text(own)
    for folder, values in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (tmp_path / folder / f"memory.{name}").write_text(f"{value}\n")
    assert main_memory(meminfo, groups, tmp_path) == DeviceMemory(150_000, 200_000)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_bf16_weights_activations_take_about_half(checkpointing: bool) -> None:
    spec = ModelSpec({**TINY, "num_hidden_layers": 4})
    whole, short = (activation_bytes(spec, 64, checkpointing=checkpointing, short=on) for on in (False, True))
    assert whole is not None
    assert short is not None
    assert 0.45 < short / whole < 0.8, "the norms and the loss count in fp32"
