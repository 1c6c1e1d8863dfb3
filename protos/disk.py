"""A disk that does not take what is written is the operator's matter: one clear error instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protos.errors import OperatorError


class DiskError(OperatorError):
    """The disk is full, read-only or gone. Whatever was written whole before is still good."""


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
