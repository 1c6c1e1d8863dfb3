"""The keys of `[model.config]` that ask for nothing that happens: unknown to the model type, or left out of the training here.

A peer trains the next-token loss alone, with weights in fp32. A key with its type's default value asks for nothing. Refuses
nothing itself: it returns a line for each such key.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from node.imports import many_imports

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
    """A line for each key that would have no effect. The model type is one that transformers knows."""
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
    known = {*fields, *cls.attribute_map, *ANY_TYPE, *_legacy(cls)}
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
        elif key not in known:
            own = sorted({*fields, *cls.attribute_map})
            near = difflib.get_close_matches(key, own, n=3)
            if not near:  # n_layers of one type is num_hidden_layers of another
                near = [name for name in own if _words(key) & _words(name)][:3]
            hint = f"; near it: {', '.join(sorted(near))}" if near else ""
            yield f"{where}: transformers knows no such key of {kind!r}{hint}; correct it or remove it"


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
