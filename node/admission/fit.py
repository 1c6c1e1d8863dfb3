"""What `join` checks before it downloads or builds anything: does the run fit this machine's memory and disk?

Counts the model without building it, looks at the machine, and asks `node.training.need`. Refuses, with one line, a run that
does not fit. Changes nothing.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from node.admission.consent import TokenizerSource, place_of
from node.config import PeerSettings
from node.data.tokenizer import load_tokenizer
from node.model.room import main_memory, room_of
from node.model.size import ModelSize, activation_bytes, size_of
from node.model.spec import ModelSpec
from node.optim.second_moment import Kind
from node.training import need as needs
from node.training.need import Need
from protos.errors import OperatorError
from protos.run_config import RunConfig

WHOLE: Kind = "whole"


def spec_of(config: RunConfig) -> ModelSpec:
    """A run's model, with its tokenizer's vocabulary if that is on this machine. Nothing is downloaded."""
    spec = ModelSpec(config.model.config, config.model.factory, config.model.kwargs)
    if (
        spec.config is None
        or "vocab_size" in spec.config
        or place_of(config.data.tokenizer, os.path.exists) is TokenizerSource.HUB
    ):
        return spec
    return replace(spec, config={"vocab_size": load_tokenizer(config.data.tokenizer).vocabulary, **spec.config})


@dataclass(frozen=True)
class Fitted:
    """What a peer takes on a machine, or why it cannot take part."""

    micro_batch: int
    """0: the memory is too small."""
    why: str
    disk_fits: bool
    disk: str
    second: Kind
    """How the peer keeps its second moment."""

    @property
    def refused(self) -> str:
        """Why the run does not fit; empty if it does."""
        return "" if self.micro_batch and self.disk_fits else self.why if not self.micro_batch else self.disk


@dataclass(frozen=True)
class Counted:
    """A run's model as shapes tell it: counted once, for whatever a peer makes of it."""

    size: ModelSize
    sample: int | None
    """Activation bytes of one sample; None: not known."""

    def need(self, config: RunConfig, *, trains: bool = True, ranks: int = 1, second: Kind = WHOLE) -> Need:
        """What the run needs of a peer."""
        return needs.need_of(
            self.size, config.optimizer, self.sample, trains=trains, ranks=ranks, second=second,
            samples=config.clock.batch_samples, checks=config.trust.enabled,
        )  # fmt: skip


def counted(config: RunConfig, settings: PeerSettings, *, trains: bool = True, ranks: int = 1) -> Counted | None:
    """The model of a run for a peer with these settings; None if its size cannot be counted. Raises ModelError."""
    spec = spec_of(config)
    size = size_of(spec)
    if size is None:
        return None
    # the ranks of a peer share the activations in ways of their own
    return Counted(size, sample_bytes(spec, config, settings) if trains and ranks == 1 else None)


def sample_bytes(spec: ModelSpec, config: RunConfig, settings: PeerSettings) -> int | None:
    """Activation bytes of one sample; None: not known."""
    how = {"checkpointing": settings.activation_checkpointing, "compiled": settings.compile}
    return activation_bytes(spec, config.data.context, **how)


def kinds_of(config: RunConfig, settings: PeerSettings, ranks: int = 1) -> tuple[Kind, ...]:
    """The ways to keep the second moment that setting and run allow, the fastest first. Raises OperatorError."""
    if settings.memory == "small" and ranks > 1:
        raise OperatorError(
            "memory = small: a peer of several devices keeps its whole second moment; set memory to auto"
        )
    if not _has_second_moment(config) or ranks > 1 or settings.memory == "full":
        return (WHOLE,)
    return ("factored",) if settings.memory == "small" else (WHOLE, "factored")


def _has_second_moment(config: RunConfig) -> bool:
    return config.optimizer.method == "demo" and config.optimizer.beta2 > 0


def without_effect(config: RunConfig, settings: PeerSettings) -> str:
    """Why `memory = small` changes nothing in this run; empty if it does, or is not set."""
    if settings.memory != "small" or _has_second_moment(config):
        return ""
    return "memory = small has no effect: the run has no second moment (beta2 of its optimizer)"


def fitted(
    config: RunConfig,
    settings: PeerSettings,
    folder: Path,
    device: torch.device,
    *,
    trains: bool = True,
    stores: bool = True,
    ranks: int = 1,
) -> Fitted | None:
    """What fits this machine, or why nothing does; None if the model's size cannot be counted before it is built.

    `folder`: of the run on this machine. `stores`: the peer stores snapshots for others, as all do but an export.
    """
    model = counted(config, settings, trains=trains, ranks=ranks)
    if model is None:
        return None
    for second in (kinds := kinds_of(config, settings, ranks)):
        need = replace(model.need(config, trains=trains, ranks=ranks, second=second), stores=stores)
        found = _verdict(need, config, settings, folder, device, second)
        if not found.refused or second == kinds[-1]:
            break
    return found


def _verdict(
    need: Need, config: RunConfig, settings: PeerSettings, folder: Path, device: torch.device, second: Kind
) -> Fitted:
    size, why = needs.fit(
        need,
        room_of(device, settings.gpu_memory),
        str(device),
        min(settings.micro_batch, config.clock.batch_samples),
        chosen="micro_batch" in settings.model_fields_set,
        checkpointing=settings.activation_checkpointing,
    )
    if size and second == "factored":
        why += ", memory small" + (" (you set it)" if settings.memory == "small" else " (full does not fit)")
        if whole := needs.whole_gradients(config.optimizer, checks=config.trust.enabled):
            why += f", but with whole gradients: {whole}"
    if not size and settings.memory == "full" and config.optimizer.beta2:
        why += ", or set memory to auto"
    if size and (idle := without_effect(config, settings)):
        why += f", but {idle}"
    main = main_memory()
    if size and main is not None:
        built, reason = needs.building(need, main)
        size, why = (size, why) if built else (0, reason)
    there, disk = needs.disk(need, free_at(folder), bytes_in(folder), str(settings.home))
    return Fitted(size, why, there, disk, second)


def check(
    config: RunConfig,
    settings: PeerSettings,
    folder: Path,
    device: torch.device,
    *,
    trains: bool = True,
    stores: bool = True,
    ranks: int = 1,
    own: bool = False,
) -> tuple[int, Kind]:
    """The micro-batch with which this machine takes part, and how it keeps its second moment. Raises OperatorError if the run
    does not fit. `own`: the model is a program's, and built already. The rest is as `fitted` has it."""
    log, wanted = structlog.get_logger("peer").bind(step="-"), settings.micro_batch
    found = None if own else fitted(config, settings, folder, device, trains=trains, stores=stores, ranks=ranks)
    if found is None:
        if not own:
            log.info("the model's size is not known before it is built")
        if idle := without_effect(config, settings):
            log.warning(idle)
        return wanted, kinds_of(config, settings, ranks)[0]
    if found.refused:
        raise OperatorError(found.refused)
    log.info(f"disk: {found.disk}")
    log.info(f"building the model: {found.why}")
    size = found.micro_batch
    return wanted if size == min(wanted, config.clock.batch_samples) else size, found.second


def free_at(folder: Path) -> int:
    """Free bytes on the disk of a folder that may not be there yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def bytes_in(folder: Path) -> int:
    """Bytes of the files in a folder and below; files that go meanwhile do not count."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:
                continue
    return total
