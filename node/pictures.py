"""A run's pictures at its end: the loss curve as a picture and in the terminal, and a table of the peers.

Refuses to measure anything; it draws the given values. The module touches no global state of a plotting library but plotext's,
and clears that before and after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protos.limits import DEVICE_CHARACTERS_MAX
from protos.text import amount, count, printable

ALLREDUCE_BYTES_PER_PARAMETER: Final = 8  # a ring sends each fp32 twice: once to reduce, once to gather
DIGEST_SHOWN_CHARS: Final = 8
ID_SHOWN_CHARS: Final = 8
DEVICE_SHOWN_CHARS: Final = 10
PICTURE_INCHES: Final = (9.0, 5.0)
PICTURE_DPI: Final = 120
TICK_COLUMNS: Final = 12  # of the terminal for each label of the x axis

Curves = Mapping[str, Sequence[tuple[int, float]]]
"""Label -> points (step, loss in nats a token), in order of the steps."""


@dataclass(frozen=True)
class PeerTotals:
    """One peer's part in a run."""

    id: str
    device: str
    steps_applied: int
    votes_accepted: int
    wire_bytes_sent: int
    wire_bytes_received: int
    state_digest: str
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0


def allreduce_bytes(parameters: int) -> int:
    """Bytes that a peer sends in a step of an fp32 ring all-reduce (the limit for many peers)."""
    return ALLREDUCE_BYTES_PER_PARAMETER * parameters


def format_ratio(part: float, whole: float) -> str:
    """How many times smaller `part` is than `whole`: 97x; a dash without a measurement."""
    if part <= 0 or whole <= 0:
        return "-"
    times = whole / part
    return f"{times:.1f}x" if times < 9.95 else f"{times:,.0f}x"


def loss_png(curves: Curves, path: Path, title: str = "Training loss") -> Path:
    """Draw the curves to a PNG file; points that are not finite leave a gap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=PICTURE_INCHES, dpi=PICTURE_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, (label, points) in enumerate(curves.items()):
        several = len(points) > 1
        axes.plot(
            [step for step, _ in points],
            [value for _, value in points],
            label=label,
            linewidth=2.0 if index == 0 else 1.2,
            marker="" if several else "o",
        )
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(curves) > 1:
        axes.legend(frameon=False)
    figure.savefig(path)
    return path


def loss_chart(points: Sequence[tuple[int, float]], width: int = 80, height: int = 18, *, title: str = "loss") -> str:
    """The curve for a terminal, without colours, `width` columns by `height` rows."""
    import plotext

    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite:
        return f"{title}: no points yet\n"
    steps, values = [step for step, _ in finite], [value for _, value in finite]
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless").title(f"{title} (nats per token)").label("step", axis="x").plot_size(width, height)
    signal = figure.signal(steps, values)
    signal.lines()
    figure.draw(signal)
    figure.ruler("x").ticks(_whole_ticks(steps[0], steps[-1], width // TICK_COLUMNS))
    drawn = figure.build().string(colorless=True)
    figure.clear()
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def _whole_ticks(first: int, last: int, count: int) -> list[int]:
    """Up to `count` whole steps, evenly spread, both ends among them."""
    parts = max(1, min(count - 1, last - first))
    return sorted({first + (last - first) * part // parts for part in range(parts + 1)})


def peers_table(rows: Sequence[PeerTotals], parameters: int) -> Table:
    """A row for each peer: its votes, its bytes on the wire, and how many times more an fp32 all-reduce sends.

    Fits in 80 columns with device names of up to 10 characters.
    """
    equal = len({row.state_digest for row in rows}) <= 1
    steps = max((row.steps_applied for row in rows), default=0)
    moved = amount(steps * allreduce_bytes(parameters))
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption=f"digests: {'all equal' if equal else 'NOT EQUAL'}; "
        f"fp32 all-reduce: {moved} from each peer in {steps:,} steps\n"
        "votes go to every other peer, and may grow while uplinks have room (vote_size)",
        caption_justify="left",
    )
    table.add_column("peer", no_wrap=True)
    table.add_column("device", no_wrap=True, max_width=DEVICE_SHOWN_CHARS)
    for name in ("steps", "votes", "sent", "received", "all-reduce"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("digest", no_wrap=True)
    for row in rows:
        table.add_row(
            row.id[-ID_SHOWN_CHARS:],
            Text(printable(row.device, DEVICE_CHARACTERS_MAX)),
            f"{row.steps_applied:,}",
            count(row.votes_accepted),
            amount(row.wire_bytes_sent),
            amount(row.wire_bytes_received),
            format_ratio(row.wire_bytes_sent, allreduce_bytes(parameters) * row.steps_applied),
            row.state_digest[:DIGEST_SHOWN_CHARS],
            style=None if equal else "red",
        )
    return table


def render(table: Table, width: int = 100) -> str:
    """The table as plain text."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()
