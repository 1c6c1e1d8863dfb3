"""What a run needs of a machine: memory for the state and the micro-batch, and disk. Pure: values in, a verdict out.

Refuses to look at a machine or to build a model: `node.model.device` and `node.model.size` do that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from node.model.device import DeviceMemory
from node.model.size import BYTES_A_NUMBER, ModelSize
from node.optim.second_moment import Kind
from node.training.optimizers import demo_config
from protos.optimizer_config import OptimizerConfig
from protos.text import amount, count

PART_USED_MAX: Final = 0.9
"""The part of the free memory that a micro-batch is chosen for. The rest is for what the estimate leaves out: gradients of
activations, buffers of kernels, and other programs."""

ADAM_MOMENTS: Final = 2
SNAPSHOT_FILES: Final = 3
"""Two snapshots stay, and a third one is written beside them."""
SNAPSHOT_FILES_MIN: Final = 2
"""The agreed snapshot, and a newer one: with less, joiners would find nothing."""
PRIVATE_FILES: Final = 2
"""Momentum is written beside the file before, which goes when the new one is complete."""


BYTES_A_SHORT: Final = 2
"""A momentum in bf16, and a gradient's sum over several micro-batches."""
Memory = Literal["full", "small", "host", "stream"]
"""What a peer keeps, and where: `memory` of its settings."""
IN_MAIN: Final[tuple[Memory, ...]] = ("host", "stream")
"""With these, weights, momentum and optimizer are in the main memory, and the device computes in bf16."""
BLOCKS_THERE: Final = 2
"""With `stream`: the block that computes, and the next one."""
HEAP_BYTES_A_PARAMETER: Final = 0.5
"""In main memory: what the C library keeps between tensors (`python -m tests.bench size`, ADR 30)."""
HOLES_BYTES_A_PARAMETER: Final = 1
"""The same, where a step has several micro-batches: each makes its gradients beside the sums of those before."""


@dataclass(frozen=True)
class Need:
    """Memory that a peer needs in one run, in bytes."""

    parameters: int
    weights: int
    """The model's own numbers: it is built in the main memory, whatever the device."""
    state: int
    """On the device, whatever the micro-batch: parameters, momentum, second moment, base optimizer, gradients that stay whole;
    with `memory = host`, bf16 weights and the gradient at hand; with `stream`, weights of two blocks and of what is none."""
    sample: int | None
    """Activations of one sample; None: not known, and counted as 0."""
    snapshot: int
    """One file of the replicated state: parameters, frozen ones, too, and the base optimizer's state."""
    private: int
    """The file of the peer's own momentum, and of the optimizer of its local steps."""
    gradients: int = 0
    """The sums of gradients where a step has several micro-batches. With one, each joins the momentum as it is made."""
    samples: int = 0
    """The most samples of a step, which one peer may have alone."""
    heap: int = 0
    """Main memory that lies between the parts, where the device computes in it."""
    holes: int = 0
    """As much more, where a step has several micro-batches."""
    checks: int = 0
    """Main memory for two transformed gradients, by which the peer checks votes (node/training/vote_checks.py)."""
    small: bool = False
    """The peer saves memory: copies go to the disk."""
    casts: int = 0
    """On a card: copies of the weights in bf16, which a pass in bf16 makes. Measured on an H200 (`python -m tests.bench size
    --device cuda`)."""
    host: int = 0
    """With `memory = host` or `stream`: main memory for what is else in `state`."""
    idle: int = 0
    """What of `state` nobody writes, the momentum of an anchor or an export: in main memory it takes no room."""
    stores: bool = True
    """False: the peer loads one snapshot, and stores no others (an export)."""

    @property
    def disk(self) -> int:
        """Room for snapshots, and for the peer's own momentum."""
        return self.disk_with(SNAPSHOT_FILES)

    def disk_with(self, snapshots: int) -> int:
        """The same, with so many snapshots."""
        if not self.stores:
            return self.snapshot
        copies = self.snapshot + self.private if self.small else 0
        return snapshots * self.snapshot + PRIVATE_FILES * self.private + copies

    @property
    def copies(self) -> int:
        """Main memory for the copies that are written to the disk while the training goes on. ADR 30."""
        return self.snapshot + self.private if self.stores and not self.small else 0

    def on(self, device: str) -> Need:
        """With what lies in the main memory counted, if the device computes there."""
        if device.startswith("cuda"):
            return replace(self, gradients=0) if self.host else replace(self, state=self.state + self.casts)
        beside = self.copies + self.heap + self.checks + self.host - self.idle
        return replace(self, state=self.state + beside, gradients=self.gradients + self.holes)

    def main(self, micro_batch: int) -> int:
        """Main memory beside a card, for a micro-batch of so many samples."""
        # no backward pass leaves holes between the sums
        sums = self.gradients * 5 // 4 if micro_batch < self.samples else 0
        return self.copies + self.checks + (self.host + self.heap + sums - self.idle if self.host else 0)

    def memory(self, micro_batch: int) -> int:
        """For a micro-batch of so many samples."""
        return self.state + (self.gradients if micro_batch < self.samples else 0) + micro_batch * (self.sample or 0)


