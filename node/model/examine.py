"""What a model does in a few passes of a few tokens, compared with what a run needs of it.

A run needs a model that predicts each token from the tokens before it, sample by sample, by its parameters alone. This module
changes the parameters of the model that it is given. Refuses nothing itself: it returns a line for each fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.model.gradients import answer_of
from node.model.passes import (
    FAILURES,
    ROWS,
    TOKENS,
    TOKENS_SHORT,
    TOLERANCE,
    PassError,
    Passes,
    apart,
    seed_all,
    trained_names,
    undisturbed,
)
from node.optim.layout import hidden_kinds, hidden_note

COPIED_NUMBERS: Final = 1 << 16
NUMBERS_MAX: Final = 1 << 24
"""Logits of one pass at most: 64 MB."""
LOSS_TOLERANCE: Final = 1e-3
"""Nats. A further term of a loss is larger, and the same loss computed in another order differs by 1e-5."""
NAMES_SHOWN_MAX: Final = 3
BUFFER_TOLERANCE: Final = 1e-3
"""Of a buffer that another device computed."""


@dataclass(frozen=True)
class Examination:
    """`faults`: a line each. `notes`: what is no fault. `loss`: of a fixed batch, in nats a token, at the start."""

    faults: tuple[str, ...]
    notes: tuple[str, ...]
    loss: float


def examine(
    model: nn.Module, vocabulary: int, context: int, *, mend_causality: str, own_code: bool, only_loss: bool = False
) -> Examination:
    """Examine a model on the CPU. `mend_causality`: what to do about a model that sees later tokens.

    `own_code`: a person wrote the module, and can mend it. `only_loss`: look for no faults. Raises PassError if the model
    cannot be run at all.
    """
    with undisturbed():
        length = min(context, TOKENS, max(NUMBERS_MAX // (ROWS * vocabulary), 2))
        at = Passes(model, vocabulary, length, max(min(context, NUMBERS_MAX // vocabulary), length))
        if only_loss:
            return Examination((), (), at.reference())
        whole = _whole(at)
        first = at.reference()
        changed = [*_of_lengths(at, whole)]
        faults = [*_of_answers(at, first), *([str(whole)] if isinstance(whole, PassError) else [])]
        if not faults:
            faults = [*_of_training(at, own_code=own_code)]
        notes = _kinds_note(model) if own_code else _dead(at.model)
        if not faults:
            at.shake()
            faults += _of_passes(at, mend_causality) or changed
    return Examination(tuple(faults), tuple(notes), first)


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
    seed_all(0)
    with at.told(at.length):
        answer = answer_of(at.model, tokens)
    parts = dict(answer.items()) if isinstance(answer, Mapping) else {}
    if isinstance(answer, (tuple, list)):
        parts = {f"part {number} of its answer": part for number, part in enumerate(answer) if number}
        if not hasattr(answer, "logits"):
            yield from _other_logits(at, answer[0], parts)
    for name, part in parts.items():
        if isinstance(part, Tensor) and part.requires_grad and part.numel() == 1:
            yield (
                f"it answers with a loss of its own ({name}), and the training here has the next-token loss of its logits "
                "alone: leave that term out"
            )
    yield from _own_loss(at)


def _other_logits(at: Passes, first: object, parts: Mapping[str, object]) -> Iterator[str]:
    """A tuple begins with its logits, and hidden states may be as wide: a part that fits the vocabulary no worse."""
    for name, part in parts.items():
        if isinstance(first, Tensor) and isinstance(part, Tensor) and part.shape[:-1] == first.shape[:-1]:
            wide, other = first.shape[-1], part.shape[-1]
            if at.vocabulary <= other and abs(other - at.vocabulary) <= abs(wide - at.vocabulary):
                yield (
                    f"its answer begins with numbers of shape {list(first.shape)}, which would be trained as logits, and "
                    f"{name} has the shape {list(part.shape)}: answer with the logits alone, or a dict that names them `logits`"
                )


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


def _whole(at: Passes) -> Tensor | PassError:
    """The logits of a whole sample, or of as much of it as one pass takes; or how this pass fails."""
    try:
        return at.logits(at.tokens(3, 1, at.whole))
    except PassError as error:
        return error


def _of_lengths(at: Passes, whole: Tensor | PassError) -> Iterator[str]:
    """An answer to a whole sample that a short one changes. `whole`: of the model's first pass, and one short pass followed."""
    if not isinstance(whole, PassError) and at.whole > at.length and apart(whole, at.logits(at.tokens(3, 1, at.whole))):
        yield (
            f"a sample of {at.whole} tokens gets other logits after a pass of {at.length}: the model keeps something that "
            "depends on the lengths before (such as a block-sparse attention that a short text turns off for good); each "
            "answer has to come from parameters and sample alone"
        )


