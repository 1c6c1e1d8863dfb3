"""The owner's name: a setting that changes while the peer runs."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.__main__ import app
from node.config import load_settings
from node.donor.live import Live
from protos.errors import OperatorError


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_command_of_before_names_the_setting() -> None:
    with pytest.raises(OperatorError, match="`swarmentum set owner NAME` shows a name"):
        CliRunner().invoke(app, ["owner", "add", "--file", "key.json"], catch_exceptions=False)


def test_the_name_is_a_setting_that_changes_while_the_peer_runs(tmp_path: Path) -> None:
    (tmp_path / "swarmentum.toml").write_text('owner = "Ada"\n')
    live = Live(tmp_path, load_settings(home=tmp_path))
    assert live.values.owner == "Ada"
    live.change("owner", "山田 😀")
    assert Live(tmp_path, load_settings(home=tmp_path)).values.owner == "山田 😀"
    with pytest.raises(ValueError, match=r"a name of 1 to 64 printable characters.*U\+202E"):
        live.change("owner", "a\u202eb")
    with pytest.raises(OperatorError, match="owner"):
        load_settings(home=tmp_path, owner="a\x1bb")
