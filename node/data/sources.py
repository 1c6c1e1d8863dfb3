"""The sources of text: a file, a folder, a data set of the hub, or this machine's own Python standard library.

All of them are read here, by one walker (`walk`) and one set of readers, with one count (`Tally`) of what was left out.
Refuses: text that is not UTF-8, binary files (a folder counts and skips them, a named file is an error), pipes and devices.
"""

from __future__ import annotations

import codecs
import stat
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from node.data.rows import (
    ARROW,
    BOM_BYTES,
    JSON,
    JSON_LINES,
    LINE_BYTES_MAX,
    PARQUET,
    TABLES,
    Rows,
    arrow,
    json_lines,
    json_rows,
    markup_note,
    parquet,
    table,
    wide_text,
)
from node.data.splits import ALL, chosen, named_otherwise, parts_told
from node.data.tally import LeftOutReason, Repeats, Tally
from node.data.text_files import PackedError, file_size, inner_name, mode_of, opened, walk
from protos.errors import DataError

STDLIB_BYTES_MAX: Final = 32 << 20
BLOCK_BYTES: Final = 1 << 20
SNIFF_BYTES: Final = 8192  # a NUL in there means binary, as in git
DOCUMENT_BYTES_MAX: Final = 1 << 30
"""Of one text file, which is one document and is read whole."""
POINTER_BYTES_MAX: Final = 1024
POINTERS: Final = (b"version https://git-lfs.github.com/spec/", b"/annex/objects/")
ARCHIVES: Final = (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz", ".lz4", ".br", ".tbz2", ".txz", ".lzma", ".z")
HUB: Final = "hf://"
# Not the library's text: what others installed, and tests (some of them are broken on purpose).
STDLIB_SKIPPED: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Source:
    """The text to read. `column`: of rows. `subset`: of datasets. `split`: of datasets and folders; `all` takes every file."""

    place: str
    column: str = "text"
    subset: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class Document:
    """One text, as it was read: a file, or a row of one."""

    path: Path
    data: bytes

    def text(self) -> str:
        return self.data.decode()


Reader = Callable[[Path, str, Tally], Iterator[str]]
_READERS: Final[dict[str, Reader]] = {
    **dict.fromkeys(JSON_LINES, json_lines),
    **dict.fromkeys(TABLES, table),
    PARQUET: parquet,
    ARROW: arrow,
}


def standard_library(bytes_max: int = STDLIB_BYTES_MAX) -> Iterator[Document]:
    """The `*.py` files of this Python's standard library in sorted order, up to `bytes_max` in all.

    Two machines with the same Python version have the same text.
    """
    root, total, tally = Path(sysconfig.get_path("stdlib")), 0, Tally()
    for path in walk(root, tally, STDLIB_SKIPPED):
        document = _plain(path, tally) if path.suffix == ".py" else None
        if document is None:
            continue
        total += len(document.data)
        if total > bytes_max:
            return
        yield document
    if total == 0:
        raise DataError(f"data: this Python has no sources of its standard library in {root}; name a file or folder")


def documents(source: Source, tally: Tally, files: list[Path] | None = None) -> Iterator[Document]:
    """All texts of a source, in its order; what is left out goes to the tally. Raises DataError if there is no text.

    `files`: what `files_of` gave, if the caller has it.
    """
    if source.place.startswith(HUB):
        found = dataset(source, tally)
    else:
        found = _of_files(files_of(source, tally) if files is None else files, source, tally)
    repeats = Repeats()
    for document in found:
        tally.took(len(document.data))
        repeats.saw(document.data)
        yield document
    tally.note(repeats.words(), repeats.count)
    if not tally.documents:
        why = "; ".join(tally.reading().lines())
        where = (
            f"no UTF-8 text file below {source.place}" if Path(source.place).is_dir() else f"{source.place} has no text"
        )
        raise DataError(f"data: {where}" + (f" ({why})" if why else ""))


def files_of(source: Source, tally: Tally) -> list[Path]:
    """The files of a source on this machine, in their order. Raises DataError."""
    path = Path(source.place)
    if not mode_of(path):
        raise DataError(
            f"data: {path} does not exist; name a text file, a folder, a .jsonl, .parquet or .arrow file, or "
            f"{HUB}OWNER/NAME for a dataset of the Hugging Face hub"
        )
    if not path.is_dir():
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"data: {path} is a pipe, socket or device; write the text to a file, and name that file")
        return [path]
    found = walk(path, tally)
    names = [file.relative_to(path) for file in found]
    reasons = chosen(names, [has_rows(file, source.column) for file in found], source.split, path.resolve().name)
    for file, reason in zip(found, reasons, strict=True):
        if reason is not None:
            tally.leave(reason, file, file_size(file))
    kept = [file for file, reason in zip(found, reasons, strict=True) if reason is None]
    for words in parts_told(kept):
        tally.note(words)
    tally.note(*named_otherwise([file.relative_to(path) for file in kept], source.split))
    if not kept:
        why = "; ".join(tally.reading().lines())
        todo = (
            f". For another split: --split of `swarmentum data build`, or {ALL} for every file" if any(reasons) else ""
        )
        raise DataError(f"data: no UTF-8 text file below {path}" + (f" ({why}){todo}" if why else ""))
    return kept


def has_rows(path: Path, column: str) -> bool:
    """Whether a file has rows, by its name. Some `.json` files have, and others are plain text."""
    suffix = PurePath(inner_name(path)).suffix
    try:
        return suffix in _READERS or (suffix == JSON and json_rows(path, column, Tally()) is not None)
    except (OSError, PackedError):
        return True


