"""What a model does in a few passes of a few tokens, compared with what a run needs of it.

A run needs a model that predicts each token from the tokens before it, sample by sample, by its parameters alone. This module
changes the parameters of the model that it is given. Refuses nothing itself: it returns a line for each fault.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from node.model.gradients import LogitsError, answer_of, logits_of, loss

ROWS: Final = 4
TOKENS: Final = 32
TOKENS_SHORT: Final = 9
NUMBERS_MAX: Final = 1 << 24
"""Logits of one pass at most: 64 MB."""
TOLERANCE: Final = 1e-4
"""Of the largest logit. Rounding differs by 1e-6 where other tokens change the shapes inside, as with experts."""
LOSS_TOLERANCE: Final = 1e-3
"""Nats. A further term of a loss is larger, and the same loss computed in another order differs by 1e-5."""
SHAKE: Final = 0.05
"""Deviation of the numbers that are added to each parameter: fresh models have zeros that hide what they do."""
NAMES_SHOWN_MAX: Final = 3
FAILURES: Final = (
    *(TypeError, ValueError, LookupError, AttributeError, ImportError),
    *(RuntimeError, ArithmeticError, AssertionError, OSError),
)  # fmt: skip
"""Errors that a model's own code raises."""


class PassError(Exception):
    """A pass of the model fails; the text says at how many tokens, and how."""


@dataclass(frozen=True)
class Examination:
    """`faults`: a line each. `notes`: what is no fault. `loss`: of a fixed batch, in nats a token, at the start."""

    faults: tuple[str, ...]
    notes: tuple[str, ...]
    loss: float


