"""A dry run of a run's model before anybody downloads anything: a few passes of a small copy, or of the model if it is small.

Raises ModelError for a model that no run should train, a line for each fault. Refuses to call a model sound that it did not
run: `untried` says why.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from node.imports import many_imports
from node.model.examine import Examination, examine, statistics_note
from node.model.other_process import compare_elsewhere, sums_of
from node.model.passes import FAILURES, PassError
from node.model.shrunken import whole_copies
from node.model.spec import (
    REFUSALS,
    SMALL_LLAMA,
    ModelError,
    ModelSpec,
    build,
    build_meta,
    configuration,
    has_own_loop,
    parameter_count,
)

PLACE: Final = "model.config"
ANY_TYPE: Final = frozenset(
    {
        "model_type",
        "attn_implementation",
        "_attn_implementation",
        "experts_implementation",
        "output_attentions",
        "dtype",
    }
    | {"torch_dtype", "num_labels", "_name_or_path", "name_or_path", "_commit_hash"}
)
"""Keys that every configuration takes, besides its own fields."""
FULL: Final = ("float32", "torch.float32", "fp32")
ALONE: Final = "the training here has the next-token loss alone"

LEFT_OUT: Final[tuple[tuple[str, str], ...]] = (
    (r"output_router_logits", f"{ALONE}, without a loss of the router: remove it"),
    (
        r"\w*(aux_loss|z_loss|balanc\w*_loss|loss_coef|loss_weight|loss_scal|loss_factor)\w*",
        f"{ALONE}, and leaves this term out: remove the key, or set it to 0",
    ),
    (r"\w*label_smooth\w*", f"{ALONE}, without smoothing: remove it"),
    (r"loss_type|loss_function|loss_fn|loss_reduction", f"{ALONE}: remove it"),
    (
        r"\w*nextn_predict\w*|\w*mtp_(num_)?(hidden_)?layers|mtp_num_layers|num_mtp\w*",
        f"{ALONE}, and trains no layers that predict further tokens: set it to 0, or remove it",
    ),
    (r"quantization_config|quantization", "a run trains whole numbers in fp32: remove it, and quantize the export"),
    (
        r"\w*gradient_checkpointing\w*|activation_checkpointing",
        "each peer chooses this for itself: remove it, and join with --set activation_checkpointing=true",
    ),
    (
        r"problem_type|num_labels|id2label|label2id|classifier_\w+|finetuning_task",
        "it belongs to a classifier, and a run trains a language model: remove it",
    ),
    (
        r"auto_map|trust_remote_code|custom_pipelines",
        "a run runs no code of the hub: remove it, or write a model.factory",
    ),
    (r"is_encoder_decoder", "a run trains a decoder alone: remove it"),
)


def idle_keys(config: Mapping[str, Any]) -> list[str]:
    """A line for each key that asks for nothing that happens: unknown to the model type, or left out of the training here.

    A peer trains the next-token loss alone, with weights in fp32. A key with its type's default value asks for nothing. The
    model type is one that transformers knows.
    """
    with many_imports():
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    kind = str(config["model_type"])
    lines = list(_of(config, CONFIG_MAPPING[kind], PLACE, kind))
    named, ours = config.get("architectures"), CAUSAL.get(kind)
    if named and ours is not None and ours not in named:
        lines.append(f"{PLACE}.architectures = {named!r}: a run trains {ours}: remove the key")
    return lines


def _of(config: Mapping[str, Any], cls: Any, place: str, kind: str) -> Iterator[str]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    known = {*fields, *cls.attribute_map, *cls.attribute_map.values(), *ANY_TYPE, *_legacy(cls)}
    for key, value in config.items():
        where = f"{place}.{key} = {_shown(value)}"
        inner = cls.sub_configs.get(key)
        if isinstance(value, Mapping) and inner is not None and dataclasses.is_dataclass(inner):
            yield from _of(value, inner, f"{place}.{key}", kind)
        elif key in ("dtype", "torch_dtype"):
            if str(value) not in FULL:
                yield f"{where}: a run's weights are fp32: remove it; each peer chooses how it computes (`precision`)"
        elif why := _left_out(key, value, fields.get(str(cls.attribute_map.get(key, key)))):
            yield f"{where}: {why}"
        elif key not in known and not _is_asked(kind, key):
            own = sorted({*fields, *cls.attribute_map})
            near = difflib.get_close_matches(key, own, n=3)
            if not near:  # n_layers of one type is num_hidden_layers of another
                near = [name for name in own if _words(key) & _words(name)][:3]
            hint = f"; near it: {', '.join(sorted(near))}" if near else ""
            yield f"{where}: transformers knows no such key of {kind!r}{hint}; correct it or remove it"


def _is_asked(kind: str, key: str) -> bool:
    """Whether the code of a model type asks its configuration for a key that no field declares, as Qwen3-MoE's for head_dim."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    with many_imports():
        model = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)
    code = "" if model is None else inspect.getsource(sys.modules[model.__module__])
    return re.search(rf'getattr\((self\.)?config, "{re.escape(key)}"', code) is not None


