"""`swarmentum doctor` as people start it: alone, and against a real swarm; and `join` of a run that fits no machine."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.doctor.swarm import look
from tests.system.local_swarm import TINY_MODEL, LocalSwarm, toml_of_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run("examined", TINY_MODEL, relay=True, clock={"batch_samples": 8, "snapshot_every": 50})
HUGE = """
name = "huge"
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 16384
num_hidden_layers = 7
num_attention_heads = 128
num_key_value_heads = 128
intermediate_size = 65536
[overlay]
bootstrap = [BOOTSTRAP]
"""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    swarm = LocalSwarm(tmp_path_factory.mktemp("examined"), RUN)
    yield swarm
    swarm.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node", *arguments]
    return subprocess.run(command, input="", capture_output=True, text=True, timeout=300, check=False)


def by_name(values: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {line["name"]: line for line in values["lines"]}


def huge_run(swarm: LocalSwarm, folder: Path) -> str:
    """The invite of a run with five trillion parameters."""
    file = folder / "huge.toml"
    file.write_text(HUGE.replace("BOOTSTRAP", json.dumps(swarm.bootstrap[0])))
    command = ("coordinator", "run", "create", str(file), "--home", swarm.home, "--json", "--no-layout")
    create = swarm.start("create2", *command)
    link: str = create.first_json()["invite"]
    create.finish()
    return link


def test_a_machine_without_a_run(tmp_path: Path) -> None:
    done = run("doctor", "--home", str(tmp_path / "home"), "--json")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    found = by_name(values)
    assert {"device", "memory", "disk", "clock", "ports", "versions"} <= found.keys()
    assert (values["name"], values["prediction"]) == (None, None)
    assert found["ports"]["verdict"] == "ok"
    assert "format 1" in found["versions"]["text"]
    assert not (tmp_path / "home").exists(), "it looked, and left nothing"
    wrong = run("doctor", "--home", str(tmp_path / "home"), "--device", "cuda:99", "--json")
    assert wrong.returncode == 1
    assert by_name(json.loads(wrong.stdout))["device"]["verdict"] == "problem"


@pytest.mark.long
def test_a_machine_and_a_run_that_goes_on(swarm: LocalSwarm, tmp_path: Path) -> None:
    ada = swarm.join("ada")
    swarm.wait_step("ada", 6)
    home = tmp_path / "home"
    done = run("doctor", swarm.link, "--home", str(home), "--listen", "127.0.0.1:0", "--threads", "1", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    values = json.loads(done.stdout)
    found = by_name(values)
    for name in ("coordinator", "run", "request", "admission", "model", "run's disk", "speed", "reachability"):
        assert found[name]["verdict"] == "ok", found[name]
    assert "open, step " in found["run"]["text"]
    assert "1 peer ready" in found["run"]["text"]
    assert found["model"]["text"].endswith(", memory full (the fastest)")
    assert "; to join takes " in found["download"]["text"]
    for name, what in (("download", " of a snapshot in "), ("upload", " of test bytes in ")):
        assert what in found[name]["text"], found[name]
        assert found[name]["verdict"] in ("ok", "warning"), "a machine that stands still for a moment has a slow line"
    prediction = values["prediction"]
    assert 0 < prediction["share"] < 1, "ada has a share, too"
    assert prediction["up_bytes_an_hour"] > 0
    assert [path.name for path in home.iterdir()] == ["identity.key"], "nothing was downloaded to keep"
    status = swarm.status()
    assert len(status["peers"]) == 1, "the doctor has joined nothing"
    ada.interrupt()
    assert ada.finish()[0] == 130
    run_id = swarm.created["run"]
    swarm.operate("run", "pause", run_id)
    swarm.operate("run", "change", run_id, "clock.batch_samples=4")
    assert asyncio.run(look(swarm.invite)).config.clock.batch_samples == 4, "what it says follows the settings of now"


def test_a_damaged_link_and_a_dead_coordinator(swarm: LocalSwarm, tmp_path: Path) -> None:
    assert run("doctor", swarm.link[:-9], "--home", str(tmp_path), "--json").returncode == 2
    gone = replace(swarm.invite, coordinators=("127.0.0.1:9",)).link()
    done = run("doctor", gone, "--home", str(tmp_path / "home"), "--json")
    assert done.returncode == 1
    line = by_name(json.loads(done.stdout))["coordinator"]
    assert line["verdict"] == "problem"
    assert line["todo"]


@pytest.mark.long
@pytest.mark.nightly
def test_a_run_that_fits_no_machine_is_refused_before_anything_is_built(swarm: LocalSwarm, tmp_path: Path) -> None:
    link, home = huge_run(swarm, tmp_path), tmp_path / "home"
    done = run("join", link, "--home", str(home), "--listen", "127.0.0.1:0", "--json")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the model does not fit: 30 G parameters need ")
    assert "free are " in last
    assert "--device" in last
    assert not (home / "cache").exists(), "the data was not read"
    told = run("doctor", link, "--home", str(home), "--listen", "127.0.0.1:0", "--json")
    assert told.returncode == 1
    assert by_name(json.loads(told.stdout))["model"]["verdict"] == "problem"
