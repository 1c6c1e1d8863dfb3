"""The sources of text: a file, a folder, or this machine's own Python standard library.

Refuses: binary files (a folder skips them, a named file is an error), hidden files, links that leave the folder.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.data.errors import DataError

STDLIB_BYTES_MAX: Final = 32 << 20
BLOCK_BYTES: Final = 1 << 20
SNIFF_BYTES: Final = 8192  # a NUL in there means binary, as in git
# Not the library's text: what others installed, and tests (some of them are broken on purpose).
STDLIB_SKIPPED: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One text file, as it was read."""

    path: Path
    data: bytes

    def text(self) -> str:
        return self.data.decode()


def standard_library(bytes_max: int = STDLIB_BYTES_MAX) -> Iterator[Document]:
    """The `*.py` files of this Python's standard library in sorted order, up to `bytes_max` in all.

    Two machines with the same Python version have the same text.
    """
    root, total = Path(sysconfig.get_path("stdlib")), 0
    for path in _sorted_files(root, STDLIB_SKIPPED):
        document = _read_text(path) if path.suffix == ".py" else None
        if document is None:
            continue
        total += len(document.data)
        if total > bytes_max:
            return
        yield document
    if total == 0:
        raise DataError(f"data: this Python has no sources of its standard library in {root}; name a file or folder")


def read_text(path: Path) -> Iterator[Document]:
    """A text file, or every UTF-8 text file below a folder, sorted by name."""
    if path.is_dir():
        return _read_folder(path)
    return iter([_read_named(path)])


def check_text(path: Path) -> None:
    """A file that the operator named is UTF-8 text, or a DataError says at which byte it is not. Reads it in blocks."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                if offset == 0 and b"\0" in block[:SNIFF_BYTES]:
                    raise DataError(f"data: {path} is binary; expected UTF-8 text, or tokens in a .npy or .bin file")
                held = len(decoder.getstate()[0])  # bytes of a character that the last block cut
                offset -= held
                decoder.decode(block)
                offset += held + len(block)
            size, offset = offset, offset - len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except OSError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"data: {path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset + error.start}; "
            "convert it, for example with `iconv -t utf-8`"
        ) from error
    if size == 0:
        raise DataError(f"data: {path} is empty; name a file with text")


def _read_named(path: Path) -> Document:
    check_text(path)
    return Document(path, path.read_bytes())


def _read_folder(root: Path) -> Iterator[Document]:
    found = skipped = 0
    for path in _sorted_files(root):
        document = _read_text(path)
        found, skipped = found + (document is not None), skipped + (document is None)
        if document is not None:
            yield document
    if found == 0:
        raise DataError(f"data: no UTF-8 text file below {root} ({skipped} other or empty files were skipped)")


def _sorted_files(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Files below a folder in an order that is the same on every machine; nothing hidden, no links out of it."""
    home, found = root.resolve(), []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".") and name not in skipped]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path for path in paths if not path.is_symlink() or path.resolve().is_relative_to(home)]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _read_text(path: Path) -> Document | None:
    """The file, or None where it is not text."""
    try:
        data = path.read_bytes()
    except PermissionError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror}; make it readable or move it away") from error
    if not data or b"\0" in data[:SNIFF_BYTES]:
        return None
    try:
        data.decode()
    except UnicodeDecodeError:
        return None
    return Document(path, data)
