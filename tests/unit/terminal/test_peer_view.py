"""The terminal view of a peer, driven by textual's pilot, over a real control door that answers what a peer once answered."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from node.control.control_server import ControlServer
from node.terminal.peer_view import PeerView
from node.terminal.widgets import Help
from tests.unit.terminal.told import fate, line, told

SIZES = [(80, 24), (140, 50)]
SECONDS_MAX = 240.0


class Peer:
    """The owner's door of a peer: what it answers, and what it was told to do."""

    def __init__(self, home: Path) -> None:
        self.values = told()
        self.commands: list[str] = []
        names = ("pause", "resume", "finish", "leave")
        commands = {name: lambda request: self._do(str(request["command"])) for name in names}
        self.door = ControlServer(home, {"me": lambda request: self.values, **commands})

    def _do(self, name: str) -> dict[str, Any]:
        self.commands.append(name)
        if name in {"pause", "resume"}:
            self.values = {**self.values, "paused": name == "pause", "paused_by_owner": name == "pause"}
        else:
            self.values = {**self.values, "ending": name}
        return {"step": self.values["step"], "paused": self.values["paused"], "held": ""}


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    peer.door.close()


@asynccontextmanager
async def shown(home: Path, size: tuple[int, int] = (80, 24)) -> AsyncIterator[tuple[PeerView, Pilot[int]]]:
    view = PeerView(home)
    async with view.run_test(size=size) as pilot:
        yield view, pilot


def rows(view: PeerView) -> list[str]:
    """The window, row by row."""
    return ["".join(segment.text for segment in strip).rstrip() for strip in view.screen._compositor.render_strips()]


async def wait_for(view: PeerView, pilot: Pilot[int], what: str, found: Callable[[], object] | None = None) -> None:
    """Until a text is in the window, or something is found."""
    look = found or (lambda: any(what in row for row in rows(view)))
    async with asyncio.timeout(SECONDS_MAX):
        while not look():
            await pilot.pause(0.05)


