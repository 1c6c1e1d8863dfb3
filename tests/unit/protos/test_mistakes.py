"""Each pattern of a setting has an example that fits it: people see the example, never the pattern."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from coordinator.config import CoordinatorSettings
from node.config import PeerSettings
from protos.address import parse_address
from protos.mistakes import EXAMPLES, PEER_ADDRESS, expected
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