def _of_training(at: Passes, *, own_code: bool) -> Iterator[str]:
    """Faults of training passes: gradients, and changes that no vote carries."""
    before = _state(at.model)
    summed = at.backward(4)
    if not summed.requires_grad:
        yield "its logits depend on no trained parameter (detach, no_grad, argmax): no gradient comes back"
        return
    for seed in (5, 6):
        at.backward(seed)
    if other := sorted(at.trained ^ trained_names(at.model)):
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


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _changes(model: nn.Module, before: Mapping[str, Tensor]) -> Iterator[str]:
    """Parameters that passes change themselves, and buffers of the export that change."""
    buffers = dict(model.named_buffers())
    for name, tensor in _state(model).items():
        if name not in buffers and not (name in before and _same(before[name], tensor)):
            module, last = _owner(model, name)
            yield f"{module} changes its parameter {last!r} in a forward pass: parameters change by votes alone"
    for module, names in changed_buffers(model, before).items():
        yield (
            f"{module} changes its buffer {', '.join(names)} in training: no vote carries buffers, so that each peer and the "
            "export would have another one; use LayerNorm or RMSNorm over each token, or a buffer that stays"
        )


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that an export has; what a module keeps for itself counts by its answers."""
    kept = model.state_dict().keys()
    return {name: buffer.detach() for name, buffer in model.named_buffers() if name in kept}


def some_numbers(buffer: Tensor) -> Tensor:
    """A copy of a buffer; of a large one (quantized weights), of numbers all over it: it may be most of what the GPU holds."""
    flat = _numbers(buffer).reshape(-1)
    return flat[:: max(flat.numel() // COPIED_NUMBERS, 1)].clone()


def changed_buffers(
    model: nn.Module, before: Mapping[str, Tensor], of: Callable[[Tensor], Tensor] = lambda buffer: buffer
) -> dict[str, list[str]]:
    """The modules whose `kept_buffers` have changed, each with the names of these. `of`: what `before` has of each."""
    owners = dict[str, list[str]]()
    for name, buffer in kept_buffers(model).items():
        if not (name in before and _same(before[name], of(buffer))):
            module, last = _owner(model, name)
            owners.setdefault(module, []).append(repr(last))
    return owners


def _owner(model: nn.Module, name: str) -> tuple[str, str]:
    """The module of a parameter or buffer, in words, and the name there."""
    owner, _, last = name.rpartition(".")
    return f"{type(model.get_submodule(owner)).__name__} {owner!r}", last


def with_statistics(model: nn.Module, *, unseen: bool = False) -> list[str]:
    """The modules that keep in buffers what follows from the batches of a training (BatchNorm, spectral_norm); `unseen`: of no
    batch yet, as far as they count them."""
    parts = {name: it for name, it in model.named_modules() if _keeps(it)}
    left = [name for name, it in parts.items() if not (unseen and bool(getattr(it, "num_batches_tracked", None)))]
    return [f"{type(parts[name]).__name__} {name!r}" for name in left]


def _keeps(module: nn.Module) -> bool:
    iterating = (module, *module._forward_pre_hooks.values())
    running = isinstance(getattr(module, "running_mean", None), Tensor)
    return running or any(hasattr(it, "n_power_iterations") for it in iterating)


def statistics_note(model: nn.Module) -> list[str]:
    """What to know of a model that nobody runs here, since programs train it."""
    if not (found := with_statistics(model)):
        return _kinds_note(model)
    return [
        *_kinds_note(model),
        f"model: {_some(found)} keeps statistics of its batches, which no vote carries: each peer has its own, and an export "
        "those of no training. Use GroupNorm or LayerNorm, or save the model in the program that trains it",
    ]


def _kinds_note(model: nn.Module) -> list[str]:
    return [f"model: {note}" for note in hidden_note(hidden_kinds(model))]


def other_buffer(model: nn.Module, start: nn.Module) -> str:
    """The name of a buffer that both models have, with other numbers in each; empty if none. Statistics of batches differ."""
    mine = dict(model.named_buffers())
    for name, theirs in start.named_buffers():
        own = mine.get(name)
        if own is None or (own.shape, own.dtype) != (theirs.shape, theirs.dtype) or not own.is_floating_point():
            continue
        if name.rpartition(".")[2].startswith("running_"):
            continue
        if not torch.allclose(own.cpu().double(), theirs.cpu().double(), rtol=BUFFER_TOLERANCE, equal_nan=True):
            return name
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    """A program's buffers may be anything: meta, sparse, of 8-bit floats, on another device since."""
    if one.shape != other.shape or one.is_meta or other.is_meta:
        return one.shape == other.shape and one.is_meta == other.is_meta
    mine, its = _numbers(one), _numbers(other).to(one.device)
    if not mine.is_floating_point() or not its.is_floating_point():
        return torch.equal(mine, its)
    wide = [(it.float() if it.element_size() == 1 else it).nan_to_num() for it in (mine, its)]
    return torch.equal(*wide)


