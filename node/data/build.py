"""Token shards from text: `swarmentum data build`. Documents are shuffled, tokenised, and cut into files of equal size.

The text is a file, a folder, a JSON Lines, Parquet or Arrow file, or a dataset that the `datasets` library opens. Documents
stream through: neither the text nor the tokens have to fit into memory. Refuses to write into a folder that has something in
it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from node.data.errors import DataError
from node.data.manifest import MANIFEST, SHARDS_MAX, Manifest, Shard, sha256_of
from node.data.sources import read_text
from node.data.tokenizer import Tokenizer
from node.data.tokens import parts_of
from protos.disk import write_bytes, writing

JSON_LINES: Final = (".jsonl", ".ndjson")
PARQUET: Final = ".parquet"
ARROW: Final = ".arrow"
ARROW_MAGIC: Final = b"ARROW1"
LINE_BYTES_MAX: Final = 64 << 20
PARQUET_ROWS: Final = 1024
SHARD_TOKENS: Final = 1 << 24
SHUFFLED_TOKENS: Final = 1 << 26
"""Tokens of the documents that wait at once to be drawn: 256 MB of memory at most."""
HUB: Final = "hf://"

Told = Callable[[int, int, int], None]
"""Called with the documents, tokens and shards so far."""


@dataclass(frozen=True)
class Source:
    """The text to build from. `column`: of JSON Lines, Parquet and datasets. `subset` and `split`: of datasets."""

    place: str
    column: str = "text"
    subset: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class Built:
    """A set that is ready. `sha256` names it in `run.toml`."""

    folder: Path
    sha256: str
    documents: int
    tokens: int
    shards: int


def build(
    source: Source,
    tokenizer: Tokenizer,
    name: str,
    folder: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    seed: int = 0,
    told: Told = lambda documents, tokens, shards: None,
) -> Built:
    """Write shards of `shard_tokens` tokens and their manifest. `name`: of the tokenizer. Raises DataError and DiskError."""
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"data build: {folder} has something in it already; name a new folder")
    width = np.dtype("<u1" if tokenizer.vocabulary <= 1 << 8 else "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    made, counted = list[Shard](), [0, 0]

    def documents() -> Iterator[npt.NDArray[Any]]:
        for text in texts(source):
            counted[0] += 1
            ids = tokenised(text, tokenizer, width)
            counted[1] += len(ids)
            yield ids

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for tokens in _cut(shuffled(documents(), seed), shard_tokens, width):
            if len(made) == SHARDS_MAX:
                raise DataError(f"data build: more than {SHARDS_MAX} shards; give a larger --shard-tokens")
            data = tokens.tobytes()
            made.append(Shard(f"{len(made):06}.bin", len(tokens), sha256_of(data)))
            write_bytes(folder / made[-1].name, data)
            told(counted[0], counted[1], len(made))
        if not made:
            raise DataError(f"data build: {source.place} has no text")
        fingerprint = sha256_of(tokenizer.fingerprint())
        encoded = Manifest(name, fingerprint, tokenizer.vocabulary, width.name, tuple(made), source.place).encode()
        write_bytes(folder / MANIFEST, encoded)
    return Built(folder, sha256_of(encoded), counted[0], counted[1], len(made))


def tokenised(text: str, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """One document's ids, and the tokenizer's end of a text after them; a newline if it has none."""
    end = tokenizer.end
    parts = parts_of(text if end is not None else text + "\n")
    ids = [np.asarray(tokenizer.encode(part), dtype=dtype) for part in parts]
    return np.concatenate([*ids, np.array([] if end is None else [end], dtype=dtype)])


def shuffled(
    documents: Iterable[npt.NDArray[Any]], seed: int, tokens_max: int = SHUFFLED_TOKENS
) -> Iterator[npt.NDArray[Any]]:
    """The documents in another order: each is drawn at random from those that wait, which hold up to `tokens_max` tokens."""
    waiting, tokens, drawn = list[npt.NDArray[Any]](), 0, random.Random(seed)  # noqa: S311
    for document in documents:
        waiting.append(document)
        tokens += len(document)
        while tokens > tokens_max:
            chosen = _taken(waiting, drawn)
            tokens -= len(chosen)
            yield chosen
    while waiting:
        yield _taken(waiting, drawn)


def _taken(waiting: list[npt.NDArray[Any]], drawn: random.Random) -> npt.NDArray[Any]:
    at = drawn.randrange(len(waiting))
    waiting[at], waiting[-1] = waiting[-1], waiting[at]
    return waiting.pop()


def _cut(documents: Iterable[npt.NDArray[Any]], size: int, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """All tokens in runs of `size`. A short rest joins the last full run, so that no shard is too short for a window."""
    waiting, tokens = [np.empty(0, dtype=dtype)], 0
    for document in documents:
        waiting.append(document)
        tokens += len(document)
        if tokens >= 2 * size:
            joined = np.concatenate(waiting)
            full = tokens // size - 1
            yield from (joined[at * size : (at + 1) * size] for at in range(full))
            waiting, tokens = [joined[full * size :]], tokens - full * size
    if tokens:
        yield np.concatenate(waiting)


def texts(source: Source) -> Iterator[str]:
    """The documents of a source, in its order. Raises DataError that names the file, the row and what was expected."""
    if source.place.startswith(HUB):
        yield from _dataset(source)
        return
    path = Path(source.place)
    if not path.exists():
        raise DataError(
            f"data build: {path} does not exist; name a text file, a folder, a .jsonl, .parquet or .arrow file, or "
            f"{HUB}OWNER/NAME for a dataset of the Hugging Face hub"
        )
    tables = sorted(path.rglob("*")) if path.is_dir() else [path]
    tables = [table for table in tables if table.suffix in _READERS]
    if not tables:
        yield from (document.text() for document in read_text(path))
    for table in tables:
        yield from _READERS[table.suffix](table, source.column)


def _json_lines(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            place = f"{path}, line {number}"
            if len(line) > LINE_BYTES_MAX:
                raise DataError(f"data build: {place} has more than {LINE_BYTES_MAX >> 20} MiB")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"data build: {place} is no JSON: {error}") from error
            yield _text_of(row, column, place)


def _parquet(path: Path, column: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"data build: {path} needs pyarrow: pip install 'swarmentum[data]'") from error
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise DataError(
                    f"data build: {path} has no column {column!r}; it has {', '.join(names)}: name one with --column"
                )
            number = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=[column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _text_of({column: value}, column, f"{path}, row {number}")
    except (ArrowException, OSError) as error:
        raise DataError(f"data build: {path} cannot be read: {error}") from error


def _arrow(path: Path, column: str) -> Iterator[str]:
    """A file that the `datasets` library saved: a stream of record batches, or a file with an index."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise DataError(f"data build: {path} needs pyarrow: pip install 'swarmentum[data]'") from error
    try:
        with pa.memory_map(str(path)) as mapped:
            indexed = mapped.read(len(ARROW_MAGIC)) == ARROW_MAGIC
            mapped.seek(0)
            opened = pa.ipc.open_file(mapped) if indexed else pa.ipc.open_stream(mapped)
            if column not in opened.schema.names:
                found = ", ".join(opened.schema.names)
                raise DataError(f"data build: {path} has no column {column!r}; it has {found}: name one with --column")
            batches = map(opened.get_batch, range(opened.num_record_batches)) if indexed else opened
            number = 0
            for batch in batches:
                for value in batch.column(opened.schema.get_field_index(column)).to_pylist():
                    number += 1
                    yield _text_of({column: value}, column, f"{path}, row {number}")
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data build: {path} cannot be read: {error}") from error


_READERS: Final[dict[str, Callable[[Path, str], Iterator[str]]]] = {
    **dict.fromkeys(JSON_LINES, _json_lines),
    PARQUET: _parquet,
    ARROW: _arrow,
}


def _dataset(source: Source) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"data build: {source.place} needs datasets: pip install 'swarmentum[data]'") from error
    name = source.place.removeprefix(HUB)
    try:
        rows = load_dataset(name, source.subset, split=source.split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield _text_of(row, source.column, f"{source.place}, row {number}")
    except DataError:
        raise
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"data build: the dataset {name} cannot be read: {why}") from error


def _text_of(row: object, column: str, place: str) -> str:
    if not isinstance(row, dict) or column not in row:
        found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"data build: {place} has no {column!r}; it has {found}: name a column of text with --column")
    text = row[column]
    if not isinstance(text, str):
        raise DataError(f"data build: {place}: {column!r} is {type(text).__name__}, expected text")
    return text
