"""Random draws for a model's initial weights that are the same bits on every machine.

A peer of an open run without an anchor loads no initial state but its own (`node/training/recovery.py`), and more than half
of the first peers have to report one root (ADR 5). Such a run needs equal bits. Other runs save a download with them.

PyTorch's own `normal_` has one path for AVX2, with its own logarithm, sine and cosine, and one for other processors
(`normal_fill_AVX2` and `normal_fill` in aten/src/ATen/native/cpu/DistributionTemplates.h). With one seed, 1,597 of 4,096
numbers differ (torch 2.13, ATEN_CPU_CAPABILITY=avx2 and =default); uniform numbers do not. So the draws of a model's weights
come from whole numbers. The whole numbers are NumPy's Philox bits (stable by NumPy's documented policy), exact sums, and
single correctly rounded operations.

Refuses nothing. Draws that the module does not cover keep PyTorch's own bits: the inverse error function of truncated normals,
the QR of orthogonal initialisers, permutations. Runs with such draws agree on step 0 through its snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK_DRAWS: Final = 1 << 20  # so that a large tensor needs little memory beside itself

# A normal number is the sum of 12 uniform 16-bit numbers, the classical approximation (Irwin-Hall). The sum's variance is
# 12 * (2^32 - 1) / 12, so its deviation is 2^16 to ten digits. The tails end at 6 deviations.
WORDS_PER_NORMAL: Final = 3
NORMAL_MEAN: Final = 12 * 65535 / 2
NORMAL_DEVIATION: Final = 65536.0
UNIFORM_BITS: Final = 24

Floats = npt.NDArray[np.float64]
aten = torch.ops.aten


class Draws:
    """A stream of normal and uniform numbers, a pure function of the seed and of what was drawn before."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed % (1 << 128))

    def normal(self, count: int) -> Floats:
        """[count], mean 0, deviation 1."""
        words: npt.NDArray[np.uint64] = self._bits.random_raw(count * WORDS_PER_NORMAL)
        parts = words.reshape(count, WORDS_PER_NORMAL).astype("<u8").view("<u2")
        sums: Floats = parts.sum(axis=1, dtype=np.int64).astype(np.float64)
        return (sums - NORMAL_MEAN) / NORMAL_DEVIATION

    def uniform(self, count: int) -> Floats:
        """[count], in [0, 1), multiples of 2^-24."""
        words: npt.NDArray[np.uint64] = self._bits.random_raw(count)
        return (words >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64) * 2.0**-UNIFORM_BITS


@contextmanager
def portable_random(seed: int) -> Iterator[None]:
    """Inside, normal and uniform draws into CPU floating point tensors come from `Draws(seed)`."""
    with _Mode(Draws(seed)):
        yield


@contextmanager
def nothing_drawn() -> Iterator[NotDrawn]:
    """Inside, draws into CPU floating point tensors give NaN, which costs no time: for weights that are loaded afterwards. What
    follows from a draw is NaN, too."""
    with NotDrawn() as mode:
        yield mode


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode without PyTorch's compiler, whose import takes a second. Nothing is compiled while a model is built."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Mode(Mode):
    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        scale = _draw_of(func, args, kwargs or {})
        if scale is not None and result.device.type == "cpu" and result.is_floating_point():
            self._fill(result, *scale)
        return result

    def _fill(self, out: torch.Tensor, kind: str, offset: float, width: float) -> None:
        """out = offset + width * draw, in float64 with one rounding an operation, then rounded to out's type."""
        draw = self._draws.normal if kind == "normal" else self._draws.uniform
        flat = torch.empty(out.numel(), dtype=out.dtype)
        for start in range(0, out.numel(), BLOCK_DRAWS):
            stop = min(start + BLOCK_DRAWS, out.numel())
            scaled = draw(stop - start) * width
            flat[start:stop] = torch.from_numpy(scaled + offset)
        out.copy_(flat.view(out.shape))


MIDDLES_MAX: Final = 10_000


