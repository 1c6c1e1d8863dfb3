"""What `join` checks before it downloads or builds anything: does the run fit this machine's memory and disk?

Counts the model without building it, looks at the machine, and asks `node.training.need`. Refuses, with one line, a run that
does not fit. Changes nothing.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import structlog
import torch

from node.commands.consent import Place, place_of
from node.config import PeerSettings
from node.data.tokenizer import load_tokenizer
from node.model.room import main_memory, room_of
from node.model.size import activation_bytes, size_of
from node.model.spec import ModelSpec
from node.training import need as needs
from node.training.need import Need
from protos.errors import OperatorError
from protos.run_config import RunConfig


def spec_of(config: RunConfig) -> ModelSpec:
    """A run's model, with its tokenizer's vocabulary if that is on this machine. Nothing is downloaded."""
    spec = ModelSpec(config.model.config, config.model.factory, config.model.kwargs)
    if (
        spec.config is None
        or "vocab_size" in spec.config
        or place_of(config.data.tokenizer, os.path.exists) is Place.HUB
    ):
        return spec
    return replace(spec, config={"vocab_size": load_tokenizer(config.data.tokenizer).vocabulary, **spec.config})


def need_of_run(config: RunConfig, settings: PeerSettings, *, trains: bool = True, ranks: int = 1) -> Need | None:
    """What a run needs of a peer with these settings; None if its size cannot be counted. Raises ModelError."""
    spec = spec_of(config)
    size = size_of(spec)
    if size is None:
        return None
    sample = None
    if trains and ranks == 1:  # the ranks of a peer share the activations in ways of their own
        sample = activation_bytes(spec, config.data.context, checkpointing=settings.activation_checkpointing)
    return needs.need_of(size, config.optimizer, sample, trains=trains, ranks=ranks)


def check(
    config: RunConfig,
    settings: PeerSettings,
    folder: Path,
    device: torch.device,
    *,
    trains: bool = True,
    stores: bool = True,
    ranks: int = 1,
) -> int:
    """The micro-batch with which this machine takes part. Raises OperatorError if the run does not fit.

    `folder`: of the run on this machine. `stores`: the peer stores snapshots for others, as all do but an export.
    """
    log, wanted = structlog.get_logger("peer").bind(step="-"), settings.micro_batch
    need = need_of_run(config, settings, trains=trains, ranks=ranks)
    if need is None:
        log.info("the model's size is not known before it is built")
        return wanted
    need = replace(need, stores=stores)
    room, main = room_of(device, settings.gpu_memory), main_memory()
    fits, why = needs.fit(
        need,
        room,
        str(device),
        min(wanted, config.clock.batch_samples),
        chosen="micro_batch" in settings.model_fields_set,
        checkpointing=settings.activation_checkpointing,
    )
    built, where = needs.disk(need, free_at(folder), bytes_in(folder), str(settings.home), settings.snapshots_gb)
    small = needs.snapshots(need, settings.snapshots_gb)
    for good, reason in (
        (fits, why),
        (not small, small),
        (built, where),
        *([] if main is None else [needs.building(need, main)]),
    ):
        if not good:
            raise OperatorError(reason)
    log.info(f"disk: {where}")
    log.info(f"building the model: {why}")
    return wanted if fits == min(wanted, config.clock.batch_samples) else fits


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
