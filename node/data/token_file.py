"""Tokens in a file, read where they are needed.

The module does not map the file. If a mapped file gets shorter, or its disk goes away, SIGBUS kills the process without an
error message. Reads are positional, so threads may share a file.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protos.errors import DataError


class FileTokens:
    """`count` tokens of `dtype` from byte `offset` of a file, which stays open: it may be renamed or removed meanwhile."""

    ndim = 1

    def __init__(self, path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> None:
        self.path, self.dtype, self._count, self._offset = path, dtype, count, offset
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"data: cannot read {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        """A run of tokens: `tokens[start:stop]`."""
        start, stop, step = part.indices(self._count)
        assert step == 1, "tokens are read in runs"
        return self._read(start, max(stop - start, 0))

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
        """The tokens from each start, [len(starts), length]."""
        found = np.empty((len(starts), length), dtype=self.dtype)
        for row, start in zip(found, starts.tolist(), strict=True):
            row[:] = self._read(start, length)
        return found

    def _read(self, start: int, length: int) -> npt.NDArray[Any]:
        assert start + length <= self._count, (start, length, self._count)
        width = self.dtype.itemsize
        wanted, at, parts = length * width, self._offset + start * width, []
        while wanted:
            try:
                data = os.pread(self._file, wanted, at)
            except OSError as error:
                raise DataError(f"data: {self.path} cannot be read any more: {error.strerror}") from error
            if not data:
                raise DataError(
                    f"data: {self.path} has become shorter since this peer began: byte {at} is gone, "
                    f"{self._offset + self._count * width} were there; put it back and join again"
                )
            parts.append(data)
            wanted, at = wanted - len(data), at + len(data)
        return np.frombuffer(b"".join(parts), dtype=self.dtype)
