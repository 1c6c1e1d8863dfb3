"""Conditions decide from facts alone; the thread that asks for facts keeps the owner's own pause apart."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from node.control.control_server import OwnerRequests
from node.donor.live import Live
from node.donor.owner_settings import LiveSettings, MachineFacts, State, decide, states
from node.training.resource_limits import ConditionWatch

MONDAY_NINE = 9 * 60
FACTS = MachineFacts(MONDAY_NINE)


@pytest.mark.parametrize(
    ("settings", "facts", "why"),
    [
        ({}, MachineFacts(MONDAY_NINE, on_mains=False, gpu_programs=("game",)), None),
        ({"hours": "mon-fri 18:00-08:00"}, FACTS, "outside the hours mon-fri 18:00-08:00; goes on at 18:00"),
        ({"hours": "sat-sun"}, FACTS, "outside the hours sat-sun; goes on at sat 00:00"),
        ({"hours": "mon"}, FACTS, None),
        ({"only_on_mains": True}, FACTS, None),
        (
            {"only_on_mains": True},
            MachineFacts(0, on_mains=False),
            "on battery; goes on when the machine is plugged in",
        ),
        (
            {"only_when_idle": 300},
            MachineFacts(0, idle_seconds=12),
            "somebody used this machine 12 s ago; goes on after 5 min without keyboard and mouse",
        ),
        ({"only_when_idle": 300}, MachineFacts(0, idle_seconds=300), None),
        (
            {"only_when_idle": 300},
            MachineFacts(0, idle_unknown="nobody says"),
            "not known whether somebody uses this machine, which counts as used (nobody says)",
        ),
        ({"not_beside_other_gpu_programs": True}, FACTS, None),
        ({"not_beside_other_gpu_programs": True}, MachineFacts(0, gpu_programs=None), None),
        (
            {"not_beside_other_gpu_programs": True},
            MachineFacts(0, gpu_programs=("a", "b", "c", "d")),
            "another program uses the GPU: a, b, c, ...; goes on when it has ended",
        ),
    ],
)
def test_each_condition_gives_its_reason(settings: dict[str, Any], facts: MachineFacts, why: str | None) -> None:
    state = decide(LiveSettings(**settings), facts)
    assert (None if state is None else state.why) == why


class Owner:
    """A peer's settings and wishes, and a machine whose facts a test writes."""

    def __init__(self, home: Path) -> None:
        self.live, self.wishes = Live(home, LiveSettings()), OwnerRequests()
        self.facts: MachineFacts | OSError = FACTS
        self.looked, self.paused = 0, threading.Event()
        import structlog

        self.watch = ConditionWatch(self.live, self.look, self.hold, structlog.get_logger())

    def hold(self, state: State | None, _facts: MachineFacts) -> None:
        self.wishes.hold("" if state is None else state.why)
        if state is not None:
            self.paused.set()

    def look(self, _settings: LiveSettings) -> MachineFacts:
        self.looked += 1
        if isinstance(self.facts, OSError):
            raise self.facts
        return self.facts


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.watch.close()


def test_a_month_that_is_used_up_pauses_until_the_next() -> None:
    settings = LiveSettings(upload_gb=2, download_gb=1)
    used = MachineFacts(0, month="2026-11", next_month="1 December", uploaded=1_900_000_000, downloaded=1_100_000_000)
    state = decide(settings, used)
    assert state.why == "the download of this month is used up: 1.1 GB of 1.0 GB; goes on on 1 December"
    assert next(it.why for it in states(settings, used)) == "1.9 GB of 2.0 GB of this month's upload are used"


def test_a_condition_that_holds_no_more_does_not_end_the_owners_pause(owner: Owner) -> None:
    owner.live.change("hours", "tue")
    owner.watch.look()
    assert owner.wishes.words() == "paused: outside the hours tue; goes on at 00:00"
    owner.wishes.pause()
    assert owner.wishes.words() == "paused by its owner"
    owner.live.change("hours", "off")
    owner.watch.look()
    assert (owner.wishes.paused, owner.wishes.held) == (True, "")
    owner.wishes.resume()
    assert not owner.wishes.paused


def test_the_owner_does_not_end_a_conditions_pause_either(owner: Owner) -> None:
    owner.live.change("only_on_mains", "true")
    owner.facts = MachineFacts(0, on_mains=False)
    owner.watch.look()
    owner.wishes.resume()
    assert owner.wishes.paused


def test_a_change_counts_at_once_and_not_after_the_next_look(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.training.resource_limits.LOOK_SECONDS", 1000.0)
    owner.watch.start()
    assert owner.looked == 1
    owner.live.change("hours", "tue")
    assert owner.paused.wait(240)
    assert owner.wishes.held


def test_a_machine_that_does_not_answer_leaves_the_peer_as_it_is_and_is_told_once(owner: Owner) -> None:
    owner.live.change("hours", "tue")
    owner.watch.look()
    owner.facts = OSError("no such bus")
    with capture_logs() as lines:
        owner.watch.look()
        owner.watch.look()
    assert [line["why"] for line in lines] == [
        "conditions cannot be looked at now: no such bus; the peer stays as it is"
    ]
    assert owner.wishes.held


def test_a_missing_library_is_told_once_and_another_reason_is_told(owner: Owner) -> None:
    owner.live.change("not_beside_other_gpu_programs", "true")
    owner.live.change("only_on_mains", "true")
    owner.live.change("hours", "tue")
    with capture_logs() as lines:
        for facts in (
            MachineFacts(MONDAY_NINE, gpu_programs=None),
            MachineFacts(24 * 60, on_mains=False, gpu_programs=None),
            MachineFacts(24 * 60, gpu_programs=None),
        ):
            owner.facts = facts
            owner.watch.look()
    assert [(line["event"], line["why"]) for line in lines] == [
        ("a setting cannot be kept to", "no effect: NVIDIA's library does not say which programs use the GPU"),
        ("still paused", "on battery; goes on when the machine is plugged in"),
    ]
    assert owner.wishes.held == ""
