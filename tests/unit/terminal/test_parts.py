"""The pure parts of the terminal view, and its log file."""

import os
from pathlib import Path

import pytest

from node.control import words
from node.owner_commands import CachedAnswer
from node.terminal.peer_view import Rates
from node.terminal.stage import LINES_KEPT, LogFile, RecentLogLines
from protos.errors import NetworkError
from tests.unit.terminal.told import fate, told


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (7920, "2 h 12 min"), (90_000, "1 d 1 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("part", "text"), [(0, "0 %"), (0.0004, "under 0.1 %"), (0.047, "4.7 %"), (0.47, "47 %"), (1, "100 %")]
)
def test_parts_of_a_whole(part: float, text: str) -> None:
    assert words.percent(part) == text


def test_a_text_is_cut_between_words_and_the_cut_shows() -> None:
    assert words.cut("a short one", 20) == "a short one"
    assert words.cut("the payload came too late for this step", 20) == "the payload came…"
    assert words.cut("x" * 50, 20) == "x" * 19 + "…"
    assert words.cut("two\nlines\x1b[2J", 20) == "two?lines?[2J"


def test_each_outcome_of_a_vote_says_why() -> None:
    assert words.vote(fate(7)) == ("step 7: accepted, 3 of 6 samples", "good")
    assert words.vote(fate(7, "refused", "too few holders")) == ("step 7: refused: too few holders", "bad")
    assert words.vote(fate(7, "probation", "the peer is new"))[1] == "wait"


def test_the_standing_follows_the_last_steps_that_asked_this_peer() -> None:
    assert words.state(told()) == ("counted", "good")
    assert words.state(told(last=[fate(9, "late", "too late"), fate(8)])) == (
        "counted in 1 of the last 2 steps",
        "wait",
    )
    assert words.state(told(last=[fate(9, "late", "too late")]))[1] == "bad"
    assert words.state(told(last=[fate(9, "not asked"), fate(8, "replayed")]))[0].startswith("in the run")
    assert words.state(told(paused=True, ending="finish"))[0] == "ending after the open step"


def test_the_last_line_says_thank_you_with_figures() -> None:
    assert words.farewell(told()) == (
        "Thank you for 2.3 k tokens in 24 steps, 50 % of the swarm's work, with 19 kB up and 18 kB down in 2 min."
    )
    came_back = words.farewell(told(votes_accepted=0, finished=True))
    assert came_back.startswith("The run is finished. It counts no votes of this peer since this start, 2 min ago")
    assert "Votes of earlier starts count as before" in came_back
    assert "Thank you" not in came_back
    assert words.farewell(told(votes_accepted=0)).startswith("The log counts no votes of this peer since this start")
    assert "applied 24 steps" in words.farewell(told(), anchor=True)


def test_the_mode_of_memory_stands_beside_the_device_and_why() -> None:
    assert words.device(told()).startswith("cpu, 93 % busy, 665 MB")
    assert words.device(told(memory_why="as set")).startswith("cpu, 93 % busy, memory full (as set), 665 MB")
    host = words.device(told(memory="host", memory_why="no faster one fits"))
    assert host.startswith("cpu, 93 % busy, memory host (no faster one fits), 665 MB")


def test_rates_are_of_the_last_seconds_and_begin_anew_after_a_restart() -> None:
    rates = Rates()
    assert rates.between(0.0, 1000, 0) == (None, None)
    assert rates.between(2.0, 3000, 1000) == (1000.0, 500.0)
    for second in range(3, 60):
        last = rates.between(float(second), 3000, 1000)
    assert last == (0.0, 0.0)
    assert rates.between(60.0, 10, 10) == (None, None)


def test_a_log_file_rotates_and_takes_descriptors_along(tmp_path: Path) -> None:
    path = tmp_path / "peer.log"
    log, taken = LogFile(path, bytes_max=100), os.open(os.devnull, os.O_WRONLY)
    log.take([taken])
    for number in range(30):
        log.write(f"line {number:03d}\n")
    os.write(taken, b"a library's line\n")
    log.close()
    os.close(taken)
    assert path.stat().st_size <= 100 + 20
    assert path.with_name("peer.log.1").stat().st_size <= 100 + 20
    assert path.read_text().endswith("a library's line\n")
    assert "line 029" in path.read_text()
    assert sorted(it.name for it in tmp_path.iterdir()) == ["peer.log", "peer.log.1"]


def test_recent_lines_are_bounded_and_printable_and_leave_out_the_steps() -> None:
    recent = RecentLogLines()
    for number in range(3 * LINES_KEPT):
        recent(None, "info", {"event": "step", "level": "info", "step": number})
        recent(None, "info", {"event": "waiting", "level": "info", "why": f"{number}\x1b[2J", "to": ["a", "b"]})
    recent(None, "debug", {"event": "details", "level": "debug"})
    assert len(recent.last()) == LINES_KEPT
    assert recent.last(1)[0]["text"] == f"waiting: {3 * LINES_KEPT - 1}?[2J, to a, b"


def test_a_kept_fact_is_asked_for_seldom_and_survives_a_failure() -> None:
    answers = iter(["first"])
    asked: list[int] = []

    def ask() -> str:
        asked.append(1)
        try:
            return next(answers)
        except StopIteration:
            raise NetworkError("away") from None

    seldom = CachedAnswer(ask, 1000.0)
    assert [seldom.get() for _ in range(5)] == ["first"] * 5
    assert len(asked) == 1
    often = CachedAnswer(ask, 0.0)
    assert often.get() is None


def test_a_pause_says_what_made_it() -> None:
    held = "outside the hours sat-sun; goes on at sat 00:00"
    assert words.state(told(paused=True, held=held)) == (f"paused: {held}", "wait")
    assert words.state(told(paused=True, paused_by_owner=True, pause_seconds_left=None)) == ("paused", "wait")
    timed = {"paused": True, "paused_by_owner": True, "pause_seconds_left": 7300.0}
    assert words.state(told(**timed)) == ("paused for 2 h 1 min more", "wait")
    assert words.state(told(**timed, held=held))[0] == f"paused by its owner for 2 h 1 min more, and {held}"
    assert (
        words.state(told(paused=True, paused_by_owner=True, pause_seconds_left=None, held=held))[0]
        == f"paused by its owner, and {held}"
    )
    assert words.resumed({"held": held, "step": 7}).endswith(held)
    assert words.resumed({"held": "", "step": 7}) == "training again from step 7"
