"""A small copy of a transformers configuration: the same model type, few layers, few heads, narrow.

A run's mistakes are those of its type, so that a copy of some hundred thousand numbers shows them in a second. Refuses nothing:
the caller finds a copy that its type cannot build; `copies` gives less and less changed ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import nn

LAYERS: Final = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_decoder_layers", "num_encoder_layers", "num_blocks"),
)  # fmt: skip
WIDTHS: Final = ("hidden_size", "n_embd", "d_model", "emb_dim", "dim")
HEADS: Final = (
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
)  # fmt: skip
KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
INNER: Final = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
    "d_inner",
    "decoder_ffn_dim",
    "encoder_ffn_dim",
)
INNER_MORE: Final = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size_mlp",
    "shared_intermediate_size",
)
ROTATED: Final = ("rotary_dim",)
HEADS_MAX: Final = 4
HEAD_WIDTH_MAX: Final = 32
LAYERS_MIN: Final = 2
LAYERS_MAX: Final = 8
PATTERN: Final = "attention_types"
EXPERTS_MAX: Final = 16
INNER_MAX: Final = 256
VOCABULARIES: Final = ("vocab_size", "vocab_size_per_layer_input")
SCAN_MAX: Final = 32


def whole_copies(
    config: Mapping[str, Any],
    made: Any,
    vocabulary: int,
    build: Callable[[Mapping[str, Any]], nn.Module | None],
    parameters_max: int,
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Copies that can be built, each with the classes of modules that the whole model has and the copy has not.

    Those without a loss come first: the experts of DeepSeek-V3 begin behind three layers, and Jamba's attention in the fifth.
    `build`: a model without its numbers, or None for a copy that its type refuses.
    """
    whole, lossy = _classes(build(config)), list[tuple[dict[str, Any], list[str]]]()
    for least in (LAYERS_MIN, LAYERS_MAX):
        for copy in copies(config, made, vocabulary, least):
            model = build(copy)
            if model is None or not 0 < sum(p.numel() for p in model.parameters() if p.requires_grad) <= parameters_max:
                continue
            if lost := sorted(whole - _classes(model)):
                lossy.append((copy, lost))
            else:
                yield copy, []
    yield from sorted(lossy, key=lambda found: len(found[1]))


def _classes(model: nn.Module | None) -> set[str]:
    return set() if model is None else {type(part).__name__ for part in model.modules()}


def copies(
    config: Mapping[str, Any], made: Any, vocabulary: int, layers_min: int = LAYERS_MIN
) -> Iterator[dict[str, Any]]:
    """Copies of a configuration, the smallest first, the same at the end. `made`: transformers' own object of it.

    `vocabulary`: ids of the tokenizer, which a copy keeps. `layers_min`: if the model has so many.
    """
    nested = "text_config" if "text_config" in getattr(type(made), "sub_configs", {}) else ""
    text = made.get_text_config() if nested else made
    given = dict(config.get(nested) or {}) if nested else dict(config)
    layers = _layers(text, given, layers_min)
    for change in (
        {**layers, **_widths(text), **_experts(text), **_words(text, vocabulary)},
        {**layers, **_widths(text), **_experts(text)},
        {**layers, **_less(text, (*INNER, *INNER_MORE), INNER_MAX), **_experts(text)},
        layers,
        {},
    ):
        changed = {**given, **{_spelt(given, type(text), key): value for key, value in change.items()}}
        yield {**config, nested: changed} if nested else changed


def _spelt(given: Mapping[str, Any], cls: Any, key: str) -> str:
    """A key as the run spells it: a type may know two names of one value."""
    return next((own for own, name in cls.attribute_map.items() if name == key and own in given), key)


def _fields(made: Any) -> dict[str, Any]:
    """The values by their fields, some under another name. A configuration that differs by layer refuses to say some."""
    values, other = vars(made), type(made).attribute_map
    return {key.name: values.get(key.name, values.get(other.get(key.name))) for key in dataclasses.fields(made)}


