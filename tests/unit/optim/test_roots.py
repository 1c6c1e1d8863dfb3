"""Roots are those of IEEE 754 on every processor: replicas of unlike processors keep the same bits."""

import math

import numpy as np
import pytest
import torch

from node.optim.base import Base, BaseConfig, given
from node.optim.exact.orthogonal import ExactRoots, root_
from node.optim.layout import Layout

CPU = torch.device("cpu")


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = np.random.default_rng(0).uniform(0, 100, count) * 10.0 ** np.random.default_rng(1).integers(-20, 20, count)
    return torch.from_numpy(drawn).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_root_is_the_nearest_number(dtype: torch.dtype) -> None:
    given_values = values(50_000, dtype)
    exact = [math.sqrt(value) for value in given_values.tolist()]  # of fp64, rounded once more to fp32: the same
    assert torch.equal(root_(given_values.clone()), torch.tensor(exact, dtype=torch.float64).to(dtype))


def test_a_part_of_a_tensor_is_written_in_place() -> None:
    whole = values(1000, torch.float32).view(10, 100)
    part, rest = whole[:, ::3], whole[:, 1::3].clone()
    expected = torch.from_numpy(np.sqrt(part.numpy()))
    assert root_(part) is part
    assert torch.equal(whole[:, ::3], expected)
    assert torch.equal(whole[:, 1::3], rest)


def test_torchs_own_calls_give_them_too() -> None:
    one = values(50_000, torch.float32)
    exact = root_(one.clone())
    with ExactRoots():
        out = torch.empty_like(one)
        torch.sqrt(one, out=out)
        for found in (one.sqrt(), torch.sqrt(one), one.clone().sqrt_(), out):
            assert torch.equal(found, exact)


def test_bases_take_them() -> None:
    layout = Layout.of_shapes([("p", (128, 192))])
    update = values(layout.chunks * 4096, torch.float32).view(layout.chunks, 64, 64).clamp_(1e-10, 1e10)
    adam = Base(BaseConfig("adamw"), layout, CPU)
    own = Base(given("own", lambda aggregate, _state, _count: aggregate.sqrt()), layout, CPU)
    assert torch.equal(own.direct(update.clone()), root_(update.clone()))
    beta2 = float(np.float32(adam.config.beta2))
    square = update.numpy() * update.numpy() * np.float32(1 - beta2)
    bias = np.float32(1 / (1 - beta2))
    expected = update.numpy() / (np.sqrt(square * bias) + np.float32(adam.config.eps))
    assert torch.equal(adam.direct(update.clone()), torch.from_numpy(expected))
