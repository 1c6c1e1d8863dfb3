"""Uploads of exports, and models of the hub, by the real huggingface_hub against a hub of the test's own (tests/system/hub.py).

The real hub was never reached from here.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from node.export.card import CARD, MARK, card_text
from tests.system import tiny
from tests.system.hub import READS, TOKEN, Hub

pytestmark = pytest.mark.system

RUN_ID = "ab" * 32
HF = Path(sys.executable).with_name("hf")


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A folder as `swarmentum export` writes it."""
    folder = tmp_path / "model"
    folder.mkdir()
    torch.manual_seed(1)
    save_model(tiny.model(), str(folder / "model.safetensors"))
    facts: dict[str, object] = {"run": "tiny", "run_id": RUN_ID, "steps": 40, "state_digest": "cd" * 32}
    (folder / MARK).write_text(json.dumps(facts))
    (folder / CARD).write_text(card_text(facts, huggingface=False))
    return folder


def ran(*command: str, environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**inherited, **environment}
    )
    return done.returncode, done.stdout, done.stderr


def swarmentum(*command: str, environment: dict[str, str]) -> tuple[int, str, str]:
    return ran(sys.executable, "-m", "node", *command, environment=environment)


PUSH = """
import sys
from pathlib import Path
from node.commands import hugging_face
from protos.console import exit_with
folder, repo = sys.argv[1:3]
exit_with(lambda: print(hugging_face.push(Path(folder), repo, public="--public" in sys.argv)))
"""
"""As `export --push-to-hub` does at its end."""


def push(folder: Path, repo: str, *flags: str, environment: dict[str, str]) -> tuple[int, str, str]:
    return ran(sys.executable, "-c", PUSH, str(folder), repo, *flags, environment=environment)


def test_an_export_goes_to_a_private_repository_and_a_newer_one_of_the_run_follows(
    tmp_path: Path, hub: Hub, export: Path
) -> None:
    environment = hub.environment(tmp_path)
    code, out, err = push(export, "ada/tiny", environment=environment)
    assert code == 0, err
    repo = hub.repos["ada/tiny"]
    assert repo.private
    sha, files = repo.commits[-1]
    assert out.strip() == f"{hub.url}/ada/tiny/commit/{sha}"
    assert {name: data for name, data in files.items() if name != ".gitattributes"} == {
        path.name: path.read_bytes() for path in export.iterdir()
    }
    assert repo.messages[-1] == f"Step 40 of run {RUN_ID[:16]}"
    facts = json.loads((export / MARK).read_text()) | {"steps": 50}
    (export / MARK).write_text(json.dumps(facts))
    (export / "model.safetensors").rename(export / "model-00001-of-00001.safetensors")
    code, _, err = push(export, "ada/tiny", environment=environment)
    assert code == 0, err
    assert repo.messages[-1] == f"Step 50 of run {RUN_ID[:16]}"
    assert [name for name in repo.commits[-1][1] if name.endswith(".safetensors")] == [
        "model-00001-of-00001.safetensors"
    ], "the weights of the earlier export are still there"


def test_an_upload_that_broke_off_goes_on(tmp_path: Path, hub: Hub, export: Path) -> None:
    environment = hub.environment(tmp_path)
    hub.refuse = lambda method, path: 0 if "/commit/" in path else None
    code, _, err = push(export, "ada/tiny", "--public", environment=environment)
    assert code == 3, err
    line = err.partition("; `")[2].partition("` goes on with it")[0]
    assert line.startswith(f"hf upload ada/tiny {export} ")
    assert not hub.repos["ada/tiny"].private
    sent = hub.count("PUT", "/lfs/")
    assert sent == 1
    hub.refuse = lambda method, path: None
    code, _, err = ran(str(HF), *shlex.split(line)[1:], environment=environment)
    assert code == 0, err
    assert hub.count("PUT", "/lfs/") == sent, "the weights were sent again"
    assert "model.safetensors" in hub.repos["ada/tiny"].commits[-1][1]