def _count(fields: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """The whole positive numbers of a configuration under these names."""
    found = {name: fields[name] for name in names if name in fields}
    return {name: value for name, value in found.items() if type(value) is int and value > 0}


def _layers(made: Any, given: Mapping[str, Any], layers_min: int) -> dict[str, Any]:
    """As many layers as have each kind once; lists with a place for each layer are cut with them."""
    fields = _fields(made)
    change: dict[str, Any] = {}
    if pattern := fields.get(PATTERN):  # of GPT-Neo: rows of kinds, and how often each row comes
        change[PATTERN] = [[list(pattern[0][0]), 1]]
        layers_min = len(pattern[0][0])
    for name, value in _count(fields, LAYERS).items():
        few = min(value, max(layers_min, _kinds(fields, value)))
        change[name] = few
        rows = {**fields, **given}
        change |= {
            key: list(row)[:few] for key, row in rows.items() if isinstance(row, (list, tuple)) and len(row) == value
        }
    return change


def _kinds(fields: Mapping[str, Any], layers: int) -> int:
    """The shortest beginning of the layers that has every kind of layer, within LAYERS_MAX."""
    most = 0
    for row in fields.values():
        if isinstance(row, (list, tuple)) and len(row) == layers and all(isinstance(kind, (str, int)) for kind in row):
            most = max(most, *(list(row).index(kind) + 1 for kind in set(row)))
    return min(most, LAYERS_MAX)


def _widths(made: Any) -> dict[str, Any]:
    """Few heads, and a width for them. A group of heads that shares keys and values stays such a group."""
    fields = _fields(made)
    width, heads, own = (_count(fields, names) for names in (WIDTHS, HEADS, ("head_dim", "qk_nope_head_dim")))
    if not width or not heads:
        few_wide = {name: min(value, HEADS_MAX * HEAD_WIDTH_MAX) for name, value in width.items()}
        return {**few_wide, **_less(made, (*INNER, *INNER_MORE), INNER_MAX)}
    wide, many = next(iter(width.values())), next(iter(heads.values()))
    few, each = min(many, HEADS_MAX), next(iter(own.values()), wide // many)
    change: dict[str, Any] = dict.fromkeys(heads, few)
    for name, value in _count(fields, KV_HEADS).items():
        change[name] = few if value >= many else min(value, max(few // 2, 1)) if value > 1 else 1
    narrow = few * min(each, HEAD_WIDTH_MAX)
    spread = next(iter(_count(fields, ("expand", "mamba_expand")).values()), 0)
    if "expand" in fields and spread:
        narrow = few * each // spread
    change |= _scans(fields, narrow * spread)
    if own.get("head_dim") == wide // many:
        change["head_dim"] = min(each, HEAD_WIDTH_MAX)
    for name, value in _count(fields, ROTATED).items():
        change[name] = min(value, HEAD_WIDTH_MAX // 2 if each > HEAD_WIDTH_MAX else each)
    if narrow < wide:
        change |= dict.fromkeys(width, narrow)
    return {**change, **_less(made, (*INNER, *INNER_MORE), INNER_MAX)}


def _scans(fields: Mapping[str, Any], inner: int) -> dict[str, int]:
    """Of state space layers: one group, short pieces, and as many heads as fill the inner width."""
    change = dict.fromkeys(_count(fields, ("n_groups", "mamba_n_groups")), 1)
    change |= {name: min(value, SCAN_MAX) for name, value in _count(fields, ("chunk_size", "mamba_chunk_size")).items()}
    each = fields.get("mamba_d_head")
    if inner and isinstance(each, int) and "mamba_n_heads" in fields:
        change["mamba_n_heads"] = max(inner // each, 1)
    return change


def _less(made: Any, names: tuple[str, ...], most: int) -> dict[str, int]:
    return {name: min(value, most) for name, value in _count(_fields(made), names).items()}


def _experts(made: Any) -> dict[str, int]:
    """Fewer experts, under whatever name, and narrower low-rank projections."""
    fields = _fields(made)
    named = tuple(name for name in fields if "expert" in name and "size" not in name)
    ranks = tuple(name for name in fields if name.endswith("_lora_rank"))
    return {**_less(made, named, EXPERTS_MAX), **_less(made, ranks, HEADS_MAX * HEAD_WIDTH_MAX)}


def _words(made: Any, vocabulary: int) -> dict[str, int]:
    """A vocabulary for the tokenizer's ids alone; padding beyond them becomes the first of them."""
    fields = _fields(made)
    change = {name: min(value, vocabulary) for name, value in _count(fields, VOCABULARIES).items()}
    padding = fields.get("pad_token_id")
    return {**change, "pad_token_id": 0} if isinstance(padding, int) and padding >= vocabulary else change
