"""Figures of a peer's network side. The network thread writes them, other threads read them; they decide nothing. ADR 6."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.blobs.blobs import Arrivals, WireBytes


@dataclass
class Counters:
    """`refused` is by reason; the bytes of payloads are without framing."""

    refused: dict[str, int] = field(default_factory=dict)
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    announcements: int = 0
    wire: WireBytes = field(default_factory=WireBytes)
    arrivals: Arrivals = field(default_factory=Arrivals)
    doors: dict[str, str] = field(default_factory=dict)
    """Peers that refused this peer's last pushed payload, and why, as they say."""
