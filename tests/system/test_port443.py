"""Peers in networks that let nothing out but TCP to port 443, or nothing but an HTTP proxy, take part without a flag.

The operator has the files of deploy: nginx takes coordinator and relay through one port 443, with the routes of
swarmentum-port443.service.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protos.calls import TLS_NAME
from tests.system.copied import GUARD
from tests.system.local_swarm import wait_for
from tests.system.netns import HOME_ADDRESS, HOME_ROUTER, HOMES, PUBLIC, Internet, NotHereError
from tests.system.test_nat import COORDINATOR_PORT, PUBLIC_PEER, RELAY_PORT, NatSwarm, leaves_cleanly, trained_together

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
STREAM = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
TINYPROXY = shutil.which("tinyproxy")
EXAMPLE, ROUTES = Path("deploy/proxy/port443.conf"), Path("deploy/proxy/swarmentum-port443.service")
WALLED, PROXIED = HOMES
PEERS = (PUBLIC_PEER, *HOMES)
ANNOUNCED = f"/ip4/{PUBLIC['pub']}/tcp/443"
PROXY_PORT, USER, PASSWORD = 8888, "campus", "sesame"

# What nginx leads where: each server answers with its port, and with the address that it sees.
SERVERS = """
import socket, sys, threading
def serve(server):
    while True:
        stream, (address, _) = server.accept()
        stream.recv(1)
        stream.sendall(f"{server.getsockname()[1]} {address}".encode())
        stream.close()
for port in map(int, sys.argv[1:]):
    threading.Thread(target=serve, args=(socket.create_server(("127.0.0.1", port)),)).start()
print("ready", flush=True)
"""
SPEAK = """
import socket, ssl, sys
first, name, outgoing = b"\\x13/multistream/1.0.0\\n", sys.argv[2], ssl.MemoryBIO()
if name:
    try:
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        first = outgoing.read()
with socket.create_connection((sys.argv[1], 443), timeout=300) as there:
    there.sendall(first)
    print(there.recv(64).decode())
"""
WEB_PORT = 8443

pytestmark = [
    pytest.mark.system,
    pytest.mark.netns,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        NGINX is None or not STREAM.exists(),
        reason="no nginx with streams: apt-get install nginx-light libnginx-mod-stream",
    ),
]


class Port443Swarm(NatSwarm):
    """Everything public is at port 443 of one address."""

    ADVERTISED, RELAY_AT = 443, "0.0.0.0"  # nginx calls both on loopback

    def __init__(self, folder: Path, internet: Internet, surroundings: dict[str, str]) -> None:
        self.of_home = surroundings
        super().__init__(folder, internet, min_peers=3, relay_flags=("--set", f"reachability=public,{ANNOUNCED}"))
        assert all(address.startswith(ANNOUNCED) for address in self.bootstrap), self.bootstrap

    def surroundings(self, name: str) -> dict[str, str]:
        return self.of_home if name == PROXIED else {}


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    """With the operator's nginx and routes at the public place."""
    try:
        internet = Internet()
    except NotHereError as why:
        pytest.skip(f"no network namespaces here: {why}")
    try:
        with nginx(tmp_path_factory.mktemp("nginx"), internet):
            yield internet
    finally:
        internet.close()


@contextmanager
def nginx(folder: Path, internet: Internet) -> Iterator[None]:
    """The example as it stands, which needs the ports of this swarm."""
    text = EXAMPLE.read_text()
    assert f"127.0.0.1:{COORDINATOR_PORT};" in text
    assert f"127.0.0.1:{RELAY_PORT};" in text
    inside = internet.inside("pub")
    for command in re.findall(r"^ExecStart=(.*)$", ROUTES.read_text(), re.MULTILINE):
        subprocess.run([*inside, *shlex.split(command)], check=True, timeout=300)
    config = folder / "nginx.conf"
    config.write_text(
        f"load_module {STREAM};\nuser www-data;\ndaemon off; pid {folder / 'nginx.pid'}; error_log {folder / 'error.log'};\n"
        f"events {{}}\n{text}"
    )
    with running(folder / "nginx.log", *inside, str(NGINX), "-c", str(config)):
        wait_for("nginx", lambda: internet.connect("pub", PUBLIC["pub"], 443) == "connected")
        yield


@contextmanager
def running(log: Path, *command: str) -> Iterator[None]:
    """A program that runs meanwhile, and that does not outlive these tests."""
    with (
        log.open("w") as file,
        subprocess.Popen([*GUARD, str(os.getpid()), *command], stdout=file, stderr=file) as child,
    ):
        try:
            yield
        finally:
            child.terminate()
            child.wait(60)


