"""Text to token ids and back: bytes (the default), or any Hugging Face tokenizer.

Text never becomes control tokens: the string `<|endoftext|>` in a text is encoded as any other text. Refuses: adding special
tokens by itself; guessing a tokenizer from the data; code that comes with a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from node.data.tally import LeftOutReason, Tally
from node.imports import quiet_libraries, slowly
from protos.errors import TokenizerError
from protos.text import printable

BYTES_VOCABULARY = 256
METASPACE = "\u2581"
"""The sign of SentencePiece tokenizers for a space."""


class Fate(Enum):
    """What a tokenizer does to a character."""

    KEPT = "kept"
    CHANGED = "changed"
    DROPPED = "dropped"


class Tokenizer(Protocol):
    """A tokenizer as the rest of the program knows it."""

    @property
    def vocabulary(self) -> int:
        """The highest id + 1: the rows that a model needs. Some tokenizers have fewer tokens than that."""

    @property
    def control(self) -> Mapping[str, int]:
        """The strings that stand for control tokens, and their ids. `encode` gives none of these ids."""

    @property
    def unknown(self) -> int | None:
        """The id that stands for what the tokenizer does not know; None if it has none."""

    def fate(self, character: str) -> Fate:
        """What becomes of a character."""

    @property
    def end(self) -> int | None:
        """The id that ends a text; None if the tokenizer has none."""

    def encode(self, text: str) -> npt.NDArray[Any]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text; bytes that are not UTF-8 become U+FFFD."""

    def fingerprint(self) -> bytes:
        """Differs between tokenizers that encode differently."""

    def huggingface(self) -> Any:
        """The same tokenizer as a `PreTrainedTokenizerBase`, to be saved beside a model."""


class ByteTokenizer:
    """The UTF-8 bytes of the text: id = byte value."""

    vocabulary = BYTES_VOCABULARY
    end = None
    unknown = None

    @property
    def control(self) -> Mapping[str, int]:
        return {}

    def fate(self, character: str) -> Fate:
        return Fate.KEPT

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def fingerprint(self) -> bytes:
        return b"bytes"

    def huggingface(self) -> Any:
        """A byte-level BPE without merges, whose ids are the byte values."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        alphabet = {sign: byte for byte, sign in enumerate(_byte_signs())}
        backend = Backend(models.BPE(vocab=alphabet, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, clean_up_tokenization_spaces=False
        )


class HuggingFaceTokenizer:
    """A tokenizer of the `transformers` library, by name or folder."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            self._inner: Any
            with quiet_libraries():
                if Path(name).is_file():
                    self._inner = PreTrainedTokenizerFast(tokenizer_file=name)  # type: ignore[no-untyped-call]
                else:
                    # without the last word it asks whether it may run what the tokenizer brought, and hears a "y" on stdin
                    with slowly(f"looking for tokenizer {name}, here and on the hub"):
                        self._inner = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # the library of a tokenizer.json raises plain exceptions
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise TokenizerError(
                f"data.tokenizer = {name!r}: transformers cannot load it: {why} Give 'bytes', a folder with a tokenizer, a "
                "tokenizer.json, or a name that this machine can download. A machine without a network needs a copy of "
                "~/.cache/huggingface from one that has the tokenizer"
            ) from error

        backend = getattr(self._inner, "backend_tokenizer", None)
        # now, because encoding changes what a tokenizer with truncation or padding says of itself
        self._described = backend.to_str() if backend is not None else repr(sorted(self._inner.get_vocab().items()))
        self._normalizer = getattr(backend, "normalizer", None)
        if drawn := _drawn(self._described):
            raise TokenizerError(
                f"data.tokenizer = {name!r}: it has {drawn}, so it encodes one text otherwise each time, and peers would have "
                "other tokens: set that to null in its tokenizer.json"
            )

    @cached_property
    def vocabulary(self) -> int:
        return max(self._inner.get_vocab().values(), default=-1) + 1

    @cached_property
    def control(self) -> Mapping[str, int]:
        added = getattr(self._inner, "added_tokens_decoder", {})
        found = {token.content: number for number, token in added.items() if token.special}
        found |= dict(zip(self._inner.all_special_tokens, self._inner.all_special_ids, strict=True))
        # a single character cannot be told from text
        return {text: number for text, number in found.items() if number != self.unknown and len(text) > 1}

    @cached_property
    def unknown(self) -> int | None:
        if self._inner.unk_token_id is not None:
            return int(self._inner.unk_token_id)
        if not self._described.startswith("{"):
            return None
        model = json.loads(self._described)["model"]  # of a tokenizer.json alone, transformers does not look
        if model.get("unk_id") is not None:
            return int(model["unk_id"])
        return self._inner.get_vocab().get(model.get("unk_token"))  # type: ignore[no-any-return]

    @property
    def end(self) -> int | None:
        return self._inner.eos_token_id  # type: ignore[no-any-return]

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        ids = self._ids(text)
        if not np.isin(ids, self._control_ids).any():
            return ids
        # The model's own words have the string, too. It is encoded in two parts, and what a normaliser still makes of it goes.
        cuts = [0, *(found.start() + 1 for found in self._pattern.finditer(text)), len(text)]
        parts = [self._ids(text[start:stop]) for start, stop in pairwise(cuts)]
        ids = np.concatenate(parts)
        return ids[~np.isin(ids, self._control_ids)]

    def _ids(self, text: str) -> npt.NDArray[np.int64]:
        try:
            return np.asarray(self._inner.encode(text, **self._options), dtype=np.int64)
        except Exception as error:  # the library of a tokenizer.json raises plain exceptions
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise TokenizerError(
                f"data.tokenizer: it cannot encode {printable(text[:40], 40)!r}: {why}; use a tokenizer that knows all text, "
                "or one with an unknown token"
            ) from error

    @cached_property
    def _options(self) -> dict[str, bool]:
        """Of `encode`. Some tokenizers never look for control tokens in text, and know no word for it."""
        plain = {"add_special_tokens": False, "verbose": False}
        try:
            self._inner.encode("a", split_special_tokens=True, **plain)
        except (TypeError, ValueError):
            return plain
        return {**plain, "split_special_tokens": True}

    @cached_property
    def _control_ids(self) -> npt.NDArray[np.int64]:
        return np.array(sorted(self.control.values()), dtype=np.int64)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return control_pattern(self.control, re.IGNORECASE)

    def fate(self, character: str) -> Fate:
        if not len(self._ids(character)):
            return Fate.DROPPED
        if self._normalizer is None:
            return Fate.KEPT
        made = self._normalizer.normalize_str(character).replace(METASPACE, " ").strip()
        return Fate.KEPT if made == character.strip() else Fate.CHANGED

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), clean_up_tokenization_spaces=False))

    def fingerprint(self) -> bytes:
        return hashlib.sha256(self._described.encode()).digest()

    def huggingface(self) -> Any:
        return self._inner


