"""What a run may ask of the machine that joins it: decided without a machine."""

from pathlib import Path
from typing import Any

import pytest

from node.admission.consent import TokenizerSource, must_ask, place_of, request
from node.config import PeerSettings
from protos.errors import OperatorError
from protos.run_config import RunConfig


def settings(**values: Any) -> PeerSettings:
    return PeerSettings(home=Path("/nowhere"), **values)


def run(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(sections)


def nothing(_path: str) -> bool:
    return False


def test_a_run_that_asks_for_nothing_asks_nobody() -> None:
    asked = request(run(), settings(), nothing)
    assert asked.wants == ()
    assert not must_ask(asked, settings(), can_ask=True)
    assert asked.lines()[0] == "Run:       swarm, 1000 steps"


@pytest.mark.parametrize("allow_data", [False, True])
def test_a_run_of_own_text_takes_no_text_but_the_persons(allow_data: bool) -> None:
    own = run(data={"source": "own"})
    with pytest.raises(OperatorError, match=r'data.source = "own".* Join with --data PATH'):
        request(own, settings(allow=["data"] * allow_data), nothing)
    asked = request(own, settings(data="mine.txt", allow=["data"] * allow_data), nothing)
    assert (asked.wants, asked.data) == ((), "'mine.txt' (--data)")
    assert request(own, settings(), nothing, trains=False).wants == (), "an anchor needs no text"


@pytest.mark.parametrize("source", [".", ".ssh", "/etc/passwd", "tokens.bin"])
def test_a_path_of_the_run_is_no_path_of_the_joiner(source: str) -> None:
    with pytest.raises(OperatorError, match=r"--data PATH .* --allow-data") as caught:
        request(run(data={"source": source}), settings(), nothing)
    assert repr(source) in str(caught.value)
    assert request(run(data={"source": source}), settings(data="mine.txt"), nothing).wants == ()
    asked = request(run(data={"source": source}), settings(allow=["data"]), nothing)
    assert asked.wants == (f"train on {source!r} of this machine",)


def test_a_tokenizer_on_the_disk_needs_the_same_word() -> None:
    config = run(data={"tokenizer": "./private"})
    with pytest.raises(OperatorError, match="--allow-data"):
        request(config, settings(data="mine.txt"), nothing)
    assert not request(config, settings(allow=["data"]), nothing).downloads


def test_where_a_tokenizer_comes_from() -> None:
    places = {
        "bytes": TokenizerSource.HERE,
        "gpt2": TokenizerSource.HUB,
        "Qwen/Qwen3-0.6B": TokenizerSource.HUB,
        "a/b/c": TokenizerSource.DISK,
    }
    places |= {"/etc": TokenizerSource.DISK, "../x": TokenizerSource.DISK, "~/tok": TokenizerSource.DISK}
    assert {name: place_of(name, nothing) for name in places} == places
    # transformers takes a folder of that name before it asks the hub
    assert place_of("gpt2", lambda path: path == "gpt2") is TokenizerSource.DISK


def test_a_download_is_shown_and_agreed_to() -> None:
    asked = request(run(data={"tokenizer": "gpt2"}), settings(), nothing)
    assert asked.downloads
    assert any("gpt2" in line and "download" in line for line in asked.lines())
    assert must_ask(asked, settings(), can_ask=True)
    assert not must_ask(asked, settings(allow=["requests"]), can_ask=True)
    assert not must_ask(asked, settings(allow=["requests"]), can_ask=False)
    with pytest.raises(OperatorError, match="--yes"):
        must_ask(asked, settings(), can_ask=False)


def test_what_was_allowed_by_a_flag_needs_nobody_at_the_terminal() -> None:
    asked = request(run(data={"source": "a.txt"}), settings(allow=["data"]), nothing)
    assert not must_ask(asked, settings(allow=["data"]), can_ask=False)
    assert must_ask(asked, settings(allow=["data"]), can_ask=True)


def test_code_of_the_run_needs_its_flag() -> None:
    config = run(model={"factory": "os:getcwd"})
    with pytest.raises(OperatorError, match="--allow-code"):
        request(config, settings(), nothing)
    assert "os:getcwd" in request(config, settings(allow=["code"]), nothing).wants[0]


def test_a_strangers_words_write_nothing_else_on_the_terminal() -> None:
    evil = "a\x1b]0;owned\x07\nRun: something else" + "x" * 1000
    config = run(
        data={"source": evil}, model={"config": {"model_type": evil, "hidden_size": evil, "vocab_size": ["\x1b"]}}
    )
    lines = request(config, settings(allow=["data"]), nothing).lines()
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 600


def test_the_type_of_raw_tokens_is_said() -> None:
    config = run(data={"source": "t.bin", "dtype": "uint32"})
    assert "tokens of uint32" in request(config, settings(allow=["data"]), nothing).data
