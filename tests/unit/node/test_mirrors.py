"""Snapshots in mirrors: an anchor's copies, and a download from mirrors beside peers, of whom some lie, end early or are away.

Stores, folders, HTTP servers and files are real. The swarm is a stand-in that has some pieces.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog

from node.mirror import snapshot_mirrors
from node.mirror.mirror_places import TEMPORARY, BucketPlace, FolderPlace, place_at
from node.mirror.snapshot_mirrors import (
    MANIFEST,
    STATE,
    MirrorReader,
    MirrorWriter,
    file_name,
    folder_of_run,
    reader_of,
    writer_to,
)
from node.snapshot.pieces import SnapshotManifest, describe, iterate_pieces
from node.snapshot.store import SnapshotStore
from node.swarm.facts import Snapshot
from node.training import sync
from node.training.sync import fetch_manifest, fetch_pieces, manifest_bytes
from protos.errors import NetworkError, OperatorError, StoppedError
from tests.system.local_swarm import wait_for
from tests.system.web_folder import WebFolder
from tests.unit.memory_bucket import memory_bucket

RUN = bytes(range(32))
HOLDERS = (b"h" * 32,)
PIECE = 1000
PIECES = 200
"""More than one row of a mirror."""
LOG = structlog.get_logger()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "RETRY_SECONDS", 0.01)


class Peers:
    """The swarm's peers, who have some pieces, and count what they are asked for."""

    def __init__(self, pieces: dict[bytes, bytes] | None = None) -> None:
        self.pieces, self.gave, self.asked = pieces or {}, 0, 0
        self.before: Callable[[], None] = lambda: None

    def fetch(self, sha256: bytes, size: int, holders: Sequence[bytes]) -> bytes:
        self.asked += 1
        self.before()
        if sha256 not in self.pieces:
            raise NetworkError("nobody to ask")
        self.gave += 1
        return self.pieces[sha256]


class States:
    """Snapshots of a run in an anchor's store."""

    def __init__(self, folder: Path) -> None:
        self.store = SnapshotStore(folder / "anchor", 1 << 30)
        self.data: dict[int, bytes] = {}
        self.manifests: dict[int, SnapshotManifest] = {}

    def reaches(self, step: int) -> SnapshotManifest:
        data = random.Random(step).randbytes(PIECE * PIECES - 7)
        about: dict[str, Any] = {"run_id": RUN, "step": step, "entry_hash": RUN, "layout_digest": RUN}
        manifest = describe(data, piece_bytes=PIECE, **about)
        self.store.write(iterate_pieces(data, PIECE), len(data), lambda hashes: manifest)
        self.data[step], self.manifests[step] = data, manifest
        return manifest

    def pieces(self, step: int) -> dict[bytes, bytes]:
        manifest = self.manifests[step]
        return dict(zip(manifest.piece_hashes, iterate_pieces(self.data[step], PIECE), strict=True))


@pytest.fixture
def states(tmp_path: Path) -> States:
    return States(tmp_path)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[WebFolder]:
    made = WebFolder(tmp_path / "mirror")
    yield made
    made.close()


def copied(states: States, mirror: Path, *steps: int, kept: int = 2) -> Path:
    """The folder of the run in the mirror, once the writer has copied these snapshots."""
    writer = writer_to(str(mirror), RUN, states.store, kept, LOG)
    for step in steps:
        root = states.reaches(step).root
        writer.agreed(step, root, root)
        manifest = mirror / folder_of_run(RUN) / file_name(step, root, MANIFEST)
        wait_for(f"the copy of step {step}", manifest.exists, 240)
    writer.close()
    return mirror / folder_of_run(RUN)


def reader(*addresses: str) -> MirrorReader:
    made = reader_of(addresses, None, RUN, LOG, lambda size: None, trusted=True)
    assert made is not None
    return made


def downloads(
    folder: Path, states: States, step: int, peers: Peers, mirrors: MirrorReader | None, progress: Any = lambda *_: None
) -> bytes:
    """The state that a joiner has on its disk then."""
    store, manifest = SnapshotStore(folder / "joiner", 1 << 30), states.manifests[step]
    snapshot = Snapshot(step, manifest.root, manifest.total_bytes, HOLDERS)
    fetch_pieces(peers, store, manifest, snapshot, progress, mirrors=mirrors)  # type: ignore[arg-type]
    return store.file(manifest.root).read_bytes()