def need_of(
    size: ModelSize,
    optimizer: OptimizerConfig,
    sample: int | None = None,
    *,
    trains: bool = True,
    ranks: int = 1,
    memory: Memory = "full",
    samples: int = 0,
    checks: bool = False,
    casts: bool = True,
) -> Need:
    """`sample`: activation bytes of one sample. `ranks`: devices of this peer, which share the state. The means of a factored
    second moment are not counted. `samples`: the most of a step. `checks`: of other peers' votes. `casts`: a card
    computes in bf16."""
    one, whole = BYTES_A_NUMBER * size.parameters, size.parameters + size.frozen
    base, private = one, one  # parameters; momentum
    second = kind_of(memory, optimizer)
    small = second == "factored"
    if optimizer.method == "demo":
        base += one * len(demo_config(optimizer, optimizer.vote_size, bytes(32)).base.state_names)
        private += one * ((bool(optimizer.beta2) and second == "whole") + bool(optimizer.nesterov))
    if small:
        private = BYTES_A_SHORT * size.parameters
    joins = small and not whole_gradients(optimizer, checks=checks)
    working = (BYTES_A_NUMBER * size.largest if joins else one) if trains else 0  # gradients
    working += one * bool(optimizer.overlap)  # the look-ahead keeps the parameters
    if trains and optimizer.local.steps > 1:
        working += one  # local steps keep the parameters where they began
        private += ADAM_MOMENTS * one
    state, host = size.model_bytes + base - one + private + working, 0
    if memory in IN_MAIN:
        weights = whole if memory == "host" else size.outside + BLOCKS_THERE * size.block
        host, short = state, (size.model_bytes - BYTES_A_NUMBER * whole) + BYTES_A_SHORT * weights
        state = short + 2 * BYTES_A_SHORT * size.largest if trains else 0
    return Need(
        size.parameters, size.model_bytes, -(-state // ranks), sample, base - one + BYTES_A_NUMBER * whole,
        private if trains else 0, host=host,
        idle=0 if trains or ranks > 1 else private,
        gradients=BYTES_A_SHORT * size.parameters if joins and trains else 0, samples=samples, small=small,
        casts=BYTES_A_SHORT * whole // ranks if casts and memory not in IN_MAIN and trains else 0,
        heap=int(HEAP_BYTES_A_PARAMETER * size.parameters), checks=2 * one if checks and trains else 0,
        holes=HOLES_BYTES_A_PARAMETER * size.parameters if trains else 0,
    )  # fmt: skip


def kind_of(memory: Memory, optimizer: OptimizerConfig) -> Kind:
    """How a peer keeps its second moment. With a factored one, its momentum is in bf16."""
    return "factored" if memory != "full" and optimizer.method == "demo" and optimizer.beta2 > 0 else "whole"


def whole_gradients(optimizer: OptimizerConfig, *, checks: bool) -> str:
    """Why a peer that saves memory keeps whole gradients all the same; empty if each joins its momentum as it is made."""
    if optimizer.local.steps > 1:
        return "local steps need them"
    if optimizer.overlap:
        return "overlap makes them before the last votes are decided"
    return "the run checks votes" if checks else ""


def fitting(need: Need, room: DeviceMemory, wanted: int) -> int:
    """The micro-batch up to `wanted` that fits, halved as often as needed; 0: not even one sample does."""
    size = wanted
    while size > 1 and need.memory(size) > PART_USED_MAX * room.free:
        size //= 2
    return size if need.memory(size) <= room.free else 0


def fit(
    need: Need, room: DeviceMemory | None, device: str, wanted: int, *, chosen: bool, checkpointing: bool
) -> tuple[int, str]:
    """The micro-batch that a peer takes on a device, and why; 0: the run does not fit, and what to do.

    `chosen`: the person named `wanted`, so that nothing else is taken in its place. `checkpointing`: it is on already.
    """
    parameters, need = f"{count(need.parameters)} parameters", need.on(device)
    if room is None:
        return wanted, f"{parameters}; the memory of {device} is not known"
    has = f"free are {amount(room.free)} of {amount(room.total)} ({device})"
    other = "close programs that use this memory, or take another device (--device)"
    if need.state > room.free:
        return 0, (
            f"the model does not fit: {parameters} need {amount(need.state)} for {_contents(need)}; {has}. "
            f"To mend it, {other}"
        )
    less = "" if checkpointing else "take --set activation_checkpointing=true, "
    fits = fitting(need, room, wanted)
    if not fits:
        return 0, (
            f"one sample does not fit: {parameters} need {amount(need.memory(1))} with it; {has}. To mend it, {less}{other}"
        )
    if chosen and fits < wanted:
        return 0, (
            f"micro_batch {wanted} does not fit: {parameters} need {amount(need.memory(wanted))} with it; {has}. "
            f"To mend it, take --set micro_batch={fits}, {less}{other}"
        )
    smaller = f", micro-batch {fits} instead of {wanted}" if fits < wanted else ""
    return fits, f"{parameters}, {amount(need.memory(fits))} of {amount(room.free)} ({device}){smaller}"


def _contents(need: Need) -> str:
    if need.host and need.state < need.host:
        return "bf16 weights and a gradient"
    return "weights, gradients and momentum"


def building(need: Need, main: DeviceMemory, micro_batch: int = 1) -> tuple[bool, str]:
    """Whether the main memory holds the weights while they are built, and later the copies that are written to the disk, the
    gradients of checks, and with `memory = host` or `stream` the whole state."""
    most = max(need.weights, need.main(micro_batch))
    if most <= main.free:
        return True, f"{amount(most)} of {amount(main.free)} main memory"
    what = "the peer's state cannot be saved: the copies of weights and momentum that go to the disk need"
    if need.checks:
        what = "the copies of weights and momentum that go to the disk, and the gradients for checks of votes, need"
    if need.host:
        what = "the peer's state does not fit: with memory = host or stream, weights, momentum and optimizer need"
    if need.weights > main.free:
        what = "the model cannot be built: its weights need"
    return False, (
        f"{what} {amount(most)} of main memory; free are {amount(main.free)} of {amount(main.total)}. To mend it, close other "
        "programs"
    )


def disk(need: Need, free: int, already: int, folder: str) -> tuple[bool, str]:
    """Whether the files of a run fit on a disk. `already`: bytes of the run that are there."""
    missing, least = (max(need.disk_with(files) - already, 0) for files in (SNAPSHOT_FILES, SNAPSHOT_FILES_MIN))
    if least > free:
        return False, (
            f"the disk is too full: snapshots and momentum need {amount(least)}, free are {amount(free)} at {folder}. "
            "To mend it, delete files, or take a folder on another disk (--home)"
        )
    return True, f"{amount(min(missing, free))} of {amount(free)} free at {folder}"
