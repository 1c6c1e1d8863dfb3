"""Any orthonormal transform: back and forth in fp32, exact in whole numbers, whatever the order of sums. And the proof of the
DCT's own inverse: recomputed bounds, worst cases, hostile precision settings."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from node.optim.exact import transforms
from node.optim.exact.transforms import NAMES, SHIFT, SUM_MAX, Transform
from tests.unit.optim import reference

CPU = torch.device("cpu")


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
    one, other = transforms.given("mine", np.eye(64)), transforms.given("mine", -np.eye(64))
    assert torch.equal(one.basis(CPU), -other.basis(CPU))


# ---- the DCT's own inverse -----------------------------------------------------------------------------------------------

BASIS = reference.integer_basis()


def exact(sums):
    """The inverse in int64, chunk by chunk."""
    return np.stack([reference.inverse(chunk.numpy().astype(np.int64)) for chunk in sums])


def worst_votes():
    """Votes that reach the bound: all sums 2 with the signs of the column of the basis with the largest sum."""
    column = BASIS[:, np.abs(BASIS).sum(0).argmax()]
    votes = 2 * np.outer(np.where(column < 0, -1, 1), np.where(column < 0, -1, 1))
    return torch.tensor(votes, dtype=torch.float32)


def test_the_bounds_of_the_proof():
    largest = int(np.abs(BASIS).sum(0).max())
    assert largest == 3707
    assert transforms.VOTE_SUM_MAX * largest < transforms.EXACT_INTEGER_MAX
    halved = transforms.VOTE_SUM_MAX * largest / 2**transforms.MIDDLE_SHIFT
    assert largest * (halved + 0.5) < transforms.EXACT_INTEGER_MAX
    assert np.abs(BASIS).max() < 2**8, "a basis entry has at most 8 bits"


def test_the_worst_votes_reach_the_bound_and_are_exact():
    sums = torch.stack([worst_votes(), -worst_votes(), torch.full((64, 64), 2.0), torch.full((64, 64), -2.0)])
    result = transforms.inverse_exact(sums)
    assert np.array_equal(result.numpy(), exact(sums))
    assert result.abs().max() == 3707**2


@pytest.mark.parametrize("density", [0.01, 0.1, 1.0])
def test_random_votes_are_exact(density):
    generator = torch.Generator().manual_seed(1)
    sums = torch.randint(-2, 3, (50, 64, 64), generator=generator).float()
    sums *= torch.rand(sums.shape, generator=generator) < density
    assert np.array_equal(transforms.inverse_exact(sums).numpy(), exact(sums))


def test_random_signs_of_full_strength_are_exact():
    generator = torch.Generator().manual_seed(2)
    sums = torch.randint(0, 2, (200, 64, 64), generator=generator).float() * 4 - 2
    assert np.array_equal(transforms.inverse_exact(sums).numpy(), exact(sums))


def test_opposite_votes_give_the_opposite_direction():
    sums = torch.randint(-2, 3, (20, 64, 64), generator=torch.Generator().manual_seed(3)).float()
    assert torch.equal(transforms.inverse_exact(-sums), -transforms.inverse_exact(sums))


def test_the_signs_are_those_of_the_real_inverse_but_next_to_zero():
    generator = torch.Generator().manual_seed(4)
    sums = torch.zeros(100, 4096)
    sums.scatter_(1, torch.rand(100, 4096, generator=generator).argsort(1)[:, :128], 1.0)
    sums = (sums * (torch.randint(0, 2, sums.shape, generator=generator) * 2 - 1)).view(-1, 64, 64)
    matrix = transforms.basis(CPU).double()
    real = matrix.T @ sums.double() @ matrix
    differs = transforms.inverse_exact(sums).sign() != real.sign()
    assert differs.double().mean() < 0.005
    assert real[differs].abs().max() < 0.05 * real.std()


@pytest.fixture
def approximate_products():
    """A process that prefers speed: bf16 products on CPUs, TF32 on GPUs."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("approximate_products")
def test_exact_under_medium_precision_and_the_setting_is_put_back():
    sums = torch.stack([worst_votes(), torch.full((64, 64), 2.0)])
    assert np.array_equal(transforms.inverse_exact(sums).numpy(), exact(sums))
    assert torch.get_float32_matmul_precision() == "medium"
    with transforms.full_precision(CPU):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


def test_exact_under_the_newer_precision_settings():
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [setting.fp32_precision for setting in settings]
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        sums = worst_votes()[None]
        assert np.array_equal(transforms.inverse_exact(sums).numpy(), exact(sums))
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def test_an_inherited_setting_is_still_inherited_afterwards():
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [setting.fp32_precision for setting in settings]
    wide = torch.backends.fp32_precision
    try:
        for setting in settings:
            setting.fp32_precision = "none"
        torch.backends.fp32_precision = "tf32"
        with transforms.full_precision(CPU):
            assert [setting.fp32_precision for setting in settings] == ["ieee", "ieee"]
        assert [setting.fp32_precision for setting in settings] == ["tf32", "tf32"]
        torch.backends.fp32_precision = "ieee"
        assert [setting.fp32_precision for setting in settings] == ["ieee", "ieee"]
    finally:
        torch.backends.fp32_precision = wide
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def test_exact_under_autocast_and_a_double_default():
    sums = worst_votes()[None]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert np.array_equal(transforms.inverse_exact(sums).numpy(), exact(sums))
    finally:
        torch.set_default_dtype(torch.float32)


def test_forward_is_orthonormal():
    chunks = torch.randn(7, 64, 64, generator=torch.Generator().manual_seed(5))
    matrix = torch.tensor(reference.basis())
    expected = matrix @ chunks.double() @ matrix.T
    result = transforms.forward(chunks)
    assert torch.allclose(result.double(), expected, atol=1e-5)
    assert torch.allclose(result.norm(), chunks.norm())
    assert torch.allclose(transforms.forward(torch.ones(1, 64, 64))[0, 0, 0], torch.tensor(64.0))


def test_the_integer_basis_is_pinned_and_far_from_rounding_ties():
    matrix = transforms.integer_basis(CPU)
    assert np.array_equal(matrix.numpy(), BASIS)
    fraction = np.abs((512 * reference.basis()) % 1 - 0.5)
    assert fraction.min() > 1e-3
    assert (
        hashlib.sha256(BASIS.astype("<i2").tobytes()).hexdigest()
        == "b5b9727305ede2ece02b2917d03158e16f153d7aec177282b1884ea02c25d1bb"
    )
