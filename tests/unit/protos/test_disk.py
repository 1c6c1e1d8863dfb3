"""Durable writes: what is on the disk at which moment, who may read it, and what a failure leaves."""

import errno
import os
import resource
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest
from pydantic import ValidationError

from coordinator.config import CoordinatorSettings
from node.config import PeerSettings
from protos import disk
from protos.disk import PRIVATE_MODE, DiskError, new_folder, path_problem, replace_bytes, replace_file
from protos.errors import OperatorError


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened to the disk, in order; it happens, too."""
    done: list[str] = []
    sync_file, sync_folder, replace = disk.sync_file, disk.sync_folder, Path.replace

    def file_synced(file: BinaryIO) -> None:
        done.append("file")
        sync_file(file)

    def folder_synced(folder: Path) -> None:
        done.append("folder")
        sync_folder(folder)

    def named(path: Path, target: Path) -> Path:
        done.append("name")
        return replace(path, target)

    monkeypatch.setattr(disk, "sync_file", file_synced)
    monkeypatch.setattr(disk, "sync_folder", folder_synced)
    monkeypatch.setattr(Path, "replace", named)
    return done


def test_a_file_is_synced_before_it_has_its_name_and_the_name_after(tmp_path: Path, order: list[str]) -> None:
    replace_bytes(tmp_path / "f", b"content")
    assert order == ["file", "name", "folder"]
    assert (tmp_path / "f").read_bytes() == b"content"


def test_what_need_not_outlive_the_power_costs_no_sync(tmp_path: Path, order: list[str]) -> None:
    replace_bytes(tmp_path / "f", b"content", synced=False)
    assert order == ["name"]
    assert (tmp_path / "f").read_bytes() == b"content"


def test_the_owner_alone_reads_a_private_file_from_its_first_byte(tmp_path: Path) -> None:
    modes: list[int] = []

    def write(file: BinaryIO) -> None:
        modes.append(stat.S_IMODE((tmp_path / ".f").stat().st_mode))
        file.write(b"key")

    replace_file(tmp_path / "f", tmp_path / ".f", write, mode=PRIVATE_MODE)
    assert modes == [0o400]
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o400


def test_a_private_file_replaces_what_a_dead_process_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 7)
    left = tmp_path / ".f.7"
    left.write_bytes(b"half of a longer key")
    left.chmod(0o644)
    for data in (b"first", b"second"):
        replace_bytes(tmp_path / "f", data, mode=PRIVATE_MODE)
        assert (tmp_path / "f").read_bytes() == data
        assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o400, "not the mode of what was left"
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]


def test_a_failure_is_the_callers_to_name_and_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")

    def fail(file: BinaryIO) -> None:
        file.write(b"new")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as found:
        replace_file(tmp_path / "f", tmp_path / ".f", fail)
    assert type(found.value) is OSError, "not a DiskError"
    assert (tmp_path / "f").read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]


@pytest.mark.parametrize("there", [False, True])
def test_a_large_file_is_synced_in_parts_whether_its_bytes_are_there_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(disk, "SYNC_BYTES", 10_000)
    path, pieces = tmp_path / "f", [bytes([number]) * 3000 for number in range(10)]
    path.write_bytes(b"".join(pieces) if there else b"")
    with path.open("r+b" if there else "wb") as file:
        assert list(disk.write_synced(file, pieces, there=there)) == pieces
    assert path.read_bytes() == b"".join(pieces)


def test_a_disk_that_maps_no_files_is_synced_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home on such a disk ended its peer at its first snapshot. Here the map is refused because the file is read only."""
    monkeypatch.setattr(disk, "SYNC_BYTES", 3000)
    (tmp_path / "f").write_bytes(bytes(9000))
    with (tmp_path / "f").open("rb") as file:
        assert list(disk.write_synced(file, [bytes(4000), bytes(5000)], there=True)) == [bytes(4000), bytes(5000)]


@pytest.mark.parametrize("there", [False, True])
def test_a_new_folder_is_there_whole_or_not_at_all(there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    if there:
        folder.mkdir()  # as a mount is

    def half() -> None:
        with new_folder(folder) as fresh:
            (fresh / "index.html").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskError, match="No space left"):
        half()
    assert [path.name for path in tmp_path.rglob("*")] == (["page"] if there else [])
    with new_folder(folder) as fresh:
        (fresh / "data").mkdir()
        (fresh / "data" / "log").write_text("log")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {"data", "data/log"}
    with pytest.raises(OperatorError, match="is not empty"), new_folder(folder):
        pass


