"""Two homes behind two NATs and one public peer train together: equal digests, nobody left out, relayed or punched.

Everything is real but the internet: processes, routers with nftables, addresses, a coordinator, a relay. The homes share one
private network number and cannot be dialled from outside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.identity import Identity
from protos.invite import Invite
from tests.system.local_swarm import TINY_MODEL, LocalSwarm, Process, digests_by_step, processes_with, wait_for
from tests.system.netns import HOMES, PUBLIC, Internet, NotHereError

pytestmark = [pytest.mark.system, pytest.mark.netns, pytest.mark.timeout(240)]

STEPS = 20
COORDINATOR_PORT, RELAY_PORT, PEER_PORT = 7700, 4001, 4002
PUBLIC_PEER = "pat"
PEERS = (PUBLIC_PEER, *HOMES)
RUN = f"""
name = "nat"
{TINY_MODEL}
[data]
source = "DATA"
context = 32
[clock]
steps = 100000
batch_samples = 12
min_peers = MIN_PEERS
snapshot_every = 50
deadline_ms_min = 1000
deadline_ms_max = 20000
[overlay]
bootstrap = BOOTSTRAP
"""


class NatSwarm(LocalSwarm):
    """A coordinator and a relay at the public address; peers there and at home."""

    def __init__(self, folder: Path, internet: Internet, min_peers: int, run: str = RUN) -> None:
        self.folder, self.internet = folder, internet
        self.processes: dict[str, Process] = {}
        try:
            self._start(min_peers, run)
        except BaseException:
            self.close()
            raise

    def _start(self, min_peers: int, run: str) -> None:
        here = PUBLIC["pub"]
        relay = self.start("relay", "node", "relay", "--home", str(self.folder / "relay"),
                           "--listen", f"{here}:{RELAY_PORT}", "--json")  # fmt: skip
        serve = self.start("coordinator", "coordinator", "serve", "--home", self.home, "--json",
                           "--listen", f"0.0.0.0:{COORDINATOR_PORT}",
                           "--advertise", f"{here}:{COORDINATOR_PORT}")  # fmt: skip
        self.serving = serve.first_json()
        self.bootstrap: list[str] = relay.first_json()["addresses"]
        text = self.folder / "text.txt"
        text.write_bytes(Path(os.__file__).read_bytes())
        run = run.replace("DATA", str(text)).replace("MIN_PEERS", str(min_peers))
        file = self.folder / "run.toml"
        file.write_text(run.replace("BOOTSTRAP", json.dumps(self.bootstrap)))
        create = self.start(
            "create", "coordinator", "run", "create", str(file), "--home", self.home, "--json", "--no-layout"
        )
        self.link = create.first_json()["invite"]
        create.finish()
        self.invite = Invite.parse(self.link)

    def inside(self, name: str) -> tuple[str, ...]:
        return self.internet.inside(name if name in HOMES else "pub")

    def join_from(self, home: str, transport: str, *flags: str) -> None:
        """A peer behind a router; it knows one address of the relay."""
        relay = next(address for address in self.bootstrap if f"/{transport}" in address)
        listen = ("--listen", f"0.0.0.0:{PEER_PORT}")
        self.join(home, *listen, "--reachability", "private", "--relay", relay, *flags)

    def way(self, home: str, other: str) -> str:
        """How a peer last said that it is connected to another: direct, relayed, or "" if it is not."""
        peer = Identity.load_or_create(self.folder / other / "identity.key").peer_id[-8:]
        said = self.events(home, "connections")
        return next((way for way in ("direct", "relayed") if said and peer in said[-1][way]), "")


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    try:
        internet = Internet()
    except NotHereError as why:
        pytest.skip(f"no network namespaces here: {why}")
    try:
        yield internet
    finally:
        internet.close()


def trained_together(swarm: NatSwarm, names: tuple[str, ...]) -> None:
    """At least STEPS steps in which all of them took part: equal states after each, most votes of each accepted."""
    first = max(swarm.steps(name)[0]["step"] for name in names)
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


def leaves_cleanly(swarm: NatSwarm, names: tuple[str, ...]) -> None:
    for name in names:
        swarm.processes[name].interrupt()
    for name in names:
        code, summary = swarm.processes[name].finish(30)
        assert (code, summary["resyncs"]) == (130, 0)


def test_two_homes_behind_nats_and_a_public_peer_train_together(internet: Internet, tmp_path: Path) -> None:
    swarm = NatSwarm(tmp_path, internet, min_peers=3)
    try:
        # The homes are there first, so that the public peer finds them and not they it: it can reach them by the relay only.
        for home in HOMES:
            swarm.join_from(home, "quic-v1")
        for home in HOMES:
            wait_for(f"{home} in the run", lambda home=home: swarm.events(home, "waiting"))  # type: ignore[misc]
        swarm.join(PUBLIC_PEER, "--listen", f"{PUBLIC['pub']}:{PEER_PORT}", "--reachability", "public")
        for name in PEERS:
            swarm.wait_step(name, 1)
        trained_together(swarm, PEERS)
        for home in HOMES:
            # once known, a public peer is no burden on the relay
            wait_for(f"direct connection to {home}", lambda home=home: swarm.way(home, PUBLIC_PEER) == "direct")  # type: ignore[misc]
            assert internet.connect("pub", PUBLIC[HOMES[home]], PEER_PORT) == "dropped"
        assert internet.connect("pub", PUBLIC["pub"], PEER_PORT) == "connected", "the probe itself does not work"
        ways = {swarm.way("home1", "home2"), swarm.way("home2", "home1")}
        assert ways <= {"direct", "relayed"}, "the homes are not connected"
        print(f"the homes' connection is {'relayed' if 'relayed' in ways else 'punched'}")
        leaves_cleanly(swarm, PEERS)
    finally:
        swarm.close()
    assert processes_with(str(tmp_path)) == [], "something was left running"


def test_two_homes_train_through_nothing_but_a_relay_over_tcp(internet: Internet, tmp_path: Path) -> None:
    swarm = NatSwarm(tmp_path, internet, min_peers=2)
    try:
        for home in HOMES:
            swarm.join_from(home, "tcp")
        for home in HOMES:
            swarm.wait_step(home, 1)
        trained_together(swarm, tuple(HOMES))
        wait_for("connection of the homes", lambda: swarm.way("home1", "home2"), 30)
        leaves_cleanly(swarm, tuple(HOMES))
    finally:
        swarm.close()
    assert processes_with(str(tmp_path)) == [], "something was left running"


@pytest.mark.nightly
def test_votes_follow_the_uplink(internet: Internet, tmp_path: Path) -> None:
    """A home that sends 1 Mbit/s ends up with small votes, a public peer with large ones; they count alike."""
    wide = RUN.replace("hidden_size = 64", "hidden_size = 256").replace(
        "intermediate_size = 128", "intermediate_size = 512"
    )
    assert wide != RUN
    internet.shape("nat1", 1000)
    swarm = NatSwarm(tmp_path, internet, min_peers=2, run=wide)
    try:
        swarm.join_from("home1", "quic-v1", "--fit-uplink", "--group-size", "8")
        listen = ("--listen", f"{PUBLIC['pub']}:{PEER_PORT}", "--reachability", "public")
        swarm.join(PUBLIC_PEER, *listen, "--fit-uplink", environment={"SWARMENTUM_UPLINK_BUDGET": "5"})

        def size(name: str) -> int:
            changes = swarm.events(name, "votes fit the uplink")
            return int(changes[-1]["size"]) if changes else 0

        wait_for("small votes of the home", lambda: size("home1") >= 64)
        wait_for("large votes of the public peer", lambda: size(PUBLIC_PEER) in {8, 16})
        trained_together(swarm, (PUBLIC_PEER, "home1"))
        leaves_cleanly(swarm, (PUBLIC_PEER, "home1"))
    finally:
        swarm.close()
        internet.shape("nat1", 0)
    assert processes_with(str(tmp_path)) == [], "something was left running"