def _drawn(described: str) -> str:
    """What makes a tokenizer draw its tokens at random: its setting and value; empty for none."""
    model = json.loads(described).get("model", {}) if described.startswith("{") else {}
    found = {key: model.get(key) for key in ("dropout", "alpha", "nbest_size")}
    return ", ".join(f"{key} {value}" for key, value in found.items() if value)


def control_pattern(control: Mapping[str, int], flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """Finds the strings of control tokens in a text, the longest of those that begin at one place."""
    return re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)", flags)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a tokenizer.json, or whatever `AutoTokenizer` knows by that name or finds in that folder."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def sha256_of_tokenizer(tokenizer: Tokenizer) -> str:
    """What `data.tokenizer_sha256` of a run names."""
    return hashlib.sha256(tokenizer.fingerprint()).hexdigest()


def run_tokenizer(name: str, sha256: str | None) -> Tokenizer:
    """The run's tokenizer. Raises TokenizerError for one that encodes differently than the run's (`sha256`, if it has one)."""
    found = load_tokenizer(name)
    if sha256 is not None and (here := sha256_of_tokenizer(found)) != sha256:
        raise TokenizerError(
            f"data.tokenizer = {name!r}: the one of this machine ({here[:16]}...) encodes differently than the run's "
            f"({sha256[:16]}...): copy the run's tokenizer to this machine, or ask the operator for the revision"
        )
    return found