def _numbers(tensor: Tensor) -> Tensor:
    """Its numbers; of a sparse one those that it stores."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.is_sparse else tensor.values()
    return tensor


def _of_passes(at: Passes, mend_causality: str) -> list[str]:
    """Faults that two passes show when they are compared."""
    tokens = at.tokens(10, 2, at.length)
    before = at.logits(tokens)
    again = [at.logits(tokens, seed=seed) for seed in (1, 2)]
    if any(apart(before, other) for other in again):
        return ["the same tokens give other logits each time, without training: it draws random numbers in eval mode, or looks "
                "at a clock or a counter; held-out losses and checks need one answer"]  # fmt: skip
    with at.without_chance():
        one, other = (at.logits(tokens, train=True, seed=3) for _ in range(2))
        if apart(one, other):
            return ["the same tokens and the same random state give other logits in training: it looks at a clock, a "
                    "counter, or what it kept before; a gradient has to come from state and sample alone"]  # fmt: skip
        modes = (False,) if not apart(before, one) else (False, True)
        faults = [*_own_token(at), *_causality(at, mend_causality, modes), *_of_batch(at, modes)]
    if apart(before, at.logits(tokens)):
        faults.append(
            "its answers depend on the batches before: it keeps a state outside its parameters, which no vote carries"
        )
    return faults


def _own_token(at: Passes) -> Iterator[str]:
    """A position that does not see its own token. An equal answer is no rounding: the token was left out."""
    tokens = at.tokens(40, ROWS, at.length)
    other = tokens.clone()
    other[:, -1] = at.tokens(41, ROWS, 1)[:, 0]
    if not torch.equal(tokens, other) and torch.equal(at.logits(tokens)[:, -1], at.logits(other)[:, -1]):
        yield (
            "a position does not see its own token: another last token changes none of the last logits, so the model would "
            "learn the token after the next (the training compares position i with token i + 1); leave out the shift of the "
            "input, or of the logits, that it makes itself"
        )


def _causality(at: Passes, mend: str, modes: tuple[bool, ...]) -> Iterator[str]:
    """An earlier position that sees a later token, at several places. `modes`: in training, or not."""
    for train in modes:
        for length in (at.length,) if train else sorted({at.length, min(TOKENS_SHORT, at.length), at.whole}):
            base, other = (at.tokens(seed, 1, length) for seed in (20, 21))
            try:
                plain = at.logits(base, train=train)
            except PassError:
                if length == at.length:
                    raise
                continue  # a type that takes whole pieces of a text alone
            for first in sorted({1, length // 2, length - 1} - {0}) if length <= at.length else (length // 2,):
                mixed = torch.cat([base[:, :first], other[:, first:]], dim=1)
                if apart(plain[:, :first], at.logits(mixed, train=train)[:, :first]):
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
        if any(apart(answers[0], other) for other in answers[1:]):
            yield (
                f"a sample's logits depend on the other samples of its batch ({'in training' if train else 'in evaluation'}): "
                "each peer chooses its own micro-batch, so gradients and losses would differ; take no statistics over the "
                "batch (LayerNorm or RMSNorm over each token instead of BatchNorm), and no capacity of experts"
            )
            return


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (", ..." if len(names) > NAMES_SHOWN_MAX else "")
