"""Files for models that people ask for: each is a run, and `run check` says what it takes."""

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator import __main__ as command
from coordinator.commands.planning import MODELS, run_toml, tokens_a_second
from protos.errors import OperatorError
from protos.run_config import RunConfig

PARAMETERS = {"gpt2-124m": 124_439_808, "smollm2-360m": 361_821_120, "llama-3.2-1b": 1_235_814_400}


@pytest.mark.parametrize("name", MODELS)
def test_each_is_a_run_of_20_tokens_a_parameter(name: str) -> None:
    config = RunConfig.model_validate(tomllib.loads(run_toml(name)))
    assert config.name == name
    tokens = config.clock.steps * config.clock.batch_samples * config.data.context
    assert tokens > 20 * PARAMETERS[name]
    assert config.model.config["vocab_size"] <= (1 << 16 if config.data.dtype == "uint16" else 1 << 32)


@pytest.mark.parametrize(
    "name", ["gpt2-124m", *(pytest.param(name, marks=pytest.mark.nightly) for name in [*MODELS][1:])]
)
def test_run_check_says_what_each_takes(name: str, tmp_path: Path) -> None:
    """With bytes for its tokenizer, which would come from the hub."""
    file = tmp_path / "run.toml"
    file.write_text(run_toml(name).replace(MODELS[name].tokenizer, "bytes"))
    done = CliRunner().invoke(command.app, ["run", "check", str(file), "--json"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    assert values["verdict"] == "no mistakes found"
    assert values["layout"]["parameters"] == PARAMETERS[name]
    cost = values["cost"]
    assert cost["least_memory_bytes"] < 13 * PARAMETERS[name]
    assert cost["computing_seconds"]["H100"] < cost["computing_seconds"]["RTX 3060"]


def test_the_command_prints_one_and_names_those_that_there_are() -> None:
    runner = CliRunner()
    assert runner.invoke(command.app, ["run", "example", "--for", "gpt2-124m"]).stdout == run_toml("gpt2-124m")
    short, whole = (runner.invoke(command.app, ["run", "example", *flags]).stdout for flags in ([], ["--all"]))
    assert 100 > len(short.splitlines()) > 12
    assert len(whole.splitlines()) > 3 * len(short.splitlines())
    with pytest.raises(OperatorError, match=r"--for gpt5: expected one of gpt2-124m, smollm2-360m, llama-3\.2-1b"):
        run_toml("gpt5")


def test_the_speed_of_a_card_is_a_part_of_its_peak() -> None:
    assert tokens_a_second(10**9, 6e12) == pytest.approx(350)
