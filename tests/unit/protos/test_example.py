"""The example of run.toml is made from the settings, so every key of it can be used."""

import re
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from protos.example import COMMON, COMPARED, example, settings_of
from protos.run_config import RunConfig

SETTINGS_MAX = 60


def test_the_example_changes_nothing() -> None:
    assert RunConfig.model_validate(tomllib.loads(example(RunConfig))) == RunConfig()


def test_every_line_of_it_can_be_used() -> None:
    """Without their `#`, the keys that have a default say the defaults."""
    keys = {f"# {it.key} = {it.default}" for it in settings_of(RunConfig) if it.default}
    used = "\n".join(line.removeprefix("# ") if line in keys else line for line in example(RunConfig).splitlines())
    values = tomllib.loads(used)
    assert RunConfig.model_validate(values) == RunConfig()
    assert values["clock"]["steps"] == RunConfig().clock.steps
    assert values["optimizer"]["base"]["name"] == "muon", "a default that follows from other settings"
    assert values["optimizer"]["lr"] == RunConfig().optimizer.lr


def test_the_short_one_has_the_keys_that_people_set() -> None:
    """A key that is renamed would leave it in silence."""
    short = example(RunConfig, COMMON)
    told = {f"{it.table}.{it.key}".lstrip("."): it for it in settings_of(RunConfig)}
    assert set(told) >= COMMON
    assert RunConfig.model_validate(tomllib.loads(short)) == RunConfig()
    assert [line.split(" = ")[0] for line in short.splitlines() if " = " in line] == [
        f"# {it.key}" for name, it in told.items() if name in COMMON
    ]


def test_bounds_and_choices_are_told() -> None:
    found = {f"{it.table}.{it.key}": it for it in settings_of(RunConfig)}
    assert len(found) <= SETTINGS_MAX, "a new setting takes the place of another"
    assert found["clock.min_peers"].allowed == "a whole number from 1 to 2,048"
    assert found["admission.mode"].allowed == '"open", "allow_list" or "invite"'
    assert found["model.factory"].default == ""


def test_what_no_list_shows_is_in_the_docs() -> None:
    words = set(re.findall(r"\w+", Path("docs/optimizers.md").read_text(encoding="utf-8")))
    assert {key.rpartition(".")[2] for key in COMPARED} <= words
    assert all(attrgetter(key)(RunConfig()) is not None for key in COMPARED), "a key that is renamed leaves the list"


def test_a_setting_without_a_word_is_refused() -> None:
    class Silent(BaseModel):
        model_config = ConfigDict(use_attribute_docstrings=True)
        key: int = 1

    with pytest.raises(ValueError, match=r"Silent\.key has no docstring"):
        example(Silent)
