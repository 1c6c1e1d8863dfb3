"""What the owner lends to the run: the parts of a peer that keep to the live settings, put together.

`Throttle` is what the training thread may take, applied on that thread, because OpenMP counts threads for each caller: threads,
and the part of the time that the device computes. Waiting for the network counts as rest. It refuses to decide, because the
settings do, and knows no step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from node.blobs.blobs import FlowDirection, WireBytes
from node.blobs.payloads import Payloads
from node.config import BYTES_A_MBIT, PeerSettings
from node.data.shard_cache import Cache
from node.donor import owner_machine
from node.donor.live import Applies, Kept, Live, Month, allowed
from node.donor.owner_machine import GpuPrograms, Machine
from node.donor.owner_settings import CONDITIONS, LiveSettings, MachineFacts, State, decide, states
from node.model.device import limit
from node.swarm.runtime import Counters
from protos.accounts import NOBODY, Owner
from protos.errors import NetworkError, OperatorError
from protos.process import usable_cores

if TYPE_CHECKING:
    from node.training.keeper import StepRecorder
    from node.training.loop import Trainer

OWED_SECONDS_MAX = 60.0
"""A peer that replayed the log for long does not rest for as long before it trains."""
OWED_SECONDS_MIN = 0.001
SLICE_SECONDS = 0.05


class Throttle:
    """Of one training thread. `wanted` gives the settings as they are now; `now` and `sleep` are in seconds."""

    def __init__(
        self,
        wanted: Callable[[], LiveSettings] = LiveSettings,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._wanted, self._now, self._sleep = wanted, now, sleep
        self._choice = min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(self._choice)
        self._threads: int | None = None
        self._at, self._owed = now(), 0.0

    def refresh(self) -> None:
        """Take the number of threads that is wanted now."""
        threads = self._wanted().threads
        if threads != self._threads:
            torch.set_num_threads(threads or self._choice)
            self._threads = threads

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Meanwhile the thread only waits. The time before counts as work."""
        self._worked()
        yield
        self._rested()

    def resting_until(self, over: Callable[[], bool]) -> Callable[[], bool]:
        """`over`, to be asked between micro-batches: it rests before it answers, unless it is over."""

        def rested() -> bool:
            self._worked()
            while not (ended := over()) and self._owed > OWED_SECONDS_MIN:
                self._sleep(min(self._owed, SLICE_SECONDS))
                self._rested()
            return ended

        return rested

    def _worked(self) -> None:
        """The time since the last call was work: so much rest is due for it."""
        part = self._wanted().duty_cycle or 1.0
        self._owed = min(self._owed + self._since() * (1 - part) / part, OWED_SECONDS_MAX)

    def _rested(self) -> None:
        part = self._wanted().duty_cycle
        since = self._since()
        self._owed = 0.0 if part is None else max(self._owed - since, 0.0)

    def _since(self) -> float:
        before, self._at = self._at, self._now()
        return self._at - before


LOOK_SECONDS = 5.0
STOP_SECONDS_MAX = 5.0
FAILURES = (OSError, RuntimeError, OperatorError, subprocess.SubprocessError, psutil.Error)


