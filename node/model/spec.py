"""The definition of a model, and its build: every machine gets the same bits from the same seed.

Refuses weights from the internet or from disk, because a run starts from its seed or from a snapshot. Refuses code from the
hub, and values that would fail later in the model library. A `factory` runs local code that the spec names; its module may lie
in the working folder. A caller that takes a spec from a stranger decides beforehand whether a factory may run.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from node.imports import many_imports, quiet_libraries
from node.model.gradients import logits_of
from node.model.portable_draws import Mode, nothing_drawn, portable_random
from protos.errors import OperatorError
from protos.process import import_from_working_folder

OWN_LOOP: Final = "own_loop"
"""The attribute of a module."""


def has_own_loop(model: nn.Module) -> bool:
    """A model that only programs train (`swarmentum.join`), since it takes no tokens or gives no logits: `own_loop = True`.

    The run then makes its first parameters from the model's code, and nobody calls it. Refuses the built-in loop.

    Whether its peers bring loops of their own.
    """
    return getattr(model, OWN_LOOP, False) is True


def check_built_in(model: nn.Module) -> None:
    """Raises OperatorError for a model that the built-in loop cannot train."""
    if has_own_loop(model):
        raise OperatorError(
            "the run's model has own_loop = True: programs train it with swarmentum.join (docs/python.md), and the command "
            "`swarmentum join` has no loss for it. `swarmentum anchor` can serve the run"
        )


ATTENTION_CHOICES: Final = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
ATTENTION_KEYS: Final = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
DEPTH_MAX: Final = 16
"""Configurations hold those of their parts, two or three deep."""


def foreign_attention(config: Mapping[str, Any]) -> str:
    """The attention that a model's configuration names: one of the library's own, and never code that it would fetch from
    the hub.

    transformers fetches and runs a kernel if one of these keys names a repository, at any depth of the configuration. Pure.

    The first key whose attention is not the library's own, and what is expected; empty if there is none.
    """
    return next(_foreign(config, "", 0), "")


def _foreign(config: Mapping[str, Any], place: str, depth: int) -> Iterator[str]:
    for key, value in config.items():
        named = value.values() if isinstance(value, Mapping) else (value,)
        if key in ATTENTION_KEYS and any(each is not None and each not in ATTENTION_CHOICES for each in named):
            yield f"{place}{key} = {value!r}: expected one of {', '.join(ATTENTION_CHOICES)}"
        elif isinstance(value, Mapping):
            if depth == DEPTH_MAX:
                yield f"{place}{key}: tables lie more than {DEPTH_MAX} deep; no model needs that"
            else:
                yield from _foreign(value, f"{place}{key}.", depth + 1)


TEXT: Final = "text_config"
"""The part of a configuration of several parts that has the vocabulary."""

# A small Llama over bytes: 885,888 parameters. Widths are multiples of 64, so that no chunk of the layout is padded.
SMALL_LLAMA: Final[Mapping[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,  # every byte is a plain byte: none begins or ends a text
    "eos_token_id": None,
    "pad_token_id": None,
}

# transformers raises these errors for values that it cannot use: an unknown activation is a KeyError, no heads a division by 0.
REFUSALS: Final = (TypeError, ValueError, KeyError, AttributeError, ImportError, RuntimeError, ArithmeticError)


class ModelError(OperatorError):
    """The model that the operator asked for cannot be built; the message names the value."""


@dataclass(frozen=True)
class ModelSpec:
    """Either an `AutoConfig` dict or a factory; neither means the small Llama."""

    config: Mapping[str, Any] | None = None
    """Keys of a transformers config, with `model_type`. Values that are left out are that type's own defaults."""
    factory: str | None = None
    """`module:function`; the function returns an `nn.Module`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


def build(
    spec: ModelSpec, seed: int, *, vocabulary: int | None = None, context: int | None = None, blank: bool = False
) -> nn.Module:
    """The model on the CPU in fp32, the same bits for the same seed; the caller's random state stays as it is.

    `vocabulary` (ids of the tokenizer) and `context` (tokens of a sample), where given, are checked against the model. `blank`:
    the parameters are loaded next, so those that would be drawn are NaN. A large model is there in seconds, not minutes.
    A bool or whole-number buffer that follows from such a draw would differ unseen (none of 151 types of transformers has one).
    Bits are equal across machines for initialisers made of normal and uniform draws (see `portable_draws`).
    """
    if spec.config is not None and spec.factory is not None:
        raise ModelError("model: both `config` and `factory` are given; keep one of them")
    if spec.kwargs and spec.factory is None:
        raise ModelError(f"model.kwargs: {sorted(spec.kwargs)} belong to a `factory`, and none is given; use `config`")
    make = _factory_maker(spec, vocabulary) if spec.factory else _config_maker(spec, vocabulary, context)
    if blank and spec.factory is None:
        with suppress(ModelError), torch.random.fork_rng(devices=[]), torch.device("cpu"), nothing_drawn() as mode:
            model = make().to(device="cpu", dtype=torch.float32)
            # nothing loads buffers
            if not mode.drew_others and not any(buffer.isnan().any() for buffer in model.buffers()):
                return model
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), portable_random(seed):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also touch the caller's CUDA generators
        return make().to(device="cpu", dtype=torch.float32)


def build_meta(spec: ModelSpec, *, vocabulary: int | None = None, context: int | None = None) -> nn.Module:
    """The model's names and shapes without its numbers, on the meta device: of any size in little memory.

    `vocabulary` and `context` as for `build`.
    """
    make = _factory_maker(spec, vocabulary) if spec.factory else _config_maker(spec, vocabulary, context)
    with torch.device("meta"), _Undrawn():  # type: ignore[no-untyped-call]
        return make()


class _Undrawn(Mode):  # type: ignore[no-untyped-call]
    """Tensors without numbers need no draws. PyTorch would import its compiler to draw them, which takes a second."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def build_in_mode(config: Mapping[str, Any] | None) -> nn.Module:
    """The model of a config, of the tensors that the caller's mode makes (torch's fake tensors have shapes, and can be run)."""
    return _config_maker(ModelSpec(config), None, None)()