def _of_files(files: list[Path], source: Source, tally: Tally) -> Iterator[Document]:
    named = not Path(source.place).is_dir()
    for path in files:
        tally.files += 1
        try:
            reader = _reader(path, source.column, tally)
            if reader is not None:
                yield from (Document(path, text.encode()) for text in reader)
                continue
            if named and path.suffix.lower() not in ARCHIVES:
                check_text(path)
            document = _plain(path, tally)
        except (OSError, PackedError) as error:
            reason = error.reason if isinstance(error, PackedError) else LeftOutReason.UNREADABLE
            why = str(error) if isinstance(error, PackedError) else error.strerror
            tally.leave(reason, f"{path}: {why}", file_size(path))
            continue
        if document is not None:
            tally.note(markup_note(document.data[:LINE_BYTES_MAX].partition(b"\n")[0], path, source.column))
            yield document


def _reader(path: Path, column: str, tally: Tally) -> Iterator[str] | None:
    """The reader of a file with rows; None for plain text."""
    suffix = PurePath(inner_name(path)).suffix
    if suffix == JSON:
        return json_rows(path, column, tally)
    if suffix not in _READERS:
        return None
    if path.stat().st_size == 0:
        tally.leave(LeftOutReason.EMPTY, path)
        return iter(())
    if (words := pointer_of(path)) is not None:
        tally.leave(LeftOutReason.POINTER, words)
        return iter(())
    return _READERS[suffix](path, column, tally)


def pointer_of(path: Path) -> str | None:
    """Words about a file that only names its text, which is elsewhere."""
    if path.stat().st_size > POINTER_BYTES_MAX:
        return None
    data = path.read_bytes()
    return (
        f"{path}" if data.startswith(POINTERS[0]) or (data.startswith(POINTERS[1]) and b"\n" not in data[:-1]) else None
    )


def _plain(path: Path, tally: Tally) -> Document | None:
    """A text file, or None for one that is left out. Raises OSError and PackedError."""
    if path.suffix.lower() in ARCHIVES or PurePath(inner_name(path)).suffix in ARCHIVES:
        tally.leave(LeftOutReason.PACKED, path, path.stat().st_size)
        return None
    if (words := pointer_of(path)) is not None:
        tally.leave(LeftOutReason.POINTER, words)
        return None
    with opened(path) as (file, unpacked):
        data = file.read(SNIFF_BYTES)
        if b"\0" not in data:
            data += _all(file, DOCUMENT_BYTES_MAX + 1 - len(data))
        size = max(path.stat().st_size, len(data), 0 if unpacked is None else len(data) + unpacked.unread)
    if (wrong := _wrong(data)) is not None:
        tally.leave(wrong[0], f"{path} {wrong[1]}", size)
        return None
    return Document(path, data.removeprefix(BOM_BYTES))


def _all(file: object, most: int) -> bytes:
    """Up to `most` bytes: a raw stream may give fewer at a time."""
    found = bytearray()
    while len(found) < most and (block := file.read(min(most - len(found), BLOCK_BYTES))):  # type: ignore[attr-defined]
        found += block
    return bytes(found)


def _wrong(data: bytes) -> tuple[LeftOutReason, str] | None:
    """Why bytes are no text, with words; None if they are."""
    if not data.removeprefix(BOM_BYTES):
        return LeftOutReason.EMPTY, "is empty"
    if wide := wide_text(data):
        return LeftOutReason.NOT_UTF8, f"is {wide}"
    if b"\0" in data:
        return LeftOutReason.BINARY, "is binary"
    if len(data) > DOCUMENT_BYTES_MAX:
        return LeftOutReason.TOO_LARGE, f"has more than {DOCUMENT_BYTES_MAX >> 20} MiB"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return LeftOutReason.NOT_UTF8, f"has byte 0x{data[error.start]:02x} at offset {error.start}"
    return None


def is_text(start: bytes) -> bool:
    """Whether the first bytes of a file are UTF-8 text; the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start


def check_text(path: Path) -> None:
    """A file that the operator named is UTF-8 text, or a DataError says at which byte it is not. Reads it in blocks."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with opened(path) as (file, _):
            while block := file.read(BLOCK_BYTES):
                if not offset and (wide := wide_text(block)):
                    raise DataError(f"data: {path} is {wide}; convert it with `iconv -f {wide} -t UTF-8`")
                if b"\0" in block:
                    raise DataError(f"data: {path} is binary; expected UTF-8 text, or tokens in a .npy or .bin file")
                held = len(decoder.getstate()[0])  # bytes of a character that the last block cut
                offset -= held
                decoder.decode(block)
                offset += held + len(block)
            size, offset = offset, offset - len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except OSError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror}") from error
    except PackedError as error:
        remedy = "; copy it again from where it comes from" if error.reason is LeftOutReason.DAMAGED else ""
        raise DataError(f"data: {path}: {error}{remedy}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"data: {path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset + error.start}; "
            "convert it with `iconv -f ENCODING -t UTF-8` from its own encoding, such as CP1252, CP1251 or SHIFT_JIS"
        ) from error
    if size == 0:
        raise DataError(f"data: {path} is empty; name a file with text")


def dataset(source: Source, tally: Tally) -> Iterator[Document]:
    """The texts of a data set that the `datasets` library opens, as a stream. Raises DataError."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"data: {source.place} needs datasets: pip install 'swarmentum[data]'") from error
    name = source.place.removeprefix(HUB)
    rows, place = Rows(Path(source.place), source.column, tally), Path(name)
    tally.files += 1
    try:
        for number, row in enumerate(load_dataset(name, source.subset, split=source.split, streaming=True), 1):
            text = rows.text(lambda row=row: row, f"{source.place}, row {number}", 0)  # type: ignore[misc]
            if text is not None:
                yield Document(place, text.encode())
            if rows.hopeless:
                return
    except DataError:
        raise
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"data: the dataset {name} cannot be read: {why}") from error
