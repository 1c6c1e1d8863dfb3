"""A disk that does not take what is written is the operator's matter: one clear error instead of a traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protos.errors import OperatorError


class DiskError(OperatorError):
    """The disk is full, read-only or gone. Whatever was written whole before is still good."""


def check_no_folder(path: Path) -> None:
    """Where only files belong. Raises OperatorError for a folder, which this program neither reads nor removes."""
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
