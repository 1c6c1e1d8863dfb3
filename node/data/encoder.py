"""Text to ids of a small type, with a count of what the tokenizer lost on the way.

Refuses an id beyond the tokenizer's own vocabulary: narrowed, 70,000 would become 4,464 without a word.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from node.data.tally import LeftOutReason, Tally
from node.data.tokenizer import ByteTokenizer, Fate, Tokenizer, control_pattern
from protos.errors import TokenizerError

CONTROL_NOTE: Final = (
    "{} strings in the text look like control tokens of the tokenizer; they were encoded as ordinary text"
)
CHANGED_NOTE: Final = "{} characters were changed by the tokenizer's normaliser (lower case, accents)"
SPACE_NOTE: Final = "{} line breaks and tabs were dropped by the tokenizer"


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
    """A tokenizer that counts. `tally` gets what was lost; `see` and `seen` count text that somebody encoded before."""

    def __init__(self, tokenizer: Tokenizer, tally: Tally, dtype: np.dtype[Any] | None = None) -> None:
        self.tokenizer, self.tally = tokenizer, tally
        self.dtype = type_for(tokenizer.vocabulary) if dtype is None else dtype
        self._pattern = control_pattern(tokenizer.control)
        self._fates: dict[str, Fate] = {}
        self._kept = set[str]()

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
        for character in set(text) - self._kept:
            if character not in self._fates:
                self._fates[character] = self._fate(character)
            fate, count = self._fates[character], text.count(character)
            if fate is Fate.KEPT:
                self._kept.add(character)
                continue
            if fate is Fate.CHANGED:
                self.tally.note(CHANGED_NOTE, count)
            elif character.isspace():
                self.tally.note(SPACE_NOTE, count)
            else:
                name = f"{place}: {character!r} (U+{ord(character):04X})"
                self.tally.leave(LeftOutReason.DROPPED, name, count * len(character.encode()), count=count)

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
