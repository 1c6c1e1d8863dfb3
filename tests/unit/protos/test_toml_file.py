"""A run.toml may come from a browser: what a text of 64 kB may cost, and that each mistake stays a message."""

import time
from pathlib import Path

import pytest

from protos import toml_file
from protos.errors import OperatorError
from protos.run_config import RunConfig

SIZE = 60_000
SECONDS_MAX = 5.0


def refusal(tmp_path: Path, text: str) -> str:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(OperatorError) as caught:
        toml_file.load(file, RunConfig)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model.config]\n" + ".".join("a" * (SIZE // 2)) + " = 1", "run.toml:2: more than 256 dots in a line"),
        ("[model.config." + ".".join("a" * (SIZE // 2)) + "]", "run.toml:1: more than 256 dots in a line"),
        ("a = " + "[" * SIZE, "cannot be read as TOML: maximum recursion depth"),
        ("a = " + "{a=" * (SIZE // 3), "cannot be read as TOML: maximum recursion depth"),
        ("seed = " + "9" * SIZE, "cannot be read as TOML: Exceeds the limit"),
        ("".join(f"a{number:x} = 1\n" for number in range(SIZE // 9)), f"and {SIZE // 9 - 100} more"),
        ("name = '" + "x " * (SIZE // 2) + "'", "(given: 'x x "),
    ],
)
def test_a_text_that_is_a_bomb_costs_little_and_gets_a_short_answer(tmp_path: Path, text: str, words: str) -> None:
    """The first took 72 s, and the sixth 93 s, of one core beside the clock."""
    began = time.process_time()  # of this process: a busy machine is no failure
    said = refusal(tmp_path, text)
    assert words in said
    assert len(said) < 30_000
    assert time.process_time() - began < SECONDS_MAX


def test_a_settings_file_that_is_none_is_not_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert toml_file.read_layers("SWARMENTUM_", "swarmentum.toml", ()).text == ""
    Path("swarmentum.toml").symlink_to("usb/swarmentum.toml")
    with pytest.raises(OperatorError, match="a link to nothing"):
        toml_file.read_layers("SWARMENTUM_", "swarmentum.toml", ())
    Path("swarmentum.toml").unlink()
    Path("swarmentum.toml").mkdir()
    with pytest.raises(OperatorError, match="a folder"):
        toml_file.read_layers("SWARMENTUM_", "swarmentum.toml", ())


def test_a_variable_of_an_environment_file_is_its_value_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's --env-file keeps quotes and the ends of lines of Windows: a home was made in a folder named `"`."""
    monkeypatch.setenv("SWARMENTUM_HOME", " /data/peer\r")
    assert toml_file.read_layers("SWARMENTUM_", "none.toml", ("home",)).of_environment == {"home": "/data/peer"}
    for quoted in ('"/data/peer"', "'/data/peer'"):
        monkeypatch.setenv("SWARMENTUM_HOME", quoted)
        with pytest.raises(OperatorError, match=r"SWARMENTUM_HOME: the quotes are a part of its value"):
            toml_file.read_layers("SWARMENTUM_", "none.toml", ("home",))
