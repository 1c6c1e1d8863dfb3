"""The peer's own files: whole or not there, verified, bounded, and never another run's."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from node.snapshot.pieces import SnapshotManifest, describe, iterate_pieces
from node.snapshot.private import PrivateState, PrivateStateError, load_private, save_private
from node.snapshot.store import HEADER_BYTES_MAX, SnapshotStore, StoreFullError
from protos.errors import Refusal

RUN, LAYOUT = bytes([1]) * 32, bytes([3]) * 32
STATE = PrivateState(RUN, LAYOUT, 5, {"momentum": torch.tensor([1.0, -0.0]), "pending": None}, {"tokens": 12})
PIECE = 16


class Killed(BaseException):
    """The process dies here: nothing after it runs, not even a clean-up."""


def manifest_of(step: int, data: bytes) -> SnapshotManifest:
    return describe(data, run_id=RUN, step=step, entry_hash=RUN, layout_digest=LAYOUT, piece_bytes=PIECE)


def keep(store: SnapshotStore, step: int, data: bytes) -> SnapshotManifest:
    manifest = manifest_of(step, data)
    kept = store.write(iterate_pieces(data, PIECE), len(data), lambda hashes: replace(manifest, piece_hashes=hashes))
    assert kept == manifest
    return kept


def test_snapshots_come_back_after_a_restart(tmp_path: Path) -> None:
    store, data = SnapshotStore(tmp_path / "s", 1000), bytes(range(100))
    manifest = keep(store, 3, data)
    assert store.total_bytes == 100
    again = SnapshotStore(tmp_path / "s", 1000)
    assert again.roots() == {manifest.root}
    assert again.file(manifest.root).read_bytes() == data
    assert again.get(manifest.root) == manifest.encoded
    pieces = [again.get(digest) for digest in manifest.piece_hashes]
    assert b"".join(piece or b"" for piece in pieces) == data
    assert again.get(bytes(32)) is None


def test_rotten_and_vanished_pieces_are_missing(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 1000)
    one, two = keep(store, 1, bytes(range(40))), keep(store, 2, bytes(range(100, 140)))
    with store.file(one.root).open("r+b") as file:
        file.seek(20)
        file.write(b"!")
    assert [store.get(digest) is not None for digest in one.piece_hashes] == [True, False, True]
    assert store.piece(one.root, 1) is None
    store.file(two.root).unlink()
    assert store.get(two.piece_hashes[0]) is None


def test_the_limit_follows_the_run_and_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays and one that is written; on a fuller disk what is there, and two at least."""
    size, free = 30 << 20, [10**12]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    one = size + HEADER_BYTES_MAX
    for kept, there, room in (
        (2, 10**12, 3 * one),
        (19, 10**12, 20 * one),
        (2, 5 * one // 2, 5 * one // 2),
        (2, one, 2 * one),
    ):
        store, free[0] = SnapshotStore(tmp_path, 100), there
        store.make_fit(size, kept)
        assert store.bytes_max == room
    store = SnapshotStore(tmp_path, 10**10)
    free[0] = 10**12
    store.make_fit(size, 2)
    assert store.bytes_max == 10**10, "small snapshots have more room"


def test_limit_and_keep(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 100)
    old, new = keep(store, 1, bytes(40)), keep(store, 2, bytes(range(60)))
    with pytest.raises(
        StoreFullError, match=r"100 bytes are used and 1 more do not fit the limit of 100.*snapshots_kept"
    ):
        keep(store, 3, b"x")
    assert store.keep([new.root]) == 1
    assert store.roots() == {new.root}
    assert store.get(old.piece_hashes[0]) is None
    keep(store, 3, b"x")


def test_a_snapshot_that_somebody_is_loading_stays_as_long_as_there_is_room(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 100)
    asked, other = keep(store, 1, bytes(20)), keep(store, 2, bytes(range(20)))
    assert store.get(asked.piece_hashes[0]) is not None
    assert store.keep([], 3600.0) == 1
    assert store.roots() == {asked.root}
    assert other.root not in store.roots()
    newer = keep(store, 3, bytes(range(40, 80)))
    assert store.keep([newer.root], 3600.0) == 1, "half of the room is for what comes next"
    assert store.roots() == {newer.root}


def test_of_the_snapshots_that_were_asked_for_one_stays(tmp_path: Path) -> None:
    """A peer kept four states: each one that somebody had asked for in the last minute."""
    store = SnapshotStore(tmp_path, 1000)
    asked = [keep(store, step, bytes(range(20 * step, 20 * step + 20))) for step in (1, 2, 3)]
    for manifest in (asked[0], asked[2], asked[1]):
        assert store.get(manifest.piece_hashes[0]) is not None
    assert store.keep([], 3600.0) == 2
    assert store.roots() == {asked[1].root}


def test_room_is_made_by_the_oldest_that_may_go(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 100)
    made = [keep(store, step, bytes(range(20 * step, 20 * step + 30))) for step in (1, 2, 3)]
    assert [m.step for m in store.make_room(30, [made[0].root])] == [2]
    assert store.make_room(40, [made[0].root]) == ()
    assert not store.fits(50)
    assert store.begun(made[0].root) is False


def test_what_was_fetched_of_a_snapshot_that_is_not_needed_gives_its_room_back(tmp_path: Path) -> None:
    store, data = SnapshotStore(tmp_path, 1000), bytes(range(100))
    stays = keep(store, 1, bytes(20))
    store.receive(manifest_of(4, data)).close()
    assert store.begun(manifest_of(4, data).root)
    assert store.total_bytes == 120
    store.drop_parts()
    assert store.total_bytes == 20
    assert store.roots() == {stays.root}


@pytest.mark.parametrize("moment", ["fsync", "replace", "sync_folder"])
def test_kill_leaves_no_half_snapshot(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    store, data = SnapshotStore(tmp_path, 1000), bytes(range(50))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)  # a dead process cleans nothing up
        match moment:
            case "fsync":
                patch.setattr(os, "fsync", die)
            case "replace":
                patch.setattr(Path, "replace", die)
            case _:
                patch.setattr("node.snapshot.store.sync_folder", die)
        with pytest.raises(Killed):
            keep(store, 1, data)
    again = SnapshotStore(tmp_path, 1000)
    if moment == "sync_folder":  # whole, and named
        assert again.file(manifest_of(1, data).root).read_bytes() == data
        return
    assert not again.roots()
    assert not list(tmp_path.iterdir())
    assert again.total_bytes == 0


def test_what_an_older_version_left_goes(tmp_path: Path) -> None:
    (tmp_path / ("0" * 64)).write_bytes(b"a piece of its own")
    (tmp_path / f"{'1' * 64}.state").write_bytes(b"without a manifest")
    assert not SnapshotStore(tmp_path, 100).roots()
    assert not list(tmp_path.iterdir())


def test_a_fetch_goes_on_after_a_restart(tmp_path: Path) -> None:
    data = bytes(range(100))
    manifest, pieces = manifest_of(4, data), list(iterate_pieces(data, PIECE))
    receiving = SnapshotStore(tmp_path, 1000).receive(manifest)
    receiving.put(2, pieces[2])
    with pytest.raises(Refusal, match="not what the manifest says"):
        receiving.put(1, pieces[3])
    receiving.close()
    store = SnapshotStore(tmp_path, 1000)
    assert not store.has(manifest.root), "it is not whole"
    assert store.get(manifest.piece_hashes[2]) is None
    receiving = store.receive(manifest)
    assert [receiving.has(index) for index in range(len(pieces))] == [index == 2 for index in range(len(pieces))]
    for index, piece in enumerate(pieces):
        receiving.put(index, piece)
    receiving.finish()
    receiving.close()
    assert store.file(manifest.root).read_bytes() == data
    assert SnapshotStore(tmp_path, 1000).roots() == {manifest.root}
    other = manifest_of(5, bytes(50))
    store.receive(other).close()
    store.receive(manifest_of(6, bytes(60))).close()
    assert len(list(tmp_path.glob("*.part"))) == 1, "one that was given up takes no room"


def test_private_state_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "private.pt"
    assert load_private(path, RUN, LAYOUT) is None
    save_private(STATE, path)
    save_private(STATE, path)
    found = load_private(path, RUN, LAYOUT)
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
