"""Addresses of peers (multiaddresses: a strict grammar, handed only to those who can dial them) and of the web. Pure.

An address is `/ip4|ip6|dns|dns4|dns6/HOST`, then `/tcp/PORT`, `/tcp/PORT/ws`, `/tcp/PORT/wss` or `/udp/PORT/quic-v1`, then
perhaps `/p2p/RELAY/p2p-circuit`, then `/p2p/PEER`. Everything else is refused: another protocol, a port or an address that
nobody can dial, a peer id that is not the signer's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final, TypeAlias
from urllib.parse import unquote, urlsplit

from protos.errors import Reason, Refusal
from protos.limits import ADDRESS_BYTES_MAX, ADDRESSES_MAX

Network: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address | None"
"""The network address that a gRPC connection comes from; None for this process or machine, without a network."""

ADDRESSES_SHOWN_MAX = 2
"""Addresses of one peer that another peer gets: an attacker that joins gets no larger part of a list."""
BLOCK_BITS_V4 = 24
BLOCK_BITS_V6 = 48
IPV6_SITE_BITS = 64
"""A home has a whole /64: its addresses count as one."""
_TRANSPORTS = (("tcp", "ws"), ("tcp", "wss"), ("udp", "quic-v1"), ("tcp", ""))
_DNS = ("dns", "dns4", "dns6")
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?:\.(?!-)[A-Za-z0-9-]{1,63})*\.?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,64}")
_HOMELY = (".local", ".lan", ".home", ".internal", ".localhost", ".home.arpa")


class Scope(Enum):
    """From where an address can be dialled."""

    LOOPBACK = "loopback"
    PRIVATE = "private"
    PUBLIC = "public"


@dataclass(frozen=True)
class Address:
    """One multiaddress. `relay` is the peer id of the relay that it leads through; `ip` is None for a DNS name."""

    text: str
    host: str
    ip: Network
    transport: str
    relay: str
    peer: str

    @property
    def scope(self) -> Scope:
        """Of the first hop: that is what is dialled."""
        if self.ip is not None:
            return scope_of(self.ip)
        host = self.host.lower().rstrip(".")
        if host == "localhost":
            return Scope.LOOPBACK
        return Scope.PRIVATE if "." not in host or host.endswith(_HOMELY) else Scope.PUBLIC


def parse_address(text: str, peer: str | None = None) -> Address:
    """The address, or `Refusal`; with a `peer`, it has to lead to that peer id."""
    if len(text) > ADDRESS_BYTES_MAX:
        raise Refusal(Reason.TOO_LARGE, f"an address of {len(text)} characters, at most {ADDRESS_BYTES_MAX}")
    words = text.split("/")
    if not text.isascii() or not text.isprintable() or len(words) < 5 or words.pop(0):
        raise _wrong(text, "it is no multiaddress")
    ip = _host(text, words)
    host, words = words[1], words[2:]
    transport = _transport(text, words)
    words = words[3:] if transport[1] else words[2:]
    relay = ""
    if len(words) == 5 and words[2] == "p2p-circuit":
        relay = _peer_id(text, words[:2])
        words = words[3:]
    found = _peer_id(text, words)
    if peer is not None and found != peer:
        raise Refusal(Reason.UNKNOWN_SIGNER, f"address {text!r} is not the signer's: it leads to another peer")
    return Address(text, host, ip, "/".join(transport), relay, found)


def usable(texts: Iterable[str], peer: str | None = None, most: int = ADDRESSES_MAX) -> list[Address]:
    """The addresses that parse, limited in number, without repetition. A bad address does not affect the others."""
    found: dict[str, Address] = {}
    for text in texts:
        if len(found) == most:
            break
        try:
            found.setdefault(text, parse_address(text, peer))
        except Refusal:
            continue
    return list(found.values())


def _host(text: str, words: Sequence[str]) -> Network:
    kind, host = words[0], words[1]
    if kind in _DNS:
        if len(host) > 253 or not _HOST.fullmatch(host) or host.replace(".", "").isdigit():
            raise _wrong(text, "its host is no DNS name")
        return None
    ip: Network = None
    try:
        if kind == "ip4":
            ip = ipaddress.IPv4Address(host)
        elif kind == "ip6":
            ip = ipaddress.IPv6Address(host)
    except ValueError:
        ip = None
    if ip is None:
        raise _wrong(text, "its host is no IP address or DNS name")
    if ip.is_unspecified or ip.is_multicast or str(ip) == "255.255.255.255" or getattr(ip, "scope_id", None):
        raise _wrong(text, "its host is no address of one machine")
    return ip


def _transport(text: str, words: Sequence[str]) -> tuple[str, str]:
    if len(words) < 2 or not _PORT.fullmatch(words[1]) or int(words[1]) > 65535:
        raise _wrong(text, "its port is none that can be dialled")
    for transport, over in _TRANSPORTS:
        if words[0] == transport and (not over or words[2:3] == [over]):
            return transport, over
    raise _wrong(text, "its transport is not tcp, ws or quic-v1")


def _peer_id(text: str, words: Sequence[str]) -> str:
    if len(words) != 2 or words[0] != "p2p" or not _PEER_ID.fullmatch(words[1]):
        raise _wrong(text, "it does not end in /p2p/ and a peer id")
    return words[1]


def _wrong(text: str, why: str) -> Refusal:
    return Refusal(Reason.MALFORMED, f"address {text[:64]!r}: {why}")


# ---- networks: who can dial what -------------------------------------------------------------------------------------


def network_of(peer: str) -> Network:
    """The network address in what gRPC calls a peer: `ipv4:192.0.2.1:4711`, `ipv6:%5B2001:db8::1%5D:4711`."""
    family, _, rest = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return None
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


@lru_cache(4096)
def is_relayed(addresses: tuple[str, ...]) -> bool:
    """Whether others reach a peer with these addresses through a relay: it names one, and no public address of its own."""
    found = usable(addresses)
    return any(it.relay for it in found) and not any(it.scope is Scope.PUBLIC and not it.relay for it in found)


def scope_of(network: Network) -> Scope:
    """From where a network address is seen. Link-local, shared (100.64.0.0/10) and documentation ranges are private."""
    if network is None:
        return Scope.LOOPBACK
    if isinstance(network, ipaddress.IPv6Address) and network.ipv4_mapped is not None:
        network = network.ipv4_mapped
    if network.is_loopback:
        return Scope.LOOPBACK
    return Scope.PUBLIC if network.is_global else Scope.PRIVATE


def site(network: Network) -> str:
    """The unit of limits by network address: an IPv4 address, an IPv6 /64, or this machine."""
    if network is None or scope_of(network) is Scope.LOOPBACK:
        return "loopback"
    if isinstance(network, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((network, IPV6_SITE_BITS), strict=False))
    return str(network)


def block_of(network: Network) -> str:
    """The block of public addresses that one owner usually holds, an IPv4 /24 or an IPv6 /48; empty for private networks.

    Identities are free in an open run, addresses in many blocks are not. Peers of one house or laboratory, and all on one
    machine, are no block: they may train together.
    """
    if network is None or scope_of(network) is not Scope.PUBLIC:
        return ""
    bits = BLOCK_BITS_V4 if isinstance(network, ipaddress.IPv4Address) else BLOCK_BITS_V6
    return str(ipaddress.ip_network((network, bits), strict=False))


def may_see(address: Address, of: Network, to: Network) -> bool:
    """Whether a peer that comes from `to` is told this address of a peer that comes from `of`.

    Everybody is told public ones. Loopback ones: who comes from the same address (loopback counts as one). Private ones:
    who comes from the same address, too, or if neither comes from a public address: then both share a private network with
    the coordinator.
    """
    if address.scope is Scope.PUBLIC or site(of) == site(to):
        return True
    if address.scope is Scope.LOOPBACK:
        return False
    return scope_of(of) is not Scope.PUBLIC and scope_of(to) is not Scope.PUBLIC


def shown(addresses: Sequence[Address], of: Network, to: Network) -> list[str]:
    """At most ADDRESSES_SHOWN_MAX addresses of one peer for another: the best direct one and the best relayed one. Without a
    relayed one, the next best direct one takes its place. First those of the family, IPv4 or IPv6, that the other peer comes
    from, because it may have no other; then those at which the coordinator sees the peer, then public ones."""
    fine = [address for address in addresses if may_see(address, of, to)]

    def rank(address: Address) -> tuple[bool, bool, bool, str]:
        other = address.ip is not None and to is not None and address.ip.version != to.version
        return other, address.ip is None or address.ip != of, address.scope is not Scope.PUBLIC, address.transport

    direct = sorted((a for a in fine if not a.relay), key=rank)
    relayed = sorted((a for a in fine if a.relay), key=rank)
    chosen = [*direct[:1], *relayed[:1], *direct[1:], *relayed[1:]]
    return [address.text for address in chosen[:ADDRESSES_SHOWN_MAX]]


# Whether a text is an address of the web, and whole: the one parser for settings, consent, downloads and cards. Pure.
#
# Schemes have any case (RFC 3986). A text that one reader takes for an address and another for a path has no hash and is
# downloaded: a run's text could then be another one for each peer.

SCHEMES: Final = ("https", "http")


def is_web(source: str) -> bool:
    """Whether a source is on the web, and no path. Also for an address that cannot be used (`web_problem`)."""
    return _scheme_of(source) in SCHEMES


def web_problem(source: str) -> str:
    """Why an address of the web cannot be used; empty if it can, and for a source that is none."""
    if not is_web(source):
        return ""
    if source != source.strip() or not source.isprintable() or " " in source:
        return "it has spaces or control characters"
    try:
        parts = urlsplit(source)
        named, _ = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    return "" if named and "://" in source else "it names no host: give https://HOST/PATH"


def _scheme_of(source: str) -> str:
    """In small letters; empty for a path. As a browser does, urlsplit leaves out some characters that do not print."""
    try:
        return urlsplit(source).scheme.lower()
    except ValueError:  # a bracket that does not close: the scheme is before it
        return source.partition(":")[0].strip().lower()
