"""What keeps this machine from a run: its memory and disk, which the run may not fit; and the word to the operator about it.

`join` checks this before it downloads or builds anything. It counts the model without building it, looks at the machine, and
asks `node.training.need`. Refuses, with one line, a run that does not fit. Changes nothing.

`telling` tells one word and this program's version, without a name (ADR 21). Refuses to tell what the person decided (no
consent, Ctrl-C) and what the coordinator knows already. To tell is best effort.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch

from node.admission.consent import TokenizerSource, place_of
from node.config import PeerSettings
from node.data.tokenizer import load_tokenizer
from node.model.device import DeviceError, computes_short, main_memory, room_of
from node.model.gradients import no_room
from node.model.size import ModelSize, activation_bytes, size_of
from node.model.spec import ModelError, ModelSpec, names_vocabulary, with_vocabulary
from node.training import need as needs
from node.training.need import IN_MAIN, Memory, Need, kind_of
from protos.errors import DataError, OperatorError, SwarmentumError, TokenizerError
from protos.run_config import RunConfig
from protos.v1 import coordinator_pb2 as pb


def spec_of(config: RunConfig) -> ModelSpec:
    """A run's model, with its tokenizer's vocabulary if that is on this machine. Nothing is downloaded."""
    spec = ModelSpec(config.model.config, config.model.factory, config.model.kwargs)
    if (
        spec.config is None
        or names_vocabulary(spec.config)
        or place_of(config.data.tokenizer, os.path.exists) is TokenizerSource.HUB
    ):
        return spec
    return replace(spec, config=with_vocabulary(spec.config, load_tokenizer(config.data.tokenizer).vocabulary))


@dataclass(frozen=True)
class Fitted:
    """What a peer takes on a machine, or why it cannot take part."""

    micro_batch: int
    """0: the memory is too small."""
    why: str
    disk_fits: bool
    disk: str
    memory: Memory

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
    short: Callable[[bool], int | None] = lambda _: None
    """Counts the same with bf16 weights and activations: of `memory = stream` (True) or `host`."""
    casts: bool = True
    """A card computes in bf16."""

    def need(self, config: RunConfig, *, trains: bool = True, ranks: int = 1, memory: Memory = "full") -> Need:
        """What the run needs of a peer."""
        sample = self.short(memory == "stream") if memory in IN_MAIN else self.sample
        return needs.need_of(
            self.size, config.optimizer, sample, trains=trains, ranks=ranks, memory=memory,
            samples=config.clock.batch_samples, checks=config.trust.enabled, casts=self.casts,
        )  # fmt: skip


def counted(config: RunConfig, settings: PeerSettings, *, trains: bool = True, ranks: int = 1) -> Counted | None:
    """The model of a run for a peer with these settings; None if its size cannot be counted. Raises ModelError."""
    spec = spec_of(config)
    size = size_of(spec)
    if size is None:
        return None
    casts = settings.precision != "fp32"
    # the ranks of a peer share the activations in ways of their own
    if not trains or ranks > 1:
        return Counted(size, None, casts=casts)
    return Counted(
        size, sample_bytes(spec, config, settings), partial(short_sample_bytes, spec, config, settings), casts
    )


def sample_bytes(spec: ModelSpec, config: RunConfig, settings: PeerSettings) -> int | None:
    """Activation bytes of one sample, in fp32; None: not known."""
    how = {"checkpointing": settings.activation_checkpointing, "compiled": settings.compile}
    return activation_bytes(spec, config.data.context, **how)


def short_sample_bytes(spec: ModelSpec, config: RunConfig, settings: PeerSettings, stream: bool) -> int | None:
    """The same in bf16, with `memory = stream` or `host`."""
    how = (
        {"stream": True}
        if stream
        else {"checkpointing": settings.activation_checkpointing, "compiled": settings.compile}
    )
    return activation_bytes(spec, config.data.context, short=True, **how)


def memories_of(
    config: RunConfig,
    settings: PeerSettings,
    device: torch.device,
    *,
    ranks: int = 1,
    own: bool = False,
    size: ModelSize | None = None,
) -> tuple[Memory, ...]:
    """What setting, run, device and model allow, the fastest first. `own`: see `check`. `size`: of the model, if it is
    known. Raises OperatorError."""
    wanted = settings.memory
    if wanted in ("small", *IN_MAIN) and ranks > 1:
        raise OperatorError(
            f"memory = {wanted}: a peer of several devices keeps its whole state there; set memory to auto"
        )
    fault = _no_host(settings, device, own=own)
    no_stream = "it does not go with compile" if settings.compile else "" if size is None else size.no_stream
    if wanted in IN_MAIN:
        if fault:
            raise OperatorError(f"memory = {wanted}: {fault}; set memory to small or auto")
        if wanted == "stream" and no_stream:
            raise OperatorError(f"memory = stream: {no_stream}; set memory to host or auto")
        return (wanted,)
    if wanted == "full" or ranks > 1:
        return ("full",)
    both: tuple[Memory, ...] = ("full",) if kind_of("small", config.optimizer) == "whole" else ("full", "small")
    if wanted == "small":
        return both[-1:]
    # where the device computes in the main memory, a second copy of the weights there saves nothing
    if fault or device.type != "cuda":
        return both
    return (*both, "host") if no_stream else (*both, *IN_MAIN)


def _no_host(settings: PeerSettings, device: torch.device, *, own: bool) -> str:
    """Why a peer cannot keep its state in the main memory, with bf16 weights on the device; empty if it can."""
    if own:
        return "a program's own loop computes with the parameters themselves"
    if settings.precision == "fp32":
        return "the device gets bf16 weights, and precision = fp32 asks for others"
    return "" if computes_short(device) else f"{device} has no bf16 units"


def without_effect(config: RunConfig, settings: PeerSettings) -> str:
    """Why `memory = small` changes nothing in this run; empty if it does, or is not set."""
    if settings.memory != "small" or kind_of("small", config.optimizer) == "factored":
        return ""
    return "memory = small has no effect: the run has no second moment (beta2 of its optimizer)"


def why(memory: Memory, settings: PeerSettings) -> str:
    """Why a peer has this mode of memory; empty if its owner set another one, which changes nothing in this run."""
    if settings.memory == "auto":
        return "the fastest" if memory == "full" else "no faster one fits"
    return "as set" if memory == settings.memory else ""


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
    for memory in (memories := memories_of(config, settings, device, ranks=ranks, size=model.size)):
        need = replace(model.need(config, trains=trains, ranks=ranks, memory=memory), stores=stores)
        found = _verdict(need, config, settings, folder, device, memory)
        if not found.refused or memory == memories[-1]:
            break
    return found


def _verdict(
    need: Need, config: RunConfig, settings: PeerSettings, folder: Path, device: torch.device, memory: Memory
) -> Fitted:
    size, told = needs.fit(
        need,
        room_of(device, settings.gpu_memory),
        str(device),
        min(settings.micro_batch, config.clock.batch_samples),
        chosen="micro_batch" in settings.model_fields_set,
        checkpointing=settings.activation_checkpointing or memory == "stream",
    )
    main = main_memory()
    if size and main is not None:
        built, reason = needs.building(need, main, size)
        size, told = (size, f"{told}, {reason}" if need.host else told) if built else (0, reason)
    if size:
        told += f", memory {memory}" + (f" ({reason})" if (reason := why(memory, settings)) else "")
        if (whole := needs.whole_gradients(config.optimizer, checks=config.trust.enabled)) and need.small:
            told += f", but with whole gradients: {whole}"
    if not size and settings.memory == "full" and config.optimizer.beta2:
        told += ", or set memory to auto"
    if size and (idle := without_effect(config, settings)):
        told += f", but {idle}"
    there, disk = needs.disk(need, free_at(folder), bytes_in(folder), str(settings.home))
    return Fitted(size, told, there, disk, memory)


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
) -> tuple[int, Memory]:
    """The micro-batch with which this machine takes part, and what it keeps where. Raises OperatorError if the run
    does not fit. `own`: the model is a program's, and built already. The rest is as `fitted` has it."""
    log, wanted = structlog.get_logger("peer").bind(step="-"), settings.micro_batch
    found = None if own else fitted(config, settings, folder, device, trains=trains, stores=stores, ranks=ranks)
    if found is None:
        if not own:
            log.info("the model's size is not known before it is built")
        if idle := without_effect(config, settings):
            log.warning("settings have no effect", why=idle)
        return wanted, memories_of(config, settings, device, ranks=ranks, own=own)[0]
    if found.refused:
        raise OperatorError(found.refused)
    log.info("room on the disk", disk=found.disk)
    log.info("building the model", memory=found.why)
    size = found.micro_batch
    return wanted if size == min(wanted, config.clock.batch_samples) else size, found.memory


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


Failing = pb.JoinFailure
BY_ERROR = (
    (TokenizerError, Failing.JOIN_FAILURE_TOKENIZER),
    (DataError, Failing.JOIN_FAILURE_DATA),
    (ModelError, Failing.JOIN_FAILURE_MODEL),
    (DeviceError, Failing.JOIN_FAILURE_DEVICE),
)


@dataclass
class JoinStage:
    """What the peer does now: the reason, if it fails there without a more precise error. None: do not tell."""

    reason: pb.JoinFailure | None = None


@contextmanager
def telling(tell: Callable[[pb.JoinFailure], None]) -> Iterator[JoinStage]:
    """`tell` the reason of an error that ends the start of a peer, then raise that error."""
    stage = JoinStage()
    try:
        yield stage
    except (OperatorError, RuntimeError, MemoryError) as error:
        reason = _reason(stage, error)
        if reason is not None:
            with suppress(SwarmentumError):
                tell(reason)
        raise


def _reason(stage: JoinStage, error: BaseException) -> pb.JoinFailure | None:
    if stage.reason is None:
        return None
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and no_room(error)):
        return Failing.JOIN_FAILURE_MEMORY
    return next((reason for kind, reason in BY_ERROR if isinstance(error, kind)), stage.reason)
