"""Shards and manifests over HTTP(S): several mirrors, resumed after a break, never more bytes than were promised.

The address comes from a run, so perhaps from a stranger. Refuses addresses of this machine and of private networks unless the
owner allows them: a run could else make a peer call the devices of its own home.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx2

from node.data.shard_cache import PART, matches
from node.data.shards import MANIFEST, MANIFEST_BYTES_MAX, Shard, sha256_of
from protos.address import SCHEMES
from protos.clocks import Waits
from protos.errors import DataError, NetworkError, in_words
from protos.version import software_version

RATE_SECONDS: Final = 30.0
RATE_BYTES_MIN: Final = 1 << 16
"""A server that sends less in RATE_SECONDS counts as away."""
CONNECT_SECONDS_MAX: Final = 20.0
SILENCE_SECONDS_MAX: Final = 60.0
LOOK_SECONDS: Final = 0.5
"""How often a deadline is looked at."""
REDIRECTS_MAX: Final = 5
WAIT_SECONDS_MIN: Final = 1.0
WAIT_SECONDS_MAX: Final = 60.0
MANIFEST_TRIES: Final = 3

_WITH_IPV4_LAST: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::/96"))
"""NAT64 (RFC 6052), and the old IPv4-compatible addresses."""
_OF_GATEWAYS_WITHIN: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
"""NAT64 for a private network's own use (RFC 8215)."""

Log = Callable[..., None]


def _silent(event: str, **facts: object) -> None:
    """Nobody wants to know."""


def _at_once(size: int) -> None:
    """There is no cap."""


def base_of(url: str) -> str:
    """The address of a set's folder, with a slash at its end. A set may be named by its folder or by its manifest."""
    return url.removesuffix(MANIFEST).rstrip("/") + "/"


class Mirrors:
    """The addresses of one set. `private`: addresses of this machine and of private networks are allowed. `paced(bytes)`
    counts bytes that came, and waits as the owner's caps ask."""

    def __init__(
        self, urls: list[str], *, private: bool, log: Log = _silent, paced: Callable[[int], None] = _at_once
    ) -> None:
        self.urls, self._web, self._log = [base_of(url) for url in urls], WebReader(private=private), log
        self._at, self._paced = 0, paced

    def manifest(self, sha256: str | None) -> bytes:
        """The manifest file. `sha256`: the hash that it must have. Raises NetworkError, or DataError if it is another set."""
        why = ""
        for attempt in range(MANIFEST_TRIES * len(self.urls)):
            url = self._url(MANIFEST)
            try:
                data = b"".join(self._web.blocks(url, 0, MANIFEST_BYTES_MAX))
            except (httpx2.HTTPError, OSError) as error:
                why = f"{url}: {one_line(error)}"
                self._at += 1
                time.sleep(WAIT_SECONDS_MIN if attempt + 1 < MANIFEST_TRIES * len(self.urls) else 0)
                continue
            if sha256 is None or sha256_of(data) == sha256:
                return data
            why = f"{url} has SHA-256 {sha256_of(data)[:16]}..., and the run names {sha256[:16]}..."
            self._at += 1
        if "SHA-256" in why:
            raise DataError(f"data: {why}: it is another set of shards; ask the run's operator which one is meant")
        raise NetworkError(f"data: the manifest of the training text cannot be had: {why}")

    def fetch(self, shard: Shard, width: int, path: Path, told: Callable[[int], bool]) -> bool:
        """Bring one shard to `path`. Tries until it is there (True) or `told` says that nobody wants it (False)."""
        part, size, waits = (
            path.with_name(path.name + PART),
            shard.tokens * width,
            Waits(WAIT_SECONDS_MIN, WAIT_SECONDS_MAX),
        )
        while told(_size(part)):
            url = self._url(shard.name)
            try:
                self._append(url, part, size, told)
                if not told(_size(part)):
                    return False
                if matches(part, shard, width):
                    part.replace(path)
                    return True
                part.unlink(missing_ok=True)
                why = "its bytes are not those that the manifest names"
            except (httpx2.HTTPError, OSError, DataError, NetworkError) as error:
                why = one_line(error)
            self._at += 1
            wait = waits.next()
            self._log("training text: the download is tried again", url=url, why=why, seconds=round(wait, 1))
            if not _slept(wait, part, told):
                return False
        return False

    def _url(self, name: str) -> str:
        return self.urls[self._at % len(self.urls)] + name

    def _append(self, url: str, part: Path, size: int, told: Callable[[int], bool]) -> None:
        """Add to `part` what it lacks of `size` bytes, as far as `told` lets it."""
        done = _size(part)
        if done > size:
            part.unlink()
            done = 0
        if done == size:
            return
        with part.open("ab") as file:
            for block in self._web.blocks(url, done, size - done):
                try:
                    self._paced(len(block))
                except (CancelledError, RuntimeError) as error:  # the peer ends, and so does its network side
                    raise NetworkError("the peer ends") from error
                file.write(block)
                done += len(block)
                if not told(done):
                    return


