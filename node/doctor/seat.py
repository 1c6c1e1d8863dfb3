"""This peer's part of a run, counted and measured: memory, disk, votes and speed. Downloads nothing, builds no real model.

The speed is that of gradients of random tokens, thrown away. The weights are small random numbers of the model's shapes: the
time does not depend on them. Refuses a model that would take longer than its time, by an estimate from one matrix product.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from node.admission.consent import request
from node.admission.fit import fitted, spec_of
from node.config import PeerSettings
from node.doctor.doctor_facts import Seat
from node.model.device import autocast, pick_device, short_copy
from node.model.gradients import accumulate_gradients
from node.model.size import Effort
from node.model.spec import ModelSpec, build_meta, parameter_count
from node.training.need import IN_MAIN, Memory
from node.training.optimizers import form_of
from node.training.uplink import following
from protos.cores import usable_cores
from protos.run_config import RunConfig

SECONDS_MAX: Final = 10.0
"""A micro-batch that is estimated to take longer is not measured."""
SECONDS_WANTED: Final = 1.0
PASSES_MAX: Final = 20
SIDE: Final = {"cpu": 512}
SIDE_OF_GPU: Final = 4096
PRODUCTS: Final = 3
OPERATIONS_A_PARAMETER: Final = 6
"""Of one token: two in the forward pass, four in the backward pass (arXiv 2001.08361, table 1)."""
PART_OF_PRODUCT: Final = 0.1
"""Small models reach a tenth of the speed of one large product: the estimate has to be on the safe side."""
WEIGHT: Final = 0.02


def samples_per_second(
    spec: ModelSpec,
    context: int,
    micro_batch: int,
    device: torch.device,
    autocast: Any,
    *,
    checkpointing: bool = False,
    short: bool = False,
) -> tuple[float | None, str]:
    """Samples a second, and how that was found; None, and why it was not measured. `short`: with bf16 weights."""
    if spec.factory is not None:
        return None, "the model is made by code (model.factory)"
    model = build_meta(spec)
    model = short_copy(model, torch.device("meta")) if short else model
    work = OPERATIONS_A_PARAMETER * parameter_count(model) * context * micro_batch
    seconds = work / (PART_OF_PRODUCT * _operations_per_second(device))
    if seconds > SECONDS_MAX:
        return None, f"one micro-batch of {micro_batch} may take {seconds:.0f} s on {device}"
    Effort(activation_checkpointing=checkpointing).prepare(_filled(model, device))
    model.train()
    tokens = torch.zeros(micro_batch, context + 1, dtype=torch.int64)
    accumulate_gradients(model, [tokens], device, autocast)  # the first pass allocates and compiles
    return _timed(model, tokens, device, autocast)


def _timed(model: nn.Module, tokens: torch.Tensor, device: torch.device, autocast: Any) -> tuple[float, str]:
    began, passes = time.monotonic(), 0
    while passes < PASSES_MAX and time.monotonic() - began < SECONDS_WANTED:
        accumulate_gradients(model, [tokens], device, autocast)  # it reads the loss, so the device has finished
        passes += 1
    rate = passes * len(tokens) / (time.monotonic() - began)
    return rate, f"{passes} micro-batch{'' if passes == 1 else 'es'} of {len(tokens)} on {device}"


def _operations_per_second(device: torch.device) -> float:
    """Of one matrix product in fp32."""
    side = SIDE.get(device.type, SIDE_OF_GPU)
    one = torch.full((side, side), WEIGHT, device=device)
    (one @ one).sum().item()
    began = time.monotonic()
    for _ in range(PRODUCTS):
        (one @ one).sum().item()
    return PRODUCTS * 2 * side**3 / max(time.monotonic() - began, 1e-6)


@torch.no_grad()
def _filled(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the device, with small numbers everywhere."""
    model.to_empty(device=device)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.fill_(WEIGHT)
    return model


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
    votes, most = payload_bytes(config, settings)
    return Seat(fits, found.why, found.disk_fits, found.disk, votes, rate, speed, most)


def _speed(
    config: RunConfig, settings: PeerSettings, micro_batch: int, device: torch.device, memory: Memory
) -> tuple[float | None, str]:
    if memory == "stream":  # the whole model has no room on the device
        return None, "with memory = stream it is known after the first step"
    return samples_per_second(
        spec_of(config),
        config.data.context,
        micro_batch,
        device,
        autocast(device, "bf16" if memory in IN_MAIN else settings.precision),
        checkpointing=settings.activation_checkpointing,
        short=memory in IN_MAIN,
    )


def payload_bytes(config: RunConfig, settings: PeerSettings) -> tuple[int, int]:
    """Bytes of this peer's votes of one step, at its own size or the run's, and at the largest that it may take by itself."""
    layout, form = form_of(build_meta(spec_of(config)), config.optimizer)
    sizes = {size: form.body_bytes(layout.chunks, size) for size in form.sizes}
    own = sizes[config.optimizer.size_of(settings.own_size)]
    follows = following(config, settings.uplink_part, sizes, metered=settings.upload_gb is not None)
    return own, own if follows is None else follows.most_bytes