def _words(key: str) -> set[str]:
    """The words of a key that say what it is of, in the singular."""
    return {word.rstrip("s") for word in key.split("_") if len(word) > 3}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _left_out(key: str, value: object, field: Any) -> str:
    """Why a key asks for what is left out; empty if it does not. No, nothing and the default ask for nothing."""
    if not value or (field is not None and value == field.default):
        return ""
    return next((why for pattern, why in LEFT_OUT if re.fullmatch(pattern, key)), "")


def _legacy(cls: Any) -> set[str]:
    """Names that a configuration reads from its other arguments: spellings of earlier versions."""
    found: set[str] = set()
    for base in cls.__mro__:
        for name in ("__post_init__", *(("convert_rope_params_to_dict",) if "rope_parameters" in _names(cls) else ())):
            code = getattr(vars(base).get(name), "__code__", None)
            found |= {
                text for text in (code.co_consts if code else ()) if isinstance(text, str) and text.isidentifier()
            }
    return found


def _names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


WHOLE_MAX: Final = 4_000_000
"""A model of fewer parameters is run as it is."""
COPY_MAX: Final = 100_000_000
FACTORY_MAX: Final = 200_000_000
"""Parameters of a model that is built to be run; code has no small copy."""
SEED: Final = 0
BYTES_VOCABULARY: Final = 256
"""Of a tokenizer of bytes, of which none is padding."""
CAUSAL_KEYS: Final = ("is_decoder", "causal", "is_causal")


@dataclass(frozen=True)
class DryRun:
    """`untried`: why the model was not run, or empty. `spec`: of what was run, and `loss`: of its fixed batch, in nats."""

    untried: str = ""
    notes: tuple[str, ...] = ()
    spec: ModelSpec | None = None
    model: nn.Module | None = None
    loss: float | None = None


def dry_run(
    spec: ModelSpec,
    vocabulary: int,
    context: int,
    export: Callable[[ModelSpec, nn.Module], Sequence[str]] | None = None,
) -> DryRun:
    """Run a run's model. `export`: tries an export of what was run; notes on it, or OperatorError. Raises ModelError."""
    done = _of_factory(spec, vocabulary, context) if spec.factory else _of_config(spec, vocabulary, context)
    if done.model is not None and done.spec is not None and export is not None:
        return dataclasses.replace(done, notes=(*done.notes, *export(done.spec, done.model)))
    return done


def check_keys(spec: ModelSpec) -> None:
    """Raises ModelError for keys of a configuration that ask for what is not done. Builds nothing."""
    if spec.config is not None:
        configuration(spec.config)
        if lines := idle_keys(spec.config):
            raise ModelError("\n".join(lines))


def shapes_of(spec: ModelSpec, *, vocabulary: int, context: int) -> nn.Module:
    """The model without its numbers, or with them if its code cannot be built without. Raises ModelError, MemoryError."""
    try:
        return build_meta(spec, vocabulary=vocabulary, context=context)
    except ModelError:
        raise
    except FAILURES as error:
        if spec.factory is None:
            raise ModelError(f"model.config: it cannot be built: {type(error).__name__}: {error}") from error
    try:
        return build(spec, SEED, vocabulary=vocabulary, context=context)
    except ModelError:
        raise
    except FAILURES as error:
        what = " ".join(str(error).split())
        raise ModelError(f"{_place(spec)}: building it fails: {type(error).__name__}: {what}") from error


def reference_loss(spec: ModelSpec, vocabulary: int, context: int) -> float:
    """The loss of the fixed batch of a model that `dry_run` ran elsewhere. Raises ModelError."""
    with _named(_place(spec)):
        return examine(build(spec, SEED), vocabulary, context, mend_causality="", own_code=False, only_loss=True).loss


def _place(spec: ModelSpec) -> str:
    return f"model.factory = {spec.factory!r}" if spec.factory else "model.config"


def _sound(found: Examination, where: str) -> None:
    if found.faults:
        raise ModelError("\n".join(f"{where}: {line}" for line in found.faults))