class WebReader:
    """Reads files of the web. `private`: addresses of this machine and of private networks are allowed. An address of the
    internet leads there in no case.

    `check` sees each request in place of that rule, also one that a server sends this program to."""

    def __init__(self, *, private: bool = False, check: Callable[[httpx2.Request], None] | None = None) -> None:
        self._private, self._check = private, check

    def blocks(self, url: str, start: int, most: int, *, exactly: bool = False) -> Iterator[bytes]:
        """At most `most` bytes of a file from byte `start` on; `exactly` these, from a server that knows ranges.

        Raises OSError, httpx2.HTTPError, DataError."""
        headers = {"Range": f"bytes={start}-{start + most - 1 if exactly else ''}"} if start or exactly else {}
        with _Deadline(url) as deadline, self._answer(url, headers, deadline) as answer:
            answer.raise_for_status()
            partial = answer.status_code == httpx2.codes.PARTIAL_CONTENT
            if exactly and not partial:
                raise OSError(f"{url}: the server knows no byte ranges")
            skipped = 0 if partial else start  # a server may know no ranges
            # raw: nothing unpacks what a stranger packed
            for block in _not_too_slow(deadline.blocks(answer.iter_raw()), url):
                kept = block[skipped:]
                skipped -= len(block) - len(kept)
                most -= len(kept)
                if most < 0:
                    raise OSError(f"{url} is larger than was promised")
                yield kept

    @contextmanager
    def _answer(self, url: str, headers: dict[str, str], deadline: _Deadline) -> Iterator[httpx2.Response]:
        """The answer after at most REDIRECTS_MAX redirects. Their bodies are not read: nothing would bound them."""
        agent = {"User-Agent": f"swarmentum/{software_version()}", "Accept-Encoding": "identity"}
        limits = httpx2.Timeout(SILENCE_SECONDS_MAX, connect=CONNECT_SECONDS_MAX)
        with httpx2.Client(headers=agent, timeout=limits) as client:
            first = following = client.build_request("GET", url, headers=headers, extensions={"trace": deadline.trace})
            for _ in range(REDIRECTS_MAX + 1):
                self._look(following, first)
                with deadline.wait():
                    answer = client.send(following, stream=True)
                if answer.next_request is None:
                    break
                answer.close()
                following = answer.next_request
            else:
                raise OSError(f"{url}: more than {REDIRECTS_MAX} redirects")
            try:
                yield answer
            finally:
                answer.close()

    def _look(self, request: httpx2.Request, first: httpx2.Request) -> None:
        """Before each request, also one that the server of the `first` one sends this peer to."""
        if self._check is not None:
            self._check(request)
            return
        if request.url.scheme not in SCHEMES:
            raise OSError(f"{request.url} is no http or https address")
        if self._private and (request is first or _private_place(first.url, known=False)):
            return
        if place := _private_place(request.url, known=not self._private):
            host = request.url.host
            todo = "if you trust the run's operator, join with --allow-data"
            if self._private:
                host, todo = f"{first.url.host} leads to {host}, which", f"if you mean it, name {host} itself"
            raise DataError(f"data: {host} is {place}, an address of this machine or of a private network; {todo}")


