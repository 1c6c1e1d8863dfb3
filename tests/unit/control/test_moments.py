"""The length of a pause, and the pause's end."""

import math
from datetime import datetime
from pathlib import Path

import pytest

from node.commands.control import pause
from node.control.control_server import OwnerRequests, seconds_of
from protos.errors import OperatorError, SwarmentumError

NOON = datetime(2026, 11, 26, 12, 0, 30)  # noqa: DTZ001 - a clock on a wall


@pytest.mark.parametrize(
    ("length", "until", "seconds"),
    [
        (None, None, None),
        ("90m", None, 5400),
        (" 2h ", None, 7200),
        ("30d", None, 2_592_000),
        (None, "18:00", 6 * 3600 - 30),
        (None, "12:00", 24 * 3600 - 30),
        (None, "9:05", 21 * 3600 + 5 * 60 - 30),
    ],
)
def test_a_pause_has_a_length_or_an_end(length: str | None, until: str | None, seconds: float | None) -> None:
    assert seconds_of(length, until, NOON) == seconds


@pytest.mark.parametrize(
    ("length", "until"),
    [
        ("0h", None),
        ("31d", None),
        ("2", None),
        ("two hours", None),
        ("", None),
        (None, "24:00"),
        (None, "6pm"),
        ("1h", "18:00"),
    ],
)
def test_what_is_neither_is_refused_with_an_example(length: str | None, until: str | None) -> None:
    with pytest.raises(OperatorError, match=r"expected .* such as|two ways"):
        seconds_of(length, until, NOON)


def test_a_time_of_the_day_in_no_zone_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A TZ that names no zone is UTC to the C library, which says nothing: the pause ended hours early or late."""
    monkeypatch.setenv("TZ", "Europe/Nowhere")
    with pytest.raises(OperatorError, match=r"--until 18:00: TZ=Europe/Nowhere names no time zone .* or give --for"):
        pause(until="18:00", home=tmp_path)
    for given in ({"for_": "2h"}, {"until": "18:00"}):
        with pytest.raises(SwarmentumError, match="no peer"):
            pause(**given, home=tmp_path)  # type: ignore[arg-type]
        monkeypatch.setenv("TZ", "UTC")


def test_a_pause_ends_by_itself_and_the_last_command_counts() -> None:
    now = 100.0
    wishes = OwnerRequests(lambda: now)
    assert (wishes.paused, wishes.pause_seconds_left) == (False, 0)
    wishes.pause(seconds=60)
    assert (wishes.paused, wishes.by_owner, wishes.pause_seconds_left, wishes.words()) == (
        True,
        True,
        60,
        "paused by its owner",
    )
    now = 159.9
    assert wishes.paused
    now = 160.0
    assert (wishes.paused, wishes.words()) == (False, "goes on")
    wishes.pause()
    now = 1e9
    assert (wishes.paused, wishes.pause_seconds_left) == (True, math.inf)
    wishes.pause(seconds=5)
    wishes.hold("on battery")
    now += 6
    assert (wishes.paused, wishes.words()) == (True, "paused: on battery")
    wishes.pause()
    wishes.resume()
    wishes.hold("")
    assert not wishes.paused
