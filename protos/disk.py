"""Durable writes: a file is there whole or not at all, whenever the process or the machine dies. Knows no content.

A disk that refuses a write is the operator's matter: one clear error instead of a traceback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from protos.errors import OperatorError


class DiskError(OperatorError):
    """The disk is full, read-only or gone. Files that were written before are still good."""


def check_no_folder(path: Path) -> None:
    """Raises OperatorError if a folder is at the place of a file. This program neither reads nor removes it."""
    if path.is_dir() and not path.is_symlink():
        raise OperatorError(f"{path} is a folder, and a file belongs there: move it away, and start again")


def sync_folder(folder: Path) -> None:
    """Put the folder's own entries on the disk: a rename alone may be lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Failures to write at or below `path` become DiskError."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{path} cannot be written: {error.strerror or error}; make room or give another folder, and start again: "
            "nothing that was there is lost"
        ) from error


def write_atomic(path: Path, temporary: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write `temporary` (in the same folder), then give it the name `path`; both are on the disk when this returns.

    Raises DiskError, the old `path` untouched.
    """
    assert temporary.parent == path.parent, "a rename is atomic within a folder"
    with writing(path):
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """`write_atomic` of a few bytes, in the folder of `path`. Raises DiskError."""
    write_atomic(path, path.with_name(f".{path.name}.new"), lambda file: file.write(data))
