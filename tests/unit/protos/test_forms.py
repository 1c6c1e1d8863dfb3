"""Each form of text that settings ask for has words for the person who wrote something else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.config import CoordinatorSettings
from node.config import PeerSettings, load_settings
from protos import forms
from protos.errors import OperatorError
from protos.run_config import RunConfig

SHOULD = {
    forms.PEER_ADDRESS: ("/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW", "12D3KooW"),
    forms.LISTEN_OR_ALL: ("*:0", "*"),
    forms.LISTEN: ("[::]:4001", "*:0"),
    forms.HOST: ("runs.example.org:7700", "runs.example.org"),
    forms.HOSTS: ("runs.example.org:7700,203.0.113.5:7700,[::1]:7700", "runs.example.org:7700,"),
    forms.HOST_OR_NONE: ("none", "nobody"),
}


def patterns(schema: Any) -> Iterator[str]:
    """All that a JSON schema names."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        for value in schema.values():
            yield from patterns(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from patterns(value)


def test_every_pattern_of_the_settings_has_words() -> None:
    found = {
        it for model in (CoordinatorSettings, PeerSettings, RunConfig) for it in patterns(model.model_json_schema())
    }
    assert len(found) >= 7
    assert found <= forms.EXPECTED.keys()
    assert "fits the pattern" in forms.expected("^x$")


@pytest.mark.parametrize("pattern", SHOULD, ids=lambda pattern: pattern[:20])
def test_a_pattern_takes_what_its_words_say(pattern: str) -> None:
    good, bad = SHOULD[pattern]
    assert re.search(pattern, good)
    assert not re.search(pattern, bad)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("relays", ["foo"], "relays.0: expected is an address of a peer with its id, such as /ip4/"),
        ("listen", "1.2.3.4", "listen: expected is an IP address and a port, such as 0.0.0.0:4001"),
        ("owner", "x" * 70, "owner: 70 characters; a name has 1 to 64"),
        ("hours", "mon-frid 8", "hours: '8' is not a time such as 18:00-08:00"),
    ],
)
def test_a_wrong_setting_of_a_peer_is_told_in_words(key: str, value: object, words: str) -> None:
    with pytest.raises(OperatorError) as caught:
        load_settings(**{key: value})
    assert words in str(caught.value)
    for private in ("Value error", "String should", "^"):
        assert private not in str(caught.value)