class NotDrawn(Mode):  # type: ignore[no-untyped-call]
    """See `nothing_drawn`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew_others = False
        """Whether something was drawn all the same, as a permutation is: what follows from it is not NaN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = _draw_of(func, args, kwargs or {}) is not None
        in_place = drawn and func in (aten.normal_.default, aten.uniform_.default)
        result = args[0] if in_place else func(*args, **(kwargs or {}))
        if drawn and result.device.type == "cpu" and result.is_floating_point():
            result.fill_(math.nan)
            return result
        self.drew_others |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {})) if in_place else result


class MiddleDraws(Mode):  # type: ignore[no-untyped-call]
    """Inside, a draw gives the middle of its distribution everywhere: noise, and dropout of a model's own. Permutations are
    drawn as ever, and so is all after MIDDLES_MAX draws: a model may draw until a number suits it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = MIDDLES_MAX

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = kwargs or {}, func.overloadpacket
        if (at := _TRAINING.get(name)) is not None and at < len(args):
            return func(*args[:at], False, *args[at + 1 :], **given)
        result = func(*args, **given)
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(result, torch.Tensor):
            return result
        self._left -= 1
        middle = _middle_of(func, args, given) if self._left >= 0 else None
        return result if middle is None else result.copy_(torch.as_tensor(middle).expand(result.shape))


_TRAINING: Final = {aten.native_dropout: 2, aten.rrelu_with_noise: 4, aten.rrelu_with_noise_: 4}
"""Operators that draw in training alone, and the place of the argument that says so; it is left out where it says no."""


def _middle_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> float | torch.Tensor | None:
    """The median of what an operator draws, or near it; None for an operator that is not covered."""
    if (scale := _draw_of(func, args, kwargs)) is not None:
        kind, offset, width = scale
        return offset if kind == "normal" else offset + width / 2
    name = func.overloadpacket
    first, second = (*args[:2], None, None)[:2]
    if name in (aten.randint, aten.randint_like, aten.random_):
        return _middle_number([it for it in args if isinstance(it, int)])
    middles: dict[Any, Callable[[], Any]] = {
        aten.exponential_: lambda: math.log(2) / float(kwargs.get("lambd", second or 1.0)),
        aten.bernoulli: lambda: torch.as_tensor(kwargs.get("p", first if second is None else second)).ge(0.5),
        aten.bernoulli_: lambda: torch.as_tensor(kwargs.get("p", 0.5 if second is None else second)).ge(0.5),
        aten.normal: lambda: kwargs.get("mean", first),
        aten.cauchy_: lambda: kwargs.get("median", second or 0.0),
        aten.log_normal_: lambda: math.exp(kwargs.get("mean", 1.0 if second is None else second)),
        aten.geometric_: lambda: math.ceil(-1.0 / math.log2(1.0 - float(kwargs.get("p", second)))),
        aten._standard_gamma: lambda: first,
        aten._sample_dirichlet: lambda: first / first.sum(-1, keepdim=True),
        aten.poisson: lambda: torch.round(first),
        aten.binomial: lambda: torch.round(first * second),
        aten.multinomial: lambda: first.topk(1 if (args[2:] or [False])[0] else second).indices,
    }
    return middles[name]() if name in middles else None


def _middle_number(limits: list[int]) -> int:
    """Of whole numbers below a limit, or between two; 1 of all numbers."""
    low, high = (0, *limits)[-2:] if limits else (0, 2)
    return (low + high) // 2


def _draw_of(func: Any, args: Any, kwargs: Any) -> tuple[str, float, float] | None:
    """Which distribution an operator draws from, as (kind, offset, width); None where it draws none of ours."""
    if func is aten.normal_.default:
        mean, std = _two(args, kwargs, ("mean", "std"), (0.0, 1.0))
        return "normal", mean, std
    if func is aten.uniform_.default:
        low, high = _two(args, kwargs, ("from", "to"), (0.0, 1.0))
        return "uniform", low, high - low
    name = func.overloadpacket
    if name in (aten.randn, aten.randn_like):
        return "normal", 0.0, 1.0
    if name in (aten.rand, aten.rand_like):
        return "uniform", 0.0, 1.0
    return None


def _two(args: Any, kwargs: Any, names: tuple[str, str], default: tuple[float, float]) -> tuple[float, float]:
    given = [*args[1:3], *default[len(args[1:3]) :]]
    return float(kwargs.get(names[0], given[0])), float(kwargs.get(names[1], given[1]))
