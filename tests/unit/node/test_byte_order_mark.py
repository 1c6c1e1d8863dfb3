"""Editors of Windows put a byte order mark before UTF-8: every text file that people write is read with it."""

from pathlib import Path

import pytest

from coordinator.commands.forks import changes_of
from coordinator.config import settings
from node.commands.options import link_from
from node.config import load_settings
from protos import toml_file
from protos.errors import OperatorError
from protos.invite import Invite
from protos.run_config import RunConfig

MARK = "\ufeff"
RUN = f'{MARK}name = "tiny"\r\n[model.config]\r\nmodel_type = "llama"\r\n[clock]\r\nsteps = 60\r\n'


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_bytes(text.encode())
    return file


def test_a_run_and_the_line_of_its_mistake(tmp_path: Path) -> None:
    assert toml_file.load(written(tmp_path, "run.toml", RUN), RunConfig).clock.steps == 60
    with pytest.raises(OperatorError, match=r"run\.toml:1: .*names?"):
        toml_file.load(written(tmp_path, "run.toml", RUN.replace("name =", "names =")), RunConfig)


def test_settings_of_a_peer_and_of_a_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWARMENTUM_CONFIG", raising=False)
    written(tmp_path, "swarmentum.toml", f"{MARK}threads = 3\r\n")
    assert load_settings().threads == 3
    written(tmp_path, "coordinator.toml", f'{MARK}listen = "127.0.0.1:9999"\r\n')
    assert settings().listen == "127.0.0.1:9999"
    written(tmp_path, "swarmentum.toml", f"{MARK}allow_code = true\n")
    with pytest.raises(OperatorError, match=r"swarmentum\.toml:1: allow_code: .*cannot agree for you"):
        load_settings()


def test_changes_and_a_file_with_a_link(tmp_path: Path) -> None:
    changes = written(tmp_path, "change.toml", f"{MARK}[clock]\nsteps = 5\n")
    assert changes_of([str(changes)]) == {"clock": {"steps": 5}}
    invite = Invite(bytes([1]) * 32, ("host:1",), bytes([2]) * 32, bytes([3]) * 32, (), "tiny")
    assert Invite.parse(link_from(None, written(tmp_path, "link.txt", MARK + invite.link()))) == invite
    (tmp_path / "wide.txt").write_bytes(invite.link().encode("utf-16"))
    with pytest.raises(OperatorError, match=r"wide\.txt: is not UTF-8 text: save it as UTF-8"):
        link_from(None, tmp_path / "wide.txt")
