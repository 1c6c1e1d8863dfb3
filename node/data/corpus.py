"""From what the operator wrote (a path, a tokenizer's name) to checked tokens: the one entrance to this package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from node.data.errors import DataError
from node.data.sources import read_text, standard_library
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


@dataclass(frozen=True)
class Corpus:
    """Tokens, and the tokenizer that they belong to."""

    name: str
    tokens: Tokens
    tokenizer: Tokenizer

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
    progress: Progress = lambda done, name: None,
) -> Corpus:
    """Text or tokens at `path` (None: the standard library's sources), every id below `vocabulary` where it is given.

    `tokenizer` is 'bytes', a tokenizer.json, or a Hugging Face name or folder; `dtype` is the type of a raw `.bin`. `cache_dir`
    keeps the tokens that a Hugging Face tokenizer makes.
    """
    chosen = run_tokenizer(tokenizer, tokenizer_sha256)
    name = "the Python standard library" if path is None else str(path)
    if path is not None and not path.exists():
        raise DataError(f"data: {path} does not exist; name a text file, a folder of text, or a .npy or .bin of tokens")
    if path is not None and path.is_file() and path.suffix in TOKEN_SUFFIXES:
        tokens: Tokens = open_tokens(path, dtype)
    else:
        tokens = _tokens_of_text(path, chosen, cache_dir, progress)
    check_vocabulary(tokens, chosen.vocabulary if vocabulary is None else vocabulary, name)
    return Corpus(name, tokens, chosen)


def _tokens_of_text(path: Path | None, tokenizer: Tokenizer, cache_dir: Path, progress: Progress) -> Tokens:
    if path is not None and path.is_file() and isinstance(tokenizer, ByteTokenizer):
        return open_text(path)
    documents = standard_library() if path is None else read_text(path)
    if isinstance(tokenizer, ByteTokenizer):
        return bytes_of(documents)
    return tokenise(documents, tokenizer, cache_dir, progress)
