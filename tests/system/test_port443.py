"""Peers in networks that let nothing out but TCP to port 443, or nothing but an HTTP proxy, take part without a flag.

The operator has the files of deploy: nginx takes coordinator and relay through one port 443, with the routes of
swarmentum-port443.service.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.local_swarm import GUARD, wait_for
from tests.system.netns import HOME_ROUTER, HOMES, PUBLIC, Internet, NotHereError
from tests.system.test_nat import COORDINATOR_PORT, PUBLIC_PEER, RELAY_PORT, NatSwarm, leaves_cleanly, trained_together

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
STREAM = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
TINYPROXY = shutil.which("tinyproxy")
EXAMPLE, ROUTES = Path("deploy/proxy/port443.conf"), Path("deploy/systemd/swarmentum-port443.service")
HOME = "home1"
ANNOUNCED = f"/ip4/{PUBLIC['pub']}/tcp/443"
PROXY_PORT = 8888

pytestmark = [
    pytest.mark.system,
    pytest.mark.netns,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        NGINX is None or not STREAM.exists(), reason="no nginx with streams: apt-get install nginx-light libnginx-mod-stream"
    ),
]


class Port443Swarm(NatSwarm):
    """Everything public is at port 443 of one address."""

    ADVERTISED, RELAY_AT = 443, "0.0.0.0"  # nginx calls both on loopback

    def __init__(self, folder: Path, internet: Internet, surroundings: dict[str, str] | None = None) -> None:
        self.of_home = surroundings or {}
        super().__init__(folder, internet, min_peers=2, relay_flags=("--set", f"announce={ANNOUNCED}"))
        assert all(address.startswith(ANNOUNCED) for address in self.bootstrap), self.bootstrap

    def surroundings(self, name: str) -> dict[str, str]:
        return self.of_home if name == HOME else {}


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
        subprocess.run([*inside, *shlex.split(command)], check=True, timeout=30)
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
    import os

    with log.open("w") as file, subprocess.Popen([*GUARD, str(os.getpid()), *command], stdout=file, stderr=file) as child:
        try:
            yield
        finally:
            child.terminate()
            child.wait(10)


def check_walls(internet: Internet, *, port_443: bool) -> None:
    """The network is as narrow as the test says."""
    for port in (COORDINATOR_PORT, RELAY_PORT):
        assert internet.connect(HOME, PUBLIC["pub"], port) == "dropped"
    assert internet.connect(HOME, PUBLIC["pub"], 443) == ("connected" if port_443 else "dropped")


@pytest.mark.long
def test_a_network_that_lets_only_port_443_out(internet: Internet, tmp_path: Path) -> None:
    internet.firewall(HOME, port_443=True)
    try:
        swarm = Port443Swarm(tmp_path, internet)
        try:
            check_walls(internet, port_443=True)
            for name in (PUBLIC_PEER, HOME):
                swarm.join_plainly(name)
            trained_together(swarm, (PUBLIC_PEER, HOME))
            swarm.wait_relay(HOME, "relay")
            assert swarm.found(HOME)["seen_at"] == [PUBLIC[HOMES[HOME]]], "the relay sees the address of nginx"
            leaves_cleanly(swarm, (PUBLIC_PEER, HOME))
        finally:
            swarm.close()
    finally:
        internet.no_firewall(HOME)
