"""Whether other peers can dial this peer, found out by asking them; and the relays of a peer that nobody can dial. ADR 20.

A peer asks peers that it has dialled. Each of them dials the peer's TCP ports back, at the address that it sees the peer at.
Refuses to dial any other address, so that nobody can use a peer to reach a third machine.

A request is a byte with the number of ports, and two bytes a port. The answer comes in two parts, because the first one is also
the measurement of a round trip: a byte (1: this peer relays for others), a byte with a length, and the address as text. Then a
byte for each port (1: a libp2p peer answers there).
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from protos.address import Scope, scope_of, site, usable
from protos.errors import NetworkError, OperatorError
from protos.identity import public_key_of
from protos.limits import RateLimiter

PROTOCOL = "/swarmentum/reach/1"
PORTS_MAX = 4
IPV4 = 4
PORT_MIN = 1024
HEADER = b"\x13/multistream/1.0.0\n"
"""The first bytes of every libp2p connection over TCP, from both sides."""
ASKED_MAX = 6
RELAYS_WANTED = 2
# A router that drops what it does not know lets a dial run into its deadline.
DIAL_SECONDS_MAX = 3.0
ASK_SECONDS_MAX = 8.0
DIALS_MAX = 8
ANSWERS_BURST = 4
ANSWERS_EACH_MS = 15_000.0
ANSWERED_KEPT = 1024

Opener = Callable[[bytes, str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class ReachState(Enum):
    """What is known about this peer."""

    UNKNOWN = "unknown"
    """No peer outside its own network has answered."""
    PUBLIC = "public"
    """All peers outside that answered have dialled it."""
    PRIVATE = "private"
    """A peer outside could not dial it."""


@dataclass(frozen=True)
class Remote:
    """A connected peer: its libp2p id, the multiaddress of the direct connection (without the id), and the IP address in it."""

    peer: str
    address: str
    ip: str


@dataclass(frozen=True)
class ReachAnswer:
    """What one peer answered. `ports`: those of this peer's TCP ports that it could dial at `seen_at`."""

    remote: Remote
    round_trip: float
    relays: bool
    seen_at: str
    ports: tuple[int, ...]


@dataclass(frozen=True)
class ReachResult:
    """The conclusion. `addresses`: where others have dialled this peer; `relays`: multiaddresses, the nearest first."""

    verdict: ReachState
    addresses: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    seen_at: tuple[str, ...] = ()
    asked: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Access:
    """How this peer is reached and connected now, for its owner. `relays`: those that it asked to carry connections to it."""

    reachable: ReachState
    relays: int
    direct: int
    """Peers with a direct connection."""
    relayed: int
    """Peers that are connected through a relay only."""


def conclude(told: Sequence[ReachAnswer], peer: str) -> ReachResult:
    """Of all answers about the peer with this id. An answer from its own network says nothing about the internet.

    If some could dial it and some could not, the peer takes relays, too, and offers both kinds of addresses: a liar among the
    asked peers costs it a relay, not its place in the run. So does a peer that is known to be dialled over IPv6 alone: most
    peers with IPv4 alone reach it through a relay that has both.
    """
    outside = [it for it in told if _public(it.seen_at)]
    near = sorted((it for it in told if it.relays and _public(it.remote.ip)), key=lambda it: it.round_trip)
    relays = tuple(f"{it.remote.address}/p2p/{it.remote.peer}" for it in near)
    seen = tuple(sorted({it.seen_at for it in outside}))
    dialled = sorted({(it.seen_at, port) for it in outside for port in it.ports})
    addresses = tuple(it.text for it in usable(f"{_ip_words(ip)}/tcp/{port}/p2p/{peer}" for ip, port in dialled))
    if not outside:
        return ReachResult(ReachState.UNKNOWN)
    over_ipv4 = any(ipaddress.ip_address(it.seen_at).version == IPV4 for it in outside)
    if all(it.ports for it in outside) and (over_ipv4 or not relays):
        return ReachResult(ReachState.PUBLIC, addresses, seen_at=seen, asked=len(outside))
    return ReachResult(ReachState.PRIVATE, addresses, relays, seen, len(outside))