def _byte_signs() -> list[str]:
    """The sign of byte-level tokenizers for each byte (GPT-2's table): the byte itself if it prints, else from U+0100 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(BYTES_VOCABULARY) if byte not in printed]
    return [chr(byte) if byte in printed else chr(0x100 + others.index(byte)) for byte in range(BYTES_VOCABULARY)]


CONTROL_NOTE: Final = (
    "strings in the text that look like control tokens of the tokenizer: {}; they were encoded as ordinary text"
)
CHANGED_NOTE: Final = "characters that the tokenizer's normaliser changed (lower case, accents): {}"
ROUND_NOTE: Final = "the tokenizer does not give all text back: {} becomes {}"
ROUND_CHARACTERS: Final = 1 << 16
"""Of the first text, which is decoded to compare it."""
SPACE_NOTE: Final = "line breaks and tabs that the tokenizer dropped: {}"


def type_for(vocabulary: int) -> np.dtype[Any]:
    """The smallest type of ids below `vocabulary`, little-endian."""
    return np.dtype("<u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")


def narrowed(ids: npt.NDArray[Any], vocabulary: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The ids in a smaller type, each of them below `vocabulary`. Raises TokenizerError."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise TokenizerError(
            f"data.tokenizer: it gave the id {int(ids.max())}, and its vocabulary ends at {vocabulary - 1}; "
            "use another tokenizer"
        )
    return ids.astype(dtype)


class Encoder:
    """A tokenizer that counts what it loses, and gives ids of a small type. Refuses an id beyond the tokenizer's vocabulary:
    narrowed, 70,000 would become 4,464 without a word.

    `tally` gets what was lost; `see` and `seen` count text that somebody encoded before.
    """

    def __init__(self, tokenizer: Tokenizer, tally: Tally, dtype: np.dtype[Any] | None = None) -> None:
        self.tokenizer, self.tally = tokenizer, tally
        self.dtype = type_for(tokenizer.vocabulary) if dtype is None else dtype
        self._pattern = control_pattern(tokenizer.control)
        self._fates: dict[str, Fate] = {}
        self._kept = set[str]()
        self._compared = 0

    def encode(self, text: str, place: object) -> npt.NDArray[Any]:
        """The ids of a text. `place`: for the count."""
        ids = self.tokenizer.encode(text)
        self.see(text, place)
        self.seen(ids, len(text), place)
        return narrowed(ids, self.tokenizer.vocabulary, self.dtype)

    def see(self, text: str, place: object) -> None:
        """Count what the tokenizer does to the characters of a text."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return
        if self.tokenizer.control:
            self.tally.note(CONTROL_NOTE, sum(1 for _ in self._pattern.finditer(text)))
        if not self._see_characters(text, place) and self._compared < ROUND_CHARACTERS:
            self._compare(text[: ROUND_CHARACTERS - self._compared])

    def _see_characters(self, text: str, place: object) -> bool:
        """Count them; True if one of them is lost or changed."""
        told = False
        for character in set(text) - self._kept:
            if character not in self._fates:
                self._fates[character] = self._fate(character)
            fate, count = self._fates[character], text.count(character)
            if fate is Fate.KEPT:
                self._kept.add(character)
                continue
            told = True
            if fate is Fate.CHANGED:
                self.tally.note(CHANGED_NOTE, count)
            elif character.isspace():
                self.tally.note(SPACE_NOTE, count)
            else:
                name = f"{place}: {character!r} (U+{ord(character):04X})"
                self.tally.leave(LeftOutReason.DROPPED, name, count * len(character.encode()), count=count)
        return told

    def _compare(self, text: str) -> None:
        """Whether the ids are the text again. A space that a tokenizer puts before a text is no difference."""
        ids = self.tokenizer.encode(text)
        self._compared += len(text)
        back = self.tokenizer.decode(ids.tolist())
        if self.tokenizer.unknown in ids or back in (text, f" {text}", text.removeprefix(" ")):
            return
        self._compared = ROUND_CHARACTERS
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, back, strict=False))
        at = max(sum(1 for _ in same) - 10, 0)
        shown = (repr(it[at : at + 30]).replace("{", "{{").replace("}", "}}") for it in (text, back))
        self.tally.note(ROUND_NOTE.format(*shown))

    def seen(self, ids: npt.NDArray[Any], characters: int, place: object) -> None:
        """Count the unknown tokens among the ids of a text."""
        if self.tokenizer.unknown is None:
            return
        if count := int(np.count_nonzero(ids == self.tokenizer.unknown)):
            size = count * characters // max(len(ids), 1)
            self.tally.leave(LeftOutReason.UNKNOWN_TOKEN, str(place), size, count=count)

    def _fate(self, character: str) -> Fate:
        """A line break may be dropped between two words only."""
        fate = self.tokenizer.fate(character)
        if not character.isspace() or character == " " or fate is Fate.CHANGED:
            return Fate.KEPT if character == " " else fate
        apart = np.concatenate([self.tokenizer.encode("a"), self.tokenizer.encode("b")])
        return Fate.DROPPED if np.array_equal(self.tokenizer.encode(f"a{character}b"), apart) else Fate.KEPT
