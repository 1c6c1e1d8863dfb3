"""`join` before it builds anything: what the run asks for is shown, asked once, and refused where nobody agreed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.local_swarm import TINY_MODEL, LocalSwarm, toml_of_run
from tests.system.terminal import CTRL_C, Terminal

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run("asking", TINY_MODEL, source="SOURCE", clock={"steps": 3, "batch_samples": 4})
TOKEN = "a line of the joiner's own, not for the model"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    folder = tmp_path_factory.mktemp("asking")
    (folder / "secret.txt").write_text(TOKEN * 100)
    swarm = LocalSwarm(folder, RUN.replace("SOURCE", str(folder / "secret.txt")))
    yield swarm
    swarm.close()


def flags(home: Path) -> tuple[str, ...]:
    return ("--home", str(home), "--listen", "127.0.0.1:0", "--threads", "1")


def join(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node", "join", *arguments]
    return subprocess.run(command, input=stdin or "", capture_output=True, text=True, timeout=300, check=False)


def test_a_file_of_the_joiner_is_not_read_because_the_run_names_it(swarm: LocalSwarm, tmp_path: Path) -> None:
    done = join(swarm.link, *flags(tmp_path), "--json")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the run asks for ")
    assert str(swarm.folder / "secret.txt") in last
    assert "--allow-data" in last


def test_a_download_needs_a_yes_where_nobody_can_be_asked(swarm: LocalSwarm, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = RUN.replace('source = "SOURCE"', 'tokenizer = "some/body"')
    text = text.replace('name = "asking"', 'name = "asking-too"')
    file.write_text(text)
    create = swarm.start(
        "create2", "coordinator", "run", "create", str(file), "--home", swarm.home, "--json", "--no-layout"
    )
    link = create.first_json()["invite"]
    create.finish()
    done = join(link, *flags(tmp_path))
    assert done.returncode == 2
    assert "The run wants to download the tokenizer 'some/body' from the Hugging Face hub." in done.stderr
    assert "--yes" in done.stderr.splitlines()[-1]


def test_a_person_says_no(swarm: LocalSwarm, tmp_path: Path) -> None:
    with Terminal("node", "join", swarm.link, *flags(tmp_path), "--allow-data") as terminal:
        terminal.wait_for("question", lambda: "Join this run? [Y/n]" in terminal.look())
        assert "Run:       asking, 3 steps" in terminal.look()
        assert "Model:     'llama', hidden_size 64" in terminal.look()
        terminal.type(b"n\r")
        terminal.wait_end()
        assert terminal.code == 130
        assert "Traceback" not in terminal.look()


def test_a_person_leaves_the_question(swarm: LocalSwarm, tmp_path: Path) -> None:
    with Terminal("node", "join", swarm.link, *flags(tmp_path), "--allow-data") as terminal:
        terminal.wait_for("question", lambda: "Join this run? [Y/n]" in terminal.look())
        terminal.type(CTRL_C)
        terminal.check_ends_soon(5.0)
        assert terminal.code == 130


def test_a_person_says_yes_and_the_link_is_in_no_list_of_processes(swarm: LocalSwarm, tmp_path: Path) -> None:
    (tmp_path / "link").write_text(swarm.link + "\n")
    file = ("--invite-file", str(tmp_path / "link"))
    with Terminal("node", "join", *file, *flags(tmp_path), "--allow-data") as terminal:
        terminal.wait_for("question", lambda: "Join this run? [Y/n]" in terminal.look())
        assert b"swarmentum://" not in Path(f"/proc/{terminal.pid}/cmdline").read_bytes()
        terminal.type(b"\r")
        terminal.wait_end()
        assert terminal.code == 0, terminal.look()


def test_a_link_from_stdin(swarm: LocalSwarm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "node", "status", "-", "--json"]
    done = subprocess.run(command, input=swarm.link + "\n", capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["name"] == "asking"
    empty = join("-", *flags(tmp_path))
    assert (empty.returncode, empty.stderr) == (
        2,
        "error: stdin: nothing is there; put the invite link, swarmentum://..., there\n",
    )
    both = join(swarm.link, "--invite-file", "x", *flags(tmp_path))
    assert both.returncode == 2
    assert "exactly one" in both.stderr
