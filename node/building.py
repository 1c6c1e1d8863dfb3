"""The replica of a peer: over the run's own model, on one device or on several, or over the model of a program.

Refuses a program's model whose layout is another one than the run's. Asks no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from node.config import PeerSettings
from node.model.size import Effort
from node.model.spec import ModelError, ModelSpec, build, check_parameters
from node.optim.layout import Layout
from node.ranks.lead import Lead, RanksReplica
from node.ranks.shard import Order
from node.training.host_maker import HostMaker
from node.training.maker import Handover
from node.training.need import IN_MAIN, Memory, kind_of
from node.training.optimizers import demo_config, local_config
from node.training.replica import Replica
from protos.errors import OperatorError
from protos.log import SignedEntry
from protos.optimizer_config import SIZE_KEYS
from protos.run_config import RunConfig
from protos.run_sections import ModelConfig
from protos.slices import Update

DIGITS_SHOWN = 16
BUFFER_TOLERANCE = 1e-3
"""Of a buffer that another device computed."""


class SharedReplica(Replica):
    """Over the model of a program, which can write to it at any time. Only the swarm may move it."""

    def apply(self, signed: SignedEntry, updates: Iterable[Update], authors: Sequence[bytes] = ()) -> bool:
        """As `Replica.apply`. Raises OperatorError if the state is not the one that was left after the entry before."""
        if self.demo.state_digest(self.step, self.digest_steps) != self.digest():
            raise OperatorError(
                f"the program changed the model's parameters after step {self.step}. The swarm moves them, the same way on "
                "every peer: evaluate with a copy of the model (copy.deepcopy), and load no other weights. Join again to go on "
                "from the swarm's state"
            )
        return super().apply(signed, updates, authors)


@dataclass(frozen=True)
class Own:
    """A program's own model and loop. `reads`: it trains on the run's text. `entered`: called when the peer is in the run."""

    handover: Handover
    reads: bool
    entered: Callable[[], None] = lambda: None

    @property
    def evaluates(self) -> bool:
        """Whether it can tell the held-out loss of states."""
        return self.reads and self.handover.loss is not None

    def asks(self, config: RunConfig) -> RunConfig:
        """The run without what it would ask of this machine in vain: its model's code. Raises OperatorError."""
        if config.trust.enabled and not self.reads:
            raise OperatorError(
                "the run checks votes against the samples that it hands out (trust.enabled), and this peer has joined with "
                "own_data=True: it would be excluded. Train on the batches of each share"
            )
        return config.model_copy(update={"model": ModelConfig()}) if config.model.factory is not None else config

    def replica(
        self,
        start: nn.Module | None,
        config: RunConfig,
        size: int,
        run_id: bytes,
        public_key: bytes,
        layout: bytes,
        memory: Memory = "full",
        copy_folder: Path | None = None,
        blank: bool = False,
    ) -> Replica:
        """Over the program's model. `start`: the run's own in its first state, or `blank`; `layout`: its digest, if known;
        `memory`: what this peer keeps; `copy_folder`: see `Replica`."""
        model = self.handover.model
        check_parameters(model, "model")
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32 or parameter.device != self.handover.device or parameter.is_meta:
                raise ModelError(
                    f"model: parameter {name!r} is {parameter.dtype} on {parameter.device}; expected torch.float32 on one "
                    "device: the swarm counts in whole bits. Autocast in your forward pass computes in fewer"
                )
        try:
            mine = Layout.of(model)
            theirs = None if start is None else Layout.of(start)
        except ValueError as error:
            raise ModelError(f"model: {error}") from error
        named = layout or (b"" if theirs is None else theirs.digest())
        if named and mine.digest() != named:
            raise ModelError(
                f"model: its parameters have layout {mine.digest().hex()[:DIGITS_SHOWN]}, and the run's have "
                f"{named.hex()[:DIGITS_SHOWN]}{_difference(mine, theirs)}. "
                "Names, shapes, their order and which are tables (nn.Embedding) have to be the run's"
            )
        if start is not None and not blank:
            first = dict(start.named_parameters())
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(first[name])
        if start is not None and (other := _other_buffer(model, start)):
            structlog.get_logger("peer").warning(
                "a buffer of the program's model has other numbers than the run's",
                step="-",
                buffer=other,
                why="no vote carries buffers: with others the same parameters are another model",
            )
        replica = SharedReplica(
            run_id, model, config.optimizer, size, author=public_key, second=kind_of(memory, config.optimizer),
            maker=self.handover, digest_steps=config.clock.digest_steps, copy_folder=copy_folder,
        )  # fmt: skip
        replica.knows_start, replica.is_blank = start is not None, blank
        return replica


