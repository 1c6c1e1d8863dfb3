"""This peer's part of a run, counted and measured: memory, disk, votes and speed. Downloads nothing, builds no real model."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from node.admission.consent import request
from node.admission.fit import fitted, spec_of
from node.config import PeerSettings
from node.doctor.doctor_facts import Seat
from node.doctor.speed import samples_per_second
from node.model.device import autocast, pick_device
from node.model.spec import build_meta
from node.training.methods import form_of
from node.training.need import Memory
from protos.cores import usable_cores
from protos.run_config import RunConfig

NOT_COUNTED = "the model cannot be counted before it is built (model.factory)"


def asked(config: RunConfig, settings: PeerSettings) -> str:
    """What the run asks of this machine, in one line. Raises OperatorError if it needs a flag that was not given."""
    wants = request(config, settings, os.path.exists).wants
    return "; ".join(f"the run wants to {want}" for want in wants) or "nothing but computing"


def seat_of(config: RunConfig, settings: PeerSettings, folder: Path) -> Seat:
    """`folder`: of the run on this machine. Raises OperatorError for a model that cannot be built."""
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), usable_cores()))
    device, wanted = pick_device(settings.device), min(settings.micro_batch, config.clock.batch_samples)
    found = fitted(config, settings, folder, device)
    if found is None:
        return Seat(wanted, NOT_COUNTED, disk_fits=True, disk=NOT_COUNTED, payload_bytes=None, samples_per_second=None,
                    speed=NOT_COUNTED)  # fmt: skip
    fits = found.micro_batch
    rate, speed = (None, "the model does not fit") if not fits else _speed(config, settings, fits, device, found.memory)
    return Seat(fits, found.why, found.disk_fits, found.disk, payload_bytes(config, settings), rate, speed)


def _speed(
    config: RunConfig, settings: PeerSettings, micro_batch: int, device: torch.device, memory: Memory
) -> tuple[float | None, str]:
    return samples_per_second(
        spec_of(config),
        config.data.context,
        micro_batch,
        device,
        autocast(device, "bf16" if memory == "host" else settings.precision),
        checkpointing=settings.activation_checkpointing,
        short=memory == "host",
    )


def payload_bytes(config: RunConfig, settings: PeerSettings) -> int:
    """Bytes of this peer's votes of one step, at its own size or the run's."""
    layout, form = form_of(build_meta(spec_of(config)), config.optimizer)
    return form.body_bytes(layout.chunks, config.optimizer.size_of(settings.own_size))
