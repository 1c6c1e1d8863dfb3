"""The terminal view of a peer: what `swarmentum me` knows, once a second, and the owner's commands as keys.

It asks the peer's control door, as any terminal of the owner can, so it neither slows the training nor waits for it. It ends
when the peer ends: the pipe `life`, whose other end the peer holds, is at its end then.

`python -m node.terminal.peer_view --home HOME --life FD --peer PID`: a peer starts this for its terminal view; people do
not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer

from node.control import words
from node.control.control_server import call
from node.terminal.widgets import Curve, Fact, Heading, Help, Lines, Rule
from protos.disk import with_tilde
from protos.errors import SwarmentumError
from protos.process import EXIT_INTERRUPTED
from protos.text import duration, printable

WINDOW_SECONDS = 10.0


class Rates:
    """Of bytes up and down, over the last WINDOW_SECONDS: votes come in bursts, one a step."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def between(self, now: float, up: int, down: int) -> tuple[float | None, float | None]:
        """Bytes a second up and down; None before there are two totals. A total that fell is that of a new start."""
        if self._seen and (up < self._seen[-1][1] or down < self._seen[-1][2]):
            self._seen.clear()
        self._seen.append((now, up, down))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_SECONDS:
            self._seen.popleft()
        then, first_up, first_down = self._seen[0]
        if now <= then:
            return None, None
        return (up - first_up) / (now - then), (down - first_down) / (now - then)


ASK_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""A peer that has not answered for so long is shown as silent; it may be busy compiling, or stopped."""
SAID_SECONDS = 6.0
END_SECONDS_MAX = 3.0
STEPS_SHOWN = 50
HELP = """\
p   pause: stop training, and keep the place in the run
    p again: train again, if your conditions let the peer
f   finish: end after the open step, when its votes are decided
q   quit: end now; what is needed to come back is saved
?   this help

Ctrl-C ends the peer as q does. The other peers go on.
From another terminal: swarmentum me, pause, resume, finish,
leave. Any key closes this help.

