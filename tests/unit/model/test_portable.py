"""The draws of initial weights: right distributions, and every way to draw goes through them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from node.model.portable_draws import BLOCK_DRAWS, Draws, MiddleDraws, portable_random


def test_normal_has_the_moments_of_a_normal() -> None:
    draws = Draws(1).normal(200_000)
    assert abs(draws.mean()) < 0.01
    assert abs(draws.std() - 1) < 0.01
    assert abs(np.mean(np.abs(draws) < 1) - 0.6827) < 0.005
    assert np.abs(draws).max() < 6


def test_uniform_fills_its_interval() -> None:
    draws = Draws(1).uniform(100_000)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01
    assert np.array_equal(draws * 2**24, np.floor(draws * 2**24))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(8, 8).weight,
        lambda: nn.Embedding(8, 8).weight,
        lambda: nn.init.xavier_normal_(torch.empty(8, 8)),
        lambda: nn.init.normal_(torch.empty(8, 8), mean=1.0, std=2.0),
        lambda: torch.empty(8, 8).normal_(std=3.0),
        lambda: torch.empty(8, 8).uniform_(-1, 1),
        lambda: torch.randn(8, 8),
        lambda: torch.rand(8, 8),
        lambda: torch.randn_like(torch.empty(8, 8)),
        lambda: torch.empty(8, 8).t().normal_(),
    ],
)
def test_every_way_to_draw_is_covered(make: Callable[[], torch.Tensor]) -> None:
    def drawn(seed: int) -> torch.Tensor:
        with portable_random(5):
            torch.default_generator.manual_seed(seed)
            return make().detach()

    with torch.random.fork_rng(devices=[]):
        assert torch.equal(drawn(1), drawn(2)), "it came from torch's own generator"
        assert drawn(1).std() > 0


def test_mean_and_deviation_arrive() -> None:
    with portable_random(1):
        normal = torch.empty(10_000).normal_(3.0, 0.5)
        uniform = torch.empty(10_000).uniform_(-2, -1)
    assert abs(normal.mean() - 3) < 0.05
    assert abs(normal.std() - 0.5) < 0.02
    assert uniform.min() >= -2
    assert uniform.max() <= -1


def test_blocks_continue_one_stream() -> None:
    with portable_random(2):
        whole = torch.empty(BLOCK_DRAWS + 5).uniform_()
    assert torch.equal(whole, torch.from_numpy(Draws(2).uniform(BLOCK_DRAWS + 5)).float())


def test_what_draws_in_training_alone_is_as_ever_in_evaluation() -> None:
    """Its default slopes are left out of the call, so that `training` took the place of one."""
    with MiddleDraws():
        slope = torch.rrelu(torch.tensor(-1.0))
    assert slope == torch.rrelu(torch.tensor(-1.0))


def test_a_model_that_draws_until_a_number_suits_it_comes_to_an_end() -> None:
    with MiddleDraws():
        while torch.rand(()) <= 0.5:
            pass
