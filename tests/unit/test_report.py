"""What a run shows at its end."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from node.pictures import PeerTotals, allreduce_bytes, format_ratio, loss_chart, loss_png, peers_table, render
from protos.text import amount

POINTS = [(step, 4 * math.exp(-step / 30) + 1.5) for step in range(1, 101)]

ROW = PeerTotals("12D3KooWabcdefgh", "cpu", 100, 2_764_800, 1_234_567, 98_765_432, "ab12" * 16)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_499, "999 kB"), (999_500, "1.0 MB"), (45_600_000, "46 MB")],
)
def test_bytes(size: float, text: str) -> None:
    assert amount(size) == text


def test_ratios() -> None:
    assert [format_ratio(*pair) for pair in ((1, 3), (1, 97), (1, 2048), (0, 5))] == ["3.0x", "97x", "2,048x", "-"]
    assert allreduce_bytes(885_888) == 7_087_104


def test_table_fits_a_terminal_and_tells_the_factor() -> None:
    text = render(peers_table([ROW, replace(ROW, id="x" * 40, device="cuda:0")], parameters=885_888), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    row = next(line for line in text.splitlines() if "abcdefgh" in line)
    assert row.split() == ["abcdefgh", "cpu", "100", "2.8", "M", "1.2", "MB", "99", "MB", "574x", "ab12ab12"]
    assert "digests: all equal" in text


def test_unequal_digests_are_loud() -> None:
    assert "NOT EQUAL" in render(peers_table([ROW, replace(ROW, state_digest="cd")], 10))


def test_chart_has_the_width_asked_for() -> None:
    text = loss_chart(POINTS, width=60, height=12)
    lines = text.splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) == 60
    assert "\x1b" not in text
    assert "step" in lines[-1]
    assert lines[-2].split() == ["1", "20", "40", "60", "80", "100"] or lines[-2].split()[0] == "1"


@pytest.mark.parametrize("points", [[], [(3, math.nan)], [(1, 5.0)], [(1, 5.0), (2, 5.0)], [(1, math.inf), (2, 4.0)]])
def test_chart_of_little(points: list[tuple[int, float]]) -> None:
    assert loss_chart(points, width=40, height=8)


def test_picture(tmp_path: Path) -> None:
    path = loss_png({"training": POINTS, "held out": POINTS[::20], "one": [(1, math.nan)]}, tmp_path / "loss.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1080, 600)
    assert loss_png({"nothing": []}, tmp_path / "empty.png").exists()
