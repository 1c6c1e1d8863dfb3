"""Base optimizers against their textbook forms in fp64, and their state."""

import pytest
import torch
from torch import Tensor

from node.optim.base import Base, BaseConfig
from node.optim.digest import state_digest
from node.optim.exact import orthogonal
from node.optim.exact.orthogonal import orthogonalised
from node.optim.layout import Layout
from node.training.optimizers import demo_config
from protos.optimizer_config import OptimizerConfig

CPU = torch.device("cpu")
LAYOUT = Layout.of_shapes([("embed.weight", (130, 64)), ("layer.weight", (128, 64)), ("layer.bias", (70,))])


def updates(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(LAYOUT.chunks, 64, 64, generator=generator) for _ in range(count)]


def directions(config: BaseConfig, given: list[Tensor]) -> list[Tensor]:
    base = Base(config, LAYOUT, CPU)
    return [base.direct(update.clone()).clone() for update in given]


def test_sgd_is_torchs() -> None:
    given = updates(4)
    for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True)):
        parameter = torch.zeros_like(given[0], dtype=torch.float64, requires_grad=True)
        theirs = torch.optim.SGD([parameter], lr=1.0, momentum=momentum, nesterov=nesterov)
        ours = torch.zeros_like(given[0], dtype=torch.float64)
        for update, direction in zip(
            given, directions(BaseConfig("sgd", momentum=momentum, nesterov=nesterov), given), strict=True
        ):
            parameter.grad = update.double()
            theirs.step()
            ours -= direction
        assert torch.allclose(ours, parameter.detach(), atol=1e-5)


def test_adamw_is_torchs() -> None:
    given = updates(4)
    for beta1 in (0.0, 0.9):
        parameter = torch.zeros_like(given[0], dtype=torch.float64, requires_grad=True)
        theirs = torch.optim.AdamW([parameter], lr=1.0, betas=(beta1, 0.95), eps=1e-8, weight_decay=0)
        ours = torch.zeros_like(given[0], dtype=torch.float64)
        for update, direction in zip(given, directions(BaseConfig("adamw", beta1=beta1), given), strict=True):
            parameter.grad = update.double()
            theirs.step()
            ours -= direction
        assert torch.allclose(ours, parameter.detach(), atol=1e-4)


def test_muon_makes_matrices_orthogonal_and_takes_signs_of_the_rest() -> None:
    [update] = updates(1)
    [direction] = directions(BaseConfig("muon"), [update])
    was = [torch.empty(place.shape) for place in LAYOUT.places]
    now = [torch.empty(place.shape) for place in LAYOUT.places]
    LAYOUT.scatter(update, was)
    LAYOUT.scatter(direction, now)
    for table in (0, 2):
        assert torch.equal(now[table], was[table].sign())
    singular = torch.linalg.svdvals(now[1].double() / 128**0.5)
    assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (7, 5), (1, 9), (33, 200)])
def test_orthogonalised_keeps_the_singular_vectors_and_levels_the_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    found = orthogonalised(matrix).double()
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    middle = left.T @ found @ right.T / max(shape) ** 0.5
    assert 0.6 < float(middle.diagonal().min()) <= float(middle.diagonal().max()) < 1.3
    assert float((middle - middle.diagonal().diag()).abs().max()) < 0.01
    assert torch.equal(orthogonalised(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (7, 5), (1, 9), (33, 200), (96, 9000)])
