"""How peers behind routers become reachable, by kind of router: needs root, for network namespaces (tests/system/netns.py).

Each kind is a run of its own with real processes and no flag about the network. Of each home: seconds from the built model to
the choice of a relay, the way to each other peer, and the steps a minute of the run.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.system.local_swarm import wait_for
from tests.system.netns import HOMES, PUBLIC, Internet
from tests.system.test_nat import OBSERVERS, PEERS, PUBLIC_PEER, NatSwarm

UP_KBIT, DOWN_KBIT = 5_000, 20_000
WAY_SECONDS = 60.0
FOUND = "whether others can dial this peer"
Change = Callable[[Internet], None]


@dataclass(frozen=True)
class Kind:
    """A kind of routers: `before` and `after` change the small internet; `relay`: the operator runs one."""

    title: str
    before: Change = lambda internet: None
    after: Change = lambda internet: None
    relay: bool = True
    public_peer: bool = True
    ipv6: bool = False
    more_relays: tuple[str, ...] = ()
    way: str = "relayed"
    """Between the homes: waited for, and told as it is if it does not come."""


def _symmetric(on: bool) -> Change:
    return lambda internet: internet.symmetric("home1", on=on)


def _no_udp(on: bool) -> Change:
    return lambda internet: internet.block_udp("home2", on=on)


def _shaped(up: int, down: int) -> Change:
    return lambda internet: [internet.shape(nat, up, down) for nat in HOMES.values()] and None


def _families(internet: Internet) -> None:
    internet.ipv6()
    internet.family("home1", ipv4=True, ipv6=False)
    internet.family("home2", ipv4=False, ipv6=True)


def _ipv4(internet: Internet) -> None:
    internet.only_ipv4()
    for home in HOMES:
        internet.family(home, ipv4=True, ipv6=False)


KINDS = {
    "nat": Kind("two homes behind NATs, a public peer, the operator's relay"),
    "no-relay": Kind("two homes behind NATs, a public peer, no relay of the operator", relay=False),
    "relay-only": Kind("two homes behind NATs, the operator's relay alone", public_peer=False),
    "symmetric": Kind("one of the homes behind an endpoint-dependent NAT", _symmetric(True), _symmetric(False)),
    "no-udp": Kind("one of the homes behind a router without UDP", _no_udp(True), _no_udp(False)),
    "double": Kind("home 1 behind two NATs", lambda it: it.double("home1"), lambda it: it.double("home1", on=False)),
    "ipv6": Kind("home 1 with IPv4 alone, home 2 with IPv6 alone behind a firewall", _families, _ipv4, ipv6=True),
    "punch": Kind("two homes behind NATs, five public relays", more_relays=tuple(OBSERVERS), way="direct"),
    "shaped": Kind("links of 20 Mbit/s down and 5 Mbit/s up", _shaped(UP_KBIT, DOWN_KBIT), _shaped(0, 0)),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=20.0, help="over which the steps a minute are counted")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as ends:
        internet = Internet(PUBLIC | OBSERVERS)
        ends.callback(internet.close)
        found = {}
        for name in options.kinds:
            kind = KINDS[name]
            kind.before(internet)
            try:
                found[name] = _one(kind, internet, options.seconds)
            finally:
                kind.after(internet)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
        return found


def _one(kind: Kind, internet: Internet, seconds: float) -> dict[str, Any]:
    names = PEERS if kind.public_peer else tuple(HOMES)
    with tempfile.TemporaryDirectory() as folder:
        swarm = NatSwarm(Path(folder), internet, min_peers=len(names), relay=kind.relay, ipv6=kind.ipv6,
                         more_relays=kind.more_relays)  # fmt: skip
        try:
            for name in names:
                swarm.join_plainly(name)
                if name == PUBLIC_PEER:
                    wait_for("the public peer in the run", lambda: swarm.events(PUBLIC_PEER, "waiting"))
            for home in HOMES:
                wait_for(f"a relay of {home}", lambda home=home: swarm.found(home).get("relays"), 120)  # type: ignore[misc]
                wait_for(f"ways of {home}", lambda home=home: _ways(swarm, home, names), 60)  # type: ignore[misc]
                swarm.wait_step(home, 3, 120)
            with suppress(AssertionError):
                wait_for("way between the homes", lambda: kind.way in _between(swarm), WAY_SECONDS)
            first, began = swarm.last_step("home1"), time.monotonic()
            time.sleep(seconds)
            steps = (swarm.last_step("home1") - first) / (time.monotonic() - began) * 60
            return {
                "kind": kind.title,
                "reachable_seconds": {home: _seconds(swarm, home) for home in HOMES},
                "ways": {home: _ways(swarm, home, names) for home in HOMES},
                "steps_a_minute": round(steps, 1),
            }
        finally:
            swarm.close()


def _between(swarm: NatSwarm) -> set[str]:
    return {swarm.way("home1", "home2"), swarm.way("home2", "home1")}


def _ways(swarm: NatSwarm, home: str, names: tuple[str, ...]) -> dict[str, str]:
    """How a home is connected to the others now; empty while it lacks one."""
    ways = {other: swarm.way(home, other) for other in names if other != home}
    return ways if all(ways.values()) else {}


def _seconds(swarm: NatSwarm, home: str) -> float:
    """From the line that says that the model is built to the finding that names a relay."""
    [began, *_] = swarm.events(home, "model")
    found = next(line for line in swarm.events(home, FOUND) if line["relays"])
    return round((_at(found) - _at(began)).total_seconds(), 1)


def _at(line: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(line["timestamp"])
