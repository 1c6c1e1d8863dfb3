"""Where p2pd listens: the addresses of a machine with IPv4, IPv6 or both, and a port that it keeps over all its starts. ADR 20.

A new p2pd at another port would make every address wrong that others know of this peer, also those at which they have dialled
it. Refuses a port that another program has: p2pd itself would take a busy TCP port silently (SO_REUSEPORT).
"""

from __future__ import annotations

import socket

from node.overlay.settings import EVERY
from protos.errors import OperatorError

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
