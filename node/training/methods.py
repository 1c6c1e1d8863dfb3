"""A run's settings as the optimizers take them: one place that knows which method has which class.

`protos.run_config` has checked the settings. An optimizer refuses settings that it cannot serve.
"""

from __future__ import annotations

from collections.abc import Mapping

from node.optim.base import BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.layout import Layout, Source
from node.optim.local import LocalConfig
from node.optim.paper.demo import PaperConfig, PaperDeMo
from node.optim.paper.form import PaperForm
from node.optim.votes.form import Form
from protos.optimizer_config import OptimizerConfig


def demo_config(optimizer: OptimizerConfig, size: int) -> DeMoConfig:
    """A run's settings as the optimizer takes them; `size` is this peer's group size or k."""
    base, values = optimizer.base, optimizer.values
    assert optimizer.method == "demo" and values != "16bit", "a run of method paper has `paper_config`"  # noqa: PT018
    return DeMoConfig(
        beta=optimizer.beta,
        beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        decay=optimizer.decay,
        clip_norm=None if optimizer.local.steps > 1 else optimizer.clip_norm,  # local steps clip their own gradients
        group_size=size if optimizer.selection == "groups" else optimizer.group_size,
        selection=optimizer.selection,
        top_k=size if optimizer.selection == "topk" else optimizer.top_k,
        values=values,
        transform=optimizer.transform,
        magnitudes=optimizer.magnitudes,
        refused=optimizer.refused,
        base=BaseConfig(base.name, base.momentum, base.nesterov, base.beta1, base.beta2, base.eps, tuple(base.tables)),
    )


def local_config(optimizer: OptimizerConfig) -> LocalConfig:
    """A run's local steps, as `LocalSteps` takes them."""
    local = optimizer.local
    return LocalConfig(local.steps, local.lr, local.beta1, local.beta2, local.weight_decay, optimizer.clip_norm)


def paper_config(optimizer: OptimizerConfig, size: int) -> PaperConfig:
    """The same for method `paper`; `size` is this peer's k."""
    return PaperConfig(
        beta=optimizer.beta,
        weight_decay=optimizer.weight_decay,
        clip_norm=optimizer.clip_norm,
        chunk=optimizer.chunk,
        top_k=size,
        refused=optimizer.refused,
    )


def optimizer_of(
    source: Source, optimizer: OptimizerConfig, size: int, kinds: Mapping[str, str] | None = None
) -> DeMo | PaperDeMo:
    """The optimizer of a run over `source`; `kinds` as `DeMo` takes them."""
    if optimizer.method == "paper":
        return PaperDeMo(source, paper_config(optimizer, size), kinds)
    return DeMo(source, demo_config(optimizer, size), kinds)


def form_of(source: Source, optimizer: OptimizerConfig) -> tuple[Layout, Form]:
    """The layout of a model, which may be on the meta device, and the format of a run's payloads for it."""
    layout, size = Layout.of(source), optimizer.vote_size
    if optimizer.method == "paper":
        return layout, PaperForm.of(source, optimizer.chunk)
    return layout, demo_config(optimizer, size).form