class _Deadline:
    """Ends the connection of a request whose server keeps this program waiting for SILENCE_SECONDS_MAX without a whole answer
    or block. The timeouts of the HTTP client begin again with each byte."""

    def __init__(self, url: str) -> None:
        self._url, self._until, self._expired = url, math.inf, False
        self._connections, self._end = list[socket.socket](), threading.Event()

    def __enter__(self) -> _Deadline:
        threading.Thread(target=self._watch, name="web-deadline", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def trace(self, event: str, facts: dict[str, Any]) -> None:
        """The HTTP client tells of its connections. A copy, because TLS takes the socket over."""
        if event.endswith("connect_tcp.complete"):
            self._connections.append(facts["return_value"].get_extra_info("socket").dup())

    @contextmanager
    def wait(self) -> Iterator[None]:
        """What this program waits for within. OSError if it takes too long."""
        self._until = time.monotonic() + SILENCE_SECONDS_MAX
        try:
            yield
        except httpx2.HTTPError:
            if not self._expired:
                raise
        except UnicodeError as error:  # a host with an empty or a long part, perhaps of a redirect
            raise OSError(f"{self._url}: {error}") from error
        self._until = math.inf
        if self._expired:  # the end of a cut connection can look like the end of a file
            raise OSError(f"{self._url}: the server kept this program waiting for {SILENCE_SECONDS_MAX:.0f} s")

    def blocks(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """The same blocks."""
        while True:
            with self.wait():
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def _watch(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            if time.monotonic() > self._until:
                self._expired = True
                for connection in list(self._connections):
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
        for connection in self._connections:
            connection.close()


def _private_place(url: httpx2.URL, *, known: bool) -> str:
    """The first address of this host that is not public; empty without one. Without `known`, a name that this machine does not
    know has none: its requests may go through a proxy."""
    port = url.port or {"https": 443}.get(url.scheme, 80)
    try:
        places = socket.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if known:
            raise OSError(f"{url.host}: {in_words(error)}") from error
        return ""
    return next((str(place[0]) for *_, place in places if not is_public(str(place[0]))), "")


def is_public(place: str) -> bool:
    """Whether an address is one machine of the internet. A gateway turns some IPv6 addresses into the IPv4 ones within."""
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(place.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _OF_GATEWAYS_WITHIN or ip.is_site_local:
            return False
        last = ipaddress.IPv4Address(ip.packed[-4:])
        ip = ip.ipv4_mapped or ip.sixtofour or (last if any(ip in net for net in _WITH_IPV4_LAST) else ip)
    return ip.is_global and not ip.is_multicast


def _not_too_slow(blocks: Iterator[bytes], url: str) -> Iterator[bytes]:
    """The same blocks. OSError if so few bytes come that another mirror should be asked; the time between two reads is ours."""
    waited, came = 0.0, 0
    while True:
        asked_at = time.monotonic()
        block = next(blocks, None)
        waited, came = waited + time.monotonic() - asked_at, came + len(block or b"")
        if block is None:
            return
        if waited > RATE_SECONDS:
            if came < RATE_BYTES_MIN:
                raise OSError(f"{url} sends {came} bytes in {waited:.0f} s: too slow")
            waited, came = 0.0, 0
        yield block


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _slept(seconds: float, part: Path, told: Callable[[int], bool]) -> bool:
    """Wait, and look every second whether the shard is still wanted."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not told(_size(part)):
            return False
        time.sleep(min(left, WAIT_SECONDS_MIN))
    return True


def one_line(error: Exception) -> str:
    """One line."""
    if isinstance(error, httpx2.HTTPStatusError):
        return f"the server answers {error.response.status_code} {error.response.reason_phrase}"
    return in_words(error)
