"""What the network side of a peer is told: addresses, limits, patience."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Literal

Reachability = Literal["auto", "public", "private"]

CONNECT_SECONDS_MAX = 10.0
# How often a peer behind a router tries to reach its first relay before it says that there is none: about 20 s.
BOOTSTRAP_TRIES = 8
# Addresses to start from that others told.
BOOTSTRAP_MAX = 128
STREAM_OPEN_SECONDS_MAX = 10.0
STREAM_IDLE_SECONDS_MAX = 20.0
# A holder has this long for a blob, and a second more for so many bytes: first, while others could be asked instead, and then
# as long as it takes at a modem's speed. Who sends a byte now and then holds nobody up.
IMPATIENT_SECONDS = 3.0
IMPATIENT_BYTES_A_SECOND = 64_000
PATIENT_BYTES_A_SECOND = 2_000
GOSSIP_SECONDS_MAX = 5.0
CALL_SECONDS_MAX = 15.0
GOODBYE_SECONDS_MAX = 1.0
# A coordinator that says that it is busy is asked again for so long.
BUSY_SECONDS_MAX = 60.0
# Where several coordinators are known: how soon one that does not say whether it acts is given up, how soon one that
# falls silent is (once it was asked whether it is there, every second), and how long all are asked often until one acts.
PROBE_SECONDS_MAX = 1.5
SILENT_SECONDS_MAX = 1.5
TAKE_OVER_SECONDS_MAX = 15.0
TAKE_OVER_RETRY_SECONDS_MAX = 0.5
DHT_SECONDS_MAX = 10.0
# A record outlives three missed refreshes.
DHT_RECORD_SECONDS = 240.0
DHT_REFRESH_SECONDS = 60.0
# What a DHT node keeps for others: records in all and of one run (8 KiB each at most), runs of a relay (a peer has one), and
# how far the clocks of two machines may be apart.
DHT_RECORDS_MAX = 4096
DHT_RECORDS_A_RUN_MAX = 1024
RELAY_RUNS_MAX = 64
DHT_CLOCKS_APART_SECONDS = 60.0
# Calls of one remote, and of all: so many keys at once, and one more each so many ms. A peer stores its one key once a
# minute and looks it up every 2 to 10 s, over several hops.
DHT_CALLS_MAX = 200
DHT_CALL_MS = 200
DHT_CALLS_ALL_MAX = 20_000
DHT_CALL_ALL_MS = 2
DHT_KEYS_A_CALL_MAX = 64
DHT_REMOTES_KEPT = 4096
DISCOVER_SECONDS = 10.0
# While a member of the roster is not connected.
DISCOVER_AGAIN_SECONDS = 2.0
# A peer that should be dialable, but was reached through a relay, is dialled directly: so many tries at a time, again
# after the shortest time, then after twice as long each, up to the longest.
STRAIGHTEN_TRIES = 3
STRAIGHTEN_SECONDS_MIN = 5.0
STRAIGHTEN_SECONDS_MAX = 300.0
RETRY_SECONDS_MIN = 0.2
RETRY_SECONDS_MAX = 5.0
OVERLAY_PEERS_MAX = 64
# Pulls that share our downlink. One from which nothing comes for so long, or that takes longer than a full share of
# IMPATIENT_BYTES_A_SECOND would, goes on beside the next one.
PULLS_MAX = 8
PULL_TURN_SECONDS = 3.0
# Blob streams: how long a server keeps an idle one, how many it takes from a member of the roster, from another peer and from
# all others together, how many a client keeps to a holder.
STREAM_KEPT_SECONDS = 900.0
STREAMS_A_PEER_MAX = 32
STREAMS_A_STRANGER_MAX = 16
STRANGERS_STREAMS_MAX = 128
# What strangers are being sent at once (blobs in memory), and how much a second: while a member of the roster is served, and
# otherwise. A joiner is a stranger until it is in a roster, and has several holders.
STRANGERS_BYTES_HELD_MAX = 256 << 20
STRANGERS_BYTES_A_SECOND_BUSY = 1 << 20
STRANGERS_BYTES_A_SECOND = 64 << 20
MEMBERS_BUSY_SECONDS = 1.0
STREAMS_KEPT_MAX = 4
# After this many opens in a row that ran into their deadline, the connection is given up and dialled again.
OPENS_STUCK_MAX = 2
# Messages on their way at once to peers that are reached through a relay only, and messages remembered to know them again.
PUSHES_MAX = 64
HEARD_MAX = 4096
# Gossip of one member of the roster (of all others together): so many messages at once, and one more each so many ms. A
# peer says one or two things a step.
ORIGIN_MESSAGES_MAX = 1000
ORIGIN_MESSAGE_MS = 10
ORIGINS_KEPT = 4096
FETCH_ROUNDS_MAX = 6
# What pullers say about our blobs: blobs remembered, and words on each.
ARRIVALS_MAX = 64
ARRIVAL_REPORTS_MAX = 64
# A holder that could not be reached is asked last for this long, or until it answers.
AWAY_SECONDS = 30.0
# How long one holder may be silent before the next is asked beside it, and how many are asked side by side.
HEDGE_SECONDS = 1.0
ATTEMPTS_MAX = 4
# The same for a payload that the log accepted: a quorum held it, and this peer cannot go on without it. Longer for more bytes
# (at IMPATIENT_BYTES_A_SECOND: our own link may be what is slow) and for holders that took long to answer lately.
HASTE_SECONDS = 0.25
# Holders of which it is remembered how long they took.
TIMES_KEPT = 1024
# How soon it is seen that two of those send: then one of them stops.
LOOK_SECONDS = 0.1
# Those who do not hold a blob are asked again while others keep us waiting: so many after this long, then after twice as
# long each, in so many rounds.
LACKING_SECONDS = 0.5
LACKING_ROUND_MAX = 4
LACKING_ROUNDS_MAX = 5
# Votes that the log names are asked for so often before a snapshot does instead.
ACCEPTED_ROUNDS_MIN = 3
# Payloads and snapshots stay at least this long after a newer snapshot is agreed: somebody may be on its way from them.
RETAIN_SECONDS = 60.0
# An announcement is gossiped again while its step is open: the first may have come before the mesh was there.
GOSSIP_AGAIN_SECONDS_MIN = 1.0
GOSSIP_AGAIN_SECONDS_MAX = 8.0


@dataclass(frozen=True)
class OverlaySettings:
    """How this peer is on the overlay.

    `listen_host` is an IP address, `listen_port` 0 takes free ports. `announce` are multiaddresses that others see instead
    of the found ones. `bootstrap` and `relays` are multiaddresses that end in /p2p/<peer id>.
    """

    listen_host: str = "0.0.0.0"  # noqa: S104 - encrypted, authenticated transport
    listen_port: int = 0
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    reachability: Reachability = "auto"
    patience_seconds: float = math.inf

    @property
    def loopback(self) -> bool:
        """Whether this peer only talks to this machine: then no router is asked for a port mapping."""
        return ipaddress.ip_address(self.listen_host).is_loopback

    def listen(self) -> list[str]:
        """TCP and QUIC on the same port number."""
        family = "ip6" if ipaddress.ip_address(self.listen_host).version == 6 else "ip4"
        at = f"/{family}/{self.listen_host}"
        return [f"{at}/tcp/{self.listen_port}", f"{at}/udp/{self.listen_port}/quic-v1"]