class _Named:
    """Names the place of an error of a pass."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PassError):
            raise ModelError(f"{self._where}: {error}") from error


def _named(where: str) -> _Named:
    return _Named(where)


# ---- a transformers type -----------------------------------------------------------------------------------------------


def _of_config(spec: ModelSpec, vocabulary: int, context: int) -> DryRun:
    config = dict(SMALL_LLAMA if spec.config is None else spec.config)
    made = configuration(config)
    check_keys(ModelSpec(config))
    failed = ""
    for copy, lost in _candidates(config, made, vocabulary):
        tried = ModelSpec(copy)
        try:
            model = build(tried, SEED)
            found = examine(model, vocabulary, context, mend_causality=_mend_causality(made), own_code=False)
        except (ModelError, PassError) as error:
            if copy == config:
                raise ModelError(
                    f"model.config: {error}".replace("model.config: model.config", "model.config")
                ) from error
            failed = failed or str(error)
            continue
        _sound(found, "model.config")
        padding = getattr(made.get_text_config(), "pad_token_id", None)  # of the run's model: a copy has another one
        left = (f"model.config: the small copy that was run has no {', '.join(lost[:3])}",) if lost else ()
        return DryRun("", (*_notes(model, padding, vocabulary), *found.notes, *left), tried, model, found.loss)
    why = (
        f"a small copy of {config['model_type']!r} does not work ({failed})"
        if failed
        else "a small copy is still large"
    )
    return DryRun(f"{why}, and the whole has more than {COPY_MAX // 10**6} million parameters")


def _candidates(config: Mapping[str, Any], made: Any, vocabulary: int) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """What to run, the best first: the model itself if it is small; else copies, with what each of them lacks."""
    model = _unfilled(config)
    if model is not None and 0 < parameter_count(model) <= WHOLE_MAX:
        yield dict(config), []
        return
    yield from whole_copies(config, made, vocabulary, _unfilled, COPY_MAX)


def _unfilled(config: Mapping[str, Any]) -> nn.Module | None:
    """A model without its numbers; None for a copy that its type refuses."""
    try:
        return build_meta(ModelSpec(config))
    except (ModelError, *FAILURES):
        return None


def _mend_causality(made: Any) -> str:
    for key in CAUSAL_KEYS:
        if getattr(made, key, None) is False:
            return f"set {key} = true in [model.config], or take a causal model type, for example 'llama' or 'gpt2'"
    return "take a causal model type, for example 'llama' or 'gpt2'"


def _notes(model: nn.Module, padding: int | None, vocabulary: int) -> Iterator[str]:
    """What a person may not know of a configuration that is sound."""
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    table = None if embeddings is None else embeddings()
    if (
        getattr(table, "padding_idx", None) is not None
        and padding is not None
        and 0 <= padding < vocabulary <= BYTES_VOCABULARY
    ):
        yield f"model.config.pad_token_id is {padding}, a plain byte here: the model does not train this byte's embedding"


# ---- a module of a person's own ----------------------------------------------------------------------------------------


def _of_factory(spec: ModelSpec, vocabulary: int, context: int) -> DryRun:
    where = _place(spec)
    raw = _unbuilt(spec, where)
    if raw is not None:
        _of_kinds(raw, where)
        if (count := parameter_count(raw)) > FACTORY_MAX:
            return DryRun(f"it has {count:,} parameters, too many to run it here")
    try:
        one, other = (build(spec, SEED, vocabulary=vocabulary) for _ in range(2))
    except MemoryError:
        return DryRun("there is no memory to build it here")
    except ModelError:
        raise
    except FAILURES as error:
        what = " ".join(str(error).split())
        raise ModelError(f"{where}: building it fails: {type(error).__name__}: {what}") from error
    if differing := _differing(one, other):
        raise ModelError(
            f"{where}: {differing!r} has other numbers in each build from the same seed: draw from torch's random numbers "
            "alone, so that each peer builds the same"
        )
    del one, other
    one = build(spec, SEED)  # those before had a pass, which may change what a model keeps for itself
    sums = sums_of(one)
    if has_own_loop(one):
        unchecked = "model: its peers train it with loops of their own (own_loop), so its answers are not checked"
        return DryRun(notes=(unchecked, *statistics_note(one), *_elsewhere(spec, sums, where)))
    mend = "mask the attention (is_causal=True), pad convolutions on the left, and take no statistics over positions"
    with _named(where):
        found = examine(one, vocabulary, context, mend_causality=mend, own_code=True)
    _sound(found, where)
    one.zero_grad(set_to_none=True)  # other processes need the memory
    return DryRun("", (*found.notes, *_elsewhere(spec, sums, where)), spec, one, found.loss)


def _elsewhere(spec: ModelSpec, sums: dict[str, list[float]], where: str) -> tuple[str, ...]:
    """A note if other processes could not build it. Raises ModelError if their numbers are others."""
    said = compare_elsewhere(spec, SEED, sums, where)
    return (said,) if said else ()


def _unbuilt(spec: ModelSpec, where: str) -> nn.Module | None:
    """The module on the meta device, before its parameters become fp32; None if it needs numbers to be built."""
    try:
        return build_meta(spec)
    except ModelError:
        raise
    except REFUSALS:
        return None


def _of_kinds(model: nn.Module, where: str) -> None:
    """Raises ModelError for parameters that are not fp32: a run makes them fp32, which the code may not expect."""
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ModelError(
                f"{where}: parameter {name!r} is {kind}, and a run's weights are fp32: build it in fp32; each peer chooses how "
                "it computes with --set precision=..."
            )


def _differing(one: nn.Module, other: nn.Module) -> str:
    """The name of a tensor that differs between two builds; empty if none does."""
    tensors: dict[str, Tensor] = dict((*other.named_parameters(), *other.named_buffers()))
    for name, tensor in (*one.named_parameters(), *one.named_buffers()):
        if not torch.equal(tensor.nan_to_num(), tensors[name].nan_to_num()):
            return name
    return ""