def test_push_names_the_hub_s_own_command(tmp_path: Path, hub: Hub, export: Path) -> None:
    environment = hub.environment(tmp_path)
    code, _, err = swarmentum("push", str(export), "ada/tiny", "--json", environment=environment)
    assert (code, "is gone" in err) == (2, True), err
    line = shlex.split(err.split("`")[-2])
    code, _, err = ran(str(HF), *line[1:], environment=environment)
    assert code == 0, err
    assert hub.repos["ada/tiny"].private
    assert hub.repos["ada/tiny"].commits[-1][1]["model.safetensors"] == (export / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("repo", "token", "code", "words"),
    [
        ("ada/tiny", None, 2, "no token of the hub is here; run `hf auth login`, or set HF_TOKEN"),
        ("ada/tiny", "hf_wrong", 2, "the hub does not take this token"),
        ("ada/tiny", READS, 4, "this token may not do that there"),
        ("bob/tiny", TOKEN, 4, "this token may not do that there"),
        ("ada/other/tiny", TOKEN, 2, "is no name of a repository"),
        ("ada/work", TOKEN, 2, "this name is taken by something that is no export; choose another name"),
        ("ada/another", TOKEN, 2, r"this name is taken by the export of another run (cdcdcdcdcdcdcdcd)"),
    ],
)
def test_what_goes_wrong_is_said_in_plain_words(
    tmp_path: Path, hub: Hub, export: Path, repo: str, token: str | None, code: int, words: str
) -> None:
    from tests.system.hub import Repo

    hub.repos["ada/work"], hub.repos["ada/another"] = Repo(private=False), Repo(private=True)
    hub.repos["ada/work"].commit({"thesis.txt": b"mine"})
    hub.repos["ada/another"].commit({MARK: json.dumps({"run_id": "cd" * 32}).encode()})
    before = {name: len(one.commits) for name, one in hub.repos.items()}
    got, _, err = push(export, repo, environment=hub.environment(tmp_path, token))
    assert got == code, err
    assert words in err
    assert "Traceback" not in err
    assert {name: len(one.commits) for name, one in hub.repos.items()} == before


def test_a_hub_that_is_away_and_a_folder_that_is_no_export(tmp_path: Path, hub: Hub, export: Path) -> None:
    away = hub.environment(tmp_path) | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    code, _, err = push(export, "ada/tiny", environment=away)
    assert (code, "the hub cannot be reached" in err) == (3, True), err
    (tmp_path / "work").mkdir()
    code, _, err = push(tmp_path / "work", "ada/tiny", environment=hub.environment(tmp_path))
    assert (code, "is not an export of this program" in err) == (2, True), err
    offline = hub.environment(tmp_path) | {"HF_HUB_OFFLINE": "1"}
    code, _, err = push(export, "ada/tiny", environment=offline)
    assert (code, "HF_HUB_OFFLINE is set" in err) == (2, True), err


@pytest.mark.long
@pytest.mark.nightly
def test_a_run_starts_from_a_model_of_the_hub_whose_revision_is_recorded(
    tmp_path: Path, hub: Hub, export: Path
) -> None:
    from tests.system.hub import Repo

    repo, weights = Repo(private=False), export / "model.safetensors"
    hub.repos["ada/tiny"] = repo
    commits = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        save_model(tiny.model(), str(weights))
        commits.append(repo.commit({"model.safetensors": weights.read_bytes(), "code.py": b"evil()"}))
    toml = tmp_path / "run.toml"
    toml.write_text('[model]\nfactory = "tests.system.tiny:model"\n')
    environment, out = hub.environment(tmp_path, token=None), tmp_path / "start.json"
    made = {}
    for name, commit in (("ada/tiny", commits[1]), (f"ada/tiny@{commits[0]}", commits[0])):
        places = ("--home", str(tmp_path / "home"), "--out", str(out), "--json", "--allow-code")
        code, text, err = swarmentum("start-from", str(toml), name, *places, environment=environment)
        assert code == 0, err
        made[commit] = json.loads(text)
        assert made[commit]["source"] == json.loads(out.read_text())["source"] == f"ada/tiny@{commit}"
    assert made[commits[0]]["model"] != made[commits[1]]["model"]
    assert not hub.count("GET", "code.py"), "something else than weights was downloaded"
    gone = f"ada/tiny@{'0' * 40}"
    code, _, err = swarmentum("start-from", str(toml), gone, *places, environment=environment)
    assert (code, "no such revision" in err) == (2, True), err