def tcp_ports(addresses: Iterable[str]) -> tuple[int, ...]:
    """The TCP ports in a peer's own direct multiaddresses, at most PORTS_MAX."""
    found: dict[int, None] = {}
    for address in addresses:
        words = address.split("/")
        if "p2p-circuit" not in words and len(words) > 4 and words[3] == "tcp" and int(words[4]) >= PORT_MIN:
            found[int(words[4])] = None
    return tuple(found)[:PORTS_MAX]


def _public(ip: str) -> bool:
    return scope_of(ipaddress.ip_address(ip)) is Scope.PUBLIC


def _ip_words(ip: str) -> str:
    return f"/ip{ipaddress.ip_address(ip).version}/{ip}"


# ---- asking ----------------------------------------------------------------------------------------------------------


async def ask_all(open_stream: Opener, remotes: Sequence[Remote], ports: Sequence[int]) -> list[ReachAnswer]:
    """Ask the first ASKED_MAX of these peers. Ends within ASK_SECONDS_MAX."""
    asked = remotes[:ASKED_MAX]
    answers = await asyncio.gather(*(_ask(open_stream, remote, ports) for remote in asked))
    return [answer for answer in answers if answer is not None]


async def _ask(open_stream: Opener, remote: Remote, ports: Sequence[int]) -> ReachAnswer | None:
    """The answer of one peer; None from a peer of other software, one that is busy, or one that is gone."""
    try:
        async with asyncio.timeout(ASK_SECONDS_MAX):
            reader, writer = await open_stream(public_key_of(remote.peer), PROTOCOL)
            try:
                began = time.monotonic()
                writer.write(bytes([len(ports)]) + b"".join(port.to_bytes(2, "big") for port in ports))
                await writer.drain()
                relays, length = await reader.readexactly(2)
                seen_at = str(ipaddress.ip_address((await reader.readexactly(length)).decode("ascii")))
                round_trip = time.monotonic() - began
                dialled = await reader.readexactly(len(ports))
            finally:
                writer.close()
    except (NetworkError, OperatorError, OSError, EOFError, TimeoutError, ValueError):
        return None
    could = tuple(port for port, dialled_it in zip(ports, dialled, strict=True) if dialled_it)
    return ReachAnswer(remote, round_trip, bool(relays), seen_at, could)


# ---- answering -------------------------------------------------------------------------------------------------------


class Answerer:
    """Dials peers back that ask. `seen_at` gives the IP address of a direct connection; `relays`: this peer relays."""

    def __init__(self, seen_at: Callable[[str], Awaitable[str | None]], relays: Callable[[], bool]) -> None:
        self._seen_at, self._relays = seen_at, relays
        self._rate = RateLimiter(ANSWERS_BURST, ANSWERS_EACH_MS, ANSWERED_KEPT)
        self._dials = asyncio.Semaphore(DIALS_MAX)

    async def answer(self, remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream. A caller that asks too often, or through a relay, gets no answer."""
        async with asyncio.timeout(ASK_SECONDS_MAX):
            count = (await reader.readexactly(1))[0]
            if count > PORTS_MAX:
                return
            raw = await reader.readexactly(2 * count)
            ports = [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]
            ip = await self._seen_at(remote)
            if ip is None or not self._rate.allow(site(ipaddress.ip_address(ip)), 1000 * time.monotonic()):
                return
            writer.write(bytes([self._relays(), len(ip)]) + ip.encode("ascii"))
            await writer.drain()
            writer.write(bytes(await asyncio.gather(*(self._dial(ip, port) for port in ports))))
            await writer.drain()
            await reader.read(1)  # the receiver closes first: p2pd may lose the last bytes of a stream (ADR 6)

    async def _dial(self, ip: str, port: int) -> bool:
        """Whether a libp2p peer answers there."""
        if port < PORT_MIN:
            return False
        with suppress(OSError, EOFError, TimeoutError):
            async with self._dials, asyncio.timeout(DIAL_SECONDS_MAX):
                reader, writer = await asyncio.open_connection(ip, port)
                try:
                    writer.write(HEADER)
                    return await reader.readexactly(len(HEADER)) == HEADER
                finally:
                    writer.close()
        return False
