"""Passes of a model with random tokens that are the same each time, and when two of them differ.

The caller's random states stay as they are (`undisturbed`). Refuses nothing: a pass that fails is a PassError.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from node.model.gradients import LogitsError, logits_of, loss
from node.model.portable_draws import MiddleDraws

ROWS: Final = 4
TOKENS: Final = 32
TOKENS_SHORT: Final = 9
TOLERANCE: Final = 1e-4
"""Of the largest logit. Rounding differs by 1e-6 where other tokens change the shapes inside, as with experts."""
SHAKE: Final = 0.05
"""Deviation of the numbers that are added to each parameter: fresh models have zeros that hide what they do."""
FAILURES: Final = (
    *(TypeError, ValueError, LookupError, AttributeError, ImportError),
    *(RuntimeError, ArithmeticError, AssertionError, OSError),
)  # fmt: skip
"""Errors that a model's own code raises."""


class PassError(Exception):
    """A pass of the model fails; the text says at how many tokens, and how."""


_DROPOUT: Final = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout),
    *(F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
)


class WithoutDropout(TorchFunctionMode):
    """Dropout changes nothing, so that two passes differ by their tokens alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func is F.rrelu:
            kwargs["training"] = False
            args = args[:3]
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
            args = args[:4]
        return func(*args, **kwargs)


@contextmanager
def _middle() -> Iterator[None]:
    with WithoutDropout(), MiddleDraws():
        yield


def answers_of(model: nn.Module) -> Tensor:
    """The logits of a few tokens in eval mode."""
    model.eval()
    with undisturbed(), torch.no_grad():
        seed_all(0)
        return logits_of(model, torch.arange(TOKENS_SHORT)[None]).float()


class Passes:
    """A model, and passes of it with random tokens that are the same each time."""

    def __init__(self, model: nn.Module, vocabulary: int, length: int, whole: int) -> None:
        self.model, self.vocabulary, self.trained = model, vocabulary, trained_names(model)
        self.length, self.whole = length, whole
        """Tokens of a pass, and of one that is as long as a sample."""
        self._drawing: Callable[[], AbstractContextManager[None]] = nullcontext
        self._special = {v for k, v in _config(model).items() if k.endswith("_token_id") and isinstance(v, int)}

    def tokens(self, seed: int, rows: int, length: int) -> Tensor:
        """int64 [rows, length], without the special tokens of the configuration where there are others."""
        drawn = torch.randint(self.vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
        plain = next((i for i in range(self.vocabulary) if i not in self._special), 0)
        for special in self._special:
            drawn[drawn == special] = plain
        return drawn

    def logits(self, tokens: Tensor, *, train: bool = False, seed: int = 0) -> Tensor:
        """Logits of a pass without gradients, fp32 [rows, length, vocabulary]; the random state is `seed`'s."""
        self.model.train(train)
        seed_all(seed)
        with torch.no_grad(), self.told(tokens.shape[1]), self._drawing():
            return logits_of(self.model, tokens).float()

    @contextmanager
    def without_chance(self) -> Iterator[None]:
        """In a pass of `logits`, dropout changes nothing, and a draw gives the middle. `tokens` draws as ever."""
        self._drawing = _middle
        try:
            yield
        finally:
            self._drawing = nullcontext

    def reference(self) -> float:
        """The loss of a fixed batch, as it will be evaluated."""
        self.model.eval()
        seed_all(0)
        with torch.no_grad(), self.told(self.length):
            return float(loss(self.model, self.tokens(1, ROWS, self.length + 1)))

    def backward(self, seed: int) -> Tensor:
        """The loss of a training pass; gradients are added to those that are there."""
        self.model.train()
        seed_all(seed)
        with self.told(self.length):
            summed = loss(self.model, self.tokens(seed, ROWS, self.length + 1))
            if summed.requires_grad:
                summed.backward()  # type: ignore[no-untyped-call]
        return summed

    def shake(self) -> None:
        """Add small random numbers to all parameters, unless the model then gives no finite logits."""
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        draws = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=SHAKE)
            if not bool(self.logits(self.tokens(2, 1, self.length)).isfinite().all()):
                for parameter, old in zip(self.model.parameters(), before, strict=True):
                    parameter.copy_(old)

    @contextmanager
    def told(self, length: int) -> Iterator[None]:
        try:
            yield
        except LogitsError as error:
            raise PassError(str(error)) from error
        except FAILURES as error:
            what = (str(error).splitlines() or [""])[0]
            hint = ""
            if isinstance(error, IndexError) or re.search(r"index \S+ is out of", what):
                hint = (
                    "; a position or a token is beyond its tables: raise max_position_embeddings, or lower data.context"
                )
            elif isinstance(error, TypeError) and "required" in what:
                hint = "; a run gives the model token ids [batch, context], and nothing else"
            raise PassError(f"a pass of {length} tokens fails: {type(error).__name__}: {what}{hint}") from error


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def apart(one: Tensor, other: Tensor) -> bool:
    """Whether two passes differ by more than rounding."""
    if one.shape != other.shape or bool((one.isfinite() != other.isfinite()).any()):
        return True
    scale = float(one.nan_to_num().abs().max()) + 1e-6 if one.numel() else 1.0
    return bool(((one - other).nan_to_num().abs() > TOLERANCE * scale).any())


def _config(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    to_dict: Callable[[], dict[str, Any]] | None = getattr(config, "to_dict", None)
    return to_dict() if to_dict is not None else {}


def seed_all(seed: int) -> None:
    """Of every generator that a forward pass may draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the caller's random states as they are, and show no warnings of libraries."""
    state, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
