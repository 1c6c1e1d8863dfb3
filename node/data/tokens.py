"""Token sequences: arrays of token ids, and files of them that are not loaded.

Reads `.npy` and raw `.bin` files without loading them, turns text into tokens, and keeps what a slow tokenizer made in
a cache file. Refuses: ids outside of the model's vocabulary, files of another type, empty sources.
"""

from __future__ import annotations

import hashlib
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from node.data.rows import BOM_BYTES
from node.data.sources import Document, check_text, is_text, pointer_of
from node.data.tally import Tally
from node.data.tokenizer import Encoder, Tokenizer
from protos.disk import remove_left, write_atomic
from protos.errors import DataError


class FileTokens:
    """`count` tokens of `dtype` from byte `offset` of a file, which stays open: it may be renamed or removed meanwhile.

    The file is not mapped. If a mapped file gets shorter, or its disk goes away, SIGBUS kills the process without an error
    message. Reads are positional, so threads may share a file. Refuses to read on in a file whose tokens were changed.
    """

    ndim = 1

    def __init__(self, path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> None:
        self.path, self.dtype, self._count, self._offset = path, dtype, count, offset
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"data: cannot read {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._file)
        self._written_ns, self._samples = self._status().st_mtime_ns, self._some()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        """A run of tokens: `tokens[start:stop]`."""
        start, stop, step = part.indices(self._count)
        assert step == 1, "tokens are read in runs"
        self._check_unchanged()
        return self._read(start, max(stop - start, 0))

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
        """The tokens from each start, [len(starts), length]."""
        self._check_unchanged()
        found = np.empty((len(starts), length), dtype=self.dtype)
        for row, start in zip(found, starts.tolist(), strict=True):
            row[:] = self._read(start, length)
        return found

    def _some(self) -> bytes:
        """A digest of blocks spread over the tokens."""
        digest, size = hashlib.sha256(), self._count * self.dtype.itemsize
        for at in dict.fromkeys(max(size - BLOCK_BYTES, 0) * block // (BLOCKS - 1) for block in range(BLOCKS)):
            with suppress(OSError):  # whoever reads the tokens hears of it
                digest.update(os.pread(self._file, min(BLOCK_BYTES, size - at), self._offset + at))
        return digest.digest()

    def _check_unchanged(self) -> None:
        """Raises DataError for tokens that somebody wrote meanwhile. What comes after them, or a new date, is nothing."""
        found = self._status()
        if found.st_mtime_ns == self._written_ns:
            return
        if found.st_size < self._offset + self._count * self.dtype.itemsize:
            raise self._shorter(found.st_size)
        if self._some() != self._samples:
            raise DataError(
                f"data: {self.path} has been written to since this peer began, and has other tokens: put back what was "
                "there, or join again to train on what is there now"
            )
        self._written_ns = found.st_mtime_ns

    def _status(self) -> os.stat_result:
        try:
            return os.fstat(self._file)
        except OSError as error:
            raise self._gone(error) from error

    def _gone(self, error: OSError) -> DataError:
        return DataError(f"data: {self.path} cannot be read any more: {error.strerror}")

    def _shorter(self, at: int) -> DataError:
        return DataError(
            f"data: {self.path} has become shorter since this peer began: byte {at} is gone, "
            f"{self._offset + self._count * self.dtype.itemsize} were there; put it back and join again"
        )

    def _read(self, start: int, length: int) -> npt.NDArray[Any]:
        assert start + length <= self._count, (start, length, self._count)
        width = self.dtype.itemsize
        wanted, at, parts = length * width, self._offset + start * width, []
        while wanted:
            try:
                data = os.pread(self._file, wanted, at)
            except OSError as error:
                raise self._gone(error) from error
            if not data:
                raise self._shorter(at)
            parts.append(data)
            wanted, at = wanted - len(data), at + len(data)
        return np.frombuffer(b"".join(parts), dtype=self.dtype)


BLOCKS: Final = 64
BLOCK_BYTES: Final = 4096
"""So much is compared of a file that was written to."""
TOKEN_SUFFIXES: Final = (".npy", ".bin")
TOKEN_TYPES: Final = ("uint8", "uint16", "uint32")
LLMC_HEADER_BYTES: Final = 1024
LLMC_VERSIONS: Final = {20240520: (1,), 20240801: (1, 7)}
"""By the first of the 256 whole numbers (4 bytes each) before the tokens of llm.c and its kin: the versions that are read. The
third is the tokens' number; the size tells whether they have 2 bytes or 4, and forks have either under one number."""
LLMC_DATES: Final = range(20230101, 20400101)
"""The first number of each file of llm.c is a date: of models, tokenizers and questions, too."""
LLMC_USED: Final = 16
"""Numbers of such a header that may be set; the others are 0."""
NO_TOKENS: Final = {
    b"\x93NUMPY": "a NumPy array: rename it to .npy",
    b"PK\x03\x04": "a zip archive, such as one of torch.save: write its tokens with numpy.save",
    b"\x80\x02\x8a": "a file of torch.save: write its tokens with numpy.save",
    b"\x80\x04\x95": "a pickle: write its tokens with numpy.save",
    b"\x80\x05\x95": "a pickle: write its tokens with numpy.save",
    b"\x1f\x8b\x08": "packed with gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "packed with zstd: unpack it",
    b"\xfd7zXZ\0": "packed with xz: unpack it",
    b"BZh91AY&SY": "packed with bzip2: unpack it",
    b"PAR1\x15": "a Parquet file: rename it to .parquet",
    b"ARROW1\0\0": "an Arrow file: rename it to .arrow",
    b"\x89HDF\r\n": "an HDF5 file: write its tokens with numpy.save",
    b"LITPKDS\x01": "a packed data set of lit-gpt: write its tokens with numpy.save",
}
"""First bytes of files that are no raw tokens, whatever their name says."""
PAIRS_TOKENS_MIN: Final = 64
PAIRS_TOKENS_MAX: Final = 1 << 16
ORDER_TOKENS_MIN: Final = 4096
TEXT_BITS_MIN: Final = 3.0
"""Entropy of the high bytes of tokens; below it is no text of people."""
SCAN_TOKENS: Final = 1 << 24  # tokens that a check looks at in one go
PART_CHARS_MAX: Final = 1 << 20  # of text that a tokenizer gets at once
TEXT_BYTES_MAX: Final = 1 << 31  # of text held in memory as byte tokens

CACHE_FORMAT: Final = b"text 2\n"
"""Part of a cache file's name: files of older versions have other ids for some texts."""

Tokens = npt.NDArray[Any] | FileTokens
Progress = Callable[[int, str], None]
"""Called with the bytes of text done so far and the name of the document."""


def open_tokens(path: Path, dtype: str = "uint16") -> FileTokens:
    """The tokens of a file, 1-D; `dtype` is the type in a raw `.bin`, little-endian. `.npy` and llm.c's `.bin` know theirs."""
    if dtype not in TOKEN_TYPES:
        raise DataError(f"data.dtype = {dtype!r}: expected one of {', '.join(TOKEN_TYPES)}")
    try:
        if pointer_of(path) is not None:
            raise ValueError(
                "it is a pointer of Git LFS or git-annex; get the file with `git lfs pull` or `git annex get`"
            )
        if path.suffix.lower() != ".npy":
            return _open_raw(path, dtype)
        tokens = np.load(path, mmap_mode="r")
    except OSError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise DataError(f"data: {path} is not a token file: {error}") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.name not in TOKEN_TYPES:
        found = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise DataError(f"data: {path} holds {found}: expected a 1-D array of {', '.join(TOKEN_TYPES)}")
    assert isinstance(tokens, np.memmap), "NumPy maps what it was asked to map"
    if (beyond := path.stat().st_size - tokens.offset - tokens.nbytes) > 0:
        raise DataError(
            f"data: {path} has {beyond} bytes after its {len(tokens)} tokens: two files were joined, or a writer broke off; "
            "write one array with numpy.save"
        )
    return FileTokens(path, tokens.dtype, len(tokens), tokens.offset)


def _open_raw(path: Path, dtype: str) -> FileTokens:
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0:
        raise ValueError("it is empty")
    with path.open("rb") as file:
        head = file.read(LLMC_HEADER_BYTES)
    if (what := next((words for first, words in NO_TOKENS.items() if head.startswith(first)), None)) is not None:
        raise ValueError(f"it is {what}")
    if (found := _open_llmc(path, head, size)) is not None:
        return found
    if size % width:
        raise ValueError(
            f"its {size} bytes are no multiple of {width}, the bytes of a {dtype}; "
            "set data.dtype to what the file was written with"
        )
    return FileTokens(path, np.dtype(dtype).newbyteorder("<"), size // width)


def _open_llmc(path: Path, head: bytes, size: int) -> FileTokens | None:
    """The tokens after a header of llm.c; None if there is none. Raises ValueError for a header that is not known."""
    numbers = struct.unpack(f"<{LLMC_HEADER_BYTES // 4}I", head.ljust(LLMC_HEADER_BYTES, b"\0"))
    first, version, count = numbers[:3]
    if version not in LLMC_VERSIONS.get(first, ()):
        if len(head) < LLMC_HEADER_BYTES or first not in LLMC_DATES or any(numbers[LLMC_USED:]):
            return None
        raise ValueError(
            f"it has a header of llm.c with the number {first} and version {version}, and tokens are read after "
            f"{' and '.join(f'{one} (version {versions[-1]})' for one, versions in LLMC_VERSIONS.items())}: write its tokens "
            "with numpy.save"
        )
    for name in ("uint16", "uint32"):
        told = np.dtype(name).newbyteorder("<")
        if size == LLMC_HEADER_BYTES + count * told.itemsize:
            return FileTokens(path, told, count, LLMC_HEADER_BYTES)
    raise ValueError(
        f"its header names {count} tokens, {LLMC_HEADER_BYTES + 2 * count} or {LLMC_HEADER_BYTES + 4 * count} bytes in all, "
        f"and it has {size}: copy it again"
    )


def open_text(path: Path) -> FileTokens:
    """A named text file as byte tokens, uint8, not loaded, so that its size does not matter."""
    check_text(path)
    with path.open("rb") as file:
        start = len(BOM_BYTES) if file.read(len(BOM_BYTES)) == BOM_BYTES else 0
    return FileTokens(path, np.dtype(np.uint8), path.stat().st_size - start, start)


def bytes_of(documents: Iterable[Document]) -> Tokens:
    """The documents as byte tokens, uint8, a newline after each."""
    joined = bytearray()
    for document in documents:
        joined += document.data + b"\n"
        if len(joined) > TEXT_BYTES_MAX:
            raise DataError(
                f"data: the text is larger than {TEXT_BYTES_MAX >> 20} MiB at {document.path}; join it into one file, "
                "which is read as it is needed, or build token shards of it with `swarmentum data build`"
            )
    return np.frombuffer(joined, dtype=np.uint8)


def tokenise(
    read: Callable[[Tally], Iterable[Document]],
    tokenizer: Tokenizer,
    cache_dir: Path,
    tally: Tally,
    progress: Progress = lambda done, name: None,
    place: str = "",
) -> Tokens:
    """The documents through a tokenizer, once: a file in `cache_dir` named by what it was made from. Each `place`, where the
    documents are from, has one file: that of an earlier text goes. `cache_dir` is this process's alone.

    `read(tally)` gives the documents, each time from the first. `tally` gets what was left out, also if the file is there.
    """
    encoder, characters = Encoder(tokenizer, tally), 0
    hashed = hashlib.sha256(CACHE_FORMAT + tokenizer.fingerprint())
    for document in _hashed(read(tally), hashed):
        text = document.text()
        encoder.see(text, document.path)
        characters += len(text)
    key = hashed.hexdigest()[:32]
    of = hashlib.sha256(os.fsencode(place) + tokenizer.fingerprint()).hexdigest()[:8]
    cached, earlier = cache_dir / f"{of}-{key}.npy", cache_dir / f"{key}.npy"
    if earlier.exists():  # of a version that named no place
        earlier.replace(cached)
    if not cached.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        for old in (*cache_dir.glob(f"{of}-*.npy"), *cache_dir.glob("*.tmp")):  # and what kills left
            remove_left(old)
        again = hashlib.sha256(CACHE_FORMAT + tokenizer.fingerprint())
        _write_cache(cached, _hashed(read(Tally()), again), tokenizer, progress, lambda: again.hexdigest()[:32] == key)
    tokens = open_tokens(cached)
    for start in range(0, len(tokens), SCAN_TOKENS):
        part = tokens[start : start + SCAN_TOKENS]
        encoder.seen(part, characters * len(part) // max(len(tokens), 1), "in all")
    return tokens


def _hashed(documents: Iterable[Document], digest: hashlib._Hash) -> Iterator[Document]:
    """The same documents; `digest` gets each."""
    for document in documents:
        digest.update(len(document.data).to_bytes(8, "little"))
        digest.update(document.data)
        yield document


def _write_cache(
    path: Path, documents: Iterable[Document], tokenizer: Tokenizer, progress: Progress, unchanged: Callable[[], bool]
) -> None:
    """Tokens go to a raw file as they come; it gets its header and its name when all are there."""
    encoder = Encoder(tokenizer, Tally(), np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4"))
    dtype = encoder.dtype

    def write(file: BinaryIO) -> None:
        np.lib.format.write_array_header_1_0(file, _header(dtype, 0))
        start, count, done = file.tell(), 0, 0
        for document in documents:
            for part in parts_of(document.text() + "\n"):
                ids = encoder.encode(part, document.path)
                file.write(ids.tobytes())
                count += len(ids)
                done += len(part.encode())
                progress(done, str(document.path))
        if not unchanged():
            raise DataError("data: the text was changed while it was read; start again when nobody writes to it")
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, _header(dtype, count))
        assert file.tell() == start, "NumPy pads its header so that it can be written again with another length"

    write_atomic(path, path.with_suffix(f".{os.getpid()}.tmp"), write)


def parts_of(text: str) -> Iterator[str]:
    """The text in parts that a tokenizer takes at once, cut after a line where there is one."""
    start = 0
    while start < len(text):
        stop = start + PART_CHARS_MAX
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _header(dtype: np.dtype[Any], count: int) -> dict[str, Any]:
    return {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}


def check_vocabulary(tokens: Tokens, vocabulary: int, name: str = "data") -> None:
    """Every token is an id of the model, or a DataError that names the first that is not. Reads all tokens once."""
    if len(tokens) == 0:
        raise DataError(f"{name}: it has no tokens")
    if np.iinfo(tokens.dtype).max < vocabulary:
        return
    for start in range(0, len(tokens), SCAN_TOKENS):
        outside = np.flatnonzero(tokens[start : start + SCAN_TOKENS] >= vocabulary)
        if outside.size:
            place = start + int(outside[0])
            found = int(tokens[place : place + 1][0])
            raise DataError(
                f"{name}: token {place}, read as {tokens.dtype.name}, has id {found}, and the vocabulary ends at "
                f"{vocabulary - 1}; use the tokenizer that the tokens were made with, a model with its vocabulary, and for a "
                ".bin the data.dtype that it was written with"
            )


def check_width(tokens: FileTokens, vocabulary: int, name: str) -> None:
    """Raises DataError for a raw file that is text, or whose tokens were written twice as wide as they are read, or big-endian.

    Wide ones are pairs, and one of each is never above the high bits of the largest id. Of big-endian ones the high byte, which
    says little in a text, is where the low one should be.
    """
    if tokens.path.suffix.lower() == ".npy" or len(tokens) < PAIRS_TOKENS_MIN:
        return
    first, high = tokens[:PAIRS_TOKENS_MAX], (vocabulary - 1) >> 8 * tokens.dtype.itemsize
    if tokens.dtype.itemsize > 1 and is_text(first.tobytes()):
        raise DataError(
            f"{name}: it is UTF-8 text, not tokens of {tokens.dtype.name}: rename it to .txt, or set data.dtype = 'uint8' if "
            "its bytes are the tokens"
        )
    if first[1::2].max() <= high < first[::2].max():
        found = f"at most {high}" if high else "0"
        raise DataError(
            f"{name}: every second token, read as {tokens.dtype.name}, is {found}, so the file has wider tokens: set "
            "data.dtype to what it was written with, such as uint32"
        )
    swapped = first[::2].max() <= high < first[1::2].max()
    if not swapped and tokens.dtype.itemsize == 2 and len(tokens) >= ORDER_TOKENS_MIN:
        low, top = (_entropy(part) for part in first.astype("<u2").view(np.uint8).reshape(-1, 2).T)
        swapped = TEXT_BITS_MIN < low < top - 1 and bool(first.byteswap().max() < vocabulary)
    if swapped:
        raise DataError(
            f"{name}: its bytes are in the order of a big-endian machine, and tokens are read little-endian: write it again "
            'with tokens.astype("<u2") or "<u4", or with numpy.save'
        )


def _entropy(values: npt.NDArray[np.uint8]) -> float:
    """Bits a byte."""
    shares = np.bincount(values) / len(values)
    return float(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())
