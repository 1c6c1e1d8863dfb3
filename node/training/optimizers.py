"""The optimizer of a replica, as the training calls it: DeMo or the papers' method on one device, or over a peer's ranks.

One place knows which method has which class, and gives it the run's settings, which `protos.run_config` has checked.

Refuses to know the log: `replica.py` says which votes are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any, Protocol

from torch import Tensor, nn

from node.optim.base import BaseConfig
from node.optim.coefficient_payload import PaperForm
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.layout import Layout, Source
from node.optim.local import LocalConfig
from node.optim.paper_demo import PaperConfig, PaperDeMo
from node.optim.second_moment import Kind
from node.optim.spread import Pieces
from node.optim.step import Contributions, Votes
from node.optim.votes.payload import Form
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


class Optimizer(Protocol):
    """The optimizer of a replica: `OwnDeMo` on one device, `node.ranks.lead.LedDeMo` over all ranks of a peer."""

    size: int

    @property
    def config(self) -> DeMoConfig | PaperConfig: ...
    @property
    def form(self) -> Form: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def pending(self) -> bool: ...
    @property
    def open_votes(self) -> Votes | None: ...
    @property
    def base_state(self) -> Mapping[str, Tensor | Pieces]: ...
    def propose(self, lr: float, step: int | None = None) -> Votes: ...
    def settle(self, accepted: bool) -> None: ...
    def apply(
        self, contributions: Contributions, lr: float, step: int | None = None, authors: Sequence[bytes] = ()
    ) -> None: ...
    def ahead(self, lr: float) -> AbstractContextManager[None]: ...
    def state_digest(self, step: int | None, all_in: int = 0) -> bytes: ...
    def whole_gradients(self) -> list[Tensor | None]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Own:
    """The calls of a replica on one device to its optimizer, beside the steps."""

    parameters: list[Tensor]

    @property
    def replicated(self) -> list[Tensor]:
        raise NotImplementedError

    def state_digest(self, step: int | None, all_in: int = 0) -> bytes:
        """32 bytes: digest of the replicated state after `step` (a rotating part of a large one, each in `all_in` steps, as
        `node.optim.digest` has it); None: of all of it."""
        return state_digest(self.replicated, step, all_in)

    def whole_gradients(self) -> list[Tensor | None]:
        """The gradients in `.grad`, in the layout's order; None counts as zeros."""
        return [parameter.grad for parameter in self.parameters]


class OwnDeMo(DeMo, _Own):
    """The optimizer of a peer with one device, for method `demo`."""


class OwnPaperDeMo(PaperDeMo, _Own):
    """The optimizer of a peer with one device, for method `paper`."""


def own_optimizer(
    model: nn.Module, optimizer: OptimizerConfig, size: int, run_id: bytes, author: bytes, second: Kind = "whole"
) -> OwnDeMo | OwnPaperDeMo:
    """The optimizer of a run over a model on this device; `size` is this peer's group size, k or `one_in`, `author` its key.

    With a `second` moment that is factored, the momentum has 2 bytes a parameter, too: both are what `memory = small` is."""
    if optimizer.method == "paper":
        return OwnPaperDeMo(model, paper_config(optimizer, size))
    own = demo_config(optimizer, size, run_id, author)
    return OwnDeMo(model, replace(own, second_moment=second, momentum_type="bf16") if second == "factored" else own)


class LocalOptimizer(Protocol):
    """Local steps of a replica: `LocalSteps` on one device, `node.ranks.lead.LedLocal` over all ranks of a peer."""

    config: LocalConfig

    def borrow(self) -> None: ...
    def step(self, lr_factor: float) -> None: ...
    def give_back(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
