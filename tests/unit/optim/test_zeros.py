"""Zeros of large tensors take memory where they are written, and are torch's own in all else."""

from pathlib import Path

import pytest
import torch

from node.optim.zeros import ALIGNED_BYTES, BYTES_MIN, zeros

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
