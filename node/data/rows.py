"""Rows of text: JSON Lines, JSON, CSV and TSV, packed or not; Parquet and Arrow with pyarrow, of the extra `data`.

A bad row is named with its file and line, counted and skipped.

Refuses: a row longer than LINE_BYTES_MAX, one whose text no UTF-8 can hold (half an emoji), one that names its column twice.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, Final

from node.data.tally import LeftOutReason, Tally
from node.data.text_files import PackedError, Unpacked, inner_name, opened
from protos.errors import DataError

JSON_LINES: Final = (".jsonl", ".ndjson")
JSON: Final = ".json"
TABLES: Final = {".csv": ",", ".tsv": "\t"}
LINE_BYTES_MAX: Final = 64 << 20
JSON_BYTES_MAX: Final = 256 << 20
SNIFF_BYTES: Final = 1 << 16
BAD_ROWS_MAX: Final = 10_000
"""Of a file in which no row is good: the rest of it is not read."""
BOM: Final = "\ufeff"
BOM_BYTES: Final = BOM.encode()


_WIDE: Final = (
    ("UTF-32LE", (False, True, True, True)),
    ("UTF-32BE", (True, True, True, False)),
    ("UTF-16LE", (False, True)),
    ("UTF-16BE", (True, False)),
)
"""Which bytes of a Latin letter are zeros."""


def wide_text(start: bytes) -> str:
    """The encoding of text in units of 2 or 4 bytes, as iconv names it, by its mark or the zeros of its first letters; else
    empty."""
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    zeros = [byte == 0 for byte in start[:8]]
    for name, unit in _WIDE:
        if len(zeros) >= 4 and zeros == [unit[place % len(unit)] for place in range(len(zeros))]:
            return name
    return ""


class RowError(ValueError):
    """A row that is skipped. The text says what is wrong."""

    def __init__(self, reason: LeftOutReason, words: str) -> None:
        super().__init__(words)
        self.reason = reason


def text_of(row: object, column: str, place: str) -> str:
    """The text of a row, which has some. Raises RowError."""
    if not isinstance(row, dict) or column not in row:
        found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise RowError(
            LeftOutReason.NO_COLUMN, f"{place} has no {column!r}; it has {found}: name a column of text with --column"
        )
    text = row[column]
    if not isinstance(text, str):
        found = "null" if text is None else type(text).__name__
        raise RowError(LeftOutReason.NOT_TEXT, f"{place}: {column!r} is {found}, expected text")
    text = text.removeprefix(BOM)
    if not text:
        raise RowError(LeftOutReason.EMPTY, place)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RowError(
            LeftOutReason.BROKEN_ROW, f"{place}: {column!r} has half a character (U+{code:04X}) at {error.start}"
        ) from error
    return text


class Rows:
    """The good rows of one file, counted; the bad ones go to the tally. `form`: what each row should be."""

    def __init__(self, path: Path, column: str, tally: Tally, form: str = "JSON") -> None:
        self.path, self._column, self._tally, self.form = path, column, tally, form
        self._good = self._bad = 0
        self.hopeless = False
        """Whether so many rows are bad, and none is good, that the rest is not worth reading."""

    def text(self, row: Callable[[], object], place: str, size: int) -> str | None:
        """The text of a row of `size` bytes that `row()` gives; None for one that is left out."""
        try:
            text = text_of(row(), self._column, place)
        except RowError as error:
            self.bad(error.reason, str(error), size)
            return None
        except (ValueError, RecursionError) as error:  # of `json`, and of bytes that are no UTF-8
            self.bad(LeftOutReason.BROKEN_ROW, f"{place} is no {self.form}: {error}", size)
            return None
        self._good += 1
        return text

    def bad(self, reason: LeftOutReason, words: str, size: int) -> None:
        """Leave a row out."""
        self._tally.leave(reason, words, size)
        self._bad += reason.lost
        self.hopeless = not self._good and self._bad >= BAD_ROWS_MAX

    def end(
        self, why: str, unpacked: Unpacked | None, size: int, reason: LeftOutReason = LeftOutReason.DAMAGED
    ) -> None:
        """The file ends before its end; `size` bytes of it, or what the unpacker has not read, are left out."""
        self._tally.leave(reason, f"{self.path} {why}", size if unpacked is None else unpacked.unread)

    def is_wide(self, file: io.BufferedReader, unpacked: Unpacked | None) -> bool:
        """Whether the file is text in another encoding than UTF-8, by its first bytes; then it is left out."""
        if wide := wide_text(file.peek(SNIFF_BYTES)):
            self.end(f"is {wide}", unpacked, self.path.stat().st_size, LeftOutReason.NOT_UTF8)
        return bool(wide)


def json_lines(path: Path, column: str, tally: Tally) -> Iterator[str]:
    """The texts of a JSON Lines file. Raises OSError."""
    rows, number = Rows(path, column, tally), 0
    with opened(path) as (file, unpacked):
        try:
            if rows.is_wide(file, unpacked):
                return
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                place = f"{path}, line {number}"
                if len(line) > LINE_BYTES_MAX:
                    size = len(line) + _skip_line(file, line)
                    rows.bad(LeftOutReason.TOO_LARGE, f"{place} has more than {LINE_BYTES_MAX >> 20} MiB", size)
                elif line.strip():
                    text = rows.text(lambda line=line: _parsed(line, column), place, len(line))  # type: ignore[misc]
                    if text is not None:
                        yield text
                if rows.hopeless:
                    rest = path.stat().st_size - file.tell() if unpacked is None else 0
                    rows.end(f"has no good row in its first {number:,} lines", unpacked, rest, LeftOutReason.BROKEN_ROW)
                    return
        except PackedError as error:
            rows.end(f"breaks off after line {number}: {error}", unpacked, 0, error.reason)


def _skip_line(file: io.BufferedReader, line: bytes) -> int:
    """The bytes of the rest of a line."""
    skipped = 0
    while line and not line.endswith(b"\n"):
        line = file.readline(LINE_BYTES_MAX)
        skipped += len(line)
    return skipped


def _parsed(line: bytes, column: str) -> object:
    """The row of a line. JSON takes the last of two values of one name, so such a row is refused."""
    name, text = json.dumps(column).encode(), line.decode("utf-8-sig")
    if line.count(name) < 2 and line.count(column.encode()) < 2:
        return json.loads(text)
    return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, column))


def _unique(pairs: list[tuple[str, Any]], column: str) -> dict[str, Any]:
    if sum(name == column for name, _ in pairs) > 1:
        raise ValueError(f"{column!r} is there twice")
    return dict(pairs)


def json_rows(path: Path, column: str, tally: Tally) -> Iterator[str] | None:
    """The texts of a `.json` file that is a list of rows, or lines of rows; None for another one. Raises OSError."""
    with opened(path) as (file, _):
        line = file.readline(LINE_BYTES_MAX).removeprefix(BOM_BYTES).strip()
        while not line and (more := file.readline(LINE_BYTES_MAX)):
            line = more.strip()
        more = file.read(SNIFF_BYTES).strip()
    if line[:1] == b"{":
        return json_lines(path, column, tally) if _is_row(line, column, alone=not more) else None
    return _list(path, column, tally) if line[:1] == b"[" and (line[1:] + more).lstrip()[:1] == b"{" else None


def _is_row(line: bytes, column: str, *, alone: bool) -> bool:
    """Whether the first line of a file is a row. The only line may also be a list of settings."""
    if line[:1] != b"{":
        return False
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and (not alone or column in found)


MARKUP_NOTE: Final = (
    "files of JSON without rows that are read: {}; their brackets and names are part of the text: one row a line, in a file "
    "named .jsonl, is read as its text alone"
)
TAGGED: Final = (b"<?xml", b"<!doctype", b"<html", b"<svg", b"<mediawiki", b"{\\rtf", b"%pdf-", b"%!ps")
TAGS_NOTE: Final = (
    "files of HTML, XML, RTF, PDF or PostScript: {}; their tags are part of the text: convert them to text first"
)


def markup_note(line: bytes, path: Path, column: str) -> str:
    """Words about a plain text whose first line is JSON or of a format with tags; empty for other text."""
    line, suffix = line[:LINE_BYTES_MAX].strip(), PurePath(inner_name(path)).suffix
    if line[:16].lower().startswith(TAGGED):
        return TAGS_NOTE
    marked = line[:1] in (b"{", b"[") if suffix in (JSON, ".ipynb") else _is_row(line, column, alone=True)
    return MARKUP_NOTE if marked else ""


def _list(path: Path, column: str, tally: Tally) -> Iterator[str]:
    rows = Rows(path, column, tally)
    with opened(path) as (file, _):
        data = file.read(JSON_BYTES_MAX + 1)
    if len(data) > JSON_BYTES_MAX:
        rows.end(
            f"has more than {JSON_BYTES_MAX >> 20} MiB; write it as JSON Lines",
            None,
            len(data),
            LeftOutReason.TOO_LARGE,
        )
        return
    try:
        found = json.loads(data.decode("utf-8-sig"), object_pairs_hook=lambda pairs: _checked(pairs, column))
    except (ValueError, RecursionError) as error:
        rows.end(f"is no JSON: {error}", None, len(data))
        return
    size = len(data) // max(len(found), 1)
    for number, row in enumerate(found, 1):
        text = rows.text(lambda row=row: row, f"{path}, row {number}", size)  # type: ignore[misc]
        if text is not None:
            yield text


def _checked(pairs: list[tuple[str, Any]], column: str) -> dict[str, Any] | str:
    """A row, or words about one that names its column twice."""
    return dict(pairs) if sum(name == column for name, _ in pairs) < 2 else f"{column!r} twice"


def not_one(names: Sequence[str], column: str) -> str:
    """Words about a file whose columns have that one not once."""
    found = f"has {column!r} twice" if column in names else f"has no column {column!r}; it has {', '.join(names)}"
    return f"{found}: name one with --column"


def table(path: Path, column: str, tally: Tally) -> Iterator[str]:
    """The texts of a CSV or TSV file, whose first line names the columns. Raises OSError."""
    rows = Rows(path, column, tally)
    separator = TABLES[PurePath(inner_name(path)).suffix]
    csv.field_size_limit(LINE_BYTES_MAX)
    with opened(path) as (file, unpacked):
        try:
            if rows.is_wide(file, unpacked):
                return
        except PackedError as error:
            rows.end(f"cannot be read: {error}", unpacked, 0, error.reason)
            return
        lines = _Lines(io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=""), separator)
        found = csv.reader(lines, delimiter=separator, strict=True)
        try:
            names = next(found, [])
            if names.count(column) == 1:
                yield from _fields(found, names, rows, lines, tabs=separator == "\t")
                return
            rows.end(
                not_one(names, column),
                None,
                path.stat().st_size,
                LeftOutReason.NO_COLUMN if names else LeftOutReason.EMPTY,
            )
        except csv.Error as error:
            rows.end(f"has no line of names: {error}", None, path.stat().st_size)
        except PackedError as error:
            rows.end(f"breaks off after line {found.line_num}: {error}", unpacked, 0, error.reason)
        finally:
            lines.file.detach()


LINES_COUNTED: Final = 100
"""Of one row."""


class _Lines:
    """The lines of a file, and how many characters and separators they have."""

    def __init__(self, file: io.TextIOWrapper, separator: str) -> None:
        self.file, self.characters, self._separator = file, 0, separator
        self.separators = list[int]()
        """Of each line since somebody emptied it; of the first few."""

    def __iter__(self) -> Iterator[str]:
        for line in self.file:
            self.characters += len(line)
            if len(self.separators) < LINES_COUNTED:
                self.separators.append(line.count(self._separator))
            yield line


def _fields(found: Any, names: list[str], rows: Rows, lines: _Lines, *, tabs: bool) -> Iterator[str]:
    """`found`: a reader of `csv`, which goes on after a row that it cannot read. `tabs`: between the fields."""
    while True:
        first, before = found.line_num + 1, lines.characters
        lines.separators.clear()
        try:
            fields = next(found, None)
            why = "" if not fields or len(fields) == len(names) else f"has {len(fields)} fields, expected {len(names)}"
        except csv.Error as error:
            fields, why = [], f"is no row: {error}"
        several = len(lines.separators) > 1 and len(names) > 1
        if tabs and not why and several and set(lines.separators) == {len(names) - 1}:
            why = f"has a quote that ends in line {found.line_num}, and each line between is a row: double the quotes in it"
        if fields is None:
            return
        place, size = f"{rows.path}, line {first}", lines.characters - before
        if why:
            rows.bad(LeftOutReason.BROKEN_ROW, f"{place} {why}", size)
        elif fields:
            row = dict(zip(names, fields, strict=True))
            text = rows.text(lambda row=row: row, place, size)  # type: ignore[misc]
            if text is not None:
                yield text


PARQUET: Final = ".parquet"
ARROW: Final = ".arrow"
ARROW_MAGIC: Final = b"ARROW1"
PARQUET_ROWS: Final = 1024


def parquet(path: Path, column: str, tally: Tally) -> Iterator[str]:
    """The texts of a Parquet file. Raises OSError; DataError without pyarrow."""
    pa = _pyarrow(path)
    from pyarrow.parquet import ParquetFile

    rows, read = Rows(path, column, tally, "UTF-8"), 0
    try:
        with ParquetFile(path) as file:
            if _lacks(rows, file.schema_arrow.names, column):
                return
            for batch in file.iter_batches(PARQUET_ROWS, columns=[column]):
                yield from _texts(batch.column(0), column, rows, read)
                read += len(batch)
    except (pa.ArrowException, OSError) as error:
        rows.end(f"cannot be read after row {read}: {error}", None, path.stat().st_size)


def arrow(path: Path, column: str, tally: Tally) -> Iterator[str]:
    """The texts of a file that the `datasets` library saved: a stream of record batches, or a file with an index."""
    pa = _pyarrow(path)
    rows, read = Rows(path, column, tally, "UTF-8"), 0
    try:
        with pa.OSFile(str(path)) as file:
            indexed = file.read(len(ARROW_MAGIC)) == ARROW_MAGIC
            file.seek(0)
            found = pa.ipc.open_file(file) if indexed else pa.ipc.open_stream(file)
            if _lacks(rows, found.schema.names, column):
                return
            batches = map(found.get_batch, range(found.num_record_batches)) if indexed else found
            for batch in batches:
                yield from _texts(batch.column(found.schema.get_field_index(column)), column, rows, read)
                read += len(batch)
    except (pa.ArrowException, OSError) as error:
        rows.end(f"cannot be read after row {read}: {error}", None, path.stat().st_size)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"data: {path} needs pyarrow: pip install 'swarmentum[data]'") from error
    return pyarrow


def _lacks(rows: Rows, names: list[str], column: str) -> bool:
    """Whether the file has no such column; then it is left out."""
    if names.count(column) == 1:
        return False
    rows.end(not_one(names, column), None, rows.path.stat().st_size, LeftOutReason.NO_COLUMN)
    return True


def _texts(values: Any, column: str, rows: Rows, read: int) -> Iterator[str]:
    size = values.nbytes // max(len(values), 1)
    for number, value in enumerate(values, read + 1):
        text = rows.text(lambda value=value: {column: value.as_py()}, f"{rows.path}, row {number}", size)  # type: ignore[misc]
        if text is not None:
            yield text
