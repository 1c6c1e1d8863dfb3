"""Homes behind NATs and public peers train together without a flag: equal digests, nobody left out, relayed or punched.

Everything is real but the internet: processes, routers with nftables, addresses, a coordinator, a relay. The homes share one
private network number and cannot be dialled from outside.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.identity import Identity
from protos.invite import Invite
from tests.system.local_swarm import (
    PATIENT,
    PLAIN_MODEL,
    TINY_MODEL,
    LocalSwarm,
    Process,
    digests_by_step,
    processes_with,
    toml_of_run,
    wait_for,
)
from tests.system.netns import HOMES, PUBLIC, Internet, NotHereError, ipv6_of

pytestmark = [pytest.mark.system, pytest.mark.netns, pytest.mark.timeout(900)]

STEPS = 20
# libp2p tells a peer its own address behind a NAT once four others have seen it there, and punches no hole before.
OBSERVERS = {f"obs{number}": f"11.{number}.0.2" for number in range(4, 8)}
COORDINATOR_PORT, RELAY_PORT, PEER_PORT = 7700, 4001, 4002
LINE_KBIT = 5_000, 20_000
"""Up and down."""
PUBLIC_PEER = "pat"
PEERS = (PUBLIC_PEER, *HOMES)
# While a home has not found its relay, the others make 50 tiny steps in the seconds that a dial takes: a snapshot that is
# nearer would be loaded instead of votes.
CLOCK = {"batch_samples": 12, "min_peers": "MIN_PEERS", "snapshot_every": 1000} | PATIENT
RUN = toml_of_run("nat", source="DATA", relay=True, clock=CLOCK).replace("[BOOTSTRAP]", "BOOTSTRAP")


class NatSwarm(LocalSwarm):
    """A coordinator and a relay at the public address; peers there and at home."""

    ADVERTISED = COORDINATOR_PORT
    """The port of the coordinator in the link."""
    RELAY_AT = PUBLIC["pub"]
    """Where the relay listens."""

    def __init__(
        self,
        folder: Path,
        internet: Internet,
        min_peers: int,
        run: str = RUN,
        *,
        relay: bool = True,
        relay_flags: tuple[str, ...] = (),
        ipv6: bool = False,
        more_relays: tuple[str, ...] = (),
    ) -> None:
        """`ipv6`: coordinator, relay and peers listen at IPv6, too, and the link names both addresses of the coordinator.
        `more_relays`: public places that have a relay of their own."""
        self.folder, self.internet, self.more_relays = folder, internet, more_relays
        self.with_relay, self.relay_flags, self.ipv6 = relay, relay_flags, ipv6
        self.processes: dict[str, Process] = {}
        try:
            self._start(min_peers, run)
        except BaseException:
            self.close()
            raise

    def _start(self, min_peers: int, run: str) -> None:
        here, also = PUBLIC["pub"], ipv6_of(PUBLIC["pub"], 2)
        relay_at, serve_at = ("*", "[::]") if self.ipv6 else (self.RELAY_AT, "0.0.0.0")
        told = f"{here}:{self.ADVERTISED}" + (f",[{also}]:{COORDINATOR_PORT}" if self.ipv6 else "")
        self.bootstrap: list[str] = []
        if self.with_relay:
            relay = self.start("relay", "node", "relay", "--home", str(self.folder / "relay"),
                               "--listen", f"{relay_at}:{RELAY_PORT}", "--json", *self.relay_flags)  # fmt: skip
        serve = self.start("coordinator", "coordinator", "serve", "--home", self.home, "--json",
                           "--listen", f"{serve_at}:{COORDINATOR_PORT}", "--advertise", told)  # fmt: skip
        self.serving = serve.first_json()
        if self.with_relay:
            self.bootstrap = relay.first_json()["addresses"]
        for place in self.more_relays:
            other = self.start(place, "node", "relay", "--home", str(self.folder / place),
                               "--listen", f"{self.internet.public[place]}:{RELAY_PORT}", "--json")  # fmt: skip
            self.bootstrap += other.first_json()["addresses"]
        text = self.folder / "text.txt"
        text.write_bytes(Path(os.__file__).read_bytes())
        run = run.replace("DATA", str(text)).replace('"MIN_PEERS"', str(min_peers))
        file = self.folder / "run.toml"
        file.write_text(run.replace("BOOTSTRAP", json.dumps(self.bootstrap)))
        create = self.start(
            "create", "coordinator", "run", "create", str(file), "--home", self.home, "--json", "--no-layout"
        )
        self.link = create.first_json()["invite"]
        create.finish()
        self.invite = Invite.parse(self.link)

    def inside(self, name: str) -> tuple[str, ...]:
        return self.internet.inside(name if name in (*HOMES, *self.more_relays) else "pub")

    def join_plainly(self, name: str) -> None:
        """A peer that says nothing about its network but a port, which the tests probe."""
        self.join(name, "--listen", f"{'*' if self.ipv6 else '0.0.0.0'}:{PEER_PORT}")

    def found(self, name: str) -> dict[str, Any]:
        """What a peer last found out about its network; empty: nothing yet."""
        said = self.events(name, "whether others can dial this peer")
        return said[-1] if said else {}

    def wait_relay(self, name: str, relay: str) -> None:
        """Until a peer has found out that nobody can dial it, and has taken this relay alone."""
        taken = [self.known_as(relay)]
        wait_for(f"relay of {name}", lambda: self.found(name).get("relays") == taken)
        assert self.found(name)["reachable"] == "private"

    def known_as(self, name: str) -> str:
        """How log lines name a peer or a relay."""
        return Identity.load_or_create(self.folder / name / "identity.key").peer_id[-8:]

    def join_from(self, home: str, transport: str, *flags: str) -> None:
        """A peer behind a router; it knows one address of the relay."""
        relay = next(address for address in self.bootstrap if f"/{transport}" in address)
        listen = ("--listen", f"0.0.0.0:{PEER_PORT}")
        self.join(home, *listen, "--set", f"reachability=private,{relay}", *flags)

    def way(self, home: str, other: str) -> str:
        """How a peer last said that it is connected to another: direct, relayed, or "" if it is not."""
        peer = self.known_as(other)
        said = self.events(home, "connections")
        return next((way for way in ("direct", "relayed") if said and peer in said[-1][way]), "")


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    try:
        internet = Internet(PUBLIC | OBSERVERS)
    except NotHereError as why:
        pytest.skip(f"no network namespaces here: {why}")
    try:
        yield internet
    finally:
        internet.close()


def trained_together(swarm: NatSwarm, names: tuple[str, ...], *, from_now: bool = False) -> None:
    """At least STEPS steps in which all of them took part: equal states after each, most votes of each accepted."""
    for name in names:
        swarm.wait_step(name, 1)
    first = max(swarm.steps(name)[-1 if from_now else 0]["step"] for name in names)
    upto = first + STEPS
    for name in names:
        swarm.wait_step(name, upto)
    lines = {name: [line for line in swarm.steps(name) if first <= line["step"] < upto] for name in names}
    for name in names:
        assert [line["step"] for line in lines[name]] == list(range(first, upto)), f"{name} did not apply every step"
        accepted = sum(line["accepted"] for line in lines[name])
        assert accepted > STEPS / 2, f"only {accepted} of {STEPS} votes of {name} were accepted"
    every = digests_by_step(*(swarm.steps(name) for name in names))
    assert all(len(digests) == 1 for digests in every.values()), "replicas differ"


@pytest.mark.long
def test_the_doctor_asks_a_home_for_nothing_that_join_does_not_need(internet: Internet, tmp_path: Path) -> None:
    """It told a home to forward a port or to name a relay; the same home then joined without a flag."""
    with NatSwarm(tmp_path, internet, min_peers=1) as swarm:
        home = ("--home", str(swarm.folder / "home1"), "--listen", f"0.0.0.0:{PEER_PORT}", "--threads", "1")
        doctor = swarm.start("home1", "node", "doctor", swarm.link, *home, "--json")
        code, values = doctor.finish()
        assert code == 0, values
        rows = {row["name"]: row for row in values["lines"]}
        for name in ("router", "reachability"):
            assert rows[name]["verdict"] in ("ok", "not measured"), rows[name]
            assert rows[name]["todo"] == "", rows[name]
        swarm.join_plainly("home1")
        swarm.wait_step("home1", 2)
        swarm.wait_relay("home1", "relay")
        if "relays" in rows["reachability"]["text"]:
            assert "takes one of 1 relays by itself" in rows["reachability"]["text"]
        leaves_cleanly(swarm, ("home1",))


def leaves_cleanly(swarm: NatSwarm, names: tuple[str, ...]) -> None:
    for name in names:
        swarm.processes[name].interrupt()
    for name in names:
        code, summary = swarm.processes[name].finish()
        assert (code, summary["resyncs"]) == (130, 0)


@pytest.mark.nightly
def test_two_homes_behind_nats_and_a_public_peer_train_together(internet: Internet, tmp_path: Path) -> None:
    with NatSwarm(tmp_path, internet, min_peers=3) as swarm:
        # The homes are there first, so that the public peer finds them and not they it: it can reach them by the relay only.
        for home in HOMES:
            swarm.join_plainly(home)
        for home in HOMES:
            wait_for(f"{home} in the run", lambda home=home: swarm.events(home, "waiting"))  # type: ignore[misc]
            assert swarm.found(home)["reachable"] == "private"
            assert swarm.found(home)["relays"] == [swarm.known_as("relay")]
        swarm.join_plainly(PUBLIC_PEER)
        for name in PEERS:
            swarm.wait_step(name, 1)
        trained_together(swarm, PEERS)
        assert swarm.found(PUBLIC_PEER)["reachable"] == "public"
        for home in HOMES:
            # once known, a public peer is no burden on the relay
            wait_for(f"direct connection to {home}", lambda home=home: swarm.way(home, PUBLIC_PEER) == "direct")  # type: ignore[misc]
            assert internet.connect("pub", PUBLIC[HOMES[home]], PEER_PORT) == "dropped"
        assert internet.reaches("pub", PUBLIC["pub"], PEER_PORT), "the probe itself does not work"
        ways = {swarm.way("home1", "home2"), swarm.way("home2", "home1")}
        assert ways <= {"direct", "relayed"}, "the homes are not connected"
        print(f"the homes' connection is {'relayed' if 'relayed' in ways else 'punched'}")
        leaves_cleanly(swarm, PEERS)
    assert processes_with(str(tmp_path)) == [], "something was left running"


@pytest.mark.long
def test_two_homes_need_no_relay_of_the_operator_if_a_peer_is_public(internet: Internet, tmp_path: Path) -> None:
    with NatSwarm(tmp_path, internet, min_peers=3, relay=False) as swarm:
        swarm.join_plainly(PUBLIC_PEER)
        wait_for("the public peer in the run", lambda: swarm.events(PUBLIC_PEER, "waiting"))
        for home in HOMES:
            swarm.join_plainly(home)
        for name in PEERS:
            swarm.wait_step(name, 1)
        # The first peer had nobody to ask. Once the homes had dialled it back, it was public, and their relay.
        for home in HOMES:
            wait_for(f"relay of {home}", lambda home=home: swarm.found(home).get("relays"))  # type: ignore[misc]
            assert swarm.found(home)["relays"] == [swarm.known_as(PUBLIC_PEER)]
        wait_for("connection of the homes", lambda: swarm.way("home1", "home2") and swarm.way("home2", "home1"))
        known = {name: swarm.known_as(name) for name in PEERS}

        def relayed() -> dict[str, bool]:
            """As the coordinator knows it: a peer tells its new addresses some seconds after it has them."""
            told = {peer["id"][-8:]: peer["relayed"] for peer in swarm.status()["peers"]}
            return {name: told[short] for name, short in known.items()}

        wait_for("status of the homes", lambda: relayed() == {PUBLIC_PEER: False, "home1": True, "home2": True})
        trained_together(swarm, PEERS, from_now=True)
        leaves_cleanly(swarm, PEERS)
    assert processes_with(str(tmp_path)) == [], "something was left running"


@pytest.mark.nightly
def test_two_homes_punch_through_their_routers_if_enough_others_see_them(internet: Internet, tmp_path: Path) -> None:
    with NatSwarm(tmp_path, internet, min_peers=3, more_relays=tuple(OBSERVERS)) as swarm:
        for name in PEERS:
            swarm.join_plainly(name)
        trained_together(swarm, PEERS)
        for home in HOMES:
            assert swarm.found(home)["reachable"] == "private"
            assert internet.connect("pub", PUBLIC[HOMES[home]], PEER_PORT) == "dropped"
        wait_for("direct way", lambda: {swarm.way("home1", "home2"), swarm.way("home2", "home1")} == {"direct"})
        trained_together(swarm, PEERS, from_now=True)
        leaves_cleanly(swarm, PEERS)


@pytest.mark.nightly
def test_routers_that_cannot_be_punched_or_block_udp_cost_nobody_a_place(internet: Internet, tmp_path: Path) -> None:
    """One home is behind an endpoint-dependent ("symmetric") NAT, the other one behind a router without UDP."""
    internet.symmetric("home1")
    internet.block_udp("home2")
    with NatSwarm(tmp_path, internet, min_peers=3) as swarm:
        for name in PEERS:
            swarm.join_plainly(name)
        trained_together(swarm, PEERS)
        for home in HOMES:
            assert swarm.found(home)["reachable"] == "private"
        wait_for("connection of the homes", lambda: swarm.way("home1", "home2") == "relayed")
        leaves_cleanly(swarm, PEERS)
        internet.symmetric("home1", on=False)
        internet.block_udp("home2", on=False)


@pytest.mark.nightly
def test_another_relay_is_taken_when_the_only_one_dies(internet: Internet, tmp_path: Path) -> None:
    with NatSwarm(tmp_path, internet, min_peers=3) as swarm:
        for home in HOMES:
            swarm.join_plainly(home)
        for home in HOMES:
            wait_for(f"{home} in the run", lambda home=home: swarm.events(home, "waiting"))  # type: ignore[misc]
            assert swarm.found(home)["relays"] == [swarm.known_as("relay")]
        swarm.join_plainly(PUBLIC_PEER)
        trained_together(swarm, PEERS)
        wait_for("the public peer relays", lambda: swarm.found(PUBLIC_PEER).get("reachable") == "public")
        swarm.processes["relay"].kill()
        taken = [swarm.known_as(PUBLIC_PEER)]
        for home in HOMES:
            wait_for(f"another relay of {home}", lambda home=home: swarm.found(home)["relays"] == taken)  # type: ignore[misc]
        trained_together(swarm, PEERS, from_now=True)
        leaves_cleanly(swarm, PEERS)


@pytest.mark.nightly
def test_a_home_whose_public_address_changes_goes_on(internet: Internet, tmp_path: Path) -> None:
    with NatSwarm(tmp_path, internet, min_peers=3) as swarm:
        for name in PEERS:
            swarm.join_plainly(name)
        trained_together(swarm, PEERS)
        internet.move("home1", "11.2.0.9")
        trained_together(swarm, PEERS, from_now=True)
        leaves_cleanly(swarm, PEERS)
        internet.move("home1", PUBLIC[HOMES["home1"]])


@pytest.mark.nightly
def test_a_home_behind_two_routers_takes_part(internet: Internet, tmp_path: Path) -> None:
    internet.double("home1")
    with NatSwarm(tmp_path, internet, min_peers=3, relay=False) as swarm:
        for name in PEERS:
            swarm.join_plainly(name)
        trained_together(swarm, PEERS)
        for home in HOMES:
            swarm.wait_relay(home, PUBLIC_PEER)
        wait_for("connection of the homes", lambda: swarm.way("home1", "home2"))
        leaves_cleanly(swarm, PEERS)
        internet.double("home1", on=False)


@pytest.mark.long
@pytest.mark.nightly
def test_peers_with_ipv4_alone_and_with_ipv6_alone_are_in_one_run(internet: Internet, tmp_path: Path) -> None:
    """A public peer has both. Neither home can send the other a packet, and each of them has the votes of both."""
    internet.ipv6()
    internet.family("home1", ipv4=True, ipv6=False)
    internet.family("home2", ipv4=False, ipv6=True)
    with NatSwarm(tmp_path, internet, min_peers=3, relay=False, ipv6=True) as swarm:
        for name in PEERS:
            swarm.join_plainly(name)
        trained_together(swarm, PEERS)
        for home in HOMES:
            swarm.wait_relay(home, PUBLIC_PEER)  # a firewall of IPv6 lets nobody in, either
            wait_for(f"direct connection of {home}", lambda home=home: swarm.way(home, PUBLIC_PEER) == "direct")  # type: ignore[misc]
        wait_for("connection of the homes", lambda: swarm.way("home1", "home2") == "relayed")
        leaves_cleanly(swarm, PEERS)
        internet.only_ipv4()
        for home in HOMES:
            internet.family(home, ipv4=True, ipv6=False)


@pytest.mark.nightly
def test_homes_with_ordinary_lines_take_part(internet: Internet, tmp_path: Path) -> None:
    """20 Mbit/s down and 5 Mbit/s up, for both homes."""
    for nat in HOMES.values():
        internet.shape(nat, *LINE_KBIT)
    with NatSwarm(tmp_path, internet, min_peers=3) as swarm:
        for name in PEERS:
            swarm.join_plainly(name)
        trained_together(swarm, PEERS)
        assert all(internet.limits(nat) == (1000 * LINE_KBIT[0], 1000 * LINE_KBIT[1]) for nat in HOMES.values())
        leaves_cleanly(swarm, PEERS)
        for nat in HOMES.values():
            internet.shape(nat, 0)


@pytest.mark.long
def test_two_homes_train_through_nothing_but_a_relay_over_tcp(internet: Internet, tmp_path: Path) -> None:
    with NatSwarm(tmp_path, internet, min_peers=2) as swarm:
        for home in HOMES:
            swarm.join_from(home, "tcp")
        for home in HOMES:
            swarm.wait_step(home, 1)
        trained_together(swarm, tuple(HOMES))
        wait_for("connection of the homes", lambda: swarm.way("home1", "home2"))
        leaves_cleanly(swarm, tuple(HOMES))
    assert processes_with(str(tmp_path)) == [], "something was left running"


@pytest.mark.nightly
def test_a_relay_keeps_to_what_its_owner_gives(internet: Internet, tmp_path: Path) -> None:
    """p2pd counts what it relays. Once that is more than the bucket holds, the relay takes nobody any more."""
    with NatSwarm(tmp_path, internet, min_peers=2, relay_flags=("--set", "relay_mbit=0.02")) as swarm:
        for home in HOMES:
            swarm.join_from(home, "tcp", "--set", "vote_size=8")
        for home in HOMES:
            swarm.wait_step(home, 1)
        [said] = wait_for("the end of relaying", lambda: swarm.events("relay", "relaying no more for now"))
        assert said["relayed"] >= 300 * 0.02e6 / 8
    assert processes_with(str(tmp_path)) == [], "something was left running"


WIDE = RUN.replace(
    PLAIN_MODEL,
    TINY_MODEL.replace("hidden_size = 64", "hidden_size = 256").replace(
        "intermediate_size = 128", "intermediate_size = 512"
    ),
)


def size(swarm: NatSwarm, name: str) -> int:
    """To which the peer's votes changed last; 0: not at all."""
    changes = swarm.events(name, "votes fit the uplink")
    return int(changes[-1]["size"]) if changes else 0


