"""The race as a picture: smoothed loss against seconds and against bytes. Labels stand in a legend below, never on a line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from node.pictures import PICTURE_DPI
from tests.bench.race.curves import SMOOTHED_STEPS, Point, smoothed

INCHES: Final = (9.0, 5.0)
STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "swarm": ("#1f5fbf", "-"),
    "swarm-muon": ("#1f5fbf", "--"),
    "ddp": ("#444444", "-"),
    "diloco": ("#2a9d4e", "-"),
    "hivemind": ("#d1495b", "-"),
    "hivemind-local": ("#d1495b", "--"),
}
"""Colour: the family; dashed: its second member."""
BYTES_MIN: Final = 1e3


def picture(curves: Mapping[str, Sequence[Point]], titles: Mapping[str, str], path: Path, title: str) -> None:
    """Draw every rival with at least 10 steps: a loss is the mean over the last 10."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=PICTURE_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for name, points in curves.items():
        if losses := smoothed(points):
            colour, style = STYLES[name]
            shown = points[SMOOTHED_STEPS - 1 :]
            how = {"color": colour, "linestyle": style, "linewidth": 1.6}
            left.plot([point.seconds for point in shown], losses, label=titles[name], **how)
            right.plot([max(point.sent_bytes, BYTES_MIN) for point in shown], losses, **how)
    left.set(xlabel="seconds since the first step", ylabel=f"loss (nats per token, mean of {SMOOTHED_STEPS} steps)")
    right.set(xlabel="bytes that a peer sent", xscale="log")
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    if left.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path)
