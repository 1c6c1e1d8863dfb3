"""The HTTP proxy of a network that lets nothing else out: what the environment names, and a connection through it (CONNECT).

A proxy is asked only for what does not answer directly. TLS and libp2p encrypt what goes through: a proxy sees addresses and
sizes. Refuses proxies of other kinds (SOCKS, TLS to the proxy itself). Every wait has a deadline.
"""

from __future__ import annotations

import base64
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

DIRECT_SECONDS_MAX = 3.0
"""A firewall that drops packets answers nothing: after so long the proxy is asked."""
ANSWER_BYTES_MAX = 16 << 10
_VARIABLES = ("https", "all")


@dataclass(frozen=True)
class HttpProxy:
    """`at` is host:port, for people. `url` may have a password, so it is not printed."""

    host: str
    port: int
    url: str = field(repr=False)

    @property
    def at(self) -> str:
        """host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def _credentials(self) -> str:
        """The header with name and password; empty without them."""
        parts = urlsplit(self.url)
        if not parts.username:
            return ""
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}\r\n"

    def connect(self, host: str, port: int, seconds_max: float) -> socket.socket:
        """A connection to host and port through the proxy, without a timeout. OSError with the proxy's words if it refuses."""
        until, there = time.monotonic() + seconds_max, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
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
    url = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        return None
    return HttpProxy(parts.hostname, port, url) if parts.scheme == "http" and parts.hostname else None


def way_to(host: str, port: int) -> HttpProxy | None:
    """The proxy if this place does not answer directly and the environment names one; otherwise None. Blocks at most
    DIRECT_SECONDS_MAX, and does not without a proxy."""
    proxy = proxy_for(host)
    if proxy is None:
        return None
    try:
        socket.create_connection((host, port), timeout=DIRECT_SECONDS_MAX).close()
    except OSError:
        return proxy
    return None
