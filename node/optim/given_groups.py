"""Groups of parameters as people give them to a torch optimizer, and the checks of them. Holds nothing."""

from __future__ import annotations

import hashlib
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from difflib import get_close_matches
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from node.optim.base import BY_CHUNKS, BaseConfig, is_named_table
from node.optim.demo import SIZE_KEYS, DeMoConfig
from node.optim.layout import hidden_note
from node.optim.local import LocalConfig
from node.optim.run_settings import plain
from node.optim.step import rounded_rate
from protos.optimizer_defaults import OF_BASES

Given = ParamSpec("Given")
Result = TypeVar("Result")
OF_A_GROUP = ("lr", "momentum", "weight_decay", "group_size", "clip_norm")
"""Options of a group of parameters; all ranks have the same in each step."""

OF_ALL_GROUPS = {option.name for option in fields(DeMoConfig)} - {"beta", *OF_A_GROUP} | {
    "method", "chunk", "local", "betas", "eps", "amsgrad", "dampening", "maximize", "learning_rate", "wd"
}  # fmt: skip
"""Options that a group cannot have alone here, or that other optimizers have: they would have no effect."""


SETTINGS = {field.name for field in fields(DeMoConfig)} - {
    "beta", "beta2", "weight_decay", "group_size", "clip_norm", "refused", "seed", "author"
}  # fmt: skip
"""Fields of `DeMoConfig` that `DeMoOptimizer` takes as keywords of that name. No votes are refused here."""

SEED_BYTES = 8
CAST = ("cpu", "cuda", "mps")
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Components that `torch.compile` and checkpointing put into the names of parameters."""


def as_usual(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Run a part of a step as in a program that set nothing: not compiled, without autocast and inference mode, and what names
    no device is on the CPU.

    Compiled kernels round otherwise, inductor fails at some views, and autocast multiplies with 8 bits. Bytes and tables of a
    step are on the CPU, where `torch.set_default_device("cuda")` would move them to the card.
    """

    @wraps(function)
    def run(*given: Given.args, **named: Given.kwargs) -> Result:
        cast = [kind for kind in CAST if torch.is_autocast_enabled(kind)]
        inference = torch.is_inference_mode_enabled()  # its tensors cannot be written later
        if torch.get_default_device().type == "cpu" and not cast and not inference:
            return function(*given, **named)
        with ExitStack() as usual:
            usual.enter_context(torch.device("cpu"))
            if inference:
                usual.enter_context(torch.inference_mode(mode=False))
                usual.enter_context(torch.no_grad())
            for kind in cast:
                usual.enter_context(torch.autocast(kind, enabled=False))
            return function(*given, **named)

    return _disable_dynamo(run)


def seed_bytes(seed: int) -> bytes:
    """A seed as settings of the step hold it. Raises `ValueError`."""
    try:
        return operator.index(seed).to_bytes(SEED_BYTES, "big", signed=True)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"seed = {seed!r}: expected is a whole number from -2^63 to 2^63 - 1") from error


def unwrapped_name(name: str) -> str:
    """The name that a parameter has in the model itself, so that states of it fit with and without a wrapper."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_of(group: Mapping[str, Any]) -> list[tuple[str | None, Tensor]]:
    """The parameters of a group, with names if they have some; `params` may be a tensor, or an iterable that is read once."""
    given = group["params"]
    check_ordered(given)
    if isinstance(given, Tensor):
        return [(None, given)]
    return [one if isinstance(one, tuple) else (None, one) for one in given]


def check_ordered(given: Any) -> None:
    """Raises `TypeError` for a set: its order is another one in each process, and states and ranks go by the order."""
    if isinstance(given, set | frozenset):
        raise TypeError(
            "the parameters are a set, which has no order, so states and ranks would mix them up: give a list"
        )


def options_of(group: Mapping[str, Any], named: Sequence[tuple[str | None, Tensor]]) -> dict[str, Any]:
    """The group with its parameters as a list, and `beta` as torch's `momentum`.

    Raises `ValueError` for an option that would have no effect.
    """
    options = renamed(group)
    if wrong := without_effect(options):
        raise ValueError(
            f"{', '.join(sorted(wrong))}: no option of one group; a group may set lr, beta, weight_decay, group_size and "
            "clip_norm, and DeMoOptimizer(...) takes the settings of all groups"
        )
    options["params"] = [tensor if name is None else (unwrapped_name(name), tensor) for name, tensor in named]
    return options


def without_effect(options: Iterable[str]) -> set[str]:
    """The options that have no effect in a group. Words of the program's own pass, but not what is nearly an option."""
    return {name for name in options if name in OF_ALL_GROUPS or (name not in OF_A_GROUP and _near(name))}


