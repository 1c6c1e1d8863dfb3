"""Durable writes: a file is there whole or not at all, whenever the process or the machine dies. Knows no content.

A disk that refuses a write is the operator's matter: one clear error instead of a traceback.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from mmap import ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import BinaryIO, Final

from protos.errors import OperatorError
from protos.text import printable

PLAIN_MODE: Final = 0o666
"""Of most files, before the umask."""
PRIVATE_MODE: Final = 0o400
"""Of private keys: the owner alone reads them, and nobody writes them again."""
SYNC_BYTES: Final = 16 << 20
"""Bytes of a large file between two syncs: a small file's sync waits for the bytes that are under way on the same disk."""

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that is full, or of a quota that is used up."""


class DiskError(OperatorError):
    """The disk is full, read-only or gone. Files that were written before are still good."""


def check_no_folder(path: Path) -> None:
    """Raises OperatorError if a folder is at the place of a file. This program neither reads nor removes it."""
    if path.is_dir() and not path.is_symlink():
        raise OperatorError(f"{path} is a folder, and a file belongs there: move it away, and start again")


def at_home(path: str | Path) -> Path:
    """`path`, in which `~` is a user's home folder. OperatorError if there is none: a container may run as any number.

    Absolute: a program with a peer in it may change its working folder.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise OperatorError(f"{path}: this user has no home folder; set HOME, or give a whole path (--home)") from error


def with_tilde(path: str) -> str:
    """`path`, in which the user's home folder is `~`."""
    with suppress(RuntimeError):
        home = str(Path.home())
        return f"~{path.removeprefix(home)}" if path.startswith(f"{home}/") else path
    return path


def path_problem(path: Path) -> str | None:
    """Why there can be no folder at `path`; None if there can. Safetensors and SQLAlchemy take paths in UTF-8 alone."""
    try:
        os.fspath(path.absolute()).encode()
    except UnicodeEncodeError:
        return f"{printable(str(path))} is no path in UTF-8, and libraries need one: name another folder"
    there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    return None if there.is_dir() else f"{there} is no folder: name another one, or move it away"


def sync_file(file: BinaryIO) -> None:
    """Put what was written to an open file on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_files(folder: Path) -> None:
    """Put the files of a folder on the disk, which somebody else wrote."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Put the folder's own entries on the disk: a rename alone may be lost with the power."""
    with _opened(folder) as handle:
        os.fsync(handle)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Failures to write at or below `path` become DiskError."""
    try:
        yield
    except OSError as error:
        few = error.errno in (errno.EMFILE, errno.ENFILE)
        todo = "allow more open files (`ulimit -n 1024`)" if few else "make room or give another folder"
        raise DiskError(
            f"{path} cannot be written: {error.strerror or error}; {todo}, and start again: nothing that was there is lost"
        ) from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill. It becomes `folder`, which is new or empty, when the block ends, and nothing is left if that fails.

    Raises OperatorError for a folder that has files, DiskError.
    """
    if (why := path_problem(folder)) is not None:
        raise OperatorError(why)
    whole = folder.absolute()
    there = whole.exists()  # perhaps a mount, which no rename replaces
    beside, prefix = (whole, ".new-") if there else (whole.parent, f".{whole.name}.new-")
    remove_killed(beside, prefix)
    if there and any(whole.iterdir()):
        raise OperatorError(f"{folder} is not empty: give a new or an empty folder, or move what is there away")
    with writing(folder), begun_folder(beside, prefix) as fresh:
        yield fresh
        if there:
            for path in sorted(fresh.iterdir()):
                path.rename(whole / path.name)
        else:
            fresh.rename(whole)


