"""Zeros of large tensors take memory where they are written, and are torch's own in all else. A look at a tensor while another
thread imports torch's distributed tensors."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from node.optim.demo import DeMo, DeMoConfig
from node.optim.laid_out import ALIGNED_BYTES, BYTES_MIN, MODULE, is_dtensor, zeros

CPU = torch.device("cpu")
MANY = 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numbers", [3, BYTES_MIN])
def test_they_are_those_of_torch(dtype: torch.dtype, numbers: int) -> None:
    made = zeros((numbers, 2), dtype, CPU)
    assert torch.equal(made, torch.zeros(numbers, 2, dtype=dtype))
    assert made.is_contiguous()
    assert made.data_ptr() % ALIGNED_BYTES == 0
    assert made.untyped_storage().nbytes() == made.nbytes
    made.add_(1)
    assert made.sum() == 2 * numbers or dtype is torch.bfloat16


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_taken_when_they_are_written() -> None:
    before = resident_bytes()
    made = zeros((MANY,), torch.float32, CPU)
    assert resident_bytes() - before < made.nbytes / 8
    made.fill_(1.0)
    assert resident_bytes() - before > made.nbytes / 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("moment", [{"beta2": 0.99}, {"nesterov": 0.9}])
def test_what_a_peer_has_for_itself_takes_no_memory_before_it_votes(moment: dict[str, float]) -> None:
    """As the plan of an anchor has it, of a Nesterov momentum, too."""
    model = torch.nn.Linear(4096, MANY >> 12, bias=False)
    DeMo(torch.nn.Linear(64, 64), DeMoConfig(**moment))  # what is made once
    before = resident_bytes()
    demo = DeMo(model, DeMoConfig(**moment))
    assert resident_bytes() - before < model.weight.nbytes / 4
    assert demo.layout.parameters == MANY


def test_a_module_that_another_thread_imports_now_has_made_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    assert not is_dtensor(torch.zeros(1))
