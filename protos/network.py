"""Blocks of network addresses: what one owner usually holds. Identities are free, addresses in many blocks are not.

Refuses to call a private network a block: peers of one house or laboratory, and all on one machine, are not limited by it.
"""

from __future__ import annotations

import ipaddress

BLOCK_BITS_V4 = 24
BLOCK_BITS_V6 = 48
_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        (
            "127.0.0.0/8",
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "169.254.0.0/16",
            "::1/128",
            "fc00::/7",
            "fe80::/10",
        ),
    )
)


def host_of(connection: str) -> str:
    """The IP address in gRPC's name of a connection (`ipv4:192.0.2.1:4711`, `ipv6:%5B2001:db8::1%5D:4711`); empty if none."""
    kind, _, rest = connection.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]").partition("%")[0]


def block_of(address: str) -> str:
    """The block of public addresses that an IP address is in, as text; empty for private addresses and what is none."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return ""
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    if any(ip.version == network.version and ip in network for network in _PRIVATE):
        return ""
    return str(ipaddress.ip_network((ip, BLOCK_BITS_V4 if ip.version == 4 else BLOCK_BITS_V6), strict=False))
