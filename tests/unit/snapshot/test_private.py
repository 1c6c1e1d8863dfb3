"""The private state on a disk that has no more room: one kind of error, and the old file stays."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from node.snapshot.private import PrivateState, load_private, save_private
from protos.disk import DiskError

RUN, LAYOUT = b"r" * 32, b"l" * 32


@pytest.mark.parametrize("room", [0, 100, 4_000, 100_000, 399_999, 400_700])
def test_a_disk_that_is_full_anywhere_in_the_file_is_a_clear_error(tmp_path: Path, room: int) -> None:
    """torch closes its archive over the write that failed, and raises an error of its own: it ended a peer with a traceback."""
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
    assert kept is not None
    assert kept.step == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["private.pt"]