def test_an_anchor_copies_agreed_snapshots_and_keeps_the_newest(states: States, tmp_path: Path) -> None:
    folder = copied(states, tmp_path / "mirror", 10, 20, 30)
    names = sorted(path.name for path in folder.iterdir())
    wanted = [file_name(step, states.manifests[step].root, kind) for step in (20, 30) for kind in (MANIFEST, STATE)]
    assert names == sorted(wanted)
    assert (folder / file_name(30, states.manifests[30].root, STATE)).read_bytes() == states.data[30]


def test_a_copy_that_is_there_is_not_written_again(states: States, tmp_path: Path) -> None:
    state = copied(states, tmp_path / "mirror", 10) / file_name(10, states.manifests[10].root, STATE)
    before = state.stat().st_ino
    copied(states, tmp_path / "mirror", 10, 20)
    assert state.stat().st_ino == before


def test_a_mirror_that_fails_stops_nobody_and_is_tried_again(
    states: States, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mirror").write_text("a file where the folder should be")
    writer = writer_to(str(tmp_path / "mirror"), RUN, states.store, 2, LOG)
    root = states.reaches(10).root
    writer.agreed(10, root, root)
    wait_for("a line in the log", lambda: "snapshot not copied" in capsys.readouterr().out, 240)
    (tmp_path / "mirror").unlink()
    writer.agreed(10, root, root)
    wait_for("the copy", (tmp_path / "mirror" / folder_of_run(RUN) / file_name(10, root, MANIFEST)).exists, 240)
    writer.close()


def test_the_newest_snapshot_goes_before_those_that_wait(states: States, tmp_path: Path) -> None:
    """A mirror slower than the snapshots leaves some out; it never has a list of them."""
    first, go = threading.Event(), threading.Event()

    class Slow(FolderPlace):
        def write(self, name: str, blocks: Any) -> None:
            first.set()
            assert go.wait(240)
            super().write(name, blocks)

    writer = MirrorWriter(Slow(str(tmp_path / "mirror"), "run"), states.store, 5, LOG)
    for step in (10, 20, 30):
        root = states.reaches(step).root
        writer.agreed(step, root, root)
        assert first.wait(240)
    go.set()
    wait_for("the newest", (tmp_path / "mirror/run" / file_name(30, states.manifests[30].root, MANIFEST)).exists, 240)
    writer.close()
    assert not list((tmp_path / "mirror/run").glob(f"{20:012d}-*"))


def test_a_rotten_piece_of_the_anchor_is_not_copied(
    states: States, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = states.reaches(10).root
    with states.store.file(root).open("r+b") as file:
        file.write(b"rot")
    writer = writer_to(str(tmp_path / "mirror"), RUN, states.store, 2, LOG)
    writer.agreed(10, root, root)
    wait_for("a line in the log", lambda: "piece 0 is not what the manifest says" in capsys.readouterr().out, 240)
    writer.close()
    assert not [path for path in tmp_path.joinpath("mirror").rglob("*") if path.is_file()]


def test_nobody_writes_to_a_web_address(states: States) -> None:
    with pytest.raises(OperatorError, match="name the folder or the bucket behind it"):
        writer_to("https://example.org/states", RUN, states.store, 2, LOG)


def test_a_joiner_takes_all_from_a_mirror_if_no_peer_is_there(
    states: States, served: WebFolder, tmp_path: Path
) -> None:
    copied(states, tmp_path / "mirror", 10)
    mirrors, manifest = reader(served.url), states.manifests[10]
    snapshot = Snapshot(10, manifest.root, manifest.total_bytes, HOLDERS)
    assert mirrors.manifest(10, manifest.root, len(manifest.encoded)) == manifest.encoded
    told: list[tuple[int, int]] = []
    assert downloads(tmp_path, states, 10, Peers(), mirrors, lambda *it: told.append(it)) == states.data[10]
    assert told[-1] == (manifest.total_bytes, manifest.total_bytes)
    assert sorted(done for done, _ in told) == [done for done, _ in told]
    with pytest.raises(NetworkError):
        fetch_manifest(Peers(), snapshot, reader(served.url + "/elsewhere"), 10)  # type: ignore[arg-type]


def test_peers_and_a_mirror_share_the_pieces(states: States, served: WebFolder, tmp_path: Path) -> None:
    copied(states, tmp_path / "mirror", 10)
    peers, mirrors = Peers(states.pieces(10)), reader(served.url)
    peers.before = lambda: wait_for("the mirror", lambda: mirrors.received, 240) and None
    assert downloads(tmp_path, states, 10, peers, mirrors) == states.data[10]
    assert mirrors.received
    assert peers.gave


def test_a_lie_costs_a_retry_and_the_peers_give_that_piece(states: States, served: WebFolder, tmp_path: Path) -> None:
    copied(states, tmp_path / "mirror", 10)
    served.lies = {150 * PIECE}
    wrong = states.manifests[10].piece_hashes[150]
    peers, mirrors = Peers({wrong: states.pieces(10)[wrong]}), reader(served.url)
    with pytest.raises(NetworkError):
        downloads(tmp_path, states, 10, peers, mirrors)  # peers lack the others, and are asked no more
    assert mirrors.wrong == {150}
    # what came before stays, and the peers have what is missing
    assert downloads(tmp_path, states, 10, peers, None) == states.data[10]
    assert peers.gave == 1


def test_a_mirror_that_lies_all_the_time_is_left_out(states: States, served: WebFolder, tmp_path: Path) -> None:
    copied(states, tmp_path / "mirror", 10)
    served.lies = set(range(0, PIECE * PIECES - 7, PIECE))
    mirrors = reader(served.url)
    assert downloads(tmp_path, states, 10, Peers(states.pieces(10)), mirrors) == states.data[10]
    assert len([path for path, _ in served.asked if path.endswith(STATE)]) <= 3


def test_the_second_mirror_has_what_the_first_one_lacks(states: States, served: WebFolder, tmp_path: Path) -> None:
    folder = copied(states, tmp_path / "mirror", 10)
    served.ends_at = 90 * PIECE + 10  # half a mirror, that has its manifest
    (tmp_path / "second").mkdir()
    folder.rename(tmp_path / "second" / folder.name)
    folder.mkdir()
    for path in (tmp_path / "second" / folder.name).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    mirrors = reader(served.url, f"file://{tmp_path}/second")
    assert downloads(tmp_path, states, 10, Peers(), mirrors) == states.data[10]


def test_a_mirror_that_is_away_costs_its_tries_and_no_more(states: States, tmp_path: Path) -> None:
    states.reaches(10)
    mirrors = reader("http://127.0.0.1:1/nobody", str(tmp_path / "nowhere"))
    assert downloads(tmp_path, states, 10, Peers(states.pieces(10)), mirrors) == states.data[10]


def test_a_server_without_ranges_is_told(
    states: States, served: WebFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(states, tmp_path / "mirror", 10)
    served.ranges = False
    with pytest.raises(NetworkError):
        downloads(tmp_path, states, 10, Peers(), reader(served.url))
    assert "knows no byte ranges" in capsys.readouterr().out


def test_a_download_goes_on_where_it_was_broken_off(states: States, served: WebFolder, tmp_path: Path) -> None:
    copied(states, tmp_path / "mirror", 10)

    def stops(done: int, total: int) -> None:
        if done > total // 3:
            raise StoppedError("stopped")

    with pytest.raises(StoppedError):
        downloads(tmp_path, states, 10, Peers(), reader(served.url), stops)
    mirrors, told = reader(served.url), list[int]()
    assert downloads(tmp_path, states, 10, Peers(), mirrors, lambda done, _: told.append(done)) == states.data[10]
    assert told[0] > len(states.data[10]) // 3
    assert mirrors.received < len(states.data[10]) * 3 // 4


def test_a_silent_mirror_holds_up_nobody(states: States, tmp_path: Path) -> None:
    """The peers take also the piece that it is at."""
    states.reaches(10)
    release = threading.Event()

    class Silent(FolderPlace):
        def read(self, name: str, start: int, most: int, *, exactly: bool) -> Iterator[bytes]:
            yield b"x"
            release.wait(30)

    mirrors = MirrorReader([Silent(str(tmp_path), "run")], LOG, lambda size: None)
    peers = Peers(states.pieces(10))
    peers.before = lambda: wait_for("the mirror", lambda: mirrors.received, 240) and None
    try:
        assert downloads(tmp_path, states, 10, peers, mirrors) == states.data[10]
    finally:
        release.set()


def test_what_a_run_may_not_name(states: States, served: WebFolder, tmp_path: Path) -> None:
    copied(states, tmp_path / "mirror", 10)
    assert (
        reader_of([str(tmp_path / "mirror"), f"file://{tmp_path}/mirror"], None, RUN, LOG, print, trusted=False) is None
    )
    with pytest.raises(OperatorError, match="--allow-data"):
        place_at(str(tmp_path), "run", trusted=False)
    web = reader_of([served.url], None, RUN, LOG, print, trusted=False)
    root = states.manifests[10].root
    assert web.manifest(10, root, 1 << 20) is None, "an address of this machine"
    assert not served.asked
    own = reader_of([], str(tmp_path / "mirror"), RUN, LOG, lambda size: None, trusted=False)
    assert own is not None, "the person named it"
    assert own.manifest(10, root, 1 << 20) == states.manifests[10].encoded


def test_a_pipe_and_a_manifest_without_end_end_no_joiner(states: States, tmp_path: Path) -> None:
    root = states.reaches(10).root
    folder = tmp_path / "mirror" / folder_of_run(RUN)
    folder.mkdir(parents=True)
    os.mkfifo(folder / file_name(10, root, MANIFEST))
    assert reader(str(tmp_path / "mirror")).manifest(10, root, 100) is None
    (folder / file_name(10, root, MANIFEST)).unlink()
    (folder / file_name(10, root, MANIFEST)).write_bytes(states.manifests[10].encoded + b"x")
    assert reader(str(tmp_path / "mirror")).manifest(10, root, len(states.manifests[10].encoded)) is None


def test_files_that_were_begun_long_ago_go(tmp_path: Path) -> None:
    folder = FolderPlace(str(tmp_path), "run")
    folder.write("there", iter([b"x"]))
    for name, at in (("old", 0.0), ("young", 4e9)):
        (tmp_path / "run" / f"{TEMPORARY}{name}").touch()
        os.utime(tmp_path / "run" / f"{TEMPORARY}{name}", (at, at))
    assert folder.names() == ["there"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"there", f"{TEMPORARY}young"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(snapshot_mirrors, "CLOSE_SECONDS_MAX", 20.0)
    return memory_bucket()


def test_a_bucket_is_a_mirror(states: States, bucket: str, tmp_path: Path) -> None:
    place = BucketPlace(bucket, folder_of_run(RUN), "s3", trusted=True)
    writer = MirrorWriter(place, states.store, 2, LOG)
    for step in (10, 20, 30):
        root = states.reaches(step).root
        writer.agreed(step, root, root)
        wait_for("the copy", lambda: place.size(file_name(step, root, MANIFEST)), 240)  # noqa: B023 - called at once
    writer.close()
    assert len(place.names()) == 4
    mirrors = reader(bucket)
    assert mirrors.manifest(30, root, manifest_bytes(Snapshot(30, root, 1 << 30, ()))) == states.manifests[30].encoded
    assert downloads(tmp_path, states, 30, Peers(), mirrors) == states.data[30]


def test_a_copy_that_breaks_off_leaves_no_part_in_a_bucket(bucket: str) -> None:
    place = BucketPlace(bucket, "run", "s3", trusted=True)

    def breaks() -> Iterator[bytes]:
        yield b"x" * 100
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        place.write("state", breaks())
    assert place.size("state") is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(OperatorError, match=r"pip install 'swarmentum\[mirror\]'"):
        place_at("s3://bucket/states", "run", trusted=True)
