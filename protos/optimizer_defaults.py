"""The defaults of `[optimizer]` that follow from other settings: the paper's, a recipe's, and the default base with its rate.

Pure functions of what a person wrote; `protos/optimizer_config.py` checks the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protos.limits import PAYLOADS_GB, PERIODS_KEPT

PAPER_SETS: dict[str, Any] = {"beta": 0.999, "beta2": 0.0, "selection": "topk", "values": "16bit"}
"""Defaults of `optimizer` with `method = "paper"`, if they differ from those of `demo`: the published ones."""

OF_BASES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("momentum", "nesterov"), ("sgd", "muon")),
    **dict.fromkeys(("beta1", "beta2", "eps"), ("adamw",)),
}
"""Settings of `[optimizer.base]`, and the bases that use them; one of a program's own may use all."""

DEFAULT_BASE: dict[str, Any] = {"name": "muon", "block": 64, "iterations": 2}
"""The base of `optimizer` where peers vote on gradients and it is not set: it learns best at its bytes (docs/benchmarks.md)."""

MUON_LR, MUON_LR_PARAMETERS, MUON_LR_POWER = 4e-3, 900_000, 0.4
"""The default of `lr` with base muon, best of 2e-3, 4e-3 and 8e-3 with so many parameters. With more it falls as AdamW's does,
whose updates have the same size: this power fits GPT-3's table of 0.1 to 7 B (arXiv 2005.14165, table 2.1)."""

MUON_LR_TOKENS, MUON_LR_TOKENS_MAX, MUON_LR_TOKENS_POWER = 1024, 16_384, 0.2
"""So many tokens a step that rate is for. With more it rises. The best of the rates tried, each with one seed: 24 M parameters
1e-3 at 512 tokens (200 steps) and 2e-3 at 16,384, AdamW 5e-4 and 1e-3; 0.7 M 4e-3 at 1,024 and 8e-3 at 8,192
(docs/benchmarks.md). Beyond the most that was measured it stays."""

RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "diloco-demo": {
        "lr": 0.7,
        "beta": 0.95,
        "beta2": 0.0,
        "nesterov": 0.9,
        "selection": "topk",
        "top_k": 640,
        "values": "8bit",
        "magnitudes": True,
        "base": {"name": "sgd"},
        "local": {"steps": 30, "lr": 4e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1},
    },
    "sparseloco": {
        "lr": 1.0,
        "beta": 0.95,
        "beta2": 0.0,
        "selection": "topk",
        "top_k": 64,
        "values": "2bit",
        "transform": "identity",
        "magnitudes": True,
        "base": {"name": "sgd"},
        "local": {"steps": 15, "lr": 4e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1},
    },
}
"""Settings of `optimizer` that a recipe has unless they are set; docs/optimizers.md says which of the numbers are published."""


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the defaults of the method or recipe in place of those that are not given."""
    if values.get("method") == "paper":
        values = {**PAPER_SETS, **values}
    sets = RECIPES.get(str(values.get("recipe", "none")), {})
    if not sets and _has_default_base(values):
        values = {**values, "base": {**DEFAULT_BASE, **(values.get("base") or {})}}
    if not sets and "lr" not in values and _is_muon(values.get("base")):
        values = {"lr": MUON_LR, **values}
    return {key: _over(sets.get(key), values.get(key)) for key in {**sets, **values}}


def muon_lr(parameters: int, tokens: int) -> float:
    """The default of `lr` with base muon for a model of so many parameters and so many tokens a step, in two digits."""
    size = min(1.0, (MUON_LR_PARAMETERS / max(parameters, 1)) ** MUON_LR_POWER)
    batch = max(1.0, min(tokens, MUON_LR_TOKENS_MAX) / MUON_LR_TOKENS) ** MUON_LR_TOKENS_POWER
    return float(f"{MUON_LR * size * batch:.1e}")


def _has_default_base(values: dict[str, Any]) -> bool:
    """Whether settings whose base has no name get `DEFAULT_BASE`: not those of methods that need another one."""
    local = values.get("local")
    steps = local.get("steps", 1) if isinstance(local, dict) else getattr(local, "steps", 1)
    other = values.get("method") == "paper" or values.get("magnitudes") or steps != 1
    base = values.get("base", {})
    return isinstance(base, dict) and "name" not in base and not other


def _is_muon(base: Any) -> bool:
    name = base.get("name") if isinstance(base, dict) else getattr(base, "name", base)
    return name == "muon"


def _over(default: Any, given: Any) -> Any:
    """A setting that is given, or else the recipe's; of a table key by key."""
    if isinstance(default, dict) and isinstance(given, dict):
        return {**default, **given}
    return default if given is None else given


GROWTH_MAX = 5
"""A payload has at most so many times the bytes of the run's own size, as group size 16 has to 128 (8: 0 to 0.9 % better)."""


def most_bytes(payload_bytes: int, selection: str, snapshot_every: int, peers: int) -> int:
    """Bytes of the largest payload that follows the lines (`vote_size`); `payload_bytes`: of the run's own size.

    The votes that joiners need must fit into the room of each peer: a step in which few `peers` vote has room for larger
    votes. At places that nobody sends, sums are as long as the largest votes.
    """
    if selection not in ("groups", "topk"):
        return payload_bytes
    room = int(PAYLOADS_GB * 10**9 / (PERIODS_KEPT * snapshot_every * peers))
    return max(payload_bytes, min(GROWTH_MAX * payload_bytes, room))
