"""Exports at a distance: a state is named when the run agrees on it, and the disk holds few. What is not an export stays."""

from pathlib import Path
from typing import Any

import pytest

from node.export.card import CARD, MARK, add_ledger, card_text
from node.training.exports import WAITING_MAX, Exports, Series
from protos.errors import OperatorError
from protos.run_config import ClockConfig

CLOCK = ClockConfig(snapshot_every=5)


class Log:
    def __init__(self) -> None:
        self.lines = list[tuple[str, int]]()

    def info(self, event: str, **facts: Any) -> None:
        self.lines.append((event, facts["step"], *filter(None, [facts.get("why")])))

    warning = info


def write(path: Path) -> None:
    path.mkdir(parents=True)
    (path / MARK).write_text("{}")


def exports(folder: Path, log: Log, published: list[int], keep: int = 2) -> Exports:
    series = Series(folder, 10, keep, lambda path, step: published.append(step))
    return Exports(series, write, CLOCK, log)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_export_has_its_name_once_its_state_is_agreed_and_the_newest_stay(tmp_path: Path) -> None:
    log, published = Log(), list[int]()
    made = exports(tmp_path, log, published)
    (tmp_path / "step-000000001").mkdir()  # of somebody else: no mark
    assert [step for step in range(34) if made.wants(step, 33)] == [10, 20, 30, 33]
    for step in (10, 20, 30):
        made.reached(step, bytes([step]))
        assert made.awaits(step)
        assert not made.wants(step, 33)
        made.agreed(step, bytes([step]))
        assert not made.awaits(step)
    assert published == [10, 20, 30]
    assert names(tmp_path) == ["step-000000001", "step-000000020", "step-000000030"]
    assert not made.wants(30, 33), "it is there"


def test_a_state_that_was_agreed_before_this_peer_had_it(tmp_path: Path) -> None:
    published = list[int]()
    made = exports(tmp_path, Log(), published)
    made.agreed(10, b"r")
    made.reached(10, b"r")
    assert published == [10]


def test_another_state_than_the_run_agreed_on_is_no_export(tmp_path: Path) -> None:
    log, published = Log(), list[int]()
    made = exports(tmp_path, log, published)
    made.reached(10, b"mine")
    made.agreed(10, b"theirs")
    assert (published, names(tmp_path)) == ([], [])
    assert log.lines == [("an export is left out", 10, "the run agreed on another state")]


def test_few_exports_wait_and_an_earlier_life_leaves_none(tmp_path: Path) -> None:
    log = Log()
    made = exports(tmp_path, log, [])
    for step in range(10, 100, 10):
        made.reached(step, b"r")
    assert len(names(tmp_path)) == WAITING_MAX
    assert log.lines[0] == ("an export is left out", 10, "the run never agreed on its state")
    exports(tmp_path, log, [])
    assert names(tmp_path) == []


def test_a_distance_between_snapshots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="--every 7: this run agrees on its state every 5 steps"):
        Exports(Series(tmp_path, 7, 1), write, CLOCK, Log())


def test_a_card_shows_the_ledger_once_and_few_identities(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text(card_text({"run_id": "ab"}))
    line = {"owner": "eve | [x](http://y)`", "votes_accepted": 3, "samples": 4, "tokens": 5}
    ledger = {"from_step": 1, "to_step": 9, "votes_accepted": 90, "tokens": 150, "exclusions": []}
    for count in (1, 30):
        identities = [{"id": f"12D3Koo{n}", **line} for n in range(count)]
        add_ledger(tmp_path, {**ledger, "identities": identities}, {"loss": f"{count}.5"})
        said = "1 peer trained this model" if count == 1 else "30 peers trained this model"
        assert said in (tmp_path / CARD).read_text()
    text = (tmp_path / CARD).read_text()
    assert "| loss | 30.5 |" in text
    assert "| loss | 1.5 |" not in text
    assert text.count("## Who trained it") == 1
    assert text.count("`12D3Koo") == 20
    assert "10 more identities are in the log." in text
    assert "| `eve \\| [x](http://y)'` |" in text, "a name is no link"
