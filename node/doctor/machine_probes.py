"""Probes of this machine: device, driver, memory, disk, clock, ports, power, versions; and this peer's part of a run.

They change nothing, download nothing, and build no real model. The speed is that of gradients of random tokens, thrown away.
The weights are small random numbers of the model's shapes: the time does not depend on them. Refuses a model that would take
longer than its time, by an estimate from one matrix product.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from node.admission.consent import STANDARD_LIBRARY, request
from node.admission.fit import fitted, free_at, spec_of
from node.config import PeerSettings
from node.data.corpus import look_at
from node.data.sources import Source
from node.data.tally import SHARE_MAX
from node.doctor.doctor_facts import Devices, Here, OwnText, Seat
from node.donor import owner_machine
from node.earlier_settings import TCP_ALONE
from node.model.device import DeviceError, autocast, devices, pick_device, room_of, short_copy
from node.model.gradients import accumulate_gradients
from node.model.size import Effort
from node.model.spec import ModelSpec, build_meta, parameter_count
from node.overlay.settings import check_port_free
from node.training.need import IN_MAIN, Memory
from node.training.optimizers import form_of
from node.training.uplink import following
from protos import clocks
from protos.address import is_web
from protos.errors import OperatorError
from protos.mistakes import OWN_TEXT
from protos.process import usable_cores
from protos.run_config import RunConfig
from protos.version import versions

SYSFS = Path("/sys")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
DISPLAY_CLASS = "0x03"
TIME_ERROR = 5
"""What adjtimex(2) returns for a clock that nothing keeps right."""
TIMEX_BYTES = 512
"""More than `struct timex` has on any Linux."""


def devices_of(settings: PeerSettings) -> Devices:
    """Devices, graphics cards and the driver."""
    build = (
        f"cuda {torch.version.cuda}" if torch.version.cuda else f"hip {hip}" if (hip := torch.version.hip) else "cpu"
    )
    found = Devices(
        torch=torch.__version__,
        build=build,
        present=tuple(devices()),
        chosen="",
        cards=cards_of(SYSFS),
        driver=driver_of(NVIDIA_DRIVER),
        threads=settings.threads or min(torch.get_num_threads(), usable_cores()),
    )
    try:
        device = pick_device(settings.device)
    except DeviceError as error:
        return replace(found, fault=str(error))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return replace(found, chosen=str(device), name=name, room=room_of(device, settings.gpu_memory))


def here(settings: PeerSettings) -> Here:
    """Disk, clock, ports, power and versions."""
    return Here(
        home=str(settings.home),
        disk_free=free_at(settings.home),
        home_fault=home_fault(settings.home),
        clock_kept=clock_kept(),
        clock_wrong=clocks.too_early(datetime.now(UTC)),
        listen=settings.listen.removesuffix(TCP_ALONE),
        quic=settings.overlay().quic,
        port_fault=port_fault(settings),
        on_battery=on_battery(SYSFS),
        keeps_awake=owner_machine.command() is not None,
        versions=versions(),
    )


def home_fault(home: Path) -> str:
    """Why a peer could not live in this folder: it is no folder, read-only, or another user's."""
    there = next((place for place in (home, *home.absolute().parents) if os.path.lexists(place)), home)
    if not there.is_dir():
        return f"{there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"this user cannot write to {there}"
    for name, mode, what in (
        ("identity.key", os.R_OK, "read"),
        ("lock", os.W_OK, "write"),
        ("runs", os.W_OK, "write to"),
    ):
        if (path := home / name).exists() and not os.access(path, mode):
            return f"this user cannot {what} {path}"
    return ""


def cards_of(sysfs: Path) -> tuple[str, ...]:
    """Makers of the graphics cards on the PCI bus, whether they have a driver or not."""
    found = set()
    for card in (sysfs / "bus" / "pci" / "devices").glob("*"):
        try:
            kind, maker = (card / "class").read_text(), (card / "vendor").read_text().strip()
        except OSError:
            continue
        if kind.startswith(DISPLAY_CLASS) and maker in MAKERS:
            found.add(MAKERS[maker])
    return tuple(sorted(found, reverse=True))


