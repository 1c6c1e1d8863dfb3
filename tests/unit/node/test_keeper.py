"""What a peer keeps is written behind its training: told when it is on the disk, bounded, and failures are not lost."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from node.archive import files
from node.archive.record import Recorder, head_of
from node.snapshot.image import Image
from node.snapshot.pieces import SnapshotManifest
from node.snapshot.store import SnapshotStore
from node.training.keeper import Keeper
from node.training.replica import Replica
from protos.disk import DiskError
from protos.log import SignedEntry
from tests.unit.node.test_recovery import Log, replica, updates_of

BLOCK_BYTES_OF_THE_TEST = 12_345


def waits(go: threading.Event) -> None:
    """A disk that takes its time."""
    assert go.wait(240)


class Kept:
    """A replica that plays a log, and what its keeper told."""

    def __init__(self, folder: Path, steps: int, bytes_max: int = 1 << 30) -> None:
        self.replica: Replica = replica()
        self.log = Log(steps)
        self.store = SnapshotStore(folder / "pieces", bytes_max)
        self.told: list[tuple[int, bool]] = []
        self.durable: list[bool] = []
        self.keeper = Keeper(self.replica, self.store, folder / "private.pt", self.tell, structlog.get_logger())

    def tell(self, manifest: SnapshotManifest, kept: bool) -> None:
        self.told.append((manifest.step, kept))
        self.durable.append(not kept or self.store.has(manifest.root))

    def plays(self, until: int) -> None:
        while self.replica.step < until:
            signed: SignedEntry = self.log.entries[self.replica.step + 1]
            self.replica.apply(signed, updates_of(signed.entry.step))


def test_what_is_written_while_the_replica_goes_on_is_the_state_as_it_was(tmp_path: Path) -> None:
    """The write waits until the replica is steps further: the bytes are those of the step."""
    peer, go = Kept(tmp_path, 6), threading.Event()
    peer.keeper._submit(partial(waits, go), None)
    for step in (2, 4):
        peer.plays(step)
        peer.keeper.snapshot(kept=step == 2)
        peer.keeper.private()
    peer.plays(6)
    assert peer.told == []
    assert not peer.store.roots()
    go.set()
    peer.keeper.flush()
    assert peer.told == [(2, True), (4, False)]
    assert all(peer.durable)
    manifest, data = peer.log.manifests[2]
    assert peer.store.file(manifest.root).read_bytes() == data
    assert [m.root for m in peer.keeper.manifests] == [peer.log.manifests[step][0].root for step in (2, 4)]
    again = replica()
    assert again.load_private(tmp_path / "private.pt")
    peer.keeper.close()


def test_a_snapshot_is_written_before_the_rest_of_a_momentum_which_is_whole_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joiners replay all steps since the last snapshot that is on a disk; a momentum may be twice as large."""
    peer, begun, go, order = Kept(tmp_path, 4), threading.Event(), threading.Event(), list[str]()
    pieces = Image.pieces

    def slowly(image: Image, piece_bytes: int) -> Iterator[bytes]:
        for piece in pieces(image, 64 if piece_bytes == BLOCK_BYTES_OF_THE_TEST else piece_bytes):
            begun.set()
            assert go.wait(240)
            yield piece

    monkeypatch.setattr("node.snapshot.private.BLOCK_BYTES", BLOCK_BYTES_OF_THE_TEST)
    monkeypatch.setattr(Image, "pieces", slowly)
    written = peer.keeper._stored
    peer.keeper._stored = lambda manifest, kept: (order.append("snapshot"), written(manifest, kept))[0]  # type: ignore
    peer.plays(2)
    was = peer.replica.demo.momentum.clone()
    peer.keeper.private()
    peer.keeper._submit(partial(order.append, "momentum"), None, private=True)
    assert begun.wait(240)
    peer.plays(4)
    peer.keeper._submit(partial(order.append, "record"), None)
    peer.keeper.snapshot(kept=True)
    go.set()
    peer.keeper.flush()
    assert order == ["record", "snapshot", "momentum"], "a kill between the first two would leave a gap in an archive"
    assert peer.told == [(4, True)]
    again = replica()
    assert again.load_private(tmp_path / "private.pt")
    assert torch.equal(again.demo.momentum, was)
    peer.keeper.close()


