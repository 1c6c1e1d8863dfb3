"""`swarmentum owner`: the key, its signature for a peer, and the owner that a peer then names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.__main__ import app
from node.config import load_settings
from node.donor.live import Live
from node.donor.owner_signature import named
from protos.errors import OperatorError
from protos.identity import Identity
from protos.owner import Owner


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(*arguments: str) -> dict[str, str]:
    done = CliRunner().invoke(app, ["owner", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_a_key_signs_for_this_machine_and_for_another(tmp_path: Path) -> None:
    file, home, away = tmp_path / "key.json", tmp_path / "home", tmp_path / "away"
    made = told("new", "Ada", "--file", str(file))
    assert file.stat().st_mode & 0o077 == 0
    signed = told("add", "--home", str(home), "--file", str(file))
    public_key = Identity.load_or_create(home / "identity.key").public_key
    owner, note = named(home, public_key, None)
    assert (owner.name, owner.standing, note) == ("Ada", "signed", "")
    assert signed["name"] == made["name"]

    other = Identity.load_or_create(away / "identity.key")
    told("add", other.peer_id, "--out", str(away / "owner.json"), "--file", str(file))
    assert named(away, other.public_key, "Ada")[0].public_key == owner.public_key
    claim, note = named(away, other.public_key, "Bob")
    assert (claim, "is a claim alone" in note) == (Owner("Bob"), True)
    with pytest.raises(OperatorError, match="not for this peer"):
        named(away, public_key, None)


def test_mistakes_lose_nothing_and_say_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    told("new", "Ada", "--file", str(file))
    before = file.read_bytes()
    for arguments, words in (
        (["new", "Bob", "--file", str(file)], "never overwritten"),
        (["new", "a\u202eb", "--file", str(tmp_path / "x")], "RIGHT-TO-LEFT OVERRIDE"),
        (["add", "--file", str(tmp_path / "none")], "swarmentum owner new NAME"),
        (["add", "12D3KooW", "--file", str(file)], "needs both its PEER_ID and --out FILE"),
    ):
        with pytest.raises(OperatorError, match=words):
            CliRunner().invoke(app, ["owner", *arguments], catch_exceptions=False)
    assert file.read_bytes() == before
    (tmp_path / "owner.json").write_text("{")
    with pytest.raises(OperatorError, match="cannot be read"):
        named(tmp_path, bytes(32), None)


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
