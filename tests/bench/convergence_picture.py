"""The picture of a convergence table: held-out loss against bytes a step, families as colours, baselines as lines."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from node.pictures import PICTURE_DPI
from tests.bench.labels import Box, place
from tests.bench.methods import BASELINES, METHODS

INCHES: Final = (11.0, 7.0)
FONT_POINTS: Final = 7.5
COLOURS: Final[Mapping[str, str]] = {
    "uncompressed": "#444444",
    "votes": "#1f5fbf",
    "gradient votes": "#5aa9e6",
    "muon votes": "#e07a1f",
    "top-k": "#7b4fa6",
    "paper": "#b3245b",
    "late or lost": "#9a9a9a",
    "local steps": "#2a9d4e",
    "replication": "#8a5a2b",
}
LINES: Final[Mapping[str, str]] = dict(zip(BASELINES, ("--", "-."), strict=True))
LINE_PIXELS: Final = 6.0
"""What a line keeps free of labels."""
BEYOND: Final = 0.03
"""Of the axes' span, added on both sides so that labels have room."""


def pareto(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Methods that no other one beats in both loss and bytes, fewest bytes first."""
    best, front = math.inf, []
    finite = [name for name, found in rows.items() if found["loss"] is not None]
    for name in sorted(finite, key=lambda name: (rows[name]["bytes_step"], rows[name]["loss"])):
        if rows[name]["loss"] < best:
            best = rows[name]["loss"]
            front.append(name)
    return front


def picture(rows: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> int:
    """Loss (mean, min to max) against bytes a step on a logarithmic axis, and the Pareto front as a line.

    Rows with their own number of peers or schedule belong to other baselines, and are left to the table. Returns how many
    labels found no room.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=PICTURE_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shown = {
        name: row
        for name, row in rows.items()
        if row["loss"] is not None and not METHODS[name].against and METHODS[name].peers is None
    }
    for name in shown.keys() & LINES.keys():
        axes.axhline(shown[name]["loss"], color=COLOURS["uncompressed"], linestyle=LINES[name], linewidth=1, label=name)
    points = {name: row for name, row in shown.items() if name not in LINES}
    seen: set[str] = set()
    for name, row in points.items():
        mean, family = row["loss"], METHODS[name].family
        spread = [[mean - row["loss_min"]], [row["loss_max"] - mean]]
        how = {"marker": "o", "markersize": 5, "capsize": 2, "linestyle": "none", "color": COLOURS[family]}
        axes.errorbar(row["bytes_step"], mean, yerr=spread, label=None if family in seen else family, **how)
        seen.add(family)
    front = [rows[name] for name in pareto(points)]
    axes.plot([r["bytes_step"] for r in front], [r["loss"] for r in front], color="grey", linewidth=1, zorder=0)
    axes.set(title=title, xlabel="bytes a step that a peer sends", ylabel="loss (nats per token)", xscale="log")
    axes.margins(BEYOND, BEYOND)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    missing = label(figure, axes, points, [shown[name]["loss"] for name in shown.keys() & LINES.keys()], front)
    figure.savefig(path)
    return missing


def label(
    figure: Any,
    axes: Any,
    points: Mapping[str, Mapping[str, Any]],
    levels: Sequence[float],
    front: Sequence[Mapping[str, Any]],
) -> int:
    """Write each name where it covers no point, no bar, no baseline and not the front, with a thin line to its point.

    Returns how many names found no room.
    """
    figure.draw_without_rendering()  # so that the axes have their place
    figure.set_layout_engine("none")
    renderer = figure.canvas.get_renderer()
    names = sorted(points, key=lambda name: points[name]["loss"])
    pixels = [axes.transData.transform((points[name]["bytes_step"], points[name]["loss"])) for name in names]
    texts = [axes.text(0, 0, name, fontsize=FONT_POINTS, color=COLOURS[METHODS[name].family]) for name in names]
    extents = [text.get_window_extent(renderer) for text in texts]
    frame = axes.get_window_extent(renderer)
    closed = [whisker(axes, points[name]) for name in names]
    closed += [Box(frame.x0, height(axes, level) - LINE_PIXELS / 2, frame.width, LINE_PIXELS) for level in levels]
    closed += along([axes.transData.transform((row["bytes_step"], row["loss"])) for row in front])
    boxes = place(
        [(float(x), float(y)) for x, y in pixels],
        [(extent.width + 2, extent.height + 2) for extent in extents],
        Box(frame.x0, frame.y0, frame.width, frame.height),
        closed,
    )
    back = axes.transData.inverted()
    for text, box, (x, y) in zip(texts, boxes, pixels, strict=True):
        if box is None:
            text.remove()
            continue
        text.set_position(back.transform((box.x + 1, box.y + 1)))
        near = (min(max(x, box.x), box.x + box.width), min(max(y, box.y), box.y + box.height))
        ends = [back.transform(end) for end in ((x, y), near)]
        axes.plot(*zip(*ends, strict=True), color=text.get_color(), linewidth=0.5, alpha=0.6, zorder=0)
    return boxes.count(None)


def height(axes: Any, loss: float) -> float:
    """Where a loss lies on the picture, in pixels."""
    return float(axes.transData.transform((axes.get_xlim()[0], loss))[1])


def along(corners: Sequence[Sequence[float]]) -> list[Box]:
    """Small boxes that cover a line through these pixels."""
    boxes = []
    for (x0, y0), (x1, y1) in pairwise(corners):
        parts = max(1, round(math.hypot(x1 - x0, y1 - y0) / LINE_PIXELS))
        for part in range(parts + 1):
            x, y = x0 + (x1 - x0) * part / parts, y0 + (y1 - y0) * part / parts
            boxes.append(Box(float(x) - LINE_PIXELS / 2, float(y) - LINE_PIXELS / 2, LINE_PIXELS, LINE_PIXELS))
    return boxes


def whisker(axes: Any, row: Mapping[str, Any]) -> Box:
    """What the bar from the lowest to the highest loss of a point covers, in pixels."""
    x, low = axes.transData.transform((row["bytes_step"], row["loss_min"]))
    _, high = axes.transData.transform((row["bytes_step"], row["loss_max"]))
    return Box(float(x) - 2, float(low), 4.0, float(high - low))
