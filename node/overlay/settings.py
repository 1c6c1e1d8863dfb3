"""Settings of the overlay: addresses, relays, patience; and where p2pd listens: IPv4, IPv6 or both, at one port. ADR 20.

p2pd keeps its port over all its starts: a new one would make every address wrong that others know of this peer, also those at
which they have dialled it. Refuses a port that another program has: p2pd would take a busy TCP port silently (SO_REUSEPORT).
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from protos.errors import OperatorError
from protos.text import printable

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


EVERY_IPV4, EVERY_IPV6 = "0.0.0.0", "::"  # noqa: S104 - encrypted, authenticated transport
PORTS_TRIED_MAX = 64


def hosts_of(host: str) -> tuple[str, ...]:
    """The IP addresses to listen at. A machine without IPv6 listens at its IPv4 addresses, and the other way round."""
    if host != EVERY:
        return (host,)
    return tuple(each for each in (EVERY_IPV4, EVERY_IPV6) if not _fault(each, 0, socket.SOCK_STREAM)) or (EVERY_IPV4,)


def free_port(host: str) -> int:
    """A port that is free for TCP and UDP at all these addresses."""
    hosts = hosts_of(host)
    for _ in range(PORTS_TRIED_MAX):
        with socket.socket(_family(hosts[0]), socket.SOCK_STREAM) as probe:
            probe.bind((hosts[0], 0))
            port = int(probe.getsockname()[1])
        if not any(_fault(each, port, kind) for each in hosts for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)):
            return port
    raise OperatorError(f"no port is free for TCP and UDP at {', '.join(hosts)}; choose one with --listen")


def check_port_free(host: str, port: int, *, quic: bool = True) -> None:
    """OperatorError if another program listens there, or if the address is not this machine's. Port 0: any port."""
    for each in hosts_of(host):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)[: 1 + quic]:
            if fault := _fault(each, port, kind):
                raise OperatorError(f"cannot listen on {each} port {port}: {fault}; choose another one with --listen")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _fault(host: str, port: int, kind: socket.SocketKind) -> str:
    """Why nobody can listen there; empty: it is free."""
    try:
        with socket.socket(_family(host), kind) as probe:
            if _family(host) == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


# hivemind and p2pd speak over two sockets. They are in a folder of this user alone: a program that writes to them steers p2pd.

SOCKET_NAME: Final = "p2pclient-0123456789a.sock"
"""As long as hivemind's longest. A socket's whole path has at most 107 bytes (macOS: 103)."""
PLAIN: Final = re.compile(r"[A-Za-z0-9._/-]+")
"""A multiaddress writes other characters in another way than the disk."""


def socket_folder(home: Path) -> Path:
    """A new folder that takes sockets: for temporary files, in memory, or in the peer's home. OperatorError if none does."""
    named = [os.environ.get(name, "") for name in ("TMPDIR", "XDG_RUNTIME_DIR")]
    refused = []
    for place in dict.fromkeys([*filter(os.path.isabs, named), "/tmp", "/var/tmp", "/dev/shm", str(home)]):  # noqa: S108
        made = None
        try:
            made = Path(tempfile.mkdtemp(prefix="swarmentum-", dir=place))
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(str(made / SOCKET_NAME))
            (made / SOCKET_NAME).unlink()
            if PLAIN.fullmatch(place):
                return made
            refused.append(f"{printable(place)}: its name has other characters than A-Z a-z 0-9 . _ -")
        except OSError as error:
            refused.append(f"{printable(place)}: {error.strerror or error}")
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    raise OperatorError(f"no folder takes the sockets of the libp2p daemon; name one by TMPDIR ({'; '.join(refused)})")
