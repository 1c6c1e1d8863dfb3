"""What a command logs of an error of ours: its traceback, and nothing of what the variables hold."""

import json
from collections.abc import Iterator

import pytest
import structlog

from protos.console import configure_logging


@pytest.fixture
def _logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("_logging")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_shows_no_values(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    def open_door(private_key: str) -> None:
        raise TypeError("of our own")

    configure_logging(as_json=as_json)
    try:
        open_door("do not " + "print this")
    except TypeError as error:
        structlog.get_logger("swarm").error("the network side failed", exc_info=error)
    said = capsys.readouterr().err
    assert "in open_door" in said
    assert "TypeError: of our own" in said
    assert "do not print this" not in said
    assert not as_json or "in open_door" in json.loads(said)["exception"]
