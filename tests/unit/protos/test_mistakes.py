"""Each pattern of a setting has an example that fits it: people see the example, never the pattern."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from coordinator.config import CoordinatorSettings, settings
from node.config import PeerSettings
from protos.address import parse_address
from protos.errors import OperatorError
from protos.mistakes import EXAMPLES, PEER_ADDRESS, REMOVED, expected
from protos.run_config import RunConfig


def patterns(schema: Any) -> Iterator[str]:
    """All patterns of a JSON schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        for value in schema.values():
            yield from patterns(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from patterns(value)


@pytest.mark.parametrize("settings", [RunConfig, PeerSettings, CoordinatorSettings])
def test_each_pattern_has_an_example(settings: type[BaseModel]) -> None:
    found = set(patterns(settings.model_json_schema()))
    assert found
    assert found <= EXAMPLES.keys()


@pytest.mark.parametrize("pattern", EXAMPLES)
def test_each_example_fits(pattern: str) -> None:
    what, example = EXAMPLES[pattern]
    assert re.search(pattern, example)
    assert expected(pattern) == f"expected {what}, for example {example!r}"


def test_the_example_of_an_address_can_be_dialled() -> None:
    assert parse_address(EXAMPLES[PEER_ADDRESS][1]).peer


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_of_before_is_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "coordinator.toml").write_text(f"{name} = true\n")
    with pytest.raises(OperatorError) as caught:
        settings()
    assert f"{name}: {REMOVED[name]}" in str(caught.value)
