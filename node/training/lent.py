"""What the owner lends to the run: the parts of a peer that keep to the live settings, put together."""

from __future__ import annotations

from typing import Any

from node.config import PeerSettings
from node.donor.live import Live
from node.donor.priority import Priority
from node.training.throttle import Throttle

SEVERAL = "this peer has several devices, so the setting counts from its start on: leave, and join again with it"


class Lent:
    """Of one peer, on its training thread. `alone`: the peer has one device."""

    def __init__(self, settings: PeerSettings, *, alone: bool, log: Any) -> None:
        fixed = {} if alone else {"threads": SEVERAL}
        self.live = Live(settings.home, settings, {"nice": Priority().set}, fixed)
        self.throttle = Throttle(lambda: self.live.values)
        for text in (*self.live.overruled(), *self.live.apply()):
            log.info(text)
        self.throttle.heed()
