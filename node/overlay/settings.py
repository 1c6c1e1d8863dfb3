"""Settings of the overlay: addresses, relays, patience."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EVERY = "*"
"""In place of an IP address: every address of this machine, IPv4 and IPv6."""
Reachability = Literal["auto", "public", "private"]
# Addresses of other peers that this peer dials when it starts; the rest of a longer list is left out.
BOOTSTRAP_MAX = 128


@dataclass(frozen=True)
class OverlaySettings:
    """How this peer is on the overlay.

    `listen_host` is an IP address, or `*` for every address, IPv4 and IPv6. `listen_port` 0 takes a free port.
    `announce` are multiaddresses that other peers see instead of the found ones. `bootstrap` and `relays` are multiaddresses
    that end in /p2p/<peer id>.
    """

    listen_host: str = EVERY
    listen_port: int = 0
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    reachability: Reachability = "auto"
    relay_for_others: bool = True
    """If others can dial this peer, carry connections between peers that nobody can dial."""
    relay_bytes_a_second: float | None = None
    """The mean of what this peer carries between others; None: no limit."""
    quic: bool = True
    """Listen on UDP (QUIC), too."""
    patience_seconds: float = math.inf

    @property
    def finds_out(self) -> bool:
        """Whether this peer asks others if they can dial it. A person who sets `reachability` knows."""
        return self.reachability == "auto" and not (self.announce or self.relays or self.loopback)

    @property
    def loopback(self) -> bool:
        """Whether this peer only talks to this machine. Such a peer asks no router for a port mapping."""
        return self.listen_host != EVERY and ipaddress.ip_address(self.listen_host).is_loopback

    def listen(self, hosts: Sequence[str]) -> list[str]:
        """TCP, and QUIC on the same port number, at each of these IP addresses (`ports.hosts_of`)."""
        found = []
        for host in hosts:
            at = f"/ip{ipaddress.ip_address(host).version}/{host}"
            found += [f"{at}/tcp/{self.listen_port}", *([f"{at}/udp/{self.listen_port}/quic-v1"] if self.quic else [])]
        return found
