"""Formats of runs and the programs that speak them: both sides name what to install."""

import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import coordinator.__main__
import node.__main__
from node.link.client import check_genesis
from protos import version
from protos.errors import OperatorError
from protos.identity import Identity
from protos.invite import Invite
from protos.log import FORMAT_VERSION, run_id_of
from protos.run_config import RunConfig
from protos.v1 import coordinator_pb2, log_pb2

COORDINATOR = Identity.from_seed(bytes(32))


def genesis(format_version: int, release: str = "") -> log_pb2.Genesis:
    return log_pb2.Genesis(
        format_version=format_version,
        config_json=RunConfig().canonical_json(),
        coordinator_public_key=COORDINATOR.public_key,
        software_version_min=release,
    )


def invite(of: log_pb2.Genesis) -> Invite:
    return Invite(run_id_of(of), ("127.0.0.1:1",), COORDINATOR.public_key, bytes(32), (), "run")


def test_the_same_format_fits_whatever_the_release() -> None:
    assert version.misfit(genesis(3, "0.3.0"), 3, "9.9.9") == ""


def test_an_older_peer_is_told_what_to_install() -> None:
    why = version.misfit(genesis(2, "0.4.0"), 1, "0.1.0")
    assert "needs swarmentum >= 0.4.0, installed is 0.1.0" in why
    assert "format 2, this peer speaks 1" in why
    assert "upgrade" in why


def test_a_newer_peer_is_told_which_release_the_run_needs() -> None:
    assert "needs swarmentum 0.1.0, installed is 0.7.0, which is too new" in version.misfit(genesis(1), 2, "0.7.0")


def test_words_of_a_stranger_are_printable_and_short() -> None:
    why = version.misfit(genesis(2, "\x1b[31m" + "9" * 500), 1, "\n" * 500)
    assert why.isprintable()
    assert len(why) < 250


def test_a_peer_refuses_a_run_of_a_newer_format_before_it_reads_the_settings() -> None:
    newer = genesis(FORMAT_VERSION + 1, "0.9.0")
    newer.config_json = "{}, in a way of writing that nobody knows yet"
    with pytest.raises(OperatorError, match=r"this run needs swarmentum >= 0\.9\.0, installed is "):
        check_genesis(newer, invite(newer))
    assert check_genesis(genesis(FORMAT_VERSION), invite(genesis(FORMAT_VERSION))) == RunConfig()


def test_this_release_knows_its_own_format() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert FORMAT_VERSION in version.RELEASES
    assert max(version.RELEASES) == FORMAT_VERSION
    as_numbers = [tuple(map(int, text.split("."))) for text in (version.RELEASES[FORMAT_VERSION], project["version"])]
    assert as_numbers[0] <= as_numbers[1], "the release that knows the format is not out yet"


def test_old_programs_keep_the_run_id_of_a_genesis_with_the_new_field() -> None:
    """A field that a program does not know stays in the bytes that it hashes."""
    data = genesis(1, "0.1.0").SerializeToString(deterministic=True)
    assert coordinator_pb2.ListRunsBody.FromString(data).SerializeToString(deterministic=True) == data


def commands_of(app: typer.Typer) -> set[str]:
    """With those of its groups, after the group's name."""
    top = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return set(top) | {f"{name} {word}" for name, group in top.items() for word in getattr(group, "commands", ())}


def test_each_program_knows_the_commands_of_the_other_one() -> None:
    of = {version.PEER: commands_of(node.__main__.app), version.COORDINATOR: commands_of(coordinator.__main__.app)}
    for program, words in version.PROGRAMS.items():
        assert set(words) <= of[program]
        (other,) = of.keys() - {program}
        assert not set(words) & of[other]
        hidden = {"push", "owner"}
        inside = {"pause", "resume", "finish", "anchor", "web", "version", "help"}
        inside |= {"run pause", "run resume", "run finish", "service status"}
        assert of[program] - of[other] - set(words) - hidden <= inside


@pytest.mark.parametrize(
    ("app", "words", "said"),
    [
        (node.__main__.app, "exclude", "No such command 'exclude': it is `swarmentum-coordinator peer exclude`."),
        (coordinator.__main__.app, "run exclude", "command 'exclude': it is `swarmentum-coordinator peer exclude`."),
        (coordinator.__main__.app, "run backup", "No such command 'backup': it is `swarmentum-coordinator backup`."),
        (node.__main__.app, "run", "No such command 'run': it is `swarmentum-coordinator run`."),
        (coordinator.__main__.app, "join", "No such command 'join': it is `swarmentum join`."),
        (coordinator.__main__.app, "pause", "No such command 'pause': it is `swarmentum-coordinator run pause`."),
        (node.__main__.app, "jion", "No such command 'jion'. Did you mean 'join'?"),
    ],
)
def test_a_command_of_the_other_program_is_named_with_it(app: typer.Typer, words: str, said: str) -> None:
    result = CliRunner().invoke(app, [*words.split(), "create"], env={"TERM": "dumb", "COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("app", "words", "after"),
    [
        (coordinator.__main__.app, ["serve", "--home", ""], "--home"),
        (coordinator.__main__.app, ["run", "create", "--home=", "run.toml"], "--home"),
        (node.__main__.app, ["data", "survey", ""], "survey"),
        (node.__main__.app, ["join", "swarmentum://", "--data", ""], "--data"),
    ],
)
def test_an_empty_word_is_no_path(
    app: typer.Typer, words: list[str], after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of the shell that is not set: keys and a journal lay in the working folder."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words, env={"TERM": "dumb", "COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"Nothing is given after {after}: is a variable of the shell not set?" in result.output
    assert not list(tmp_path.iterdir())


def test_a_value_that_ends_with_an_equals_sign_is_a_value() -> None:
    """A link or a token of base64: it was told that nothing is given."""
    result = CliRunner().invoke(coordinator.__main__.app, ["run", "create", "--label=YWRhYWRhYQ=="])
    assert "Nothing is given" not in result.output