def _other_buffer(model: nn.Module, start: nn.Module) -> str:
    """The name of a buffer that both models have, with other numbers in each; empty if none. Statistics of batches differ."""
    mine = dict(model.named_buffers())
    for name, theirs in start.named_buffers():
        own = mine.get(name)
        if own is None or (own.shape, own.dtype) != (theirs.shape, theirs.dtype) or not own.is_floating_point():
            continue
        if name.rpartition(".")[2].startswith("running_"):
            continue
        if not torch.allclose(own.cpu().double(), theirs.cpu().double(), rtol=BUFFER_TOLERANCE, equal_nan=True):
            return name
    return ""


def _difference(mine: Layout, theirs: Layout | None) -> str:
    """The first parameter that differs, in words."""
    if theirs is None:
        return ""
    ours = [(place.name, place.shape, place.kind) for place in mine.places]
    runs = [(place.name, place.shape, place.kind) for place in theirs.places]
    for own, run in zip(ours, runs, strict=False):
        if own != run:
            inner = " (give the model inside of its wrapper)" if own[0].endswith(f".{run[0]}") else ""
            words, theirs_words = (" ".join(map(str, filter(None, place))) for place in (own, run))
            return f": {words} stands where the run has {theirs_words}{inner}"
    return f": it has {len(ours)} parameters, the run has {len(runs)}"


def own_start(
    spec: ModelSpec, config: RunConfig, vocabulary: int, *, begun: bool, allow_code: bool, blank: bool = False
) -> nn.Module | None:
    """The run's first state for a program's model. None if only the run's code makes it, and the person has not agreed to that:
    then the peer takes the state that the run has agreed on. Raises OperatorError if the run has not `begun` with one."""
    if spec.factory is None or allow_code:
        return build(spec, config.seed, vocabulary=vocabulary, context=config.data.context, blank=blank)
    if not begun:
        raise OperatorError(
            f"the run has no agreed state yet, and its first one comes from the code {spec.factory!r}. If you wrote or trust "
            "it, join with allow_code=True; otherwise join when other peers, or an anchor, have begun the run"
        )
    return None


def replica_of(
    spec: ModelSpec,
    config: RunConfig,
    vocabulary: int,
    size: int,
    device: torch.device,
    *,
    run_id: bytes,
    public_key: bytes,
    settings: PeerSettings,
    lead: Lead | None,
    memory: Memory,
    copy_folder: Path | None = None,
    blank: bool = False,
) -> Replica:
    """Over the run's model, in its first state, or `blank` if the peer loads an agreed state next. `memory`: what it keeps, and
    where. `copy_folder`: see `Replica`."""
    context, optimizer, digest_steps = config.data.context, config.optimizer, config.clock.digest_steps
    effort = Effort(settings.activation_checkpointing, settings.compile)
    if lead is None:
        model, maker = build(spec, config.seed, vocabulary=vocabulary, context=context, blank=blank), None
        if memory in IN_MAIN:
            maker = HostMaker(model, device, effort, stream=memory == "stream")
        else:
            model = effort.prepare(model.to(device))
        replica = Replica(
            run_id,
            model,
            optimizer,
            size,
            author=public_key,
            second=kind_of(memory, optimizer),
            maker=maker,
            digest_steps=digest_steps,
            copy_folder=copy_folder,
        )
        replica.is_blank = blank
        return replica
    if optimizer.method == "paper":
        raise OperatorError(
            f"this peer has {lead.ranks} devices, and the run's optimizer.method is paper, which works on one device: "
            "join without torchrun"
        )
    own, local = demo_config(optimizer, size, run_id, public_key), local_config(optimizer)
    order = Order(spec, config.seed, vocabulary, context, own, local, settings.precision, effort)
    return RanksReplica(run_id, lead, order, optimizer, size, digest_steps)


def vote_size(config: RunConfig, settings: PeerSettings, log: Any) -> int:
    """The size of this peer's votes. Raises OperatorError for one that the run's votes do not have."""
    if settings.own_size is not None and config.optimizer.selection not in SIZE_KEYS:
        log.warning(
            "vote_size has no effect: votes of this run's selection have one size", selection=config.optimizer.selection
        )
    return config.optimizer.size_of(settings.own_size)