@pytest.mark.parametrize("there", [False, True])
def test_a_new_folder_takes_the_place_of_one_whose_process_was_killed(there: bool, tmp_path: Path) -> None:
    """What a killed export left in an empty folder made the folder "not empty" for its repeat."""
    folder = tmp_path / "page"
    folder.mkdir()
    left = folder / ".new-123" if there else tmp_path / ".page.new-123"
    (left / "data").mkdir(parents=True)
    if not there:
        folder.rmdir()
    with new_folder(folder) as fresh:
        (fresh / "index.html").write_text("whole")
        if there:  # a second process does not remove it
            with pytest.raises(OperatorError, match="is not empty"), new_folder(folder):
                pass
    assert {path.name for path in tmp_path.rglob("*")} == {"page", "index.html"}


def test_a_temporary_folder_is_removed_by_a_later_process_if_its_own_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The homes of each killed `swarmentum.local` stayed in /tmp for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = "import os; from protos.disk import temporary_folder; temporary_folder('run-'); os.kill(os.getpid(), 9)"
    subprocess.run(
        [sys.executable, "-c", killed], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False, timeout=240
    )
    [left] = tmp_path.iterdir()
    machine = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((machine.sysname, "another", *machine[2:])))
    other, remove = disk.temporary_folder("run-")
    os.close(remove.args[1])  # type: ignore[attr-defined] # as where that machine's lock is not seen
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert {*tmp_path.iterdir()} == {left, other}
    first, remove = disk.temporary_folder("run-")
    second, _ = disk.temporary_folder("run-")
    assert {*tmp_path.iterdir()} == {first, second, other}
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    remove()
    assert set(tmp_path.iterdir()) == {second, other}
    opened, mkdir = os.open, Path.mkdir

    def late(path: Path, *given: int) -> int:
        monkeypatch.undo()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        disk.remove_killed(tmp_path, path.name.rstrip("0123456789"))  # another process, before this one holds its lock
        return opened(path, *given)

    def made(folder: Path, mode: int) -> None:
        mkdir(folder, mode)
        monkeypatch.setattr(os, "open", late)

    monkeypatch.setattr(Path, "mkdir", made)
    third, _ = disk.temporary_folder("run-")
    assert set(tmp_path.iterdir()) == {second, third, other}


def test_too_few_open_files_are_no_lack_of_room(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(DiskError, match="Too many open files; allow more"), disk.writing(tmp_path):
            (tmp_path / "file").touch()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_there_is_no_folder_below_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert path_problem(tmp_path / "new" / "home") is None
    for place, named in ((file, file), (file / "home", file), (tmp_path / "nowhere", tmp_path / "nowhere")):
        assert str(path_problem(place)).startswith(f"{named} is no folder")
    with pytest.raises(OperatorError, match="is no folder"), new_folder(file / "page"):
        pass


def test_a_user_without_a_home_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a number that has no name: each command ended with a traceback, `version` too."""

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    assert disk.with_tilde(f"{Path.home()}/peer") == "~/peer"
    assert disk.at_home("~/peer") == Path.home() / "peer"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(OperatorError, match=r"~/peer: this user has no home folder; set HOME"):
        disk.at_home("~/peer")
    assert disk.at_home("/a/peer") == Path("/a/peer")
    assert disk.with_tilde("/root/peer") == "/root/peer"
    for settings in (PeerSettings, CoordinatorSettings):
        assert settings(home=Path("/a/peer")).home == Path("/a/peer")
        with pytest.raises(ValidationError, match="this user has no home folder"):
            settings()


def test_a_tilde_of_an_environment_is_the_home_folder() -> None:
    """A unit of systemd passes it on as it is: a coordinator made a folder of that name."""
    assert CoordinatorSettings(home=Path("~/c")).home == PeerSettings(home=Path("~/c")).home == Path.home() / "c"


def test_a_home_stays_where_it_is_in_a_program_that_changes_its_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`swarmentum.join(home="./mine")`, then `os.chdir`: the momentum went into another folder, and the peer ended."""
    monkeypatch.chdir(tmp_path)
    for settings in (PeerSettings, CoordinatorSettings):
        assert settings(home=Path("mine")).home == tmp_path / "mine"
