"""Settings of a run.toml that fit their types, and that no peer could train with: the keys of each, and what to do. Pure.

What needs torch to see is in `swarmentum layout`, which `layout_of_run` asks. Refuses nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from protos.address import parse_address
from protos.errors import Refusal
from protos.limits import SNAPSHOT_PIECE_BYTES, SNAPSHOT_PIECES_MAX
from protos.mistakes import PEER_ADDRESS, Mistake, expected
from protos.optimizer_config import SIZE_KEYS, SIZES
from protos.optimizer_defaults import OF_BASES
from protos.run_config import RunConfig

HEADS: Final = ("num_attention_heads", "n_head")
WIDTHS: Final = ("hidden_size", "n_embd")
POSITIONS: Final = ("max_position_embeddings", "n_positions")
LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PARAMETERS_MAX: Final = SNAPSHOT_PIECES_MAX * SNAPSHOT_PIECE_BYTES // 4
"""A snapshot holds no more numbers of fp32."""
NOT_EVERYWHERE: Final = (".", "~")
"""A path that begins so is another one on each peer."""


def mistakes(config: RunConfig) -> Iterator[Mistake]:
    """All of them."""
    yield from config.misfits()
    yield from _of_schedule(config)
    yield from _without_effect(config)
    if config.admission.mode == "allow_list" and not config.admission.allowed:
        text = "the list is empty, so nobody can join; list peer ids, or take mode open or invite"
        yield Mistake(text, "admission.allowed", "admission.mode")
    for address in config.overlay.bootstrap:
        try:
            parse_address(address)
        except Refusal as refusal:
            yield Mistake(f"{refusal.detail}; {expected(PEER_ADDRESS)}", "overlay.bootstrap")
    yield from _of_paths(config)
    yield from _of_model(config)


def _of_schedule(config: RunConfig) -> Iterator[Mistake]:
    clock, optimizer = config.clock, config.optimizer
    if "warmup_steps" in optimizer.model_fields_set and optimizer.warmup_steps >= clock.steps:
        yield Mistake(
            f"the warm-up of {optimizer.warmup_steps} steps is not shorter than the run of {clock.steps}: the learning rate "
            "never gets to optimizer.lr; lower it, or raise clock.steps",
            "optimizer.warmup_steps",
            "clock.steps",
        )
    decay = optimizer.decay_steps if optimizer.schedule == "wsd" else 0
    if decay and decay + optimizer.warmup_steps > clock.steps:
        yield Mistake(
            f"a decay of {decay} steps and a warm-up of {optimizer.warmup_steps} are longer than the run of {clock.steps}; "
            "lower one of them, or raise clock.steps",
            "optimizer.decay_steps",
            "optimizer.warmup_steps",
            "clock.steps",
        )


def _without_effect(config: RunConfig) -> Iterator[Mistake]:
    """Settings that another one leaves without effect: `optimizer.top_k` alone would train with group votes."""
    own, told = config.optimizer, config.evaluation
    base, local, size = own.base, own.local, SIZE_KEYS.get(own.selection)
    unused: tuple[tuple[Any, str, Iterable[str], str, object], ...] = (
        (own, "optimizer", SIZES.keys() - {size}, "selection", own.selection),
        (own, "optimizer", ["decay_steps"] if own.schedule != "wsd" else [], "schedule", own.schedule),
        (own, "optimizer", ["clip_norm"] if own.beta2 else [], "beta2", own.beta2),
        (base, "optimizer.base", [key for key, of in OF_BASES.items() if base.name not in of], "name", base.name),
        (local, "optimizer.local", type(local).model_fields.keys() - {"steps"} if local.steps == 1 else [], "steps", 1),
        (told, "evaluation", ["samples", "sample_tokens", "prompt"] if not told.every else [], "every", 0),
        (told, "evaluation", ["prompt"] if told.every and not told.sample_tokens else [], "sample_tokens", 0),
    )
    for section, place, keys, other, value in unused:
        for key in sorted(section.model_fields_set & set(keys)):
            if getattr(section, key) != type(section).model_fields[key].default:
                yield Mistake(
                    f"it has no effect with {place}.{other} = {json.dumps(value)}: remove it, or set that one, too",
                    f"{place}.{key}",
                    f"{place}.{other}",
                )


def _of_paths(config: RunConfig) -> Iterator[Mistake]:
    """Paths that mean another place on each peer, or that are not there."""
    data = config.data
    for source, _, _ in data.sources():
        if source.startswith(NOT_EVERYWHERE):
            yield Mistake(
                f"{source!r} is another place on each peer: give a whole path that all peers have, or the address of token "
                "shards (`swarmentum data build`)",
                "data.mix" if data.mix else "data.source",
            )
    if data.tokenizer.startswith(NOT_EVERYWHERE):
        text = f"{data.tokenizer!r} is another place on each peer: give a name of the hub, or a whole path that all peers have"
        yield Mistake(text, "data.tokenizer")
    elif data.tokenizer.startswith("/") and not Path(data.tokenizer).exists():
        text = f"there is no {data.tokenizer} on this machine; give 'bytes', a name of the hub, or a folder with a tokenizer"
        yield Mistake(text, "data.tokenizer")


def _of_model(config: RunConfig) -> Iterator[Mistake]:
    """Mistakes in the numbers of a model's config, as far as they show without torch."""
    model, place = config.model.config, "model.config"
    if model is None:
        return
    if "model_type" not in model:
        yield Mistake("model_type is missing: name a transformers model type, for example model_type = 'llama'", place)
    found = {name: _number(model, names) for name, names in (("heads", HEADS), ("width", WIDTHS), ("most", POSITIONS))}
    for name, (key, value) in found.items():
        if value is not None and value <= 0:
            yield Mistake(f"{value} {name}: expected a positive number", f"{place}.{key}")
            return
    yield from _of_size(model)
    (heads_key, heads), (width_key, width), (most_key, most) = found["heads"], found["width"], found["most"]
    if heads and width and "head_dim" not in model and width % heads:
        near = max(width // heads, 1) * heads
        text = f"{width} is not a multiple of {heads} heads; take {near} or {near + heads}"
        yield Mistake(text, f"{place}.{width_key}", f"{place}.{heads_key}")
    if most is not None and most < config.data.context:
        yield Mistake(
            f"samples have {config.data.context} tokens; raise it to {config.data.context}, or lower data.context to {most}",
            f"{place}.{most_key}",
            "data.context",
        )


def _of_size(model: dict[str, Any]) -> Iterator[Mistake]:
    """A model of more numbers than a snapshot holds, counted without building it: two square matrices a layer, and a table."""
    (key, width), (layers_key, layers) = _number(model, WIDTHS), _number(model, LAYERS)
    _, vocabulary = _number(model, ("vocab_size",))
    if width is None:
        return
    square = 0 if "head_dim" in model else 2 * width * width
    count = width * (vocabulary or 0) + (layers or 1) * square
    if count > PARAMETERS_MAX:
        text = f"{width} makes a model of over {count:.1g} parameters, and a run's snapshots hold {PARAMETERS_MAX:,} at most"
        yield Mistake(f"{text}; lower it, or the layers", f"model.config.{key}", f"model.config.{layers_key}")


def _number(model: dict[str, Any], names: tuple[str, ...]) -> tuple[str, int | None]:
    """The first of these keys that the model has, with its value if that is a whole number."""
    key = next((name for name in names if name in model), names[0])
    value = model.get(key)
    return key, value if isinstance(value, int) and not isinstance(value, bool) else None
