"""The terminal view of a run from outside: what `swarmentum status` knows, every other second. Joins nothing.

A coordinator that is away is asked again and again, and the view says since when it is away. Only a refusal ends the view.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import DataTable, Footer

from node.control import words
from node.terminal.widgets import Curve, Fact, Heading, Rule, TerminalView
from protos.amounts import amount, duration
from protos.errors import NetworkError, SwarmentumError
from protos.signals import EXIT_INTERRUPTED
from protos.text import printable
from protos.waits import Waits

LOOK_SECONDS = 2.0
LOOK_SECONDS_MAX = 30.0
LOSSES_SHOWN = 200
PACE_SECONDS = 120.0
WIDE_COLUMNS = 110
NARROW = (("peer", 8), ("state", 15), ("device", 16), ("step", 8), ("votes", 7), ("samples/s", 9))
WIDE = (*NARROW, ("loss", 8), ("standing", 28))
HELP = """\
q   quit (Ctrl-C, too); the run goes on
up and down, page up and page down   more peers
?   this help

The view asks the coordinator every two seconds and joins nothing.
"loss" is the mean over the samples of a step, in nats a token.
"votes" of a peer are those that the log counts.
Any key closes this help.
"""

Values = Mapping[str, Any]


class RunViewSource(Protocol):
    """Where the view gets its facts."""

    async def look(self) -> dict[str, Any]:
        """The facts of `swarmentum status --json`. Raises NetworkError or RefusedError."""

    async def losses(self, step: int, count: int) -> list[float]:
        """Of up to so many steps, the last of which is `step`; the newest last. Raises as `look` does."""

    async def close(self) -> None:
        """Hang up."""


class RunView(TerminalView):
    """Of one run. `failure` is the refusal that ended the view, if one did."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "Quit"),
        Binding("question_mark", "explain", "Help", key_display="?"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+q", "leave", show=False, priority=True),
    ]
    HELP_TEXT = HELP
    CSS = (
        TerminalView.CSS
        + """
    DataTable { height: 1fr; background: $background; overflow-x: hidden; }
    """
    )

    def __init__(self, source: RunViewSource) -> None:
        super().__init__()
        self._source = source
        self.failure: SwarmentumError | None = None
        self._pace: deque[tuple[float, int]] = deque()
        self._losses: deque[float] = deque(maxlen=LOSSES_SHOWN)
        self._step = 0
        self._answered = time.monotonic()
        self._values: Values | None = None
        self._columns: tuple[tuple[str, int], ...] = ()
        self._rows: list[tuple[Text, ...]] = []

    def compose(self) -> ComposeResult:
        with Vertical(id="main"):
            yield Heading(id="head")
            yield Fact("state", name="state", long=True)
            yield Fact("time", name="time")
            yield Curve("loss", name="loss")
            yield Fact("votes", name="votes")
            yield Fact("peers", name="peers")
            yield Rule("the peers")
            yield DataTable(cursor_type="none", cell_padding=1)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to ask."""
        super().on_mount()
        self.fact("state").say("asking the coordinator", "wait")
        self.follow()

    def on_resize(self) -> None:
        """Another width may have room for other columns."""
        if self._values is not None and self.is_up:
            self._show_peers(self._values["peers"])

    def fact(self, name: str) -> Fact:
        """A fact by its name."""
        return self.main.query_one(f"#{name}", Fact)

    # ---- what the coordinator says -----------------------------------------------------------------------------------

    @work(exclusive=True)
    async def follow(self) -> None:
        """Look again and again."""
        waits = Waits(2 * LOOK_SECONDS, LOOK_SECONDS_MAX)
        try:
            while True:
                try:
                    values = await self._source.look()
                    await self._learn(values["step"])
                    self.tell(values)
                    waits.reset()
                    delay = LOOK_SECONDS
                except NetworkError as error:
                    delay = waits.next()
                    self.away(str(error))
                except SwarmentumError as error:
                    self.failure = error
                    self.end(error.exit_code)
                    return
                await asyncio.sleep(delay)
        finally:
            await self._source.close()

    async def _learn(self, step: int) -> None:
        """The losses of the steps since the last look, and the pace."""
        now = time.monotonic()
        self._answered = now
        if step < self._step:
            self._losses.clear()
            self._pace.clear()
        elif step > self._step:
            self._losses.extend(await self._source.losses(step, min(step - self._step, LOSSES_SHOWN)))
        if not self._pace or step != self._step:
            self._pace.append((now, step))
        while len(self._pace) > 2 and now - self._pace[0][0] > PACE_SECONDS:
            self._pace.popleft()
        self._step = step

    def away(self, why: str) -> None:
        """The coordinator does not answer."""
        if self.is_up:
            since = duration(time.monotonic() - self._answered)
            self.fact("state").say(f"no answer for {since}, asking again: {words.cut(why, 160)}", "bad")

    def tell(self, values: Values) -> None:
        """Show the facts."""
        if not self.is_up:
            return
        self._values = values
        heading = self.main.query_one("#head", Heading)
        heading.name_shown = words.cut(values["name"], words.NAME_CHARACTERS_MAX)
        heading.progress, heading.part = words.progress(values), values["step"] / max(values["steps"], 1)
        good = values["phase"] in {"open", "finished"}
        self.fact("state").say(f"{values['phase']}: {words.cut(values['reason'], 160)}", "good" if good else "wait")
        self.fact("time").say(self._time(values))
        self.main.query_one("#loss", Curve).show(values["loss"], list(self._losses))
        agreed = "none is agreed yet" if values["snapshot_step"] is None else f"step {values['snapshot_step']:,}"
        self.fact("votes").say(f"{amount(values['payload_bytes'])} in all; newest snapshot: {agreed}")
        self.fact("peers").say(peers_in_words(values["peers"]))
        self._show_peers(values["peers"])

    def _time(self, values: Values) -> str:
        if values["phase"] == "finished":
            return "-"
        (then, first), (now, last) = self._pace[0], self._pace[-1]
        if last <= first or now <= then:
            return "the time left is not known yet"
        pace = (now - then) / (last - first)
        return f"about {duration(pace * (values['steps'] - last))} left, {pace:.2g} s a step"

    def _show_peers(self, peers: Sequence[Values]) -> None:
        """Only cells that changed are drawn, so that the table keeps its place."""
        table = self.main.query_one(DataTable)
        columns = WIDE if self.size.width >= WIDE_COLUMNS else NARROW
        rows = [tuple(row(peer)[: len(columns)]) for peer in peers]
        if columns != self._columns or len(rows) != len(self._rows):
            at = table.scroll_y
            table.clear(columns=True)
            for name, width in columns:
                table.add_column(Text(name, style="dim"), width=width)
            for cells in rows:
                table.add_row(*(_fitted(cell, width) for cell, (_, width) in zip(cells, columns, strict=True)))
            table.scroll_to(y=at, animate=False)
        else:
            for y, (cells, before) in enumerate(zip(rows, self._rows, strict=True)):
                for x, (cell, old) in enumerate(zip(cells, before, strict=True)):
                    if cell != old:
                        table.update_cell_at((y, x), _fitted(cell, columns[x][1]))  # type: ignore[arg-type]
        self._columns, self._rows = columns, rows

    # ---- keys --------------------------------------------------------------------------------------------------------

    def action_leave(self) -> None:
        """The key `q`."""
        self.end()

    def action_interrupt(self) -> None:
        """Ctrl-C."""
        self.end(EXIT_INTERRUPTED)


def peers_in_words(peers: Sequence[Values]) -> str:
    """How many there are, and of which kinds."""
    trainers = [peer for peer in peers if not peer["anchor"]]
    said = [words.things(len(trainers), "peer")]
    paused, anchors = sum(peer["paused"] for peer in trainers), len(peers) - len(trainers)
    on_probation = sum(peer["standing"] == "probation" for peer in trainers)
    for number, name in ((on_probation, "on probation"), (paused, "paused")):
        if number:
            said.append(f"{number} {name}")
    if anchors:
        said.append(words.things(anchors, "anchor"))
    speed = sum(peer["samples_per_second"] for peer in trainers)
    return f"{', '.join(said)}; {speed:.3g} samples a second in all"


def row(peer: Values) -> list[Text]:
    """A peer's cells, in the order of WIDE. Text of the peer is text."""
    state = "paused" if peer["paused"] else peer["phase"]
    standing = ": ".join(printable(word, 60) for word in (peer["standing"], peer["standing_reason"]) if word)
    return [
        Text(peer["id"][-8:]),
        Text("anchor" if peer["anchor"] else state, style="yellow" if peer["paused"] else ""),
        Text(printable(peer["device"], 64)),
        Text(f"{peer['applied_step']:,}", justify="right"),
        Text(f"{peer['votes_accepted']:,}", justify="right"),
        Text(f"{peer['samples_per_second']:.3g}", justify="right"),
        Text("-" if peer["loss"] is None else f"{peer['loss']:.4f}", justify="right"),
        Text(standing, style="" if peer["standing"] == "counted" else "yellow"),
    ]


def _fitted(cell: Text, width: int) -> Text:
    """The cell, ending in `…` if the column is too narrow for it."""
    fitted = cell.copy()
    fitted.truncate(width, overflow="ellipsis")
    return fitted