def test_what_waits_is_not_written_over_what_is_saved_at_an_end(tmp_path: Path) -> None:
    """A program moved the parameters: a momentum that waited was written over the newest one, or at once with it, into one
    file; and a snapshot of the moved state was told to the swarm."""
    peer = Kept(tmp_path, 2)
    peer.keeper._submit(partial(waits, peer.keeper._hurry), None)
    peer.plays(2)
    peer.keeper.private()
    peer.keeper.snapshot(kept=True)
    peer.keeper.abandon()
    assert (peer.told, peer.store.roots(), (tmp_path / "private.pt").exists()) == ([], frozenset(), False)


def test_a_state_that_is_being_written_when_the_program_moves_the_model_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model was perhaps moved while it was copied; the swarm was told this peer's snapshot all the same."""
    peer, begun, pieces = Kept(tmp_path, 2), threading.Event(), Image.pieces

    def slowly(image: Image, piece_bytes: int) -> Iterator[bytes]:
        begun.set()
        waits(peer.keeper._hurry)
        yield from pieces(image, piece_bytes)

    monkeypatch.setattr(Image, "pieces", slowly)
    peer.plays(2)
    peer.keeper.snapshot(kept=True)
    waits(begun)
    peer.keeper.abandon()
    assert (peer.told, peer.store.roots(), list((tmp_path / "pieces").iterdir())) == ([], frozenset(), [])


def test_what_fails_behind_the_training_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise DiskError("no space left on device")

    peer = Kept(tmp_path, 1)
    monkeypatch.setattr(SnapshotStore, "write", full)
    peer.keeper.snapshot(kept=True)
    with pytest.raises(DiskError, match="no space left"):
        peer.keeper.flush()
    with pytest.raises(DiskError):
        peer.keeper.check()
    assert peer.told == []
    peer.keeper.close()