def test_int8_and_fp32_orthogonalise_to_the_same_bits(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 2, shape[1])
    found = []
    for int8 in (True, False):
        monkeypatch.setattr(orthogonal, "_multiplies_int8", lambda _device, int8=int8: int8)
        found.append(orthogonalised(matrix))
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def iterated(matrix: Tensor) -> Tensor:
    """Muon's iteration in fp64."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x * max(matrix.shape) ** 0.5


def with_one(matrix: Tensor, entry: float) -> Tensor:
    matrix[3, 5] = entry
    return matrix


RANDOM = torch.Generator().manual_seed(4)
HARD = {
    "random": (torch.randn(96, 300, generator=RANDOM), 0.002),
    "one large entry": (with_one(torch.randn(256, 512, generator=RANDOM), 60.0), 0.01),
    "all the same but one": (with_one(torch.ones(64, 64), 20.0), 0.05),
    "all the same but a huge one": (with_one(torch.ones(128, 512), 3000.0), 0.1),
    "heavy tails": (torch.randn(128, 512, generator=RANDOM) / torch.rand(128, 512, generator=RANDOM), 0.03),
    "rows of all sizes": (torch.randn(64, 90, generator=RANDOM) * torch.logspace(-6, 6, 64)[:, None], 0.03),
    "columns of all sizes": (torch.randn(64, 90, generator=RANDOM) * torch.logspace(-6, 6, 90), 0.05),
    "rank two": (torch.randn(64, 2, generator=RANDOM) @ torch.randn(2, 90, generator=RANDOM), 0.1),
    # flat numbers that would all be rounded the same way
    "one on the diagonal": (torch.eye(512) - 0.00212890625, 0.04),
    "one on a longer diagonal": (torch.eye(1024) + 0.00055273437, 0.03),
    "mostly zeros": (torch.randn(64, 90, generator=RANDOM) * (torch.rand(64, 90, generator=RANDOM) < 0.02), 0.01),
}


@pytest.mark.parametrize(("matrix", "error"), HARD.values(), ids=HARD.keys())
def test_orthogonalised_is_near_the_iteration_in_fp64(matrix: Tensor, error: float) -> None:
    found, wanted = orthogonalised(matrix), iterated(matrix)
    assert float((found - wanted).norm()) <= error * float(wanted.norm())


def test_entries_are_bounded_whatever_the_iteration_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orthogonal, "COEFFICIENTS", (100.0, 0.0, 0.0))
    assert float(orthogonalised(torch.ones(64, 64)).abs().max()) == orthogonal.ENTRY_MAX * 8


@pytest.mark.parametrize("int8", [True, False])
def test_products_of_digits_are_exact_beyond_what_fp32_holds(int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orthogonal, "_multiplies_int8", lambda _device: int8)
    one = torch.full((64, 9000), orthogonal.DIGIT_MAX, dtype=torch.int8)
    one[::2, :3] = 63
    missing = torch.tensor([[64**2 - 63**2, 64], [64, 0]])  # of rows of either kind, three times
    sums = 9000 * 64**2 - 3 * missing
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = orthogonal._sums(one, one.T)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]
    assert torch.equal(found, sums.to(torch.int32).repeat(32, 32))


def test_the_bits_are_those_of_every_other_machine() -> None:
    """Of entries that need no library to draw: whoever changes this, changes what recorded runs of Muon replay to."""
    matrix = (torch.arange(96 * 200) * 40503 % 65537 - 32768).to(torch.float32).view(96, 200)
    assert state_digest([orthogonalised(matrix)]).hex() == (
        "3d2699533ff7105a4c7dcd48ac10b0027f04111bd75d3f3897bfa63f80e427d9"
    )


def test_int8_products_that_are_not_exact_or_do_not_exist_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturates(one: Tensor, other: Tensor) -> Tensor:
        return (one.int() @ other.int()).clamp(-(2**15), 2**15 - 1)

    def rounds(one: Tensor, other: Tensor) -> Tensor:
        return (one.double() @ other.double()).float().int()

    def only_turned(one: Tensor, other: Tensor) -> Tensor:
        if other.is_contiguous():
            raise RuntimeError("not in this order")
        return one.int() @ other.int()

    def fails(_one: Tensor, _other: Tensor) -> Tensor:
        raise RuntimeError("not on this device")

    asked = orthogonal._multiplies_int8.__wrapped__
    monkeypatch.setattr(orthogonal.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(orthogonal, "_is_faster_in_int8", lambda _one, _other: False)
    assert not asked(CPU), "a processor without VNNI"
    monkeypatch.setattr(orthogonal, "_is_faster_in_int8", lambda _one, _other: True)
    assert asked(CPU)
    for wrong in (saturates, rounds, only_turned, fails):
        monkeypatch.setattr(torch, "_int_mm", wrong)
        assert not asked(CPU)


def test_digits_hold_twelve_bits_of_the_largest_in_a_row() -> None:
    for scale in (1e-12, 1.0, 3e7):
        matrix = torch.randn(50, 70, generator=torch.Generator().manual_seed(3)) * scale
        digits = orthogonal._digits(matrix)
        again = (128 * digits.high.double() + digits.low.double()) / digits.scale.double()
        assert torch.equal(orthogonal._whole(digits).double(), again)
        largest = matrix.abs().amax(1, keepdim=True).clamp(min=2.0**-40)
        assert bool(((again - matrix).abs() <= largest * 2.0**-12).all())
        assert max(int(digits.high.abs().max()), int(digits.low.abs().max())) <= orthogonal.DIGIT_MAX


def test_a_matrix_too_large_for_muon_is_refused_by_name() -> None:
    sides = (2, orthogonal.SIDE_MAX + 1)
    with pytest.raises(ValueError, match=r"parameter layer.weight .*262143"):
        Base(BaseConfig("muon"), Layout.of_shapes([("layer.weight", sides)]), CPU, chunks=0)
    Base(BaseConfig("muon"), Layout.of_shapes([("embed.weight", sides)]), CPU, chunks=0)


@pytest.mark.parametrize(
    "config",
    [
        BaseConfig("sgd", momentum=0.9, nesterov=True),
        BaseConfig("adamw", beta1=0.9),
        BaseConfig("adamw"),
        BaseConfig("muon", momentum=0.9),
    ],
    ids=lambda config: f"{config.name}-{config.beta1}",
)
def test_bits_depend_on_neither_threads_nor_a_break(config: BaseConfig) -> None:
    given = updates(4)
    threads = torch.get_num_threads()
    whole = directions(config, given)
    base = Base(config, LAYOUT, CPU)
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        for update in given[:2]:
            base.direct(update.clone())
        again = Base(config, LAYOUT, CPU)
        for name, tensor in base.state.items():
            again.state[name].copy_(tensor)
        assert again.count == 2
        for update, wanted in zip(given[2:], whole[2:], strict=True):
            assert torch.equal(again.direct(update.clone()), wanted)
    finally:
        torch.set_num_threads(threads)


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"name": "adam"}, {"momentum": 1.0}, {"beta1": -0.1}, {"beta2": 1.0}, {"eps": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong)).replace("name", "base")):
            BaseConfig(**wrong)  # type: ignore[arg-type]


def test_which_matrices_are_tables_is_a_setting_of_the_run() -> None:
    """GPT-2 calls its embeddings wte and wpe; they were made orthogonal like maps."""
    names = ["transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight", "words.weight", "h.0.attn.weight"]
    layout = Layout.of_shapes([(name, (64, 64)) for name in names])
    update = torch.randn(layout.chunks, 64, 64, generator=torch.Generator().manual_seed(0))

    def signs(optimizer: OptimizerConfig) -> list[str]:
        direction = Base(demo_config(optimizer, 128, b"").base, layout, CPU).direct(update.clone())
        return [
            name for name, place in zip(names, direction, strict=True) if torch.equal(place.abs(), torch.ones(64, 64))
        ]

    muon = {"name": "muon"}
    assert signs(OptimizerConfig.model_validate({"base": muon})) == names[:3]
    assert signs(OptimizerConfig.model_validate({"base": {**muon, "tables": ["words"]}})) == ["words.weight"]
    assert tuple(OptimizerConfig().base.tables) == BaseConfig().muon_except
