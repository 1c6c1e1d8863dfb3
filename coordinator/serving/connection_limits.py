"""The TCP connections of one network address, bounded: gRPC bounds only the number of all connections.

The module looks from time to time at the sockets of a listening port. If a site has too many connections, the module shuts
down those without a call, the newest first. gRPC then ends them like any connection whose other side has gone.

The module reads `/proc`, so it works on Linux only. On other systems a firewall has to bound the connections
(`deploy/coordinator.nft` is for Linux, too). Refuses to touch a socket that it does not find again under its descriptor.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import structlog

from coordinator.serving.call_limits import LOOPBACK
from protos.address import network_of, site

SITE_MAX = 600
"""Connections of one address (an IPv6 /64 counts as one): a NAT with 500 peers, one connection each, finds room."""
LOOPBACK_MAX = 4096
LOOK_EVERY_S = 2.0
_ESTABLISHED = "01"
_SOCKETS = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
_DESCRIPTORS = Path("/proc/self/fd")
_IS_THERE = _DESCRIPTORS.is_dir()


@dataclass(frozen=True)
class Connection:
    """An accepted connection: the socket's number in the kernel, and the other end's address and port."""

    inode: int
    address: str
    port: int

    @property
    def far(self) -> tuple[str, int]:
        """The other end's address and port."""
        return self.address, self.port


def far_end(peer: str) -> tuple[str, int]:
    """The address and port in gRPC's name of a peer: `ipv4:192.0.2.1:50000`, `ipv6:%5B2001:db8::1%5D:50000`."""
    return str(network_of(peer)), int(peer.rpartition(":")[2])


def parse(lines: Iterable[str], port: int) -> list[Connection]:
    """The established connections that a listening port accepted, from the lines of `/proc/net/tcp` or `tcp6`."""
    found = []
    for line in lines:
        words = line.split()
        if len(words) < 10 or words[3] != _ESTABLISHED or int(words[1].rpartition(":")[2], 16) != port:
            continue
        host, _, number = words[2].rpartition(":")
        found.append(Connection(int(words[9]), _address(host), int(number, 16)))
    return found


def _address(text: str) -> str:
    """The kernel writes 32-bit words in the machine's own order."""
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    if len(data) == 4:
        return str(IPv4Address(data))
    address = IPv6Address(data)
    return str(address.ipv4_mapped or address)


def surplus(
    found: Iterable[Connection], busy: Collection[tuple[str, int]], site_max: int, loopback_max: int
) -> list[Connection]:
    """The connections to close: of each site with too many, those without a call, the newest (highest socket number)
    first."""
    sites: dict[str, list[Connection]] = defaultdict(list)
    for connection in found:
        sites[site(ip_address(connection.address))].append(connection)
    gone = []
    for where, here in sites.items():
        over = len(here) - (loopback_max if where == LOOPBACK else site_max)
        if over > 0:
            idle = sorted((c for c in here if c.far not in busy), key=lambda c: c.inode, reverse=True)
            gone += idle[:over]
    return gone


class Bounded:
    """The connections of one listening port. `busy`: connections with a call under way, as gRPC names them."""

    def __init__(
        self, port: int, busy: Callable[[], Collection[str]], site_max: int = SITE_MAX, loopback_max: int = LOOPBACK_MAX
    ) -> None:
        self._port, self._busy, self._most = port, busy, (site_max, loopback_max)
        self.ended = 0
        """Connections that were shut down since the start."""

    async def run(self) -> None:
        """Look every LOOK_EVERY_S, until cancelled. Ends at once without `/proc`."""
        log = structlog.get_logger("coordinator").bind(step=0, peer="-")
        while _IS_THERE:
            await asyncio.sleep(LOOK_EVERY_S)
            ended = await asyncio.to_thread(self.look, {far_end(peer) for peer in self._busy()})
            if ended:
                self.ended += ended
                log.warning("one network address has too many connections; its idle ones are closed", ended=ended)

    def look(self, busy: Collection[tuple[str, int]]) -> int:
        """Look once. Returns the number of connections that were shut down. Blocks, because it reads each descriptor."""
        found: list[Connection] = []
        for table in _SOCKETS:
            with suppress(OSError), table.open() as lines:
                found += parse(lines, self._port)
        if len(found) <= min(self._most):
            return 0
        gone = {connection.inode: connection for connection in surplus(found, busy, *self._most)}
        return sum(_shut(int(path.name), gone) for path in _DESCRIPTORS.iterdir()) if gone else 0


def _shut(descriptor: int, gone: dict[int, Connection]) -> bool:
    """Shut this descriptor's socket down, if it is one of these. The check uses a copy that no other code can close."""
    try:
        if _inode(descriptor) not in gone:
            return False
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if _inode(copy.fileno()) not in gone:
                return False
            copy.shutdown(socket.SHUT_RDWR)
    except OSError:  # the connection has ended meanwhile
        return False
    return True


def _inode(descriptor: int) -> int:
    """The inode of the socket behind a descriptor; -1 if it is no socket."""
    text = str((_DESCRIPTORS / str(descriptor)).readlink())
    return int(text[8:-1]) if text.startswith("socket:[") else -1
