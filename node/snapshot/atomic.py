"""Files that are there whole or not at all, whenever the process or the machine dies. Knows no content."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from protos.disk import sync_folder, writing


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
