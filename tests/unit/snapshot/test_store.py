"""The peer's own files: whole or not there, verified, bounded, and never another run's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from node.snapshot.atomic import write_atomic
from node.snapshot.private import PrivateState, PrivateStateError, load_private, save_private
from node.snapshot.store import PieceStore, StoreFullError
from protos.disk import DiskError

RUN, LAYOUT = bytes([1]) * 32, bytes([3]) * 32
STATE = PrivateState(RUN, LAYOUT, 5, {"momentum": torch.tensor([1.0, -0.0]), "pending": None}, {"tokens": 12})


class Killed(BaseException):
    """The process dies here: nothing after it runs, not even a clean-up."""


def test_pieces_come_back_after_a_restart(tmp_path: Path) -> None:
    store = PieceStore(tmp_path / "s", 100)
    digests = [store.put(piece) for piece in (b"one", b"two", b"one", b"")]
    assert store.total_bytes == 6
    again = PieceStore(tmp_path / "s", 100)
    assert again.hashes() == set(digests)
    assert again.total_bytes == 6
    assert [again.get(digest) for digest in digests] == [b"one", b"two", b"one", b""]
    assert again.get(bytes(32)) is None


def test_rotten_and_vanished_pieces_are_missing(tmp_path: Path) -> None:
    store = PieceStore(tmp_path, 100)
    rotten, gone = store.put(b"good"), store.put(b"gone")
    (tmp_path / rotten.hex()).write_bytes(b"baad")
    (tmp_path / gone.hex()).unlink()
    assert store.get(rotten) is None
    assert store.get(gone) is None
    assert not store.hashes()
    assert store.total_bytes == 0
    assert store.get(store.put(b"good")) == b"good"


def test_limit_and_keep(tmp_path: Path) -> None:
    store = PieceStore(tmp_path, 10)
    old, new = store.put(b"12345"), store.put(b"67890")
    with pytest.raises(StoreFullError, match="10 bytes are used and 1 more do not fit its limit of 10"):
        store.put(b"x")
    assert store.put(b"12345") == old, "what is here needs no room"
    assert store.keep([new]) == 1
    assert store.hashes() == {new}
    store.put(b"abcde")


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_kill_leaves_no_half_piece(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    store = PieceStore(tmp_path, 100)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)  # a dead process cleans nothing up
        if moment == "fsync":
            patch.setattr(os, "fsync", die)
        else:
            patch.setattr(Path, "replace", die)
        with pytest.raises(Killed):
            store.put(b"half")
    assert len(list(tmp_path.iterdir())) == 1
    again = PieceStore(tmp_path, 100)
    assert not again.hashes()
    assert not list(tmp_path.iterdir())


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def fail(_: object) -> None:
        raise OSError("disk full")

    with pytest.raises(DiskError, match="disk full"):
        write_atomic(path, tmp_path / ".f", fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_private_state_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "private.pt"
    assert load_private(path, RUN, LAYOUT) is None
    save_private(STATE, path)
    save_private(STATE, path)
    found = load_private(path, RUN, LAYOUT)
    assert found is not None
    assert torch.equal(found.optimizer["momentum"].view(torch.int32), STATE.optimizer["momentum"].view(torch.int32))
    assert (found.step, found.bookkeeping, found.optimizer["pending"]) == (5, {"tokens": 12}, None)
    assert list(path.parent.iterdir()) == [path]


def test_private_state_of_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "private.pt"
    save_private(STATE, path)
    with pytest.raises(PrivateStateError, match=r"belongs to run 0101010101010101, not 0909.*move it away"):
        load_private(path, bytes([9]) * 32, LAYOUT)
    with pytest.raises(PrivateStateError, match="belongs to layout 0303"):
        load_private(path, RUN, bytes([9]) * 32)


@pytest.mark.parametrize("content", [b"", b"garbage", {"other": 1}, [1], "code"])
def test_damaged_private_state(content: object, tmp_path: Path) -> None:
    path = tmp_path / "private.pt"
    if content == "code":
        torch.save({"format": os.system}, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(PrivateStateError, match=r"private\.pt"):
        load_private(path, RUN, LAYOUT)