class _WithoutDropout(TorchFunctionMode):
    """Dropout changes nothing, so that two passes differ by their tokens alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout):
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
            args = args[:4]
        return func(*args, **kwargs)


def examine(
    model: nn.Module, vocabulary: int, context: int, *, mend_causality: str, own_code: bool, only_loss: bool = False
) -> Examination:
    """Examine a model on the CPU. `mend_causality`: what to do about a model that sees later tokens.

    `own_code`: a person wrote the module, and can mend it. `only_loss`: look for no faults. Raises PassError if the model
    cannot be run at all.
    """
    with _undisturbed():
        length = min(context, TOKENS, max(NUMBERS_MAX // (ROWS * vocabulary), 2))
        at = Passes(model, vocabulary, length)
        first = at.reference()
        if only_loss:
            return Examination((), (), first)
        faults = [*_of_answers(at, first), *_of_context(at, context)]
        if not faults:
            faults = [*_of_training(at, own_code=own_code)]
        notes = () if own_code else tuple(_dead(at.model))
        if not faults:
            at.shake()
            faults += _of_passes(at, mend_causality)
    return Examination(tuple(faults), notes, first)


def answers_of(model: nn.Module) -> Tensor:
    """The logits of a few tokens in eval mode."""
    model.eval()
    with _undisturbed(), torch.no_grad():
        _seed(0)
        return logits_of(model, torch.arange(TOKENS_SHORT)[None]).float()


class Passes:
    """A model, and passes of it with random tokens that are the same each time."""

    def __init__(self, model: nn.Module, vocabulary: int, length: int) -> None:
        self.model, self.vocabulary, self.length, self.trained = model, vocabulary, length, _trained(model)
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
        _seed(seed)
        with torch.no_grad(), self._told(tokens.shape[1]):
            return logits_of(self.model, tokens).float()

    def reference(self) -> float:
        """The loss of a fixed batch, as it will be evaluated."""
        self.model.eval()
        _seed(0)
        with torch.no_grad(), self._told(self.length):
            return float(loss(self.model, self.tokens(1, ROWS, self.length + 1)))

    def backward(self, seed: int) -> Tensor:
        """The loss of a training pass; gradients are added to those that are there."""
        self.model.train()
        _seed(seed)
        with self._told(self.length):
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
    def _told(self, length: int) -> Iterator[None]:
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


def _of_answers(at: Passes, first: float) -> Iterator[str]:
    """Faults of what the model answers at its start."""
    logits = at.logits(at.tokens(1, 1, at.length))
    if logits.shape[-1] < at.vocabulary:
        yield f"logits = {logits.shape[-1]}: the tokenizer has {at.vocabulary} ids; raise it to at least {at.vocabulary}"
    if logits.shape[-1] > 1 and bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < TOLERANCE).all()):
        yield "it answers with probabilities (each row is 1 in all), not with logits: leave its softmax out"
    if not math.isfinite(first):
        yield f"the loss is {first} before any training: it has to be a finite number; look for divisions by 0 and logs of 0"
    yield from _further_loss(at)


def _further_loss(at: Passes) -> Iterator[str]:
    """A term that the model computes beside its logits, and that the training leaves out."""
    tokens = at.tokens(1, 1, at.length)
    at.model.train()
    _seed(0)
    answer = answer_of(at.model, tokens)
    parts = dict(answer.items()) if isinstance(answer, Mapping) else {}
    if isinstance(answer, (tuple, list)):
        parts = {f"part {number} of its answer": part for number, part in enumerate(answer) if number}
    for name, part in parts.items():
        if isinstance(part, Tensor) and part.requires_grad and part.numel() == 1:
            yield (
                f"it answers with a loss of its own ({name}), and the training here has the next-token loss of its logits "
                "alone: leave that term out"
            )
    yield from _own_loss(at)


def _own_loss(at: Passes) -> Iterator[str]:
    """Of transformers: the loss that the type itself computes, compared with the one that is trained."""
    if not hasattr(at.model, "loss_function"):
        return
    at.model.eval()
    tokens = at.tokens(1, 2, at.length)
    try:
        with torch.no_grad():
            answer = answer_of(at.model, tokens, labels=tokens)
            own, logits = float(answer.loss), answer.logits.float()
    except FAILURES:
        return  # a type without labels computes no loss that could differ
    shifted = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    as_given = float(F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
    if min(abs(own - shifted), abs(own - as_given)) > LOSS_TOLERANCE * max(1.0, abs(shifted)):
        yield (
            f"its own loss of a batch is {own:.4f} nats, and the next-token loss is {shifted:.4f}: the configuration asks for "
            "a further term, which the training here leaves out; remove what asks for it"
        )


def _of_context(at: Passes, context: int) -> Iterator[str]:
    """A pass of a whole sample, as far as it fits: positions may end earlier."""
    length = min(context, max(NUMBERS_MAX // at.vocabulary, at.length))
    if length > at.length:
        try:
            at.logits(at.tokens(3, 1, length))
        except PassError as error:
            yield str(error)


def _of_training(at: Passes, *, own_code: bool) -> Iterator[str]:
    """Faults of training passes: gradients, and changes that no vote carries."""
    before = _state(at.model)
    summed = at.backward(4)
    if not summed.requires_grad:
        yield "its logits depend on no trained parameter (detach, no_grad, argmax): no gradient comes back"
        return
    for seed in (5, 6):
        at.backward(seed)
    if other := sorted(at.trained ^ _trained(at.model)):
        yield f"a pass freezes or thaws {_some(other)}: set requires_grad where the model is made, and leave it"
    gradients = {name: p.grad for name, p in at.model.named_parameters() if p.grad is not None}
    if sparse := [name for name, gradient in gradients.items() if gradient.layout != torch.strided]:
        yield f"the gradient of {_some(sparse)} is sparse, and votes need dense ones: make the embedding with sparse=False"
        return
    bad = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    if bad:
        yield f"the gradient of {_some(bad)} is not finite before any training"
    if not any(bool(gradient.any()) for gradient in gradients.values()):
        yield "every gradient is 0: the loss does not depend on the parameters"
    if own_code:
        yield from _dead(at.model)
    yield from _changes(at.model, before)


def _dead(model: nn.Module) -> list[str]:
    """Trained parameters without a gradient, but for those of a row of modules of which some have one, as experts."""
    named = {name: p.grad is not None for name, p in model.named_parameters() if p.requires_grad}
    alive = {re.sub(r"\d+", "*", name) for name, has in named.items() if has}
    dead = [name for name, has in named.items() if not has and re.sub(r"\d+", "*", name) not in alive]
    if not dead:
        return []
    return [
        f"{len(dead)} of {len(named)} parameters get no gradient and are never trained ({_some(dead)}): use them, remove "
        "them, or set requires_grad=False"
    ]


def _trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _changes(model: nn.Module, before: Mapping[str, Tensor]) -> Iterator[str]:
    """Parameters that passes change themselves, and buffers of the export that change."""
    after, kept, buffers = _state(model), model.state_dict().keys(), dict(model.named_buffers())
    changed = [name for name, tensor in after.items() if name not in before or not _same(before[name], tensor)]
    owners = dict[str, list[str]]()
    for name in changed:
        owner, _, last = name.rpartition(".")
        module = f"{type(model.get_submodule(owner)).__name__} {owner!r}"
        if name not in buffers:
            yield f"{module} changes its parameter {last!r} in a forward pass: parameters change by votes alone"
        elif name in kept:  # what a module keeps for itself counts by its answers
            owners.setdefault(module, []).append(repr(last))
    for module, names in owners.items():
        yield (
            f"{module} changes its buffer {', '.join(names)} in training: no vote carries buffers, so that each peer and the "
            "export would have another one; use LayerNorm or RMSNorm over each token, or a buffer that stays"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(
        torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)
    )


def _of_passes(at: Passes, mend_causality: str) -> list[str]:
    """Faults that two passes show when they are compared."""
    tokens = at.tokens(10, 2, at.length)
    before = at.logits(tokens)
    again = [at.logits(tokens, seed=seed) for seed in (1, 2)]
    if any(_apart(before, other) for other in again):
        return ["the same tokens give other logits each time, without training: it draws random numbers in eval mode, or looks "
                "at a clock or a counter; held-out losses and checks need one answer"]  # fmt: skip
    with _WithoutDropout():
        one, other = (at.logits(tokens, train=True, seed=3) for _ in range(2))
        if _apart(one, other):
            return ["the same tokens and the same random state give other logits in training: it looks at a clock, a "
                    "counter, or what it kept before; a gradient has to come from state and sample alone"]  # fmt: skip
        modes = (False,) if not _apart(before, one) else (False, True)
        faults = [*_causality(at, mend_causality, modes), *_of_batch(at, modes)]
    if _apart(before, at.logits(tokens)):
        faults.append(
            "its answers depend on the batches before: it keeps a state outside its parameters, which no vote carries"
        )
    return faults


def _causality(at: Passes, mend: str, modes: tuple[bool, ...]) -> Iterator[str]:
    """An earlier position that sees a later token, at several places. `modes`: in training, or not."""
    for train in modes:
        for length in (at.length,) if train else {at.length, min(TOKENS_SHORT, at.length)}:
            base, other = (at.tokens(seed, 1, length) for seed in (20, 21))
            try:
                plain = at.logits(base, train=train)
            except PassError:
                if length == at.length:
                    raise
                continue  # a type that takes whole pieces of a text alone
            for first in sorted({1, length // 2, length - 1} - {0}):
                mixed = torch.cat([base[:, :first], other[:, first:]], dim=1)
                if _apart(plain[:, :first], at.logits(mixed, train=train)[:, :first]):
                    yield (
                        f"an earlier position sees a later token: the logits of the first {first} of {length} tokens change "
                        f"with the tokens after them, so the model would learn to copy what it has to predict; {mend}"
                    )
                    return


def _of_batch(at: Passes, modes: tuple[bool, ...]) -> Iterator[str]:
    """A sample whose answer depends on the other samples of its batch: how many those are is each peer's own choice."""
    rows = at.tokens(30, 2, at.length)
    beside = (at.tokens(31, ROWS, at.length), rows.repeat(2, 1), rows[:1, :1].expand(ROWS, at.length))
    for train in modes:
        alone = torch.cat([at.logits(row[None], train=train) for row in rows])
        answers = [alone, *(at.logits(torch.cat([others, rows]), train=train)[-2:] for others in beside)]
        if any(_apart(answers[0], other) for other in answers[1:]):
            yield (
                f"a sample's logits depend on the other samples of its batch ({'in training' if train else 'in evaluation'}): "
                "each peer chooses its own micro-batch, so gradients and losses would differ; take no statistics over the "
                "batch (LayerNorm or RMSNorm over each token instead of BatchNorm), and no capacity of experts"
            )
            return


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two passes differ by more than rounding."""
    if one.shape != other.shape or bool((one.isfinite() != other.isfinite()).any()):
        return True
    scale = float(one.nan_to_num().abs().max()) + 1e-6 if one.numel() else 1.0
    return bool(((one - other).nan_to_num().abs() > TOLERANCE * scale).any())


def _config(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    to_dict: Callable[[], dict[str, Any]] | None = getattr(config, "to_dict", None)
    return to_dict() if to_dict is not None else {}


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (", ..." if len(names) > NAMES_SHOWN_MAX else "")


def _seed(seed: int) -> None:
    """Of every generator that a forward pass may draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the caller's random states as they are, and show no warnings of libraries."""
    state, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
