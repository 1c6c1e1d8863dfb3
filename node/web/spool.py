"""The signed entries of one log by step, in a temporary file: browsers get the same bytes that the coordinator signed.

The file is a row of records: a u32 length (big endian) and the envelope. The spool knows no contents; the caller verifies.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from typing import Final

from protos.errors import OperatorError

LENGTH_BYTES: Final = 4
PAGE_ENTRIES_MAX: Final = 512
PAGE_BYTES_MAX: Final = 1 << 20
SPOOL_BYTES_MAX: Final = 8 << 30


class SpoolFullError(Exception):
    """The log is longer than this process keeps, or the disk of the temporary folder is full."""


class Spool:
    """Envelopes of the steps 1, 2, 3 ... in order. OperatorError without a temporary folder."""

    def __init__(self, bytes_max: int = SPOOL_BYTES_MAX) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="swarmentum-web-")  # noqa: SIM115 - `close` closes it
        except OSError as error:
            text = f"the page has no temporary folder to keep the log in ({error.strerror}); TMPDIR names another"
            raise OperatorError(text) from error
        self._ends = array("Q", [0])
        self._bytes_max = bytes_max

    @property
    def head(self) -> int:
        """The last step; 0 if the spool is empty."""
        return len(self._ends) - 1

    @property
    def total_bytes(self) -> int:
        """Bytes of all records."""
        return self._ends[-1]

    def append(self, envelope: bytes) -> None:
        """Keep the envelope of the next step. Raises SpoolFullError, and keeps nothing of this envelope then."""
        end = self._ends[-1] + LENGTH_BYTES + len(envelope)
        if end > self._bytes_max:
            raise SpoolFullError(f"the log is longer than {self._bytes_max} bytes, the most that the page keeps")
        record = len(envelope).to_bytes(LENGTH_BYTES, "big") + envelope
        try:
            written = os.pwrite(self._file.fileno(), record, self._ends[-1])
        except OSError as error:
            raise SpoolFullError(f"the temporary folder cannot hold the log: {error.strerror}") from error
        if written != len(record):
            raise SpoolFullError("the temporary folder is full, and cannot hold the log")
        self._ends.append(end)

    def page(self, first: int) -> tuple[bytes, int, bool]:
        """Records from step `first` on: their bytes, the last step among them, and whether the page is as long as a page gets.

        A page that is not full may grow. `first` is at least 1. Without such steps the page is empty.
        """
        last = min(self.head, first + PAGE_ENTRIES_MAX - 1)
        if first > last:
            return b"", first - 1, False
        begin, fits = self._ends[first - 1], last
        while fits > first and self._ends[fits] - begin > PAGE_BYTES_MAX:
            fits -= 1
        full = fits < last or fits - first + 1 == PAGE_ENTRIES_MAX
        return os.pread(self._file.fileno(), self._ends[fits] - begin, begin), fits, full

    def close(self) -> None:
        """Delete the file."""
        self._file.close()