@lru_cache(maxsize=256)  # the words are a program's
def _near(name: str) -> bool:
    return bool(get_close_matches(name, OF_A_GROUP, cutoff=0.85))


def check_options(groups: Iterable[Mapping[str, Any]], own: Iterable[str]) -> None:
    """Raises `ValueError` for an option that came into a group later, and has no effect. `own`: words of this optimizer."""
    for group in groups:
        if wrong := (without_effect(group) | group.keys() & {"beta"}) - set(own):
            raise ValueError(
                f"{', '.join(sorted(wrong))} in optimizer.param_groups has no effect: a group may change lr, momentum (that is "
                "beta), weight_decay, group_size and clip_norm; make a new optimizer for other settings"
            )


def renamed(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of parameters with what is called `beta` here as torch's `momentum`."""
    return {("momentum" if key == "beta" else key): value for key, value in group.items()}


def saved_group(group: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group as this version names it. A version before December 2026 kept the wrappers' components in the names."""
    options, names = renamed(group), group.get("param_names") or []
    bare = [unwrapped_name(name) for name in names]
    if bare != names and bare == here.get("param_names"):
        options |= {"param_names": bare, "layout": here["layout"]}
    return options


def check_effect(config: DeMoConfig, clip_norm: float | None, *, local: bool) -> None:
    """Raises `ValueError` for a setting that another one leaves without effect: `top_k` alone would train with group votes."""
    base = config.base
    for owner, names, other in (
        (config, set(SIZE_KEYS.values()) - {SIZE_KEYS.get(config.selection)}, f"selection {config.selection!r}"),
        (
            base,
            () if base.function else {key for key, of in OF_BASES.items() if base.name not in of},
            f"base {base.name!r}",
        ),
    ):
        for name in sorted(names):
            if (value := getattr(owner, name)) != getattr(type(owner), name):
                raise ValueError(
                    f"{name} {value!r} has no effect with {other}: leave it out, or set another {other.split()[0]}"
                )
    if clip_norm not in (None, DeMoConfig.clip_norm) and (local or config.beta2):
        other = (
            "local steps: set it in LocalConfig" if local else f"beta2 {config.beta2}: leave it out, or set beta2 to 0"
        )
        raise ValueError(f"clip_norm {clip_norm!r} has no effect with {other}")


def without_place(
    groups: Sequence[dict[str, Any]], added: Sequence[tuple[str | None, Tensor]], known: frozenset[int]
) -> list[tuple[str | None, Tensor]]:
    """The parameters `added` with the names that groups have for them, if those have names.

    A parameter that was frozen when its group was made has no place in it (its id is not `known`): it leaves that group. One
    that is trained in another group stays there, so that torch refuses it here.
    """
    ids, names = {id(tensor) for _, tensor in added} - known, {}
    for group in groups:
        kept = [index for index, tensor in enumerate(group["params"]) if id(tensor) not in ids]
        theirs = group.get("param_names")
        if theirs is not None:
            names.update({id(tensor): name for tensor, name in zip(group["params"], theirs, strict=True)})
            group["param_names"] = [theirs[index] for index in kept]
        group["params"] = [group["params"][index] for index in kept]
    if not any("param_names" in group for group in groups):
        return list(added)
    count = sum(len(group["params"]) for group in groups)
    return [(name or names.get(id(tensor), f"added.{count + i}"), tensor) for i, (name, tensor) in enumerate(added)]


def check_known(named: Iterable[tuple[str, Tensor]], known: frozenset[int]) -> None:
    """Raises `ValueError` with the name of a parameter that is trained, and whose id is not known."""
    for name, tensor in named:
        if tensor.requires_grad and id(tensor) not in known:
            raise ValueError(
                f"parameter {name} is trained now and has no place in this optimizer: it was frozen when the optimizer was "
                "made, or it is new. Call optimizer.add_param_group({'params': [...]}) on all ranks, or make a new optimizer"
            )


def defaults_of(params: Any, beta2: float | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of method demo that follow from others, as those of a run do. Muon has to know tables: a module tells them."""
    sized = bool(settings.get("magnitudes"))
    found = {"beta2": (0.0 if sized or settings.get("nesterov") else 0.99) if beta2 is None else beta2}
    if sized or "base" in settings:
        return found
    if isinstance(params, nn.Module):
        return found | {"base": BY_CHUNKS}
    warnings.warn(
        "parameters do not tell which of them are tables of embeddings, so their base is 'sign', not Muon by chunks: its best "
        "learning rate is half as high, and its loss about 3 % higher. Give the module, DeMoOptimizer(model, ...), or say "
        "base='sign'",
        stacklevel=3,  # whoever makes the optimizer
    )
    return found


def check_rate(lr: Any) -> None:
    """Raises `ValueError` for a learning rate that is no number, infinite or below 0."""
    value = plain(lr)
    if not isinstance(value, int | float) or not 0 <= rounded_rate(value) < math.inf:
        hint = " (YAML reads 1e-3 as text: write 1.0e-3)" if isinstance(lr, str) else ""
        raise ValueError(f"learning rate {value!r}: expected is a finite number of at least 0{hint}")


def check_paper(beta2: float | None, group_size: int, local: LocalConfig | None, settings: Mapping[str, Any]) -> None:
    """Raises `ValueError` for settings that the paper's method does not have."""
    given = settings.keys() - {"top_k"}
    given |= {
        name for name, it in {"beta2": bool(beta2), "group_size": group_size != DeMoConfig.group_size}.items() if it
    }
    given |= {"local"} if local is not None and local.steps > 1 else set()
    if given:
        raise ValueError(
            f'{", ".join(sorted(given))}: the method paper has no such setting; remove it, or use method="demo"'
        )


def warn_of_stacks(named: Sequence[tuple[str, Tensor]], tables: tuple[str, ...]) -> None:
    """Names do not tell a convolution from a stack of experts, and Muon treats them in different ways."""
    stacks = [name for name, tensor in named if tensor.dim() == 3 and not is_named_table(name, tables)]
    if stacks:
        warnings.warn(
            f"base muon takes {', '.join(stacks)} for stacks of matrices [experts, height, width]; a convolution is one "
            "matrix, which names do not tell: give the module, DeMoOptimizer(model, ...)",
            stacklevel=14,  # whoever makes the optimizer
        )


def warn_of_hidden(names: Sequence[str], tables: tuple[str, ...]) -> None:
    """Of parameters whose module's kind a parametrization hides."""
    for note in hidden_note([name for name in names if not is_named_table(name, tables)]):
        warnings.warn(note, stacklevel=14)  # as above


def settings_digest(settings: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """16 hexadecimal digits of what ranks have in common: layouts, methods and settings. Functions count by their names."""
    words = [f"{name}={_word(value)}" for name, value in sorted(settings.items())]
    words += [f"{group['layout']} {group['method']}" for group in groups]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _word(value: object) -> str:
    if isinstance(value, BaseConfig):
        numbers = f"{value.momentum} {value.nesterov} {value.beta1} {value.beta2} {value.eps}"
        return f"{value.name} {numbers} {value.block} {value.iterations} {value.output} {value.muon_except}"
    return (
        str(value) if isinstance(value, str | int | float | bytes | None) else str(getattr(value, "name", type(value)))
    )