class ConditionWatch:
    """The thread that looks whether the owner's conditions let the peer work, and pauses it or lets it go on. ADR 35.

    It decides nothing (`node/donor/owner_settings.py` does). The owner's own pause is another value of `OwnerRequests`, and
    stays as it is. `facts` looks at the machine; `hold` takes the condition that pauses the peer, or None, and the facts.
    """

    def __init__(
        self,
        live: Live,
        facts: Callable[[LiveSettings], MachineFacts],
        hold: Callable[[State | None, MachineFacts], None],
        log: Any,
    ) -> None:
        self._live, self._facts, self._hold, self._log = live, facts, hold, log
        self._said: set[str] = set()
        self._held: State | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._look_forever, name="conditions", daemon=True)

    def start(self) -> None:
        """Look once now, so that the peer begins as its conditions say; then every LOOK_SECONDS, and after each `set`."""
        self._live.changed.clear()
        self.look()
        if self._held is not None:
            self._log.info("paused from the start on", why=self._held.why)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended = True
        self._live.changed.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS_MAX)
            self.look()  # the month's last bytes

    def look(self) -> None:
        """Once."""
        settings = self._live.values
        try:
            facts = self._facts(settings)
        except FAILURES as error:
            self._say_once(f"conditions cannot be looked at now: {error}; the peer stays as it is")
            return
        state = decide(settings, facts)
        if facts.zone_fault:
            self._say_once(f"hours: {facts.zone_fault}")
        if settings.not_beside_other_gpu_programs and facts.gpu_programs is None:
            self._say_once(next(it.why for it in states(settings, facts) if it.key == "not_beside_other_gpu_programs"))
        if state is not None and self._held is not None and state.key != self._held.key:
            self._log.info("still paused", why=state.why)
        self._held = state
        try:
            self._hold(state, facts)
        except FAILURES as error:
            self._say_once(f"not every setting of the owner holds now: {error}; the peer tries again")

    def _look_forever(self) -> None:
        while True:
            self._live.changed.wait(LOOK_SECONDS)
            self._live.changed.clear()
            if self._ended:
                return
            self.look()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._log.warning("a setting cannot be kept to", why=text)


TASKS = Path("/proc/self/task")
LATER = "the system lets a program only lower its priority, so nice {} counts from the next start on"


class Priority:
    """The priority of this process among the programs of its machine. Off means the priority that it started with.

    Linux counts the priority of each thread by itself, so every thread gets it; threads and processes that start later inherit
    it.
    """

    def __init__(self) -> None:
        self._first = os.getpriority(os.PRIO_PROCESS, 0)

    def set(self, nice: int | None) -> str:
        """Take the priority. Returns why it cannot be taken now; empty: every thread has it."""
        wanted = self._first if nice is None else max(nice, self._first)
        threads = [int(task.name) for task in TASKS.iterdir()] if sys.platform == "linux" else [0]
        try:
            for thread in threads:
                with suppress(ProcessLookupError):  # it has just ended
                    os.setpriority(os.PRIO_PROCESS, thread, wanted)
        except PermissionError:
            return LATER.format(wanted)
        return ""


NO_TRAINING = "an anchor does not train, so no condition pauses it; `swarmentum leave` ends it"
SIGNATURE_IGNORED = (
    "owner.json in the home is not read any more; `swarmentum set owner NAME` shows the name, as a claim"
)
SEVERAL = "this peer has several devices, so the setting counts from its start on: leave, and join again with it"