def test_an_older_snapshot_gives_its_room_to_a_new_one(tmp_path: Path) -> None:
    """Room for two and a half: the third one did not fit beside two others, and the peer ended in the middle of the run."""
    size = len(Log(0).manifests[0][1])
    peer = Kept(tmp_path, 8, bytes_max=5 * size // 2)
    for step in (2, 4, 6, 8):
        peer.plays(step)
        peer.keeper.snapshot(kept=True)
        peer.keeper.flush()
        if step == 4:
            peer.keeper.agreed(4, peer.keeper.manifests[-1].root)
    assert [manifest.step for manifest in peer.store.manifests()] == [4, 8], "the agreed one stays"
    assert peer.told == [(2, True), (4, True), (2, False), (6, True), (6, False), (8, True)]
    peer.keeper.close()


def test_a_snapshot_that_does_not_fit_is_left_to_others(tmp_path: Path) -> None:
    peer = Kept(tmp_path, 2, bytes_max=100)
    peer.plays(2)
    peer.keeper.snapshot(kept=True)
    peer.keeper.flush()
    assert peer.told == [(2, False)]
    assert [m.root for m in peer.keeper.manifests] == [peer.log.manifests[2][0].root], "its word on the root counts"
    peer.keeper.close()


def test_momentum_that_waits_for_the_disk_keeps_no_snapshot_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large momentum was written when the next snapshot was due: seven of ten snapshots were left out."""
    monkeypatch.setattr("node.training.keeper.WAITING_BYTES_MAX", 0)
    peer, go = Kept(tmp_path, 4), threading.Event()
    peer.keeper._submit(partial(waits, go), None)
    for step in (2, 4):
        peer.plays(step)
        peer.keeper.private()
        peer.keeper.snapshot(kept=True)
    peer.plays(4)
    go.set()
    peer.keeper.flush()
    assert [step for step, kept in peer.told if kept] == [2], "one of each kind waits"
    assert peer.store.file(peer.log.manifests[2][0].root).read_bytes() == peer.log.manifests[2][1]
    assert replica().load_private(tmp_path / "private.pt")
    peer.keeper.close()


def test_a_slow_disk_leaves_a_snapshot_out_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.training.keeper.WAITING_BYTES_MAX", 1000)
    peer, go = Kept(tmp_path, 6), threading.Event()
    peer.keeper._submit(partial(waits, go), None)
    for step in (2, 4, 6):
        peer.plays(step)
        peer.keeper.snapshot(kept=True)
    go.set()
    peer.keeper.flush()
    peer.keeper.snapshot(kept=True)
    peer.keeper.flush()
    assert [step for step, kept in peer.told if kept] == [2, 6]
    peer.keeper.close()


class Pauses(threading.Event):
    """Tells how long somebody would have waited, and lets nobody wait."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout or 0.0)
        return True


def test_nobody_pauses_after_the_last_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was left then, so the part of a core was the least: 99 times what the last piece took, before its name."""
    for piece_bytes in (1 << 20, 100):
        monkeypatch.setattr("node.training.keeper.SNAPSHOT_PIECE_BYTES", piece_bytes)
        peer = Kept(tmp_path / str(piece_bytes), 6)
        peer.keeper._hurry = asked = Pauses()
        for step in (2, 4, 6):
            peer.plays(step)
            peer.keeper.snapshot(kept=True)
            peer.keeper._jobs.join()
        pieces = -(-peer.replica.image().total_bytes // piece_bytes)
        assert len(asked.asked) == 3 * (pieces - 1)
        peer.keeper.close()


def test_a_snapshot_that_is_known_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A joiner packed its state twice at its start."""
    peer = Kept(tmp_path, 2)
    peer.plays(2)
    peer.keeper.snapshot(kept=True)
    peer.keeper.flush()

    def never(*_: Any) -> None:
        raise AssertionError("it was computed again")

    monkeypatch.setattr(Replica, "image", never)
    peer.keeper.snapshot(kept=True)
    assert peer.told == [(2, True), (2, True)]
    assert peer.keeper.root() == peer.log.manifests[2][0].root
    peer.keeper.close()


def test_kill_at_any_moment_leaves_what_was_told(tmp_path: Path) -> None:
    """A new store on the same folder has every snapshot that the coordinator heard of."""
    peer = Kept(tmp_path, 4)
    found: list[tuple[int, bool]] = []
    peer.keeper._stored = lambda manifest, kept: found.append(
        (manifest.step, manifest.root in SnapshotStore(tmp_path / "pieces", 1 << 30).roots())
    )
    for step in (2, 4):
        peer.plays(step)
        peer.keeper.snapshot(kept=True)
        peer.keeper.flush()
    assert found == [(2, True), (4, True)]
    peer.keeper.close()


def test_an_archive_is_recorded_behind_the_training_and_can_be_replayed(tmp_path: Path) -> None:
    """Each segment begins with the state of its step, however far the replica is when it is written."""
    peer, go = Kept(tmp_path, 6), threading.Event()
    room = 4 * sum(tensor.numel() for tensor in peer.replica.state.values())
    recorder = Recorder(tmp_path / "archive", 2 * room, b"genesis", peer.replica)
    recorder.begin(peer.replica)
    recorder._segment_bytes_max = 1  # a segment for each step
    peer.keeper._submit(partial(waits, go), None)
    for step in range(1, 7):
        peer.plays(step)
        if step == 3:
            go.set()
            peer.keeper.flush()
        peer.keeper.archive(recorder, peer.log.entries[step], (), {})
    peer.keeper.flush()
    recorder.close()
    found = files.segments(tmp_path / "archive")
    assert len(found) > 1
    for segment in found:
        manifest, data = peer.log.manifests[segment.step]
        assert segment.path(files.STATE).read_bytes() == data
        assert segment.path(files.MANIFEST).read_bytes() == manifest.encoded
    assert head_of(found[-1]) == 6
    peer.keeper.close()


@pytest.mark.parametrize(("kept", "left"), [(2, [6, 8]), (3, [4, 6, 8])])
def test_the_newest_snapshots_stay_as_many_as_the_person_wants(tmp_path: Path, kept: int, left: list[int]) -> None:
    peer = Kept(tmp_path, 8)
    peer.keeper = Keeper(
        peer.replica, peer.store, tmp_path / "private.pt", peer.tell, structlog.get_logger(), snapshots_kept=kept
    )
    for step in (2, 4, 6, 8):
        peer.plays(step)
        peer.keeper.snapshot(kept=True)
    peer.keeper.flush()
    peer.keeper.close()
    assert [manifest.step for manifest in peer.store.manifests()] == left
    assert [step for step, stored in peer.told if not stored] == [step for step in (2, 4, 6) if step not in left]