def driver_of(file: Path) -> str:
    """The version of the loaded NVIDIA driver; empty without one."""
    try:
        first = file.read_text().partition("\n")[0]
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", first)
    return found.group() if found else "of an unknown version"


def clock_kept() -> bool | None:
    """Whether the kernel's clock is kept right by somebody; None where the kernel does not say."""
    if sys.platform != "linux":
        return None
    status: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))  # zeros: asks, and sets nothing
    return None if status < 0 else status != TIME_ERROR


def port_fault(settings: PeerSettings) -> str:
    """Why this machine cannot listen as the settings say; empty: it can."""
    wanted = settings.overlay()
    try:
        check_port_free(wanted.listen_host, wanted.listen_port, quic=wanted.quic)
    except OperatorError as error:
        return f"the peer cannot listen at {settings.listen}: {error}"
    return ""


def on_battery(sysfs: Path) -> bool | None:
    """Whether a battery runs down; None without a battery."""
    states = []
    for supply in (sysfs / "class" / "power_supply").glob("*"):
        try:
            if (supply / "type").read_text().strip() == "Battery":
                states.append((supply / "status").read_text().strip())
        except OSError:
            continue
    return "Discharging" in states if states else None


# The probe of training text on this machine: that of the person (`--data`), and that which a run names and may use.


def of_person(settings: PeerSettings) -> tuple[OwnText, ...]:
    """The text of `--data`. Raises DataError."""
    return () if settings.data is None or is_web(settings.data) else (_look(settings.data, settings),)


def of_run(config: RunConfig, settings: PeerSettings) -> tuple[OwnText, ...]:
    """The text on this machine that the run names, if `join` would read it. Raises DataError."""
    if settings.data is not None or "data" not in settings.allow:
        return ()
    named = [source for source, _, _ in config.data.sources()]
    return tuple(
        _look(source, settings) for source in named if source not in (STANDARD_LIBRARY, OWN_TEXT) and not is_web(source)
    )


def _look(place: str, settings: PeerSettings) -> OwnText:
    found = look_at(Source(place))
    read, *left = found.lines()
    return OwnText(place, read, tuple(left), "left_out" in settings.allow or found.share <= SHARE_MAX)


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


def seat_of(config: RunConfig, settings: PeerSettings, folder: Path, peers: int) -> Seat:
    """`folder`: of the run on this machine. `peers`: that vote, this one among them.

    Raises OperatorError for a model that cannot be built.
    """
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), usable_cores()))
    device, wanted = pick_device(settings.device), min(settings.micro_batch, config.clock.batch_samples)
    found = fitted(config, settings, folder, device)
    if found is None:
        return Seat(wanted, NOT_COUNTED, disk_fits=True, disk=NOT_COUNTED, payload_bytes=None, samples_per_second=None,
                    speed=NOT_COUNTED)  # fmt: skip
    fits = found.micro_batch
    rate, speed = (None, "the model does not fit") if not fits else _speed(config, settings, fits, device, found.memory)
    votes, most = payload_bytes(config, settings, peers)
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


def payload_bytes(config: RunConfig, settings: PeerSettings, peers: int) -> tuple[int, int]:
    """Bytes of this peer's votes of one step of so many peers, at its own size or the run's, and at the largest that it may
    take by itself."""
    layout, form = form_of(build_meta(spec_of(config)), config.optimizer)
    sizes = {size: form.body_bytes(layout.chunks, size) for size in form.sizes}
    own = sizes[config.optimizer.size_of(settings.own_size)]
    follows = following(config, settings.uplink_part, sizes, metered=settings.upload_gb is not None)
    if follows is None:
        return own, own
    follows.limit(config.clock, peers)
    return own, follows.most_bytes
