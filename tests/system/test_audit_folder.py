"""The folder for an auditor, from a real run: the commands of its README are run as they stand; each fraud is found."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node import __main__ as command
from node.archive.audit import sums
from node.data.build import Source, build
from node.data.tokenizer import ByteTokenizer
from tests.system.local_swarm import PLAIN_MODEL, LocalSwarm
from tests.system.web_folder import files_of

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]
STEPS = 8
RUN = f"""
name = "audited"
{PLAIN_MODEL}
[[data.mix]]
name = "here"
source = "URL/set"
sha256 = "HASH"
weight = 1
[[data.mix]]
name = "gone"
source = "URL/gone"
sha256 = "HASH"
weight = 1
[data]
context = 32
[clock]
steps = {STEPS}
batch_samples = 4
snapshot_every = 4
[overlay]
bootstrap = [BOOTSTRAP]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """The folder of a run that one peer finished, and the manifest that the run trained on."""
    place = tmp_path_factory.mktemp("audit")
    built = build(Source(json.__path__[0]), ByteTokenizer(), "bytes", place / "web" / "set")
    own = place / "own"
    for name in ("here", "gone"):
        shutil.copytree(place / "web" / "set", own / name)
    with (
        files_of(place / "web") as url,
        LocalSwarm(place, RUN.replace("URL", url.rstrip("/")).replace("HASH", built.sha256)) as swarm,
    ):
        assert swarm.join("ada", "--data", str(own)).finish()[0] == 0
        made = CliRunner().invoke(
            command.app, ["audit-folder", swarm.link, str(place / "out"), "--allow-data", "--json"]
        )
        assert made.exit_code == 0, made.output
        told = json.loads(made.stdout.splitlines()[-1])
        assert (told["run"], told["steps"]) == (swarm.invite.run_id.hex(), STEPS)
        assert [name.rsplit("/")[-1] for name in told["not_had"]] == ["gone"]
    return place / "out", (place / "web" / "set" / "manifest.json").read_bytes()


def verified_by(folder: Path) -> list[int]:
    """The exit code of each command of the README."""
    [block] = re.findall(r"^```console\n(.*?)^```", (folder / "README.md").read_text(), flags=re.S | re.M)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return [
        subprocess.run(
            ["bash", "-c", line], check=False, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True
        ).returncode
        for line in block.splitlines()
    ]


def test_its_three_commands_verify_it_without_the_coordinator(folder: tuple[Path, bytes], tmp_path: Path) -> None:
    whole = shutil.copytree(folder[0], tmp_path / "copy")
    assert verified_by(whole) == [0, 0, 0]


def test_it_has_the_peers_the_texts_and_the_coordinators_word(folder: tuple[Path, bytes]) -> None:
    out, manifest = folder
    here, gone = json.loads((out / "data" / "sources.json").read_text())
    assert (out / "data" / here["manifest"]).read_bytes() == manifest
    assert (gone["manifest"], bool(gone["why_not"])) == (None, True)
    status = json.loads((out / "from-coordinator" / "status.json").read_text())
    [peer] = [json.loads(line) for line in (out / "from-log" / "peers.jsonl").read_text().splitlines()]
    assert (peer["peer"], peer["voted"]) == (status["peers"][0]["id"], [[1, STEPS]])
    digests = [
        json.loads(line)["state_digest_before"] for line in (out / "from-log" / "steps.jsonl").read_text().splitlines()
    ]
    assert all(digests[1:])
    assert "1 manifests of 2 sources" in (out / "README.md").read_text()


def test_each_kind_of_fraud_is_found(folder: tuple[Path, bytes], tmp_path: Path) -> None:
    def changed(name: str, old: bytes, new: bytes, *, summed: bool) -> list[int]:
        copy = shutil.copytree(folder[0], tmp_path / f"{name.replace('/', '-')}-{summed}")
        data = (copy / name).read_bytes()
        assert old in data
        (copy / name).write_bytes(data.replace(old, new, 1))
        if summed:
            (copy / "SHA256SUMS").unlink()
            (copy / "SHA256SUMS").write_text(sums(copy))
        return [code != 0 for code in verified_by(copy)]

    votes = b'"voted": [[1,', b'"voted": [[2,'
    assert changed("from-log/peers.jsonl", *votes, summed=False) == [True, False, True]
    assert changed("from-log/peers.jsonl", *votes, summed=True) == [False, False, True]
    log = folder[0] / "run.log"
    tail = log.read_bytes()[-20:]
    assert changed("run.log", tail, bytes(20), summed=True) == [False, True, True]
    run = json.loads((folder[0] / "from-log" / "run.json").read_text())["run"].encode()
    assert changed("README.md", b"--run " + run, b"--run " + b"0" * 64, summed=True) == [False, True, False]
