"""What a set of token shards is: a small JSON file beside them, whose SHA-256 names the whole set.

The shards of a set are raw little-endian token files. A manifest may come from a stranger's server, so `parse` is its door.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from node.data.tokens import TOKEN_TYPES
from protos.errors import DataError

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
MANIFEST_BYTES_MAX: Final = 32 << 20
SHARDS_MAX: Final = 1 << 17
SHARD_BYTES_MAX: Final = 1 << 32
TEXT_CHARACTERS_MAX: Final = 1000
REASONS_MAX: Final = 64
COUNT_MAX: Final = 1 << 62
REASON: Final = re.compile(r"[a-z0-9_]{1,40}")
SHARD_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SHA256_HEX: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Shard:
    """One file of a set."""

    name: str
    tokens: int
    sha256: str
    """Of the file, in hex digits."""


@dataclass(frozen=True)
class ShardManifest:
    """A set of shards. `tokenizer_sha256`: of the tokenizer's description, which differs if two encode differently."""

    tokenizer: str
    tokenizer_sha256: str
    vocabulary: int
    dtype: str
    shards: tuple[Shard, ...]
    source: str = ""
    """For people: the text that the tokens come from."""
    left_out: tuple[tuple[str, int], ...] = ()
    """For people: what of the text is not in the tokens, by reason. A manifest without it is as it always was."""

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return np.dtype(self.dtype).itemsize

    @property
    def tokens(self) -> int:
        """Of all shards."""
        return sum(shard.tokens for shard in self.shards)

    def encode(self) -> bytes:
        """The file."""
        values = {"format": FORMAT, **asdict(self)}
        left = dict(values.pop("left_out"))
        return json.dumps(values | ({"left_out": left} if left else {}), indent=1).encode() + b"\n"


def sha256_of(data: bytes) -> str:
    """The name of a set: the hash of its manifest file, in hex digits."""
    return hashlib.sha256(data).hexdigest()


def parse(data: bytes, place: str) -> ShardManifest:
    """The manifest that `data` is. `place` is for the error. Raises DataError."""
    try:
        if len(data) > MANIFEST_BYTES_MAX:
            raise ValueError(f"it has more than {MANIFEST_BYTES_MAX >> 20} MiB")
        values = json.loads(data)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            found = values.get("format") if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"its format is {found!r}, and this version reads format {FORMAT}")
        return _manifest(values)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(f"data: {place} is no manifest of token shards: {why}") from error


def _manifest(values: dict[str, Any]) -> ShardManifest:
    dtype, shards = values["dtype"], values["shards"]
    if dtype not in TOKEN_TYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(TOKEN_TYPES)}")
    if not isinstance(shards, list) or not 1 <= len(shards) <= SHARDS_MAX:
        raise ValueError(f"shards: expected a list of 1 to {SHARDS_MAX}")
    made = tuple(_shard(values, np.dtype(dtype).itemsize) for values in shards)
    if len({shard.name for shard in made}) < len(made):
        raise ValueError("two shards have one name")
    return ShardManifest(
        _text(values, "tokenizer"),
        _hash(values, "tokenizer_sha256"),
        _count(values, "vocabulary", 1 << 32),
        dtype,
        made,
        _text(values, "source"),
        _left_out(values),
    )


def _left_out(values: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    left = values.get("left_out", {})
    if not isinstance(left, dict) or len(left) > REASONS_MAX or not all(map(REASON.fullmatch, left)):
        raise ValueError(f"left_out: expected a count for each of at most {REASONS_MAX} reasons")
    return tuple((reason, _count(left, reason, COUNT_MAX)) for reason in left)


def _shard(values: dict[str, Any], width: int) -> Shard:
    name = values["name"]
    if not isinstance(name, str) or not SHARD_NAME.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"a shard is named {str(name)[:100]!r}: expected letters, digits, '.', '_' and '-'")
    return Shard(name, _count(values, "tokens", SHARD_BYTES_MAX // width), _hash(values, "sha256"))


def _count(values: dict[str, Any], name: str, most: int) -> int:
    count = values[name]
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
        raise ValueError(f"{name} is {str(count)[:40]}: expected 1 to {most}")
    return count


def _hash(values: dict[str, Any], name: str) -> str:
    text = values[name]
    if not isinstance(text, str) or not SHA256_HEX.fullmatch(text):
        raise ValueError(f"{name}: expected 64 hex digits")
    return text


def _text(values: dict[str, Any], name: str) -> str:
    text = values.get(name, "")
    if not isinstance(text, str) or len(text) > TEXT_CHARACTERS_MAX:
        raise ValueError(f"{name}: expected text of at most {TEXT_CHARACTERS_MAX} characters")
    return text
