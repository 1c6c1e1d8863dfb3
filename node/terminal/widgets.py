"""Parts of the terminal view: a line with progress, facts with a name, a curve, lines that are cut at the window's edge.

All text is shown as it is, never as markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.app import ComposeResult, RenderResult
from textual.containers import Horizontal
from textual.reactive import reactive
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Sparkline, Static

STYLES = {"good": "#4ec96a", "wait": "#e5c454", "bad": "bold #ff6b6b", "": ""}


class Heading(Widget):
    """One line: a name on the left, the progress on the right, and a bar below both."""

    DEFAULT_CSS = "Heading { height: 2; }"
    name_shown: reactive[str] = reactive("")
    progress: reactive[str] = reactive("")
    part: reactive[float] = reactive(0.0)
    """Of the bar, between 0 and 1."""

    def render(self) -> RenderResult:
        width = self.size.width
        right = Text(self.progress)
        left = Text(self.name_shown, style="bold", no_wrap=True)
        left.truncate(max(width - right.cell_len - 2, 0), overflow="ellipsis", pad=True)
        done = round(width * min(max(self.part, 0.0), 1.0))
        bar = Text().append("━" * done, style=STYLES["good"]).append("━" * (width - done), style="dim")
        return Text("\n").join([left.append("  ").append(right), bar])


class Fact(Horizontal):
    """A name and a value. The value is one line, which ends in `…` where the window is too narrow; or `rows` lines."""

    DEFAULT_CSS = """
    Fact { height: auto; }
    Fact > .label { width: 9; color: $text-muted; }
    Fact > .value { width: 1fr; height: auto; text-wrap: nowrap; text-overflow: ellipsis; }
    Fact.long > .value { text-wrap: wrap; max-height: 2; }
    """

    def __init__(self, label: str, *, long: bool = False, name: str) -> None:
        super().__init__(id=name, classes="long" if long else "")
        self._label = label
        self._shown: tuple[str, str] | None = None

    def compose(self) -> ComposeResult:
        yield Static(self._label, classes="label", markup=False)
        yield Static("", classes="value", markup=False)

    def say(self, text: str, kind: str = "") -> None:
        """Show a value; `kind` is one of STYLES."""
        if self._shown != (text, kind):
            self._shown = (text, kind)
            self.query_one(".value", Static).update(Text(text, style=STYLES[kind]))


class Curve(Horizontal):
    """A name, the newest value, and the values of before as bars: a high bar is a high value."""

    DEFAULT_CSS = """
    Curve { height: 2; }
    Curve > .label { width: 9; color: $text-muted; }
    Curve > .value { width: 10; }
    Curve > Sparkline { width: 1fr; height: 100%; }
    Curve > Sparkline > .sparkline--max-color { color: $warning; }
    Curve > Sparkline > .sparkline--min-color { color: $success; }
    """

    def __init__(self, label: str, *, name: str) -> None:
        super().__init__(id=name)
        self._label = label
        self._shown: tuple[float | None, list[float]] | None = None

    def compose(self) -> ComposeResult:
        yield Static(self._label, classes="label", markup=False)
        yield Static("-", classes="value", markup=False)
        yield Sparkline([], summary_function=_mean)

    def show(self, newest: float | None, values: Sequence[float]) -> None:
        """`values`: the newest last."""
        if self._shown != (newest, list(values)):
            self._shown = newest, list(values)
            self.query_one(".value", Static).update(Text("-" if newest is None else f"{newest:.4f}"))
            self.query_one(Sparkline).data = list(values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Lines(Widget):
    """The last lines that fit; a line that is too long ends in `…`. Each line: (what is dim before it, the text, its style)."""

    DEFAULT_CSS = "Lines { height: 1fr; min-height: 1; }"
    lines: reactive[tuple[tuple[str, str, str], ...]] = reactive(())

    def render(self) -> RenderResult:
        shown = []
        for before, text, kind in self.lines[-max(self.size.height, 1) :]:
            line = Text(before, style="dim", no_wrap=True).append(text, style=STYLES[kind] or "not dim")
            line.truncate(self.size.width, overflow="ellipsis")
            shown.append(line)
        return Text("\n").join(shown)


class Rule(Widget):
    """A line with a title."""

    DEFAULT_CSS = "Rule { height: 1; color: $text-muted; }"

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def render(self) -> RenderResult:
        return Text(f"─ {self._title} ".ljust(self.size.width, "─")[: self.size.width], no_wrap=True)


class Help(ModalScreen[None]):
    """What the keys do; any key closes it."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help > Static { width: 74; height: auto; padding: 1 2; background: $surface; border: round $primary; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._closed = False

    def compose(self) -> ComposeResult:
        yield Static(self._text, markup=False)

    def on_key(self, key: events.Key) -> None:
        """Any key, once: the next one may be on its way already."""
        key.stop()
        if not self._closed:
            self._closed = True
            self.dismiss()