@pytest.mark.long
def test_first_bytes_tell_where_a_connection_goes_and_its_address_stays(internet: Internet) -> None:
    ports = (RELAY_PORT, COORDINATOR_PORT, WEB_PORT)
    command = [*internet.inside("pub"), sys.executable, "-c", SERVERS, *map(str, ports)]
    with subprocess.Popen([*GUARD, str(os.getpid()), *command], stdout=subprocess.PIPE, text=True) as servers:
        try:
            assert servers.stdout.readline() == "ready\n"
            for port, name in zip(ports, ("", TLS_NAME, "swarm.example"), strict=True):
                spoken = subprocess.run(
                    [*internet.inside("home1"), sys.executable, "-c", SPEAK, PUBLIC["pub"], name],
                    capture_output=True, text=True, check=False, timeout=300,
                )  # fmt: skip
                assert spoken.stdout.strip() == f"{port} {PUBLIC['nat1']}", (name, spoken.stderr)
        finally:
            servers.kill()


@contextmanager
def proxied(folder: Path, internet: Internet) -> Iterator[dict[str, str]]:
    """An HTTP proxy on the router of home2, which allows CONNECT to port 443 alone; the environment that names it."""
    assert TINYPROXY is not None
    config = folder / "tinyproxy.conf"
    config.write_text(
        f"Port {PROXY_PORT}\nListen {HOME_ROUTER}\nAllow {HOME_ADDRESS}\nConnectPort 443\nBasicAuth {USER} {PASSWORD}\n"
        f'LogFile "{folder / "tinyproxy.log"}"\n'
    )
    with running(folder / "proxy.log", *internet.inside(HOMES[PROXIED]), TINYPROXY, "-d", "-c", str(config)):
        wait_for("proxy", lambda: internet.connect(PROXIED, HOME_ROUTER, PROXY_PORT) == "connected")
        yield {"https_proxy": f"http://{USER}:{PASSWORD}@{HOME_ROUTER}:{PROXY_PORT}"}


@contextmanager
def walls(internet: Internet) -> Iterator[None]:
    """The network of home1 lets port 443 out, that of home2 nothing."""
    try:
        for home in HOMES:
            internet.firewall(home, port_443=home == WALLED)
            for port in (COORDINATOR_PORT, RELAY_PORT):
                assert internet.connect(home, PUBLIC["pub"], port) == "dropped"
        assert internet.reaches(WALLED, PUBLIC["pub"], 443)
        assert internet.connect(PROXIED, PUBLIC["pub"], 443) == "dropped"
        yield
    finally:
        for home in HOMES:
            internet.no_firewall(home)


@pytest.mark.long
@pytest.mark.skipif(TINYPROXY is None, reason="no HTTP proxy: apt-get install tinyproxy-bin")
@pytest.mark.parametrize(
    "order",
    [
        # the public peer finds the homes, and reaches them through the relay
        (*HOMES, PUBLIC_PEER),
        # the homes know a public peer that they cannot dial: they wait for their deadlines, and it finds them
        pytest.param((PUBLIC_PEER, *HOMES), marks=pytest.mark.nightly),
    ],
    ids=["homes_first", "public_peer_first"],
)
def test_networks_with_port_443_alone_and_with_a_proxy_alone(
    internet: Internet, tmp_path: Path, order: tuple[str, ...]
) -> None:
    with walls(internet), proxied(tmp_path, internet) as around, Port443Swarm(tmp_path, internet, around) as swarm:
        for batch in (order[:2], order[2:]):
            for name in batch:
                swarm.join_plainly(name)
            for name in batch:
                wait_for(f"{name} in the run", lambda name=name: swarm.events(name, "connections"))  # type: ignore[misc]
        trained_together(swarm, PEERS)
        for home in HOMES:
            swarm.wait_relay(home, "relay")
            assert swarm.found(home)["seen_at"] == [PUBLIC[HOMES[home]]], "the relay sees the address of nginx"
        at = f"{HOME_ROUTER}:{PROXY_PORT}"
        [called] = swarm.events(PROXIED, "the coordinator is called through the HTTP proxy")
        assert (called["at"], called["proxy"]) == (f"{PUBLIC['pub']}:443", at)
        [told] = swarm.events(PROXIED, "these peers are reached through the HTTP proxy")
        assert (told["addresses"], told["proxy"]) == (swarm.bootstrap, at)
        assert PASSWORD not in (swarm.folder / f"{PROXIED}.log").read_text()
        leaves_cleanly(swarm, PEERS)


@pytest.mark.nightly
@pytest.mark.skipif(TINYPROXY is None, reason="no HTTP proxy: apt-get install tinyproxy-bin")
def test_the_doctor_behind_a_proxy_says_which_way_it_takes(internet: Internet, tmp_path: Path) -> None:
    with walls(internet), proxied(tmp_path, internet) as around, Port443Swarm(tmp_path, internet, around) as swarm:
        flags = ("--home", str(swarm.folder / PROXIED), "--listen", "0.0.0.0:0", "--threads", "1", "--json")
        code, values = swarm.start(PROXIED, "node", "doctor", swarm.link, *flags).finish()
        assert code == 0, values
        rows = {row["name"]: row for row in values["lines"]}
        way = f"{PUBLIC['pub']}:443 through the HTTP proxy {HOME_ROUTER}:{PROXY_PORT}, round trip "
        assert rows["coordinator"]["text"].startswith(way), rows["coordinator"]
        assert "takes one of 1 relays by itself" in rows["reachability"]["text"], rows["reachability"]