def parameter_count(model: nn.Module) -> int:
    """Trained numbers; tied weights count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _config_maker(spec: ModelSpec, vocabulary: int | None, context: int | None) -> Callable[[], nn.Module]:
    config = configuration(SMALL_LLAMA if spec.config is None else spec.config)
    text = config.get_text_config()
    ids, positions = getattr(text, "vocab_size", None), getattr(text, "max_position_embeddings", None)
    if vocabulary is not None and ids is not None and ids < vocabulary:
        raise ModelError(_too_small("model.config.vocab_size", ids, vocabulary))
    if context is not None and positions is not None and positions < context:
        raise ModelError(
            f"model.config.max_position_embeddings = {positions}: samples have {context} tokens; "
            f"raise it to {context} or lower the context"
        )
    return lambda: _from_config(config)


def configuration(config: Mapping[str, Any]) -> Any:
    """A transformers configuration of these keys. Raises ModelError for one that the library cannot use, or that names code."""
    with many_imports():
        from transformers import CONFIG_MAPPING, AutoConfig

    if foreign := foreign_attention(config):
        raise ModelError(f"model.config.{foreign}")
    kind = config.get("model_type")
    if kind is None:
        raise ModelError("model.config.model_type is missing: name a transformers model type, as 'llama' or 'gpt2'")
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), n=3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise ModelError(f"model.config.model_type = {kind!r}: transformers does not know it{hint}")
    with quiet_libraries(), _refusal_of_transformers(f"model.config: transformers refuses it for {kind!r}"):
        rest = {key: _with_floats(value) for key, value in config.items() if key != "model_type"}
        return AutoConfig.for_model(kind, **rest)


def names_vocabulary(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says itself how many ids there are."""
    return "vocab_size" in config or "vocab_size" in vocabulary_part(config)


def vocabulary_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text's part of a configuration of several parts; empty for any other."""
    found = config.get(TEXT)
    return found if isinstance(found, Mapping) else {}


