"""What the owner lends to the run: the parts of a peer that keep to the live settings, put together."""

from __future__ import annotations

import os
from typing import Any

import torch

from node.config import PeerSettings
from node.donor.gpu import GpuPrograms
from node.donor.live import Live
from node.donor.machine import Machine
from node.donor.priority import Priority
from node.donor.settings import CONDITIONS
from node.donor.watch import Watch
from node.training.loop import Trainer
from node.training.throttle import Throttle

NO_TRAINING = "an anchor does not train, so no condition pauses it; `swarmentum leave` ends it"
SEVERAL = "this peer has several devices, so the setting counts from its start on: leave, and join again with it"


class Lent:
    """Of one peer, on its training thread. `alone`: the peer has one device. `trains`: it is no anchor."""

    def __init__(self, settings: PeerSettings, *, alone: bool, trains: bool, log: Any) -> None:
        fixed = ({} if alone else {"threads": SEVERAL}) | ({} if trains else dict.fromkeys(CONDITIONS, NO_TRAINING))
        self.live = Live(settings.home, settings, {"nice": Priority().set}, fixed)
        self.throttle = Throttle(lambda: self.live.values)
        for text in (*self.live.overruled(), *self.live.apply()):
            log.info(text)
        self.throttle.heed()
        self._log = log
        self._family = None if alone else os.getppid()
        self._watch: Watch | None = None

    def watch(self, trainer: Trainer) -> None:
        """From now on the conditions pause the peer, and let it go on. They have no effect on an anchor: it does not train."""
        if trainer.is_anchor:
            return
        machine = Machine(GpuPrograms(bus_id_of(trainer.replica.device), self._family))
        self._watch = Watch(self.live, machine.facts, trainer.wishes.hold, self._log)
        self._watch.start()

    def close(self) -> None:
        """Look at the machine no more."""
        if self._watch is not None:
            self._watch.close()


def bus_id_of(device: torch.device) -> str | None:
    """The PCI bus id of a GPU, as NVML names it; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    card = torch.cuda.get_device_properties(device)
    told: Any = card  # torch's stubs lack these names
    domain, bus, slot = told.pci_domain_id, told.pci_bus_id, told.pci_device_id
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"
