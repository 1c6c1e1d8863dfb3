"""A small internet on one machine for tests: network namespaces, routers and home NATs that nothing leaves.

    pub (11.1.0.2) ---- inet (router) ---- nat1 (11.2.0.2 | 192.168.1.1) ---- home1 (192.168.1.2)
                              |
                              +----------- nat2 (11.3.0.2 | 192.168.1.1) ---- home2 (192.168.1.2)

No link leads to the machine's own network. The addresses look public because libp2p neither relays nor punches through
private ones, and go-multiaddr counts 192.0.2.0/24, 198.51.100.0/24 and 203.0.113.0/24 as private, too. Both homes have the
same private network, as homes do.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PUBLIC = {"pub": "11.1.0.2", "nat1": "11.2.0.2", "nat2": "11.3.0.2"}
HOMES = {"home1": "nat1", "home2": "nat2"}
HOME_ADDRESS, HOME_ROUTER = "192.168.1.2", "192.168.1.1"
INNER_ADDRESS, INNER_ROUTER = "10.0.5.2", "10.0.5.1"
NAME = re.compile(r"^swarmentum-(\d+)-\w+$")
CONNECT_SECONDS_MAX = 1.0
PROBE_PORT = 7
PROBE_SECONDS_MAX = 60

# What a home router does: lets its home out under its own address, and nobody in who was not asked.
HOME_NAT = """
table ip home {
  chain out { type nat hook postrouting priority srcnat; policy accept; oifname "wan" masquerade; }
  chain here { type filter hook input priority filter; policy drop;
    iifname { "lo", "lan" } accept; ct state established,related accept; }
  chain through { type filter hook forward priority filter; policy drop;
    iifname "lan" accept; ct state established,related accept; }
}
"""
CUT = """
table ip cut {
  chain in { type filter hook input priority filter; policy drop; iifname "lo" accept; }
  chain out { type filter hook output priority filter; policy drop; oifname "lo" accept; }
  chain through { type filter hook forward priority filter; policy drop; }
}
"""
# IPv6 has no NAT. The router of a home lets its home out, and nobody in who was not asked.
HOME_FIREWALL = """
table ip6 home {
  chain here { type filter hook input priority filter; policy drop;
    iifname { "lo", "lan" } accept; ct state established,related accept;
    icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept; }
  chain through { type filter hook forward priority filter; policy drop;
    iifname "lan" accept; ct state established,related accept; }
}
"""
SYMMETRIC = """
flush chain ip home out
add rule ip home out oifname "wan" masquerade fully-random
"""
CONE = """
flush chain ip home out
add rule ip home out oifname "wan" masquerade
"""
NO_UDP = """
table ip noudp {
  chain through { type filter hook forward priority filter; policy accept; meta l4proto udp drop; }
}
"""
# What a firewall does that lets its network out to one TCP port alone, or (with no port) only to the router itself.
ONLY_443 = """
table ip only443 {
  chain through { type filter hook forward priority filter - 1; policy drop;
    tcp dport 443 accept; ct state established,related accept; }
}
"""
NO_WAY_OUT = """
table ip only443 {
  chain through { type filter hook forward priority filter - 1; policy drop; }
}
"""
SPLIT = """
table ip split {
  chain through { type filter hook forward priority filter; policy accept;
    ip saddr { SOME } ip daddr { REST } drop; ip saddr { REST } ip daddr { SOME } drop; }
}
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
except TimeoutError:
    print("dropped")
except OSError as error:
    print(error)
else:
    print("connected")
"""

# A probe of both transports: what was sent comes back, with the address that it came from.
ECHO = """
import socket, sys
here = (sys.argv[1], int(sys.argv[2]))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(here)
tcp = socket.create_server(here)
print("ready", flush=True)
for _ in range(2):
    data, sender = udp.recvfrom(64)
    udp.sendto(sender[0].encode(), sender)
    stream, sender = tcp.accept()
    stream.sendall(sender[0].encode())
    stream.close()
"""
ASK = """
import socket, sys
there, seconds = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3])
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(seconds)
udp.sendto(b"?", there)
with socket.create_connection(there, timeout=seconds) as tcp:
    print(udp.recv(64).decode(), tcp.recv(64).decode())
