"""A peer whose disk is full leaves the run, says so once, shows it as a metric, and takes part again when there is room."""

import errno
import os
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import structlog

from node import full_disk
from node.blobs.payloads import Payloads
from node.full_disk import is_full, outlasting
from node.owner_commands import Stop
from protos.disk import DiskError, write_bytes
from protos.errors import OperatorError, SwarmentumError
from tests.unit.small_disk import fill, small_disk

ROOM = 1 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_only_a_full_disk_is_one() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = SwarmentumError("bug in the network side")
    wrapped.__cause__ = DiskError("cannot be written")
    wrapped.__cause__.__cause__ = full
    assert is_full(full)
    assert is_full(wrapped)
    assert is_full(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    assert not is_full(OSError(errno.EROFS, "Read-only file system"))
    assert not is_full(SwarmentumError("no"))
    assert not is_full(None)


def test_another_error_goes_through(tmp_path: Path) -> None:
    def take_part(first: bool) -> str:
        raise OperatorError("the run is of another format")

    with pytest.raises(OperatorError, match="another format"):
        outlasting(take_part, tmp_path, structlog.get_logger(), None)


@pytest.mark.parametrize("measured", [False, True])
def test_a_peer_waits_for_room_and_takes_part_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    """The writer of payloads is the real one, on a disk that is really full."""
    monkeypatch.setattr(full_disk, "ROOM_BYTES_MIN", ROOM)
    monkeypatch.setattr(full_disk, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(full_disk, "LOOK_SECONDS_MAX", 0.01)
    listen = f"127.0.0.1:{free_port()}" if measured else None
    seen: list[str] = []
    with small_disk(tmp_path / "disk", 4 * ROOM) as disk, structlog.testing.capture_logs() as lines:
        payloads = Payloads(disk / "payloads", 10**9)
        payloads.put(1, b"1" * 32, bytes(1000))
        filling = fill(disk)

        def makes_room() -> None:
            if listen is not None:
                seen.append(urllib.request.urlopen(f"http://{listen}/metrics", timeout=240).read().decode())
            filling.unlink()

        class Log:
            def error(self, *words: Any, **values: Any) -> None:
                structlog.get_logger().error(*words, **values)
                threading.Thread(target=makes_room).start()

            def warning(self, *words: Any, **values: Any) -> None:
                structlog.get_logger().warning(*words, **values)

        def take_part(first: bool) -> str:
            Payloads(disk / "payloads", 10**9).put(2, b"2" * 32, bytes(100_000))
            return "first" if first else "again"

        assert outlasting(take_part, disk, Log(), listen) == "again"
        said = [line for line in lines if line["log_level"] == "error"]
        assert len(said) == 1
        assert "the disk is full" in said[0]["event"]
        assert said[0]["free_bytes"] < ROOM
        assert any("has room again" in line["event"] for line in lines)
        assert all("swarmentum_disk_full 1.0" in text for text in seen)
        assert bool(seen) is measured


def test_a_peer_that_leaves_does_not_wait_for_room(tmp_path: Path) -> None:
    """Ctrl-C on a full disk: the momentum cannot be saved, and the peer waited to take part again."""
    stop, times = Stop(), 0

    def take_part(_first: bool) -> None:
        nonlocal times
        times += 1
        stop.ask()
        with small_disk(tmp_path / "disk", 4 * ROOM) as disk:
            fill(disk)
            write_bytes(disk / "private.pt", bytes(100_000))

    with structlog.testing.capture_logs() as lines, pytest.raises(DiskError, match=r"private.pt cannot be written"):
        outlasting(take_part, tmp_path, structlog.get_logger(), None, stop)
    assert (times, lines) == (1, [])


def test_a_full_disk_leaves_every_file_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 * ROOM) as disk:
        kept = disk / "announcement"
        write_bytes(kept, b"old")
        fill(disk)
        with pytest.raises(DiskError, match="cannot be written") as caught:
            write_bytes(kept, bytes(100_000))
        assert is_full(caught.value)
        assert kept.read_bytes() == b"old"
        assert sorted(path.name for path in disk.iterdir()) == ["announcement", "filling"]