@contextmanager
def begun_folder(beside: Path, prefix: str) -> Iterator[Path]:
    """A folder of this process to fill and to rename, below `beside`; it is gone after the block, if no rename took it.

    Raises OSError.
    """
    fresh = beside / f"{prefix}{os.getpid()}"
    try:
        fresh.mkdir(parents=True)
        with _opened(fresh) as handle:
            with suppress(OSError):  # a disk that locks nothing: then nobody removes it, either
                fcntl.flock(handle, fcntl.LOCK_SH)
            yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def temporary_folder(prefix: str) -> tuple[Path, Callable[[], None]]:
    """A folder that only this user reads, and what removes it. After a kill the next call on this machine with this
    `prefix` does.

    Raises OSError.
    """
    beside = Path(tempfile.gettempdir())
    prefix += (
        f"{zlib.crc32(os.uname().nodename.encode())}-"  # some disks of several machines lock on each machine alone
    )
    remove_killed(beside, prefix)
    while True:
        folder = beside / f"{prefix}{secrets.randbits(40)}"
        folder.mkdir(0o700)
        with suppress(FileNotFoundError):  # another process took it for one that was left, before the lock
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_SH)
            if folder.exists():
                return folder, partial(_remove, folder, handle)
            os.close(handle)


def _remove(folder: Path, handle: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)


def remove_killed(beside: Path, prefix: str) -> None:
    """Remove the folders that processes began to fill and were killed. A folder that is still locked is somebody's."""
    with suppress(OSError):  # `beside` is not there, or may not be read
        for path in list(beside.iterdir()):
            if path.name.startswith(prefix) and path.name.removeprefix(prefix).isdecimal():
                with suppress(OSError), _opened(path) as handle:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)


def remove_at_end(path: Path) -> None:
    """Remove a file that told others of this process; a disk that has become read-only keeps it, and is told elsewhere."""
    with suppress(OSError):
        path.unlink()


def remove_left(path: Path) -> None:
    """Remove what is left of a write, if the disk lets it: a failure of the write itself is what people should hear of."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def replace_file(
    path: Path, temporary: Path, write: Callable[[BinaryIO], object], *, mode: int = PLAIN_MODE, synced: bool = True
) -> None:
    """Write `temporary` (in the same folder), then give it the name `path`: the one definition of a durable write.

    Both are on the disk when this returns. Without `synced`, a loss of power may cost the file, and a kill may not. Raises
    OSError, the old `path` untouched: for callers whose error says what is lost. The others use `write_atomic`.
    """
    assert temporary.parent == path.parent, "a rename is atomic within a folder"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            if synced:
                sync_file(file)
        temporary.replace(path)
    except BaseException:
        remove_left(temporary)
        raise
    if synced:
        sync_folder(path.parent)


def replace_bytes(path: Path, data: bytes, *, mode: int = PLAIN_MODE, synced: bool = True) -> None:
    """`replace_file` of a few bytes, also where several processes write the same file. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    if mode == PRIVATE_MODE:
        temporary.unlink(missing_ok=True)  # a process that died left it, and nobody may write to it
    replace_file(path, temporary, lambda file: file.write(data), mode=mode, synced=synced)


def write_atomic(path: Path, temporary: Path, write: Callable[[BinaryIO], object]) -> None:
    """`replace_file`, synced. Raises DiskError."""
    with writing(path):
        replace_file(path, temporary, write)


def write_bytes(path: Path, data: bytes) -> None:
    """`write_atomic` of a few bytes, in the folder of `path`. Raises DiskError."""
    write_atomic(path, path.with_name(f".{path.name}.new"), lambda file: file.write(data))


def write_synced(file: BinaryIO, pieces: Iterable[bytes], *, there: bool = False) -> Iterator[bytes]:
    """Write `pieces` one after the other, sync them every SYNC_BYTES, and give each back. The caller syncs the last ones.
    `there`: the file, open to read and write, has them already."""
    start = end = 0
    for piece in pieces:
        end += len(piece)
        if not there:
            file.write(piece)
        if end - start >= SYNC_BYTES:
            if not (there and _sync_part(file, start, end)):
                sync_file(file)
            start = end - end % ALLOCATIONGRANULARITY
        yield piece


def _sync_part(file: BinaryIO, start: int, end: int) -> bool:
    """Sync some bytes of a file: a sync of the file would wait for all of it. False on a disk that maps no files."""
    try:
        part = mmap(file.fileno(), end - start, offset=start)
    except OSError:
        return False
    with part:
        part.flush()
    return True
