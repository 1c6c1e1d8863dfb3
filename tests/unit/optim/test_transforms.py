"""Any orthonormal transform: back and forth in fp32, exact in whole numbers, whatever the order of sums."""

import numpy as np
import pytest
import torch
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from node.optim.exact import transforms
from node.optim.exact.transforms import NAMES, SHIFT, SUM_MAX, Transform


def rotation(seed: int) -> Transform:
    """A random orthonormal matrix."""
    matrix, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(64, 64)))
    return transforms.given(f"rotation {seed}", matrix)


ALL = [*(transforms.named(name) for name in NAMES), rotation(0)]
every = pytest.mark.parametrize("transform", ALL, ids=lambda transform: transform.name)


@every
def test_forward_is_the_matrix_on_both_sides(transform: Transform) -> None:
    chunks = torch.randn(3, 64, 64)
    matrix = torch.from_numpy(transform.matrix)
    wanted = matrix @ chunks.double() @ matrix.T
    assert torch.allclose(transform.forward(chunks.clone()).double(), wanted, atol=2e-5)
    out = torch.empty_like(chunks)
    assert transform.forward(chunks, out=out) is out
    assert torch.allclose(out.double(), wanted, atol=2e-5)


@every
def test_inverse_is_exact_and_near_the_real_one(transform: Transform) -> None:
    sums = torch.randint(-SUM_MAX, SUM_MAX + 1, (2, 64, 64), dtype=torch.int32)
    basis = [[round(4096 * value) for value in row] for row in transform.matrix.tolist()]
    whole = np.array(basis, dtype=object).T @ sums[0].numpy().astype(object) @ np.array(basis, dtype=object)
    found = transform.inverse_exact(sums)
    assert (found[0].numpy().astype(object) == whole).all()
    matrix = torch.from_numpy(transform.matrix)
    real = matrix.T @ sums.double() @ matrix
    # the whole numbers are off by up to 1/2 of 1/4096: 4.6e-4 * SUM_MAX rms, so this is 6.5 standard deviations
    assert float((found / transform.scale - real).abs().max()) < 3e-3 * SUM_MAX


@settings(max_examples=25, deadline=None)
@for_all(st.integers(0, 2**32 - 1))
def test_no_partial_sum_passes_what_fp64_holds(seed: int) -> None:
    column = int(np.abs(np.rint(2.0**SHIFT * rotation(seed).matrix)).sum(0).max())
    assert SUM_MAX * column * column < 2**53


def test_hadamard_and_identity_are_what_they_are_called() -> None:
    hadamard = transforms.named("hadamard").matrix
    assert set(np.unique(hadamard)) == {-0.125, 0.125}
    assert (transforms.named("identity").matrix == np.eye(64)).all()


def test_what_is_not_orthonormal_is_refused() -> None:
    with pytest.raises(ValueError, match="not orthonormal"):
        transforms.given("stretched", 1.001 * np.eye(64))
    with pytest.raises(ValueError, match="not orthonormal"):
        transforms.given("broken", np.full((64, 64), np.nan))
    with pytest.raises(ValueError, match="64 by 64"):
        transforms.given("small", np.eye(32))
    with pytest.raises(ValueError, match="none of dct, hadamard, identity"):
        transforms.named("wavelet")


def test_two_transforms_of_one_name_are_not_mixed_up() -> None:
    device = torch.device("cpu")
    one, other = transforms.given("mine", np.eye(64)), transforms.given("mine", -np.eye(64))
    assert torch.equal(one.basis(device), -other.basis(device))
