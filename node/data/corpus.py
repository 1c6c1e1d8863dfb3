"""From what the operator wrote (a path, a tokenizer's name) to checked tokens: the one entrance to this package."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from node.data.rows import BOM_BYTES, LINE_BYTES_MAX, markup_note
from node.data.shard_cache import manifest_of
from node.data.shards import MANIFEST, ShardManifest
from node.data.sources import (
    ARCHIVES,
    HUB,
    Document,
    Source,
    documents,
    files_of,
    has_rows,
    pointer_of,
    standard_library,
)
from node.data.tally import ALLOW, SHARE_MAX, LeftOutReason, Reading, Tally
from node.data.text_files import PackedError, file_size, mode_of, opened
from node.data.tokenizer import ByteTokenizer, Encoder, Tokenizer, run_tokenizer
from node.data.tokens import (
    SCAN_TOKENS,
    TOKEN_SUFFIXES,
    FileTokens,
    Progress,
    Tokens,
    bytes_of,
    check_vocabulary,
    check_width,
    open_text,
    open_tokens,
    parts_of,
    tokenise,
)
from protos.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """Tokens, and the tokenizer that they belong to. `reading`: what was read and left out."""

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
        tokens: Tokens = (of_file := open_tokens(path, dtype))
        check_width(of_file, chosen.vocabulary if vocabulary is None else vocabulary, name)
        check_range(of_file, chosen, name)
        note = stranger_note(of_file, chosen)
        reading = Reading(1, 1, len(tokens) * tokens.dtype.itemsize, notes=(note,) if note else ())
    else:
        tokens, reading = _tokens_of_text(path, chosen, cache_dir, progress)
        reading.check(name, allowed=allow_left_out, how="add --set allow=left_out")
    check_vocabulary(tokens, chosen.vocabulary if vocabulary is None else vocabulary, name)
    return Corpus(name, tokens, chosen, reading)


def check_range(tokens: FileTokens, tokenizer: Tokenizer, name: str) -> None:
    """Raises DataError for tokens of a type that has no room for the tokenizer's ids: what a writer cut off looks like others.

    `arr[:] = ids` cuts in silence in NumPy. Control tokens, which no text has, may lie beyond.
    """
    control, highest = set(tokenizer.control.values()), tokenizer.vocabulary - 1
    while highest in control:
        highest -= 1
    if highest > np.iinfo(tokens.dtype).max:
        raise DataError(
            f"{name}: its tokens are {tokens.dtype.name}, which has no room for the ids of data.tokenizer, up to {highest}: "
            "larger ids were cut off when it was written, or its tokens are another tokenizer's; write the ids as uint32"
        )


STRANGER_TOKENS: Final = 4096
"""Of the middle of a token file."""
STRANGER_SHARE_MIN: Final = 0.97
"""The part of the tokens that comes back. Of another tokenizer's tokens it was 0.82 to 0.91, of its own 1."""
STRANGER_NOTE: Final = (
    "of {:,} tokens in the file's middle only {:.0%} are the same when they are decoded and encoded again, and of a text that "
    "data.tokenizer encoded nearly all are: these may be another tokenizer's tokens; decoded, they begin {!r}"
)


def stranger_note(tokens: FileTokens, tokenizer: Tokenizer) -> str:
    """Words about tokens that this tokenizer would hardly have made; empty if it would."""
    first = max(len(tokens) - STRANGER_TOKENS, 0) // 2
    ids = tokens[first : first + STRANGER_TOKENS].astype(np.int64)
    ids = ids[ids < tokenizer.vocabulary]
    ids = ids[~np.isin(ids, [*tokenizer.control.values(), -1 if tokenizer.unknown is None else tokenizer.unknown])]
    text = tokenizer.decode(ids.tolist())
    again, here = Counter(tokenizer.encode(text).tolist()), Counter(ids.tolist())
    same = (again & here).total() - sum(unicodedata.category(sign) == "Cc" and not sign.isspace() for sign in text)
    share = same / max(again.total(), here.total(), 1)
    return (
        ""
        if share >= STRANGER_SHARE_MIN or not len(ids)
        else STRANGER_NOTE.format(len(ids), max(share, 0.0), text[:30])
    )


