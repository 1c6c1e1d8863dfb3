"""Machines as people have them: a clock of 1972, a proxy in the environment, one identity on two machines. Real commands."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.local_swarm import PLAIN_MODEL, SURROUNDINGS, TINY_MODEL, LocalSwarm, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
RUN = toml_of_run("surrounded", TINY_MODEL, clock={"batch_samples": 8, "snapshot_every": 50})


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    swarm = LocalSwarm(tmp_path_factory.mktemp("surrounded"), RUN)
    yield swarm
    swarm.close()


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node", *arguments]
    environment = os.environ | SURROUNDINGS | environment
    return subprocess.run(command, input="", capture_output=True, text=True, timeout=300, check=False, env=environment)


def at(time: str) -> dict[str, str]:
    return {"LD_PRELOAD": str(LIBRARY), "FAKETIME": f"@{time}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


needs_faketime = pytest.mark.skipif(
    LIBRARY is None, reason="needs Debian's package faketime (apt-get install faketime)"
)


@needs_faketime
@pytest.mark.parametrize("time", ["1972-02-22 00:00:00", "2037-12-01 00:00:00"])
def test_a_wrong_clock_ends_no_command(swarm: LocalSwarm, time: str) -> None:
    done = run("status", swarm.link, "--json", **at(time))
    assert done.returncode == 0, done.stderr


@needs_faketime
@pytest.mark.nightly
@pytest.mark.parametrize(("time", "words"), [("1972-02-22 00:00:00", "younger"), ("2037-12-01 00:00:00", "apart")])
def test_the_doctor_names_a_wrong_clock_once(swarm: LocalSwarm, tmp_path: Path, time: str, words: str) -> None:
    done = run("doctor", swarm.link, "--home", str(tmp_path), "--listen", "127.0.0.1:0", "--json", **at(time))
    assert done.returncode == 0, (done.stdout, done.stderr)
    values = json.loads(done.stdout)
    [wrong] = [line for line in values["lines"] if line["name"] == "clock" and "says" in line["text"]]
    assert values["verdict"] == wrong["verdict"] == "warning"
    assert f"this machine's clock says {time[:10]}" in wrong["text"]
    assert words in wrong["text"]


@needs_faketime
@pytest.mark.long
def test_a_peer_with_the_clock_of_1972_says_so_and_trains(swarm: LocalSwarm) -> None:
    peer = swarm.join("old", environment=at("1972-02-22 00:00:00"))
    swarm.wait_step("old", 2)
    [told] = swarm.events("old", "the clock is wrong")
    assert "this machine's clock says 1972-02-22" in told["why"]
    assert "timedatectl" in told["todo"]
    peer.interrupt()
    assert peer.finish()[0] == 130


def test_a_proxy_is_not_asked_for_a_coordinator(swarm: LocalSwarm) -> None:
    proxies = dict.fromkeys(("https_proxy", "HTTPS_PROXY", "http_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    done = run("status", swarm.link, "--json", no_proxy="", NO_PROXY="", **proxies)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[LocalSwarm]:
    """A run of its own: the peers of another test may have ended with the only copy of its votes."""
    swarm = LocalSwarm(tmp_path, RUN.replace(TINY_MODEL, PLAIN_MODEL))
    yield swarm
    swarm.close()


@pytest.mark.long
def test_a_home_on_two_machines_is_told_to_both(fresh: LocalSwarm) -> None:
    for name in ("bob", "ada"):
        fresh.join(name)
    fresh.wait_step("ada", 3)
    (fresh.folder / "copy").mkdir()
    shutil.copy(fresh.folder / "ada" / "identity.key", fresh.folder / "copy")
    fresh.join("copy")
    for name in ("ada", "copy"):
        [told, *_] = wait_for("a word", lambda name=name: fresh.events(name, "two machines use one identity"))
        assert "127.0.0.1" in told["why"]
        assert "delete identity.key in the home of one of the two" in told["todo"]
    wait_for(
        "a step of ada without votes", lambda: "another program may vote" in (fresh.folder / "ada.log").read_text()
    )
    fresh.wait_step("bob", fresh.last_step("bob") + 20)  # bob has what both sign, and would have them excluded
    for name in ("ada", "copy"):
        assert fresh.processes[name].child.poll() is None
        assert "excluded" not in (fresh.folder / f"{name}.log").read_text()
    for name in ("copy", "ada"):
        fresh.processes[name].interrupt()
        assert fresh.processes[name].finish()[0] == 130
