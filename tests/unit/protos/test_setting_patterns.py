"""The patterns of settings take what they should; a wrong value is told without a pattern."""

import re

import pytest

from node.config import load_settings
from protos import mistakes
from protos.errors import OperatorError

SHOULD = {
    mistakes.PEER_ADDRESS: ("/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW", "12D3KooW"),
    mistakes.PEER_LISTEN_OR_ALL: ("*:0", "*"),
    mistakes.PEER_LISTEN: ("[::]:4001", "*:0"),
    mistakes.LISTEN: ("runs.example.org:7700", "runs.example.org"),
    mistakes.ADVERTISED: ("runs.example.org:7700,203.0.113.5:7700,[::1]:7700", "runs.example.org:7700,"),
    mistakes.LISTEN_OR_NONE: ("none", "nobody"),
}


@pytest.mark.parametrize("pattern", SHOULD, ids=lambda pattern: pattern[:20])
def test_a_pattern_takes_what_its_words_say(pattern: str) -> None:
    good, bad = SHOULD[pattern]
    assert re.search(pattern, good)
    assert not re.search(pattern, bad)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("bootstrap", ["foo"], "bootstrap.0: expected an address of a peer, for example '/ip4/"),
        ("listen", "1.2.3.4", "listen: expected an IP address and a port; * is every address, for example '*:4001'"),
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