@pytest.mark.parametrize("size", SIZES)
async def test_the_first_look_has_everything(peer: Peer, tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(tmp_path, size) as (view, pilot):
        await wait_for(view, pilot, "counted")
        await wait_for(view, pilot, "p Pause")
        window = "\n".join(rows(view))
        for text in (
            "owners", "step 24 of 1,000", "state    counted", "here for 2 min; about 5 min left, 0.34 s a step", "4.0641",
            "vote     step 24: accepted, 3 of 6 samples", "2.3 k tokens, 72 samples; 50 % of the swarm in the last steps",
            "cpu, 93 % busy, 665 MB for this peer, 3.2 GB of 25 GB in use",
            "others cannot dial this peer; they come through 2 relays",
            "4 connected: 3 directly, 1 through a relay; 2 voted in the last step",
            "run found: run owners, steps 1000, head 0", "log: /home/ada/.swarmentum/peer/peer.log",
            "p Pause / go on  f Finish, then leave  q Quit  ? Help",
        ):  # fmt: skip
            assert text in window, f"{text!r} is missing in\n{window}"
        for text in (
            r"up       (-|0 B)/s, 19 kB in total",
            r"down     (-|0 B)/s, 18 kB in total",
        ):  # the second look has a rate
            assert re.search(text, window), f"{text!r} is missing in\n{window}"
        assert "█" in window, "no curve of the losses"
        assert ("─ the last steps" in window) == (size == (140, 50))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"entered": False}, "joining the run"),
        ({"entered": False, "loading": "loading the state: 12 MB of 1.4 GB"}, "loading the state: 12 MB of 1.4 GB"),
        ({"waiting": "2 of 3 peers needed are ready"}, "waiting: 2 of 3 peers needed are ready"),
        ({"committed_step": 27}, "catching up: 3 steps behind"),
        ({"checks": "probation: 4 of 10 checks passed"}, "probation: 4 of 10 checks passed"),
        ({"paused": True}, "paused"),
        ({"ending": "finish"}, "ending after the open step"),
        ({"ending": "leave"}, "leaving"),
        ({"step": 1000, "committed_step": 1000}, "the run is finished"),
        ({"last": [fate(24, "late", "the step was decided before the votes were announced"), *[fate(s) for s in (23, 22)]]},
         "counted in 2 of the last 3 steps"),
        ({"last": [], "loss": None, "losses": [], "step": 0, "committed_step": 0}, "no step is decided yet"),
    ],
)  # fmt: skip
async def test_states(peer: Peer, tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    peer.values = told(**changed)
    async with shown(tmp_path) as (view, pilot):
        await wait_for(view, pilot, words)


async def test_keys(peer: Peer, tmp_path: Path) -> None:
    async with shown(tmp_path) as (view, pilot):
        await wait_for(view, pilot, "counted")
        await pilot.press("p")
        await wait_for(view, pilot, "state    paused")
        await wait_for(view, pilot, "paused at step 24; p lets it train again")
        await pilot.press("p")
        await wait_for(view, pilot, "state    counted")
        await pilot.press("question_mark")
        await wait_for(view, pilot, "help", lambda: isinstance(view.screen, Help))
        await wait_for(view, pilot, "this help")
        await pilot.press("x", "x", "f")  # the first closes the help, the last is for the view
        await wait_for(view, pilot, "state    ending after the open step")
        await pilot.press("q")
        await wait_for(view, pilot, "state    leaving")
        await pilot.press("ctrl+c")  # nobody's process here: as q
        await wait_for(view, pilot, "a second leave", lambda: peer.commands.count("leave") == 2)
    assert peer.commands == ["pause", "resume", "finish", "leave", "leave"]


@pytest.mark.parametrize("size", [*SIZES, (60, 15), (40, 12)])
async def test_nothing_is_longer_than_its_row_and_a_cut_shows(
    peer: Peer, tmp_path: Path, size: tuple[int, int]
) -> None:
    long = "word " * 60
    peer.values = told(
        name="a-run-with-a-name-" * 10,
        device="cuda: " + "NVIDIA GeForce RTX 4070 Laptop GPU " * 3,
        last=[fate(24, "refused", f"too few holders: {long}")],
        lines=[line(long) for _ in range(50)],
        log_file="/very/long" * 30,
    )
    async with shown(tmp_path, size) as (view, pilot):
        await wait_for(view, pilot, "step 24: refused: too")
        await wait_for(view, pilot, "p Pause")
        window = rows(view)
        assert len(window) == size[1]
        assert "p Pause" in window[-1]
        assert all(len(row) <= size[0] for row in window)
        assert "…" in window[0]
        assert [row for row in window if row.startswith(" vote") and "refused" in row]
        events = [row for row in window if "word word" in row and ":" in row[:6]]
        assert all(row.endswith("…") for row in events)


async def test_text_of_others_is_text_and_never_markup(peer: Peer, tmp_path: Path) -> None:
    evil = "[bold red]boo[/] [/x] [@click=app.quit]x[/] \x1b[2J\u202eevil\nline"
    peer.values = told(name=evil, waiting=evil, device=evil, lines=[line(evil, "warning")])
    async with shown(tmp_path) as (view, pilot):
        await wait_for(view, pilot, "waiting: [bold red]boo[/] [/x]")
        window = "\n".join(rows(view))
        assert window.count("[bold red]boo[/]") == 4
        assert "\x1b" not in window
        assert "\u202e" not in window
        assert "?[2J?evil?line" in window


async def test_a_peer_that_is_silent_is_shown_as_silent(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.terminal.peer_view.SILENT_SECONDS", 0.0)
    async with shown(tmp_path) as (view, pilot):
        await wait_for(view, pilot, "counted")
        peer.door.close()
        await wait_for(view, pilot, "no answer for")
        await pilot.press("p")
        await wait_for(view, pilot, "no peer runs with the home")


async def test_a_window_that_changes_its_size(peer: Peer, tmp_path: Path) -> None:
    async with shown(tmp_path) as (view, pilot):
        await wait_for(view, pilot, "counted")
        await pilot.resize_terminal(140, 50)
        await wait_for(view, pilot, "─ the last steps")
        await pilot.resize_terminal(80, 24)
        await wait_for(view, pilot, "small", lambda: not any("─ the last steps" in row for row in rows(view)))
        await wait_for(view, pilot, "keys", lambda: "p Pause" in rows(view)[-1])


async def test_a_peer_that_was_started_before_this_version_is_shown(peer: Peer, tmp_path: Path) -> None:
    peer.values["run"] = peer.values.pop("name")
    async with shown(tmp_path) as (view, pilot):
        await wait_for(view, pilot, peer.values["run"])
