"""Settings that change while a peer runs: what is kept, what wins, and what a wrong value gets."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from node.config import load_settings
from node.donor.live import KEPT_FILE, Live
from node.donor.owner_settings import KEYS, LiveSettings, expected, meaning, with_value
from protos.errors import OperatorError


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_setting_says_what_it_means_and_which_values_it_takes() -> None:
    for key in KEYS:
        assert meaning(key).endswith("."), key
        assert expected(key), key


def test_what_set_changed_wins_and_survives_a_restart_until_it_is_forgotten(tmp_path: Path) -> None:
    Path("swarmentum.toml").write_text("threads = 2\nnice = 3\n")
    live = Live(tmp_path, load_settings(home=tmp_path))
    assert (live.values.threads, live.values.nice) == (2, 3)
    row, _ = live.change("threads", "7")
    assert (row["value"], row["kept"]) == (7, True)
    live.change("nice", "off")

    again = Live(tmp_path, load_settings(home=tmp_path, threads=5))
    assert (again.values.threads, again.values.nice) == (7, None)
    assert [line.split(", as")[0] for line in again.overruled()] == ["nice is off", "threads is 7"]
    row, _ = again.change("threads", "default")
    assert (row["value"], row["kept"]) == (5, False)
    assert Live(tmp_path, load_settings(home=tmp_path)).values.threads == 2


def test_a_home_with_a_setting_that_is_gone_still_starts_and_says_so(tmp_path: Path) -> None:
    (tmp_path / KEPT_FILE).write_text("overlay_memory_gb = 1.5\nnice = 7\n")
    with capture_logs() as told:
        live = Live(tmp_path, LiveSettings())
    assert (live.values.nice, len(live.overruled())) == (7, 1)
    [line] = told
    assert line["event"] == "a key is no setting any more, and is left out"
    assert (line["key"], line["why"]) == ("overlay_memory_gb", "the machine's memory decides")


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("threads", "many", "threads = 'many': expected is a whole number from 1 to 1,024, or off"),
        ("threads", "0", "threads = '0': expected is a whole number from 1 to 1,024, or off"),
        ("nice", "-5", "nice = '-5': expected is a whole number from 0 to 19, or off"),
        ("device", "cpu", "'device' cannot be changed while the peer runs; these can: threads, nice"),
        ("thread", "4", "'thread' cannot be changed while the peer runs; did you mean threads? these can: "),
    ],
)
def test_a_wrong_value_names_the_key_the_value_and_what_was_expected(
    tmp_path: Path, key: str, text: str, words: str
) -> None:
    live = Live(tmp_path, LiveSettings(threads=3))
    with pytest.raises(ValueError, match=r"expected is|cannot be changed") as caught:
        live.change(key, text)
    assert words in str(caught.value)
    assert live.values.threads == 3
    assert not (tmp_path / KEPT_FILE).exists()


def test_a_value_that_the_machine_does_not_take_is_not_kept(tmp_path: Path) -> None:
    def refuse(_: object) -> str:
        raise ValueError("no")

    live = Live(tmp_path, LiveSettings(), {"nice": refuse}, {"threads": "not here"})
    for key in ("nice", "threads"):
        with pytest.raises(ValueError, match="no"):
            live.change(key, "5")
    assert live.values == LiveSettings()
    assert Live(tmp_path, LiveSettings()).values == LiveSettings()


def test_a_damaged_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / KEPT_FILE
    file.write_text("# by hand\nnice = 3\nthreads = -1\n")
    with pytest.raises(OperatorError, match=r"set\.toml:3: threads = '-1': expected is a whole number"):
        Live(tmp_path, LiveSettings())
    file.write_text("threads = \n")
    with pytest.raises(OperatorError, match=r"set\.toml: cannot be read: .*; correct the file, or remove it"):
        Live(tmp_path, LiveSettings())


def test_off_is_no_value_in_files_and_flags_too() -> None:
    Path("swarmentum.toml").write_text('threads = "off"\n')
    assert load_settings(nice="off").threads is None
    assert load_settings(device="off").device == "off", "of other settings it is a word"
    assert with_value(LiveSettings(threads=2), "threads", "OFF").threads is None