@pytest.mark.nightly
def test_votes_follow_the_uplink(internet: Internet, tmp_path: Path) -> None:
    """A home that sends 1 Mbit/s ends up with small votes, a public peer with large ones; they count alike."""
    wide = WIDE + "[optimizer]\ngroup_size = 8\n"
    internet.shape("nat1", 1000)
    with NatSwarm(tmp_path, internet, min_peers=2, run=wide) as swarm:
        swarm.join_from("home1", "quic-v1", "--set", "vote_size=25%")
        listen = ("--listen", f"{PUBLIC['pub']}:{PEER_PORT}", "--set", "reachability=public")
        swarm.join(PUBLIC_PEER, *listen, "--set", "vote_size=500%")

        wait_for("small votes of the home", lambda: size(swarm, "home1") >= 64)
        wait_for("large votes of the public peer", lambda: size(swarm, PUBLIC_PEER) in {8, 16})
        trained_together(swarm, (PUBLIC_PEER, "home1"))
        leaves_cleanly(swarm, (PUBLIC_PEER, "home1"))
        internet.shape("nat1", 0)
    assert processes_with(str(tmp_path)) == [], "something was left running"


@pytest.mark.nightly
def test_a_slow_downlink_keeps_everybodys_votes_small(internet: Internet, tmp_path: Path) -> None:
    """A home that receives 0.1 Mbit/s gets votes of the run's size, from whoever could send more; then its line gets fast."""
    internet.shape("nat1", 0, 100)
    with NatSwarm(tmp_path, internet, min_peers=3, run=WIDE) as swarm:
        listen = ("--listen", f"{PUBLIC['pub']}:{PEER_PORT}", "--set", "reachability=public")
        swarm.join(PUBLIC_PEER, *listen, "--set", "vote_size=500%")
        for home in HOMES:
            swarm.join_from(home, "quic-v1", "--set", "vote_size=500%")
        swarm.wait_step(PUBLIC_PEER, 20)
        assert [size(swarm, name) for name in PEERS] == [0, 0, 0]
        internet.shape("nat1", 0)
        wait_for("large votes of all", lambda: all(size(swarm, name) in {16, 32} for name in PEERS))
        trained_together(swarm, PEERS)
        leaves_cleanly(swarm, PEERS)
    assert processes_with(str(tmp_path)) == [], "something was left running"
