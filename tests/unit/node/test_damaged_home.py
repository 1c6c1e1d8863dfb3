"""A peer's home in which something is not what this program left there: named, with what to do, or done without."""

import hashlib
import os
from pathlib import Path

import pytest

from node.blobs.payloads import Payloads
from node.link.coordinators import Coordinators
from node.snapshot.store import SnapshotStore
from node.swarm.publication import LastAnnouncement
from node.training.telemetry import StepLog
from protos.errors import OperatorError
from protos.identity import Identity

INVITED = ("127.0.0.1:7700",)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b"\xff\xfe", b"", b"{", b'{"a": 1}', b"[1, null, []]", b'["' + b"x" * 10_000 + b'"]', b"\0"],
)
def test_garbage_instead_of_the_coordinators_addresses_is_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "coordinators.json"
    file.write_bytes(content)
    assert Coordinators(INVITED, file).addresses == INVITED


def test_a_folder_instead_of_the_coordinators_addresses_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "coordinators.json").mkdir()
    known = Coordinators(INVITED, tmp_path / "coordinators.json")
    known.learn(["192.0.2.1:7700"])
    assert known.addresses == ("192.0.2.1:7700", *INVITED)


def test_folders_where_files_belong_are_named(tmp_path: Path) -> None:
    piece, payload = tmp_path / "pieces" / ("0" * 64), tmp_path / "payloads" / f"1-{'0' * 64}"
    for folder in (piece, payload, tmp_path / "run" / "announced"):
        folder.mkdir(parents=True)
    openings = {
        piece: lambda: SnapshotStore(tmp_path / "pieces", 1 << 20),
        payload: lambda: Payloads(tmp_path / "payloads"),
        tmp_path / "run" / "announced": lambda: LastAnnouncement(tmp_path / "run", bytes(32), bytes(32)),
    }
    for path, opening in openings.items():
        with pytest.raises(OperatorError, match="is a folder, and a file belongs there: move it away") as caught:
            opening()
        assert str(path) in str(caught.value)


def test_files_where_folders_belong_are_named(tmp_path: Path) -> None:
    (tmp_path / "pieces").touch()
    (tmp_path / "payloads").touch()
    (tmp_path / "steps.jsonl").mkdir()
    for name, opening in {
        "pieces": lambda: SnapshotStore(tmp_path / "pieces", 1 << 20),
        "payloads": lambda: Payloads(tmp_path / "payloads"),
        "steps.jsonl": lambda: StepLog(tmp_path / "steps.jsonl"),
    }.items():
        with pytest.raises(OperatorError, match=name):
            opening()


@pytest.mark.parametrize("size", [0, 1, 40, 150])
def test_a_torn_announcement_says_what_to_do(tmp_path: Path, size: int) -> None:
    """Cut anywhere: never taken for none, or the peer could announce two payloads for one step."""
    me = Identity.from_seed(bytes(32))
    (tmp_path / "announced").write_bytes(os.urandom(size) if size else b"")
    with pytest.raises(OperatorError, match="delete it, and the peer will send no votes in the step that is open"):
        LastAnnouncement(tmp_path, hashlib.sha256(b"run").digest(), me.public_key)
