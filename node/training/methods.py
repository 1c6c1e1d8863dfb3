"""A run's settings as the optimizers take them: one place that knows which method has which class.

`protos.run_config` has checked the settings. An optimizer refuses settings that it cannot serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from node.optim.base import BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.layout import Layout, Source
from node.optim.local import LocalConfig
from node.optim.paper.coefficient_payload import PaperForm
from node.optim.paper.demo import PaperConfig, PaperDeMo
from node.optim.votes.form import Form
from protos.optimizer_config import SIZE_KEYS, OptimizerConfig, Section


def demo_config(optimizer: OptimizerConfig, size: int, run_id: bytes, author: bytes = b"") -> DeMoConfig:
    """A run's settings as the optimizer takes them; `size` is this peer's group size, k or `one_in`.

    Places that no peer chooses follow from `run_id`, and with selection independent from this peer's public key `author`.
    """
    base = optimizer.base
    assert optimizer.method == "demo" and optimizer.values != "16bit", "a run of method paper has `paper_config`"  # noqa: PT018
    own = {
        "clip_norm": None if optimizer.local.steps > 1 else optimizer.clip_norm,  # local steps clip their own gradients
        "seed": run_id,
        "author": author if optimizer.selection == "independent" else b"",
        "base": BaseConfig(**base.model_dump(exclude={"tables"}), muon_except=tuple(base.tables)),
        **_size(optimizer.selection, size),
    }
    return DeMoConfig(**{**_shared(optimizer, DeMoConfig), **own})


def _shared(section: Section, config: Any) -> dict[str, Any]:
    """The settings that a section of run.toml and an optimizer's own configuration have in common."""
    return {it.name: getattr(section, it.name) for it in fields(config) if it.name in type(section).model_fields}


def _size(selection: str, size: int) -> dict[str, int]:
    """A peer's own size, under the key that the selection has; `full` has none."""
    return {SIZE_KEYS[selection]: size} if selection in SIZE_KEYS else {}


def local_config(optimizer: OptimizerConfig) -> LocalConfig:
    """A run's local steps, as `LocalSteps` takes them."""
    return LocalConfig(**_shared(optimizer.local, LocalConfig), clip_norm=optimizer.clip_norm)


def paper_config(optimizer: OptimizerConfig, size: int) -> PaperConfig:
    """The same for method `paper`; `size` is this peer's k."""
    return PaperConfig(**{**_shared(optimizer, PaperConfig), "top_k": size})


def optimizer_of(
    source: Source, optimizer: OptimizerConfig, size: int, run_id: bytes, kinds: Mapping[str, str] | None = None
) -> DeMo | PaperDeMo:
    """The optimizer of a run over `source`; `kinds` as `DeMo` takes them."""
    if optimizer.method == "paper":
        return PaperDeMo(source, paper_config(optimizer, size), kinds)
    return DeMo(source, demo_config(optimizer, size, run_id), kinds)


def form_of(source: Source, optimizer: OptimizerConfig) -> tuple[Layout, Form]:
    """The layout of a model, which may be on the meta device, and the format of a run's payloads for it."""
    layout, size = Layout.of(source), optimizer.vote_size
    if optimizer.method == "paper":
        return layout, PaperForm.of(source, optimizer.chunk)
    return layout, demo_config(optimizer, size, b"").form  # a format has no seed
