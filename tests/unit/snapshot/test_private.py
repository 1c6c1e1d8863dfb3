"""The private state on a disk that has no more room: one kind of error, and the old file stays."""

import hashlib
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.snapshot.private import MAGIC, PrivateState, PrivateStateError, load_private, save_private
from protos.disk import DiskError

RUN, LAYOUT = b"r" * 32, b"l" * 32


@pytest.mark.parametrize("room", [0, 100, 4_000, 100_000, 399_999, 400_300])
def test_a_disk_that_is_full_anywhere_in_the_file_is_a_clear_error(tmp_path: Path, room: int) -> None:
    """It ended a peer with a traceback."""
    path = tmp_path / "run" / "private.pt"
    old = PrivateState(RUN, LAYOUT, 1, {"momentum": torch.zeros(8)})
    save_private(old, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (room, before[1])
    )  # Python ignores SIGXFSZ: a write fails, as on a full disk
    try:
        with pytest.raises(DiskError, match=r"private.pt cannot be written: File too large; make room"):
            save_private(PrivateState(RUN, LAYOUT, 2, {"momentum": torch.ones(100_000)}), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = load_private(path, RUN, LAYOUT)
    assert kept.step == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["private.pt"]


def saved(path: Path) -> bytes:
    momentum = torch.arange(2_000, dtype=torch.float32)
    save_private(PrivateState(RUN, LAYOUT, 7, {"momentum": momentum}, {"published_step": 7}), path)
    return path.read_bytes()


def damaged(data: bytes) -> Iterator[bytes]:
    """Cuts, flipped bits and zeroed pages, all over the file."""
    for at in range(0, len(data), 97):
        yield data[:at]
        yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        if any(data[at : at + 512]):
            yield data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]
    yield data + b"x"


def test_no_damage_is_ever_taken_for_momentum(tmp_path: Path) -> None:
    """Of such copies 1,094 of 2,112 were loaded as other numbers, and a few ended the peer with a KeyError at each start."""
    path = tmp_path / "private.pt"
    data = saved(path)
    state = load_private(path, RUN, LAYOUT)
    assert torch.equal(state.optimizer["momentum"], torch.arange(2_000, dtype=torch.float32))
    copies = list(damaged(data))
    assert len(copies) > 250
    for copy in copies:
        path.write_bytes(copy)
        with pytest.raises(PrivateStateError, match=r"private.pt is (damaged|of an older)"):
            load_private(path, RUN, LAYOUT)


def test_a_file_of_an_older_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "private.pt"
    torch.save({"format": "swarmentum private state 2", "run_id": RUN}, path)
    with pytest.raises(PrivateStateError, match="of another version"):
        load_private(path, RUN, LAYOUT)


@pytest.mark.parametrize(
    "content", [b"", b"junk", pickle.dumps(Path("x"), 2), b"PK\x03\x04", b"PK\x05\x06" + bytes(18)]
)
def test_what_has_its_hash_and_is_no_state_is_refused_too(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "private.pt"
    path.write_bytes(MAGIC + hashlib.sha256(content).digest() + content)
    with pytest.raises(PrivateStateError):
        load_private(path, RUN, LAYOUT)


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "private.pt").mkdir()
    with pytest.raises(PrivateStateError):
        load_private(tmp_path / "private.pt", RUN, LAYOUT)