"""


class NotHereError(Exception):
    """This machine cannot make network namespaces with NAT; the text says why."""


def _run(*command: str, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise NotHereError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Internet:
    """Made by the constructor, which raises NotHereError; `close` ends every process in it and removes it."""

    def __init__(self, public: Mapping[str, str] = PUBLIC, homes: Mapping[str, str] = HOMES) -> None:
        """`public`: address by place, each in a /24 of its own; `homes`: the place whose router a home is behind."""
        self.public, self.homes = dict(public), dict(homes)
        if os.geteuid() != 0:
            raise NotHereError("needs root")
        missing = [tool for tool in ("ip", "nft", "tc") if shutil.which(tool) is None]
        if missing:
            raise NotHereError(f"needs {' and '.join(missing)} (apt-get install iproute2 nftables)")
        _remove(name for name in _names() if not Path("/proc", _owner(name)).exists())
        try:
            self._make()
            self._probe()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for place in ("inet", *self.public, *self.homes):
            _run("ip", "netns", "add", self.name(place))
            self._ip(place, "link", "set", "lo", "up")
        for place, address in self.public.items():
            router = address.rpartition(".")[0] + ".1"
            self._link("inet", place, f"{router}/24", place, "wan", f"{address}/24")
            self._ip(place, "route", "add", "default", "via", router)
        for home, nat in self.homes.items():
            self._link(nat, "lan", f"{HOME_ROUTER}/24", home, "eth", f"{HOME_ADDRESS}/24")
            self._ip(home, "route", "add", "default", "via", HOME_ROUTER)
            _run(*self.inside(nat), "nft", "-f", "-", given=HOME_NAT)
        for router in ("inet", *self.homes.values()):
            _run(*self.inside(router), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def _probe(self) -> None:
        """Both homes reach the public place over UDP and TCP, under their routers' addresses; otherwise NotHereError."""
        echo = [*self.inside("pub"), sys.executable, "-c", ECHO, self.public["pub"], str(PROBE_PORT)]
        with subprocess.Popen(echo, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout.readline() == "ready\n", "the probe's server did not start"
                for home, nat in self.homes.items():
                    words = (sys.executable, "-c", ASK, self.public["pub"], str(PROBE_PORT), str(PROBE_SECONDS_MAX))
                    seen = _run(*self.inside(home), *words).split()
                    if seen != [self.public[nat]] * 2:
                        raise NotHereError(
                            f"{home} is seen as {seen} over UDP and TCP, not as {self.public[nat]}: no NAT"
                        )
            finally:
                server.kill()

    def _link(self, near: str, near_end: str, near_address: str, far: str, far_end: str, far_address: str) -> None:
        peer = ("peer", "name", far_end, "netns", self.name(far))
        self._ip(near, "link", "add", near_end, "type", "veth", *peer)
        for place, end, address in ((near, near_end, near_address), (far, far_end, far_address)):
            self._ip(place, "address", "add", address, "dev", end)
            self._ip(place, "link", "set", end, "up")

    def _ip(self, place: str, *words: str) -> None:
        _run("ip", "-n", self.name(place), *words)

    @staticmethod
    def name(place: str) -> str:
        """Namespace of a place; carries this process's id, so that a later run finds what a killed one left."""
        return f"swarmentum-{os.getpid()}-{place}"

    def inside(self, place: str) -> tuple[str, ...]:
        """What to put before a command that is to run there; it keeps its process id."""
        return ("ip", "netns", "exec", self.name(place))

    def connect(self, place: str, address: str, port: int, seconds_max: float = CONNECT_SECONDS_MAX) -> str:
        """What a TCP connection attempt from `place` comes to: connected, dropped (after `seconds_max`), or the error."""
        words = (sys.executable, "-c", CONNECT, address, str(port), str(seconds_max))
        return _run(*self.inside(place), *words).strip()

    def reaches(self, place: str, address: str, port: int) -> bool:
        """Whether a TCP connection comes about, however slow this machine is."""
        return self.connect(place, address, port, PROBE_SECONDS_MAX) == "connected"

    def shape(self, place: str, up_kbit: int, down_kbit: int = 0) -> None:
        """Make the link of a public place or of a home's router slow: a token bucket for each way. 0: no limit that way."""
        self._limit(place, "wan", up_kbit)
        self._limit("inet", place, down_kbit)

    def _limit(self, place: str, device: str, kbit: int) -> None:
        """What leaves `place` by `device`."""
        bucket = ("tbf", "rate", f"{kbit}kbit", "burst", "8kb", "latency", "1s") if kbit else ("noqueue",)
        _run(*self.inside(place), "tc", "qdisc", "replace", "dev", device, "root", *bucket)

    def limits(self, place: str) -> tuple[int, int]:
        """What `shape` has set for a place, as the kernel tells it: bits a second up and down, 0 where there is no limit."""
        found = []
        for where, device in ((place, "wan"), ("inet", place)):
            [queue] = json.loads(_run(*self.inside(where), "tc", "-j", "qdisc", "show", "dev", device, "root"))
            found.append(8 * int(queue["options"]["rate"]) if queue["kind"] == "tbf" else 0)
        return found[0], found[1]

    def sent(self) -> dict[str, int]:
        """Bytes that each public place has sent so far, as the router's interfaces count what comes in, headers included."""
        links = json.loads(_run("ip", "-n", self.name("inet"), "-s", "-j", "link", "show"))
        return {link["ifname"]: int(link["stats64"]["rx"]["bytes"]) for link in links if link["ifname"] in self.public}

    def cut(self, place: str) -> None:
        """No packet gets in or out of a place any more, and nobody is told; its own loopback stays."""
        _run(*self.inside(place), "nft", "-f", "-", given=CUT)

    def heal(self, place: str) -> None:
        """Undo `cut`."""
        _run(*self.inside(place), "nft", "delete", "table", "ip", "cut")

    def symmetric(self, home: str, *, on: bool = True) -> None:
        """The home's router takes another port for each destination, so that nobody can punch through it."""
        _run(*self.inside(self.homes[home]), "nft", "-f", "-", given=SYMMETRIC if on else CONE)

    def block_udp(self, home: str, *, on: bool = True) -> None:
        """The home's router lets no UDP through, as in some offices and hotels."""
        nft = (*self.inside(self.homes[home]), "nft")
        if on:
            _run(*nft, "-f", "-", given=NO_UDP)
        else:
            _run(*nft, "delete", "table", "ip", "noudp")

    def firewall(self, home: str, *, port_443: bool) -> None:
        """The home's router lets nothing out but TCP to port 443, or nothing at all. Undone by `no_firewall`."""
        _run(*self.inside(self.homes[home]), "nft", "-f", "-", given=ONLY_443 if port_443 else NO_WAY_OUT)

    def no_firewall(self, home: str) -> None:
        """Undo `firewall`."""
        _run(*self.inside(self.homes[home]), "nft", "delete", "table", "ip", "only443")

    def move(self, home: str, address: str) -> None:
        """The provider gives the home's router another public address, in the same /24; its connections are dead."""
        nat = self.homes[home]
        self._ip(nat, "address", "flush", "dev", "wan")
        self._ip(nat, "address", "add", f"{address}/24", "dev", "wan")
        self._ip(nat, "route", "replace", "default", "via", address.rpartition(".")[0] + ".1")

    def double(self, home: str, *, on: bool = True) -> None:
        """The home is behind a second router inside of the first one, with a NAT of its own."""
        nat, inner = self.homes[home], f"{home}inner"
        self._ip(nat, "link", "delete", "lan")
        if not on:
            _run("ip", "netns", "delete", self.name(inner))
            self._link(nat, "lan", f"{HOME_ROUTER}/24", home, "eth", f"{HOME_ADDRESS}/24")
            self._ip(home, "route", "add", "default", "via", HOME_ROUTER)
            return
        _run("ip", "netns", "add", self.name(inner))
        self._ip(inner, "link", "set", "lo", "up")
        self._link(nat, "lan", f"{HOME_ROUTER}/24", inner, "wan", f"{HOME_ADDRESS}/24")
        self._ip(inner, "route", "add", "default", "via", HOME_ROUTER)
        self._link(inner, "lan", f"{INNER_ROUTER}/24", home, "eth", f"{INNER_ADDRESS}/24")
        self._ip(home, "route", "add", "default", "via", INNER_ROUTER)
        _run(*self.inside(inner), "nft", "-f", "-", given=HOME_NAT)
        _run(*self.inside(inner), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def ipv6(self) -> None:
        """The public places get IPv6 beside IPv4; and so do the homes, behind firewalls. Undone by `only_ipv4`."""
        for place in self.public:
            self._six("inet", place, ipv6_of(self.public[place], 1))
            self._six(place, "wan", ipv6_of(self.public[place], 2))
            self._ip(place, "-6", "route", "replace", "default", "via", ipv6_of(self.public[place], 1))
        for home, nat in self.homes.items():
            address = self.public[nat]
            self._six(nat, "lan", ipv6_of(address, 1, home=True))
            self._six(home, "eth", ipv6_of(address, 2, home=True))
            self._ip(home, "-6", "route", "replace", "default", "via", ipv6_of(address, 1, home=True))
            network = f"{ipv6_of(address, 0, home=True)}/64"
            self._ip("inet", "-6", "route", "replace", network, "via", ipv6_of(address, 2))
            _run(*self.inside(nat), "nft", "-f", "-", given=HOME_FIREWALL)
        for router in ("inet", *self.homes.values()):
            _run(*self.inside(router), "sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/forwarding")

    def _six(self, place: str, device: str, address: str) -> None:
        self._ip(place, "-6", "address", "add", f"{address}/64", "dev", device, "nodad")

    def only_ipv4(self) -> None:
        """Undo `ipv6`."""
        for nat in self.homes.values():
            _run(*self.inside(nat), "nft", "delete", "table", "ip6", "home")
        for place in ("inet", *self.public, *self.homes):
            self._ip(place, "-6", "address", "flush", "scope", "global")

    def family(self, home: str, *, ipv4: bool, ipv6: bool) -> None:
        """The home has these families of addresses, and no others. Needs `ipv6` before."""
        self._ip(home, "address", "flush", "dev", "eth", "scope", "global")
        if ipv4:
            self._ip(home, "address", "add", f"{HOME_ADDRESS}/24", "dev", "eth")
            self._ip(home, "route", "replace", "default", "via", HOME_ROUTER)
        if ipv6:
            address = self.public[self.homes[home]]
            self._six(home, "eth", ipv6_of(address, 2, home=True))
            self._ip(home, "-6", "route", "replace", "default", "via", ipv6_of(address, 1, home=True))

    def split(self, places: Sequence[str]) -> None:
        """No packet gets from these public places to the others or back; among themselves they do. One split at a time."""
        some = ", ".join(self.public[place] for place in places)
        rest = ", ".join(sorted(set(self.public.values()) - {self.public[place] for place in places}))
        _run(*self.inside("inet"), "nft", "-f", "-", given=SPLIT.replace("SOME", some).replace("REST", rest))

    def join(self) -> None:
        """Undo `split`."""
        _run(*self.inside("inet"), "nft", "delete", "table", "ip", "split")

    def close(self) -> None:
        """End what runs inside, and remove the namespaces with their links and rules."""
        _remove(name for name in _names() if _owner(name) == str(os.getpid()))


def ipv6_of(address: str, host: int, *, home: bool = False) -> str:
    """An IPv6 address that looks public: of the network of a public place by its IPv4 address, or of the home behind it."""
    return f"2a0a:{'21' if home else '11'}:{address.split('.')[1]}::{host or ''}"


def _names() -> list[str]:
    listed = _run("ip", "netns", "list").splitlines()
    return [name for line in listed if line and NAME.match(name := line.split()[0])]


def _owner(name: str) -> str:
    found = NAME.match(name)
    assert found is not None, name
    return found[1]


def _remove(names: Iterable[str]) -> None:
    for name in names:
        for pid in _run("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "delete", name)
