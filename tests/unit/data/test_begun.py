"""A build of token shards that broke off goes on, and gives the bytes of a build in one go."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.data import build as building
from node.data import samples
from node.data.build import build
from node.data.samples import Shuffle, shuffled
from node.data.sources import Source
from node.data.tally import LeftOutError
from node.data.text_files import STATE_FILE
from node.data.tokenizer import ByteTokenizer
from protos.disk import DiskError
from protos.errors import DataError

SHARD = 1024
LOOK = 300
"""Texts that the first look encodes: all of them."""


class Counting(ByteTokenizer):
    """Counts the texts that it encodes, and stops at one of them."""

    def __init__(self, stop: int | None = None) -> None:
        self.calls, self._stop = 0, stop

    def encode(self, text: str) -> object:  # type: ignore[override]
        self.calls += 1
        if self.calls == self._stop:
            raise KeyboardInterrupt
        return super().encode(text)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of several lengths, and an order that mixes few of them."""
    monkeypatch.setattr(building, "SHUFFLED_TOKENS", 3000)
    monkeypatch.setattr(building, "shuffled", lambda documents, seed: shuffled(documents, seed, 3000))
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{number} " * (1 + number * 37 % 90)}) + "\n" for number in range(300))
    )
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def made(path: Path, folder: Path, tokenizer: ByteTokenizer, **options: object) -> object:
    return build(Source(str(path)), tokenizer, "bytes", folder, shard_tokens=SHARD, **options)  # type: ignore[arg-type]


def test_a_build_goes_on_after_a_break_at_any_document(text: Path, tmp_path: Path) -> None:
    whole = Counting()
    made(text, tmp_path / "whole", whole)
    expected = files(tmp_path / "whole")
    assert STATE_FILE not in expected
    assert len(expected) > 20
    assert whole.calls == LOOK + 300
    for stop in (1, 40, 150, 299, 300):
        folder = tmp_path / f"broken-{stop}"
        with pytest.raises(KeyboardInterrupt):
            made(text, folder, Counting(LOOK + stop))
        kept = {name: path for name, path in files(folder).items() if name.endswith(".bin")}
        after = Counting()
        made(text, folder, after)
        assert files(folder) == expected
        assert kept.items() <= expected.items()
        if stop > 100:
            assert after.calls - LOOK < 300 - stop + 110, "it encoded again what lies in shards"


def test_a_build_goes_on_after_several_breaks_and_a_lost_shard(text: Path, tmp_path: Path) -> None:
    made(text, tmp_path / "whole", Counting())
    folder = tmp_path / "broken"
    for stop in (80, 80, 60):
        with pytest.raises(KeyboardInterrupt):
            made(text, folder, Counting(LOOK + stop))
    (folder / "000003.bin").write_bytes(b"x" * SHARD)
    with pytest.raises(KeyboardInterrupt):
        made(text, folder, Counting(LOOK + 40))
    made(text, folder, Counting())
    assert files(folder) == files(tmp_path / "whole")


def test_another_text_or_other_options_are_refused(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        made(text, folder, Counting(LOOK + 150))
    before = files(folder)
    with pytest.raises(DataError, match="has the beginning of another build"):
        made(text, folder, Counting(), seed=1)
    lines = text.read_text().splitlines(keepends=True)
    text.write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(DataError, match="is another than when this build began"):
        made(text, folder, Counting())
    text.write_text("".join(lines[:20]))
    with pytest.raises(DataError, match="is another than when this build began"):
        made(text, folder, Counting())
    assert files(folder) == before
    (folder / STATE_FILE).write_text("{}")
    with pytest.raises(DataError, match=rf"{STATE_FILE} cannot be read.*delete"):
        made(text, folder, Counting())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="has something in it already"):
        made(text, tmp_path / "mine", Counting())


def test_too_much_left_out_at_the_end_loses_no_work(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with text.open("a") as file:
        file.write('{"text": null}\n' * 9)
    monkeypatch.setattr(building, "survey", lambda source, tokenizer: _Nothing())
    with pytest.raises(LeftOutError, match="start again with --allow-left-out: the build goes on where it stopped"):
        made(text, tmp_path / "out", Counting())
    again = Counting()
    made(text, tmp_path / "out", again, allow_left_out=True)
    assert again.calls == 0
    made(text, tmp_path / "whole", Counting(), allow_left_out=True)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


class _Nothing:
    """A first look that saw only good rows."""

    def check(self, *, allowed: bool) -> None:
        """Nothing is wrong."""


def test_the_order_follows_from_lengths_alone() -> None:
    lengths = [7 * number % 50 + 1 for number in range(200)]
    by_length = [len(document) for document in shuffled((range(length) for length in lengths), 5, 300)]
    shuffle_ = Shuffle[bytes](5, 300)

    def one_by_one() -> Iterator[bytes]:
        for length in lengths:
            yield from shuffle_.add(bytes(length))
        yield from shuffle_.rest()

    assert [len(document) for document in one_by_one()] == by_length
    assert samples.SHUFFLED_TOKENS == 1 << 26, "another number is another order, and breaks old digests"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_ends_a_build_and_loses_nothing(text: Path, tmp_path: Path) -> None:
    made(text, tmp_path / "whole", Counting())
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(DiskError, match="cannot be written: No space left on device; make room"):
            made(text, disk / "out", Counting())
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        made(text, disk / "out", Counting())
        assert files(disk / "out") == files(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
