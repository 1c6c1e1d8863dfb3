"""The HTTP proxy of a network that lets nothing else out: what the environment names, and a connection through it (CONNECT).

A proxy is asked only for what does not answer directly. TLS and libp2p encrypt what goes through: a proxy sees addresses and
sizes. Refuses proxies of other kinds (SOCKS, TLS to the proxy itself). Every wait has a deadline.
"""

from __future__ import annotations

import base64
import ipaddress
import re
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import quote, unquote_to_bytes, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

DIRECT_SECONDS_MAX = 3.0
"""A firewall that drops packets answers nothing: after so long the proxy is asked."""
ANSWER_BYTES_MAX = 16 << 10
HTTP_PORT = 80
_VARIABLES = ("https", "all")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class HttpProxy:
    """`at` is host:port, for people. `url` may have a password, so it is not printed."""

    host: str
    port: int
    url: str = field(repr=False)

    @property
    def at(self) -> str:
        """host:port."""
        return _at(self.host, self.port)

    @property
    def _credentials(self) -> str:
        """The header with name and password; empty without them."""
        parts = urlsplit(self.url)
        if not parts.username:
            return ""
        pair = unquote_to_bytes(parts.username) + b":" + unquote_to_bytes(parts.password or "")
        return f"Proxy-Authorization: Basic {base64.b64encode(pair).decode()}\r\n"

    def connect(self, host: str, port: int, seconds_max: float) -> socket.socket:
        """A connection to host and port through the proxy, without a timeout. OSError with the proxy's words if it refuses, or
        for a host that cannot be."""
        until = time.monotonic() + seconds_max
        try:
            there = _at(_checked(host), port)
        except ValueError as error:
            raise OSError(str(error)) from error
        opened = socket.create_connection((self.host, self.port), timeout=seconds_max)
        try:
            opened.sendall(f"CONNECT {there} HTTP/1.1\r\nHost: {there}\r\n{self._credentials}\r\n".encode())
            answer = bytearray()
            while not answer.endswith(b"\r\n\r\n"):  # one by one: what follows belongs to the other side
                opened.settimeout(max(until - time.monotonic(), 0.001))
                byte = opened.recv(1)
                if not byte or len(answer) >= ANSWER_BYTES_MAX:
                    raise OSError("it is no HTTP proxy: it did not answer CONNECT")
                answer += byte
            line = answer.split(b"\r\n", 1)[0].decode("ascii", "replace")
            if line.split(" ")[1:2] != ["200"]:
                raise OSError(f"it answered {line[:100]!r}")
        except BaseException:
            opened.close()
            raise
        opened.settimeout(None)
        return opened


def proxy_for(host: str) -> HttpProxy | None:
    """What `https_proxy` (or `all_proxy`) names, in capitals or not, unless `no_proxy` names this host. None: no usable one."""
    found = getproxies_environment()
    url = next((found[name] for name in _VARIABLES if found.get(name)), "")
    if not url or proxy_bypass(host):
        return None
    url = url.strip()
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            return None
        host, port = _checked(parts.hostname), parts.port or HTTP_PORT
        name, password = (quote(unquote_to_bytes(it), safe="") for it in (parts.username or "", parts.password or ""))
    except ValueError:
        return None
    # Whole, in parts that gRPC reads as this program does: it takes another port where none is named, sends a name without a
    # password in another form, and prints what it cannot read.
    return HttpProxy(host, port, f"http://{f'{name}:{password}@' if name else ''}{_at(host, port)}")


def way_to(host: str, port: int) -> HttpProxy | None:
    """The proxy if this place does not answer directly and the environment names one; otherwise None. Blocks at most
    DIRECT_SECONDS_MAX, and does not without a proxy. No proxy leads to a place that cannot be: who asks hears why."""
    proxy = proxy_for(host)
    if proxy is None:
        return None
    try:
        socket.create_connection((host, port), timeout=DIRECT_SECONDS_MAX).close()
    except OSError:
        return proxy
    except ValueError:
        return None
    return None


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _checked(host: str) -> str:
    """The host as it goes over the wire. ValueError for what is no name and no address."""
    if ":" in host and "%" not in host:  # a zone means nothing to another machine
        return str(ipaddress.IPv6Address(host))
    try:
        name = host.encode("idna").decode()
    except UnicodeError as error:
        raise ValueError(f"{host!r} is no name of a host: {error}") from error
    if not _NAME.fullmatch(name):
        raise ValueError(f"{host!r} is no name of a host")
    return name
