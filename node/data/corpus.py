"""From what the operator wrote (a path, a tokenizer's name) to checked tokens: the one entrance to this package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from node.data.sources import ARCHIVES, Document, Source, documents, has_rows, pointer_of, standard_library
from node.data.tally import Reading, Tally
from node.data.tokenizer import ByteTokenizer, Tokenizer, run_tokenizer
from node.data.tokens import (
    SCAN_TOKENS,
    TOKEN_SUFFIXES,
    Progress,
    Tokens,
    bytes_of,
    check_vocabulary,
    open_text,
    open_tokens,
    tokenise,
)
from node.data.unpack import PackedError, opened
from node.data.walk import mode_of
from protos.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """Tokens, and the tokenizer that they belong to. `reading`: what was read and left out; None for token files."""

    name: str
    tokens: Tokens
    tokenizer: Tokenizer
    reading: Reading | None = None

    def digest(self) -> str:
        """sha256 over the tokens as little-endian uint32, hex: equal where two peers have the same data."""
        digest = hashlib.sha256()
        for start in range(0, len(self.tokens), SCAN_TOKENS):
            digest.update(self.tokens[start : start + SCAN_TOKENS].astype("<u4").tobytes())
        return digest.hexdigest()


def open_corpus(
    path: Path | None,
    cache_dir: Path,
    *,
    tokenizer: str = "bytes",
    tokenizer_sha256: str | None = None,
    dtype: str = "uint16",
    vocabulary: int | None = None,
    allow_left_out: bool = False,
    progress: Progress = lambda done, name: None,
) -> Corpus:
    """Text or tokens at `path` (None: the standard library's sources), every id below `vocabulary` where it is given.

    `tokenizer` is 'bytes', a tokenizer.json, or a Hugging Face name or folder; `dtype` is the type of a raw `.bin`. `cache_dir`
    keeps the tokens that a Hugging Face tokenizer makes. Raises LeftOutError if much text is left out, unless that is allowed.
    """
    chosen = run_tokenizer(tokenizer, tokenizer_sha256)
    name = "the Python standard library" if path is None else str(path)
    if path is not None and not mode_of(path):
        raise DataError(f"data: {path} does not exist; name a text file, a folder of text, or a .npy or .bin of tokens")
    reading = None
    if path is not None and is_tokens(path):
        tokens: Tokens = open_tokens(path, dtype)
    else:
        tokens, reading = _tokens_of_text(path, chosen, cache_dir, progress)
        reading.check(name, allowed=allow_left_out, how="add --set allow=left_out")
    check_vocabulary(tokens, chosen.vocabulary if vocabulary is None else vocabulary, name)
    return Corpus(name, tokens, chosen, reading)


def is_tokens(path: Path) -> bool:
    """Whether a file has tokens, not text."""
    return path.is_file() and path.suffix.lower() in TOKEN_SUFFIXES


def _tokens_of_text(
    path: Path | None, tokenizer: Tokenizer, cache_dir: Path, progress: Progress
) -> tuple[Tokens, Reading]:
    tally, as_bytes = Tally(), isinstance(tokenizer, ByteTokenizer)
    if path is not None and as_bytes and _is_plain(path):
        found = open_text(path)
        return found, Reading(1, 1, len(found))
    if as_bytes:
        return bytes_of(_documents(path, tally)), tally.reading()
    tokens = tokenise(lambda tally: _documents(path, tally), tokenizer, cache_dir, tally, progress)
    return tokens, tally.reading()


def _documents(path: Path | None, tally: Tally) -> Iterator[Document]:
    if path is not None:
        return documents(Source(str(path)), tally)
    return _counted(standard_library(), tally)


def _counted(found: Iterator[Document], tally: Tally) -> Iterator[Document]:
    for document in found:
        tally.files += 1
        tally.took(len(document.data))
        yield document


def _is_plain(path: Path) -> bool:
    """Whether a file is its own text, byte for byte. Its first bytes say whether it is packed, not its name."""
    if not path.is_file() or has_rows(path, Source.column) or path.suffix.lower() in ARCHIVES:
        return False
    try:
        with opened(path) as (_, unpacked):
            return unpacked is None and pointer_of(path) is None
    except PackedError:
        return False
    except OSError:
        return True  # `open_text` says why
