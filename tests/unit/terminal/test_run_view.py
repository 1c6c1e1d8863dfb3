"""The terminal view of a run, driven by textual's pilot, on facts as a coordinator gives them."""

import asyncio
from typing import Any

import pytest
from textual.widgets import Footer

from node.terminal.run_view import RunView
from protos.errors import NetworkError, RefusedError, SwarmentumError
from tests.unit.terminal.test_peer_view import rows, wait_for

EVIL = "[bold red]boo[/] [/x] \x1b[2J\u202eevil"


def peer(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "id": f"12D3KooWJ8Zr3pRZ5qYtKqg8mJq1V6pWkmR1yG1cTz1Fxv{number:06d}", "anchor": False, "paused": False,
        "phase": "ready", "device": "cuda: NVIDIA GeForce RTX 4070", "applied_step": 40, "state_digest": "",
        "votes_accepted": 38, "samples_per_second": 12.5, "loss": 3.25, "standing": "counted", "score": 0.0, "check_rate": 0.0,
        "standing_reason": "", **changed,
    }  # fmt: skip


def facts(**changed: Any) -> dict[str, Any]:
    return {
        "run": "00" * 32, "name": "evening-run", "phase": "open", "reason": "2 of 3 payloads are held", "step": 40,
        "steps": 1000, "loss": 3.3, "head": "11" * 32, "payload_bytes": 281_000, "anchored": False, "fork": None,
        "snapshot_step": 0, "snapshot_root": "22" * 32, "exclusions": [],
        "peers": [peer(1), peer(2, paused=True), peer(3, standing="probation", standing_reason="4 of 10 checks passed")],
        **changed,
    }  # fmt: skip


class Recorded:
    """Facts as a coordinator gave them; an error is raised instead."""

    def __init__(self) -> None:
        self.now: dict[str, Any] | SwarmentumError = facts()

    async def look(self) -> dict[str, Any]:
        if isinstance(self.now, SwarmentumError):
            raise self.now
        return self.now

    async def losses(self, step: int, count: int) -> list[float]:
        return [5.0 - at / 100 for at in range(step - count + 1, step + 1)]

    async def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.terminal.run_view.LOOK_SECONDS", 0.05)


@pytest.mark.parametrize("size", [(80, 24), (140, 50)])
async def test_a_run_is_shown_and_followed(size: tuple[int, int]) -> None:
    source = Recorded()
    view = RunView(source)
    async with view.run_test(size=size) as pilot:
        await wait_for(view, pilot, "open: 2 of 3 payloads are held")
        await wait_for(view, pilot, "xv000003")
        window = "\n".join(rows(view))
        for text in (
            "evening-run", "step 40 of 1,000", "3 peers, 1 on probation, 1 paused; 37.5 samples a second in all", "█",
            "281 kB in all; newest snapshot: step 0",
        ):  # fmt: skip
            assert text in window, f"{text!r} is missing in\n{window}"
        assert ("probation: 4 of 10 checks" in window) == (size[0] == 140)
        assert all(len(row) <= size[0] for row in rows(view))
        source.now = facts(step=60, peers=[peer(1, step=60), *(peer(number) for number in range(4, 60))])
        await wait_for(view, pilot, "step 60 of 1,000")
        await wait_for(view, pilot, "57 peers")
        await wait_for(view, pilot, " left, ")


async def test_a_coordinator_that_is_away_is_asked_again() -> None:
    source = Recorded()
    source.now = NetworkError("the coordinator does not answer: refused")
    view = RunView(source)
    async with view.run_test(size=(140, 50)) as pilot:
        await wait_for(view, pilot, "asking again: the coordinator does not answer: refused")
        source.now = facts()
        await wait_for(view, pilot, "open: 2 of 3 payloads are held")


async def test_a_refusal_ends_it_with_its_code() -> None:
    source = Recorded()
    source.now = RefusedError("this is another run")
    view = RunView(source)
    async with view.run_test() as pilot:
        await wait_for(view, pilot, "end", lambda: view.failure)
    assert view.return_value == RefusedError.exit_code


async def test_an_answer_while_the_view_ends_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class LastToGo(Footer):
        """Widgets end in any order."""

        async def on_unmount(self) -> None:
            await asyncio.sleep(0.1)

    async def answer_always() -> None:
        while True:
            view.tell(facts())
            view.away("refused")
            await asyncio.sleep(0)

    monkeypatch.setattr("node.terminal.run_view.Footer", LastToGo)
    view = RunView(Recorded())
    async with view.run_test(size=(140, 50)) as pilot:
        await wait_for(view, pilot, "evening-run")
        answers = asyncio.create_task(answer_always())
    assert not answers.done(), answers
    answers.cancel()


async def test_keys() -> None:
    for key, code in (("q", 0), ("ctrl+c", 130)):
        view = RunView(Recorded())
        async with view.run_test() as pilot:
            await wait_for(view, pilot, "evening-run")
            await pilot.press("question_mark")
            await wait_for(view, pilot, "Any key closes this help.")
            await pilot.press("x")
            await pilot.press(key)
        assert view.return_value == code


async def test_text_of_others_is_text_and_never_markup() -> None:
    source = Recorded()
    source.now = facts(name=EVIL, reason=EVIL, peers=[peer(1, device=EVIL, standing_reason=EVIL)])
    view = RunView(source)
    async with view.run_test(size=(140, 50)) as pilot:
        await wait_for(view, pilot, "open: [bold red]boo[/] [/x] ?[2J?evil")
        await wait_for(view, pilot, "xv000001")
        window = "\n".join(rows(view))
        assert window.count("[bold red]boo") == 4
        assert "\x1b" not in window
        assert "\u202e" not in window