class ResourceLimits:
    """Of one peer, on its training thread. `device`: that it computes on. `alone`: it has one. `trains`: it is no anchor."""

    def __init__(
        self,
        settings: PeerSettings,
        device: Callable[[], torch.device],
        *,
        alone: bool,
        trains: bool,
        log: Any,
    ) -> None:
        self._settings = settings
        fixed = {} if alone else {"threads": SEVERAL, "gpu_memory": SEVERAL}
        fixed |= {} if trains else dict.fromkeys((*CONDITIONS, "gpu_memory"), NO_TRAINING)
        applies: dict[str, Applies] = {"nice": Priority().set, "keep_awake": owner_machine.check}
        if trains:
            applies["gpu_memory"] = lambda part: limit(device(), part)
        self.live = Live(settings.home, settings, applies, fixed)
        self.throttle = Throttle(lambda: self.live.values)
        self.owner = Owner(self.live.values.owner or "")
        signed = [SIGNATURE_IGNORED] if (settings.home / "owner.json").exists() else []
        for text in (*self.live.overruled(), *self.live.apply(), *signed):
            log.info("a setting is not as written", why=text)
        self.throttle.refresh()
        self.month = Month(settings.home, log)
        self.counters = Counters(
            wire=WireBytes(up=FlowDirection(self._rate("upload_mbit")), down=FlowDirection(self._rate("download_mbit")))
        )
        self._log = log
        self._told_owner = NOBODY
        self._disk_limited, self._relayed = settings.disk_gb is not None, 0
        self._family = None if alone else os.getppid()
        self._watch: ConditionWatch | None = None
        self._awake = owner_machine.Awake(log)

    def watch(self, trainer: Trainer, payloads: Payloads, shelves: Sequence[Cache]) -> None:
        """From now on the conditions pause the peer, and let it go on; and a month that is used up closes its ways.

        The disk's limit holds for the trainer's archive, for `payloads`, and for the text on the `shelves`."""
        looked_at = Machine(GpuPrograms(bus_id_of(trainer.replica.maker.device), self._family))
        wire = self.counters.wire

        def facts(settings: LiveSettings) -> MachineFacts:
            found = looked_at.facts(settings)
            relayed = self._relayed  # it came in and went out
            self.month.count(found.month, wire.sent + relayed, wire.received + relayed)
            return replace(found, uploaded=self.month.up, downloaded=self.month.down)

        def hold(state: State | None, found: MachineFacts) -> None:
            shut = {it.key for it in states(self.live.values, found) if not it.works}
            wire.up.shut, wire.down.shut = "upload_gb" in shut, "download_gb" in shut
            if not trainer.is_anchor:
                trainer.wishes.hold("" if state is None else state.why)
            self._name_owner(trainer)
            self._limit_relaying(trainer)
            self._limit_disk(trainer.archive, payloads, shelves)
            self._awake.keep(self.live.values.keep_awake and not trainer.wishes.paused)

        self._watch = ConditionWatch(self.live, facts, hold, self._log)
        self._watch.start()

    def _name_owner(self, trainer: Trainer) -> None:
        """After `swarmentum set owner NAME`: the coordinator hears of it in the next report."""
        owner = Owner(self.live.values.owner or "")
        if owner == self._told_owner:
            return
        with suppress(NetworkError):  # the network side is busy or closed: the next look tries again
            trainer.swarm.name_owner(owner)
            self.owner = self._told_owner = owner
            self._log.info("the owner's name is changed", owner=owner.name)

    def _limit_relaying(self, trainer: Trainer) -> None:
        with suppress(NetworkError):
            self._relayed = trainer.swarm.limit_relaying(self._rate("relaying_mbit")())

    def _limit_disk(self, archive: StepRecorder | None, payloads: Payloads, shelves: Sequence[Cache]) -> None:
        """Each store heeds its part of the disk at its next write, and the shelf at once."""
        disk_gb = self.live.values.disk_gb
        if disk_gb is None and not self._disk_limited:
            return
        self._disk_limited = disk_gb is not None
        used = Kept(
            0 if archive is None else archive.total_bytes,
            payloads.total_bytes,
            sum(shelf.total_bytes for shelf in shelves),
        )
        now = allowed(disk_gb, used)
        payloads.bytes_max = now.payloads
        if archive is not None:
            archive.limit(now.archive)
        for shelf in shelves:
            shelf.limit(now.text // len(shelves))

    def told(self) -> dict[str, Any]:
        """For `me`: the month's bytes, and how many the owner gives."""
        values, month = self.live.values, self.month
        return {"up": month.up, "down": month.down, "upload_gb": values.upload_gb, "download_gb": values.download_gb}

    def _rate(self, key: str) -> Callable[[], float | None]:
        """Bytes a second, as they are set now."""

        def rate() -> float | None:
            mbit: float | None = getattr(self.live.values, key)
            return None if mbit is None else mbit * BYTES_A_MBIT

        return rate

    def close(self) -> None:
        """Look at the machine no more."""
        if self._watch is not None:
            self._watch.close()
        self._awake.close()


def bus_id_of(device: torch.device) -> str | None:
    """The PCI bus id of a GPU, as NVML names it; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    card = torch.cuda.get_device_properties(device)
    told: Any = card  # torch's stubs lack these names
    domain, bus, slot = told.pci_domain_id, told.pci_bus_id, told.pci_device_id
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"