def with_vocabulary(config: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """The configuration with the tokenizer's ids, unless it says itself how many there are; where its type has that key."""
    if names_vocabulary(config):
        return dict(config)
    try:
        kind = type(configuration(config))
    except ModelError:  # who builds it says so
        return {"vocab_size": vocabulary, **config}
    if "vocab_size" in {*kind.attribute_map, *(key.name for key in fields(kind))} or TEXT not in kind.sub_configs:
        return {"vocab_size": vocabulary, **config}
    return {**config, TEXT: {"vocab_size": vocabulary, **vocabulary_part(config)}}


def _with_floats(value: Any) -> Any:
    """A value of config.json, where transformers writes infinity as a table."""
    if isinstance(value, Mapping):
        whole = {key: _with_floats(each) for key, each in value.items()}
        return float(value["__float__"]) if whole.keys() == {"__float__"} else whole
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def settings_beside(config: Mapping[str, Any], made: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration, to compare with those of another one. `made`: a model of it, perhaps without numbers.

    Some types change their own (BART becomes a decoder), or a file of them is read otherwise (Moshi): any of these values is
    right, and that of `others` is taken if it is one. Of a type of several parts (Llama 4) the text's part alone is saved.
    """
    own: dict[str, Any] = made.config.to_dict()
    part = config["model_type"] != own["model_type"] == others["model_type"]
    settings: dict[str, Any] = own if part else configuration(config).to_dict()
    values = (*own.items(), *configuration(own).to_dict().items())
    return {**settings, **{key: value for key, value in values if value == others.get(key)}}


@contextmanager
def _refusal_of_transformers(where: str) -> Iterator[None]:
    """Raise a ModelError for an error that the library raises for a value that it cannot use."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (*REFUSALS, StrictDataclassError) as error:
        reason = " ".join(
            str(error).partition("Model type should be one of")[0].split()
        )  # it lists 200 names, over lines
        raise ModelError(f"{where}: {type(error).__name__}: {reason}") from error


def _from_config(config: Any) -> nn.Module:
    with many_imports():
        from transformers import AutoModelForCausalLM

    with (
        many_imports(),
        quiet_libraries(),
        _refusal_of_transformers(f"model.config: no causal language model comes from {config.model_type!r}"),
    ):
        model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, trust_remote_code=False
        )
    return model


def _factory_maker(spec: ModelSpec, vocabulary: int | None) -> Callable[[], nn.Module]:
    where = f"model.factory = {spec.factory!r}"
    if (kind := torch.get_default_dtype()) != torch.float32:
        raise ModelError(
            f"{where}: this program has set the default type {kind}, with which the code makes other "
            "parameters and buffers than on other peers: call torch.set_default_dtype(torch.float32) before it joins"
        )
    function = _resolve(str(spec.factory), where)
    try:
        inspect.signature(function).bind(**spec.kwargs)
    except TypeError as error:
        raise ModelError(f"{where}: its arguments do not fit model.kwargs = {dict(spec.kwargs)!r}: {error}") from error
    return lambda: _from_factory(function, spec.kwargs, where, vocabulary)


def _from_factory(
    function: Callable[..., Any], kwargs: Mapping[str, Any], where: str, vocabulary: int | None
) -> nn.Module:
    model = function(**kwargs)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{where}: it returned {type(model).__name__}, expected a torch.nn.Module")
    check_parameters(model, where)
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"{where}: the module has no parameter that is trained")
    if vocabulary is not None and not has_own_loop(
        model
    ):  # a plain module tells its vocabulary only by its answer, here to two tokens
        made = [name for name, _ in model.named_parameters()]
        with torch.no_grad():
            ids = logits_of(model, torch.zeros(1, 2, dtype=torch.int64)).shape[-1]
        if other := sorted({name for name, _ in model.named_parameters()} ^ set(made)):
            raise ModelError(
                f"{where}: its first pass adds, ties or removes the parameter {other[0]!r}: do that where the module is made, "
                "so that each peer knows it from the start"
            )
        if ids < vocabulary:
            raise ModelError(_too_small(f"{where}: logits", ids, vocabulary))
    return model


def check_parameters(model: nn.Module, where: str) -> None:
    """Raises ModelError for a parameter that cannot be voted on or saved: not real numbers of its own, one after the other."""
    known: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"{where}: parameter {name!r} has no shape before the first pass (a lazy module): give its module every size"
            )
        if parameter.is_inference():
            raise ModelError(
                f"{where}: parameter {name!r} was made under torch.inference_mode, and cannot be trained: make it without"
            )
        if not parameter.is_floating_point():
            kind = str(parameter.dtype).removeprefix("torch.")
            mend = "two real ones" if parameter.is_complex() else "a buffer (register_buffer)"
            raise ModelError(f"{where}: parameter {name!r} is of {kind}, expected real numbers; make it {mend}")
        if not parameter.is_contiguous():
            raise ModelError(
                f"{where}: parameter {name!r} of shape {tuple(parameter.shape)} is not contiguous (strides "
                f"{parameter.stride()}): it is transposed, or a view; make it nn.Parameter(tensor.contiguous())"
            )
        if not parameter.numel():
            continue
        store, first = _place(parameter)
        memory = known.setdefault(store, [])
        last = first + parameter.numel() * parameter.element_size()
        for other_first, other_last, other in memory:
            if first < other_last and other_first < last:
                raise ModelError(
                    f"{where}: parameters {other!r} and {name!r} lie in the same memory and are not the same parameter: a step "
                    "would move it twice; use one nn.Parameter in both places, or give each its own tensor"
                )
        memory.append((first, last, name))


def _place(parameter: nn.Parameter) -> tuple[int, int]:
    """Where a parameter lies: a name of its memory, and its first byte. On the meta device, memory has no address."""
    if parameter.is_meta:
        return parameter.untyped_storage()._cdata, int(parameter.storage_offset()) * parameter.element_size()
    return parameter.untyped_storage().data_ptr(), parameter.data_ptr()


def _resolve(factory: str, where: str) -> Callable[..., Any]:
    name, colon, attribute = factory.partition(":")
    if not (name and colon and attribute):
        raise ModelError(f"{where}: expected 'module:function'")
    import_from_working_folder()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ModelError(
                f"{where}: no module {name!r} can be imported; start in its folder, or put that on PYTHONPATH"
            ) from error
        raise ModelError(f"{where}: importing {name!r} failed: it needs {error.name!r}") from error
    function = getattr(module, attribute, None)
    if function is None:
        raise ModelError(f"{where}: module {name!r} has no {attribute!r}")
    if not callable(function):
        raise ModelError(f"{where}: it is a {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]


def _too_small(where: str, ids: int, vocabulary: int) -> str:
    return f"{where} = {ids}: the tokenizer has {vocabulary} ids; raise it to at least {vocabulary}"