def is_tokens(path: Path) -> bool:
    """Whether a file has tokens, not text."""
    return path.is_file() and path.suffix.lower() in TOKEN_SUFFIXES


def _tokens_of_text(
    path: Path | None, tokenizer: Tokenizer, cache_dir: Path, progress: Progress
) -> tuple[Tokens, Reading]:
    tally, as_bytes = Tally(), isinstance(tokenizer, ByteTokenizer)
    if path is not None and as_bytes and _is_plain(path):
        found = open_text(path)
        with path.open("rb") as file:
            tally.note(markup_note(file.readline(LINE_BYTES_MAX).removeprefix(BOM_BYTES), path, Source.column))
        return found, Reading(1, 1, len(found), notes=tally.reading().notes)
    if as_bytes:
        return bytes_of(_documents(path, tally)), tally.reading()
    tokens = tokenise(lambda tally: _documents(path, tally), tokenizer, cache_dir, tally, progress, str(path))
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


SURVEY_BYTES_MAX: Final = 64 << 20
ENCODED_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True)
class Survey:
    """A look at a source of text before anybody trains on it: every name, and the first part of the text itself.

    Reads at most SURVEY_BYTES_MAX, so that it takes seconds for any source. Downloads nothing, and writes nothing.

    `names`: what the names alone say, of all files. `inside`: what the text says, as far as it was read.
    """

    place: str
    names: Reading
    inside: Reading

    def check(self, *, allowed: bool, how: str = "add --allow-left-out") -> None:
        self.names.check(self.place, allowed=allowed, how=how)
        self.inside.check(self.place, allowed=allowed, how=how)

    @property
    def share(self) -> float:
        return max(self.names.share, self.inside.share)

    def lines(self) -> list[str]:
        """For people: what was read, then what was left out."""
        needs = f"{self.share:.0%} is left out: training on it needs {ALLOW}" if self.share > SHARE_MAX else ""
        return [self.inside.read(), *self.names.lines(), *self.inside.lines(), *filter(None, (needs,))]

    def values(self) -> dict[str, Any]:
        """For programs."""
        inside, names = self.inside.values(), self.names.values()
        left = names["left_out"] | inside["left_out"]  # a reason is seen either in a name or in a text
        return {**inside, "source": self.place, "left_out": left, "left_out_share": round(self.share, 6)}


def look_at(source: Source) -> Survey:
    """Look at what a run or a person names: text, a token file, or a folder of token shards. Raises DataError."""
    path = Path(source.place)
    if is_tokens(path):
        open_tokens(path, "uint8")  # of any size: the type is the run's
        return Survey(source.place, Reading(), Reading(1, 1, file_size(path)))
    if (path / MANIFEST).is_file():
        _, manifest = manifest_of(path)
        shards = Reading(len(manifest.shards), 0, manifest.tokens * manifest.width, notes=left_out_of(manifest))
        return Survey(source.place, Reading(), shards)
    return survey(source)


def left_out_of(manifest: ShardManifest) -> tuple[str, ...]:
    """What was left out when a set of shards was built, for people."""
    known = {reason.key: reason for reason in LeftOutReason}
    told = [f"{count:,} {known[key].words(count) if key in known else key}" for key, count in manifest.left_out]
    return (f"left out when the shards were built: {'; '.join(told)}",) if told else ()


def survey(source: Source, tokenizer: Tokenizer | None = None, bytes_max: int = SURVEY_BYTES_MAX) -> Survey:
    """Look at a source. `tokenizer`: also at what it makes of the first text. Raises DataError if there is none."""
    names, inside = Tally(), Tally()
    files = None if source.place.startswith(HUB) else files_of(source, names)
    for file in files or ():
        names.took(file_size(file))
    encoder, whole = None if tokenizer is None else Encoder(tokenizer, inside), True
    for document in documents(source, inside, files):
        if encoder is not None and inside.size <= ENCODED_BYTES_MAX:
            for part in parts_of(document.text()):
                encoder.encode(part, document.path)
        if inside.size > bytes_max:
            whole = False
            break
    rows = any(has_rows(file, source.column) for file in files or ())  # each has many documents
    return Survey(source.place, replace(names.reading(), counted=not rows), inside.reading(whole=whole))
