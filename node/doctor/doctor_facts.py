"""Facts that the probes of `swarmentum doctor` collect: values only. A failed probe gives a `Fault` in place of its fact."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.blobs.testbytes import Upload
from node.model.device import DeviceMemory
from protos.errors import OperatorError, RefusedError, SwarmentumError, in_words


@dataclass(frozen=True)
class Fault:
    """Why a fact is not known."""

    why: str
    refused: bool = False
    """The run itself said no, or cannot be joined by this program: to try again changes nothing."""


def fault_of(error: BaseException) -> Fault:
    """What a failed probe says."""
    refused = isinstance(error, RefusedError | OperatorError)
    return Fault(str(error) if isinstance(error, SwarmentumError) else in_words(error), refused)


@dataclass(frozen=True)
class Devices:
    """What torch computes on here, and the graphics cards that the machine has, whatever torch sees."""

    torch: str
    """Version of torch."""
    build: str
    """`cuda 12.8`, `hip 6.4`, or `cpu`: what this torch was built for."""
    present: tuple[str, ...]
    """Torch's names, best first; `cpu` is the last."""
    chosen: str
    """The device that `join` takes with these settings; empty with a `fault`."""
    name: str = ""
    """The chosen device's own name."""
    fault: str = ""
    cards: tuple[str, ...] = ()
    """Makers of graphics cards on this machine's bus: `NVIDIA`, `AMD`."""
    driver: str = ""
    """Version of the NVIDIA driver; empty: none is loaded."""
    room: DeviceMemory | None = None
    """Memory of the chosen device."""
    threads: int = 0


@dataclass(frozen=True)
class Here:
    """The rest of this machine."""

    home: str
    disk_free: int
    clock_kept: bool | None
    """Whether the system keeps the clock right (NTP); None: it does not say."""
    listen: str
    quic: bool
    port_fault: str
    """Why the peer could not listen there; empty: it could."""
    on_battery: bool | None
    home_fault: str = ""
    """Why `join` could not keep its files there; empty: nothing is known against it."""
    clock_wrong: str = ""
    """Why the clock is wrong; empty: nothing is known against it."""
    keeps_awake: bool = False
    """Whether this machine has a program that the setting `keep_awake` can use."""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seat:
    """The model and this peer's part of it: what `node.admission.fit` counts, and the votes."""

    micro_batch: int
    """That fits; 0: the run does not."""
    why: str
    disk_fits: bool
    disk: str
    payload_bytes: int | None
    samples_per_second: float | None
    """Measured on this device; None: not measured, and `speed` says why."""
    speed: str
    most_bytes: int = 0
    """Of the votes of a step, where the lines carry more."""


@dataclass(frozen=True)
class OwnText:
    """Training text on this machine, as far as the doctor read it. `left`: what is left out, a line for each reason."""

    place: str
    read: str
    left: tuple[str, ...]
    enough: bool
    """Whether so little is left out, or so much is allowed, that `join` takes the text."""


@dataclass(frozen=True)
class Others:
    """The run's peers, as the coordinator says."""

    ready: int
    samples_per_second: float
    """Of all ready peers together."""
    anchors: int
    batch_samples: int
    head_step: int
    steps: int
    phase: str
    steps_per_second: float | None
    """Of the run, while the doctor looked; None: it did not move."""
    clock_wrong: str = ""
    """How this machine's clock differs from the coordinator's; empty: it does not."""


@dataclass(frozen=True)
class Reach:
    """This machine on the overlay."""

    addresses: tuple[str, ...]
    """That p2pd tells others."""
    connected: int
    """Peers of the run that answered."""
    seen_from: str
    """This machine's IP address, as the coordinator sees it; empty: it does not say."""
    dialled: bool | None = None
    """Whether peers outside could dial this machine when they were asked; None: none of them has answered."""
    relays: int = 0
    """Peers that relay for peers which nobody can dial."""


@dataclass(frozen=True)
class Download:
    """Pieces of the newest snapshot, pulled from peers of the run."""

    size: int
    seconds: float
    of: int
    """Bytes of the whole snapshot, which a joiner pulls."""


@dataclass(frozen=True)
class InLine:
    """A run that is full, and the peers in the line before it."""

    waiting: int


@dataclass(frozen=True)
class Found:
    """All that is known about a run from here. A `Fault` stands for what could not be found."""

    name: str
    address: str
    round_trip_ms: float | Fault
    facts: Others | Fault
    asks: str | Fault
    """What the run asks of this machine (data, code, downloads)."""
    admitted: str | InLine | Fault
    """This peer's id, if the coordinator admits it."""
    seat: Seat | Fault
    reach: Reach | Fault
    download: Download | Fault
    upload: Upload | Fault
    texts: tuple[OwnText, ...] | Fault = ()
    """On this machine, if the run may read them."""
