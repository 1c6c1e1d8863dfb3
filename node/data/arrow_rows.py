"""Rows of text in Parquet and Arrow files. They need pyarrow, of the extra `data`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from node.data.rows import Rows, not_one
from node.data.tally import LeftOutReason, Tally
from protos.errors import DataError

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