"counted" means that the log counts this peer's votes. If a step
does not count them, the line "vote" says why. swarmentum me lists
the last steps.
"""


class PeerView(App[int]):
    """Of the peer with this home. `peer`: its process, which Ctrl-C is for; `life`: see the module. The mouse is left to the
    terminal, so that text can be selected."""

    TITLE = "swarmentum"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause / go on"),
        Binding("f", "finish", "Finish, then leave"),
        Binding("q", "leave", "Quit"),
        Binding("question_mark", "explain", "Help", key_display="?"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+q", "leave", show=False, priority=True),
    ]
    CSS = """
    #main { padding: 0 1; height: 1fr; overflow: hidden; }
    Footer { dock: bottom; }
    #facts { width: 1fr; height: auto; }
    #upper { height: auto; }
    #votes { display: none; width: 52; height: 100%; margin-left: 2; }
    .-wide #votes { display: block; }
    .-tall Curve { height: 6; }
    #foot { height: 1; color: $text-muted; }
    """

    def __init__(self, home: Path, *, peer: int | None = None, life: int | None = None) -> None:
        super().__init__(ansi_color=None)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-tall")]
        self._home, self._peer, self._life = home, peer, life
        self._rates = Rates()
        self._answered = time.monotonic()
        self._log_file = ""
        self._said_until = 0.0
        self._paused = False

    def compose(self) -> ComposeResult:
        with Vertical(id="main"):
            yield Heading(id="head")
            with Horizontal(id="upper"):
                with Vertical(id="facts"):
                    yield Fact("state", name="state", long=True)
                    yield Fact("time", name="time")
                    yield Curve("loss", name="loss")
                    yield Fact("vote", name="vote", long=True)
                    yield Fact("given", name="given")
                    yield Fact("up", name="up")
                    yield Fact("down", name="down")
                    yield Fact("device", name="device")
                    yield Fact("reached", name="link")
                    yield Fact("peers", name="peers")
                with Vertical(id="votes"):
                    yield Rule("the last steps")
                    yield Lines(id="steps")
            yield Rule("the last events")
            yield Lines(id="events")
            yield Lines(id="foot")
        yield Footer()

    def show(self) -> int:
        """Show it until it ends; the exit code."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is a key here
        signal.signal(signal.SIGHUP, lambda *_: os._exit(EXIT_INTERRUPTED))  # no terminal is left to put in order
        code = self.run(mouse=False)
        return 1 if code is None else code

    @property
    def main(self) -> Screen[object]:
        """The view itself, also while the help covers it."""
        return self.screen_stack[0]

    @property
    def is_up(self) -> bool:
        """Whether there is something to draw on: an answer may come while the view begins or ends."""
        return self.is_running and bool(self.screen_stack) and bool(self.main.query("Footer"))

    def end(self) -> None:
        """Leave the terminal as it was. The peer says how it ended."""
        self.exit(0)

    def on_mount(self) -> None:
        """Begin to ask. Ends in order when it is asked to."""
        if not self.is_headless:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.end)
        if self._life is not None:
            asyncio.get_running_loop().add_reader(self._life, self.end)
            threading.Thread(target=_end_with, args=(self._life,), daemon=True).start()
        self.fact("state").say("starting", "wait")
        self.set_interval(ASK_SECONDS, self.ask)
        self.ask()

    def fact(self, name: str) -> Fact:
        """A fact by its name."""
        return self.main.query_one(f"#{name}", Fact)

    # ---- what the peer says ------------------------------------------------------------------------------------------

    @work(thread=True, exclusive=False, group="ask")
    def ask(self) -> None:
        """One question at a time: a peer that is slow to answer gets no more of them."""
        if sum(worker.group == "ask" for worker in self.workers) > 1:
            return
        try:
            told = call(self._home, "me", steps=STEPS_SHOWN)
        except SwarmentumError as error:
            self.call_from_thread(self.silent, str(error))
        else:
            self.call_from_thread(self.tell, told)

    def silent(self, why: str) -> None:
        """The peer did not answer."""
        if not self.is_up:
            return
        seconds = time.monotonic() - self._answered
        if seconds >= SILENT_SECONDS:
            self.fact("state").say(f"no answer for {duration(seconds)}: {words.cut(why, 200)}", "bad")

    def tell(self, told: Mapping[str, Any]) -> None:
        """Show what the peer said."""
        if not self.is_up:
            return
        self._answered = time.monotonic()
        self._paused, self._log_file = told["paused_by_owner"], told["log_file"] or ""
        heading = self.main.query_one("#head", Heading)
        heading.name_shown = words.cut(told.get("name", told["run"]), words.NAME_CHARACTERS_MAX)  # of an older peer
        heading.progress, heading.part = words.progress(told), told["step"] / max(told["steps"], 1)
        self.fact("state").say(*words.state(told))
        self.fact("time").say(words.clock(told))
        self.main.query_one("#loss", Curve).show(told["loss"], told["losses"])
        self.fact("vote").say(*(words.vote(told["last"][0]) if told["last"] else ("no step is decided yet", "wait")))
        self.fact("given").say(words.given(told))
        up, down = told["wire_bytes_sent"], told["wire_bytes_received"]
        month = told["month"]
        rates = self._rates.between(self._answered, up, down)
        self.fact("up").say(words.traffic(rates[0], up, month["up"], month["upload_gb"]))
        self.fact("down").say(words.traffic(rates[1], down, month["down"], month["download_gb"]))
        self.fact("device").say(words.device(told))
        self.fact("link").say(words.link(told["access"]))
        self.fact("peers").say(words.peers(told["access"], told["last"]))
        self.main.query_one("#steps", Lines).lines = tuple(("", *words.vote(fate)) for fate in reversed(told["last"]))
        self.main.query_one("#events", Lines).lines = tuple(map(_event, told["lines"]))
        if self._answered >= self._said_until:
            self.say(f"log: {with_tilde(self._log_file)}" if self._log_file else "")

    def say(self, text: str, kind: str = "") -> None:
        """On the line above the keys."""
        if not self.is_up:
            return
        self.main.query_one("#foot", Lines).lines = (
            ((printable(text), "", kind),) if not kind else (("", printable(text), kind),)
        )

    # ---- keys --------------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """The key `p`."""
        self.command("resume" if self._paused else "pause")

    def action_finish(self) -> None:
        """The key `f`."""
        self.command("finish")

    def action_leave(self) -> None:
        """The key `q`."""
        self.command("leave")

    def action_explain(self) -> None:
        """The key `?`."""
        if not isinstance(self.screen, Help):
            self.push_screen(Help(HELP))

    def action_interrupt(self) -> None:
        """Ctrl-C: as in a terminal without the view."""
        if self._peer is not None:
            os.kill(self._peer, signal.SIGINT)
            self.fact("state").say("leaving: saving what is needed to come back; Ctrl-C again ends it at once", "wait")
        else:
            self.action_leave()

    @work(thread=True, exclusive=False, group="command")
    def command(self, name: str) -> None:
        """A command of the owner."""
        try:
            told = call(self._home, name)
        except SwarmentumError as error:
            self.call_from_thread(self.answer, str(error), "bad")
        else:
            text = words.resumed(told) if name == "resume" else ANSWERS[name].format(**told)
            self.call_from_thread(self.answer, text, "good")
            self.ask()

    def answer(self, text: str, kind: str) -> None:
        """Show for a while what a command came to."""
        self._said_until = time.monotonic() + SAID_SECONDS
        self.say(text, kind)


ANSWERS = {
    "pause": "paused at step {step}; p lets it train again",
    "finish": "ending after the open step",
    "leave": "leaving at step {step}",
}


def _end_with(life: int) -> None:
    """End this process with the peer's, also if the window takes no output: then the view itself is stuck in writing."""
    select.select([life], [], [])
    time.sleep(END_SECONDS_MAX)
    os._exit(1)


def _event(line: Mapping[str, Any]) -> tuple[str, str, str]:
    kind = {"warning": "wait", "error": "bad", "critical": "bad"}.get(line["level"], "")
    return f"{local_time(line['at'])}  ", printable(line["text"], 300), kind


def local_time(at: str) -> str:
    """The time of day of a line of the log, as this machine counts it."""
    try:
        return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return printable(at, 8)


def main() -> int:
    """Show the view until the peer ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--peer", type=int, required=True)
    given = parser.parse_args()
    return PeerView(given.home, peer=given.peer, life=given.life).show()


if __name__ == "__main__":
    raise SystemExit(main())
