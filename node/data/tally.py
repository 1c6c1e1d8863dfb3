"""What a reader of text read, and what it left out, counted by reason. One count for each command that reads text.

Refuses in silence to lose anything: a reader that skips a file or a row tells a `Tally`. If more than SHARE_MAX of the text is
left out, `Reading.check` raises LeftOutError, unless the person allowed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from protos.errors import DataError
from protos.text import amount, printable, things

SHARE_MAX: Final = 0.01
EXAMPLES_KEPT: Final = 3
EXAMPLE_CHARACTERS_MAX: Final = 200
ALLOW: Final = "--allow-left-out"


class LeftOutReason(Enum):
    """Why something is left out: words, and whether text is lost. What is not lost does not count towards SHARE_MAX."""

    NOT_UTF8 = ("not UTF-8", True)
    BINARY = ("binary", True)
    DAMAGED = ("damaged or cut off", True)
    PACKED = ("packed in a way that is not read (.gz and .zst are)", True)
    TOO_LARGE = ("too large", True)
    UNREADABLE = ("unreadable", True)
    DANGLING = ("link{s} to nothing", True)
    OUTSIDE = ("link{s} out of the folder", True)
    POINTER = ("pointer{s} of Git LFS or git-annex, without the data", True)
    PARTIAL = ("unfinished download{s}", True)
    BROKEN_ROW = ("broken row{s}", True)
    NO_COLUMN = ("without the column of text", True)
    NOT_TEXT = ("row{s} whose column has no text", True)
    UNKNOWN_TOKEN = ("part{s} that the tokenizer turned into its unknown token", True)
    DROPPED = ("character{s} that the tokenizer dropped", True)
    EMPTY = ("empty", False)
    HIDDEN = ("hidden", False)
    RUBBISH = ("file{s} of the system, editors and backups", False)
    SPECIAL = ("pipe{s}, socket{s} or device{s}", False)
    LINK = ("link{s} to text that is read anyway", False)
    ABOUT = ("about the data set (README, licence, lists)", False)
    SPLIT = ("of another split", False)
    REVISION = ("of another revision in the hub's cache", False)
    OWN = ("token shard{s}", False)

    def __init__(self, words: str, lost: bool) -> None:
        self._words, self.lost = words, lost

    def words(self, count: int) -> str:
        """For people: what so many are."""
        return self._words.format(s="" if count == 1 else "s")

    @property
    def key(self) -> str:
        """For programs."""
        return self.name.lower()


REMEDIES: Final = {
    LeftOutReason.NOT_UTF8: "convert it with `iconv -t UTF-8`, and say with -f what it is",
    LeftOutReason.PACKED: "unpack it, or pack it with gzip or zstd",
    LeftOutReason.DAMAGED: "copy it again from where it comes from",
    LeftOutReason.TOO_LARGE: "divide it with `split --line-bytes`",
    LeftOutReason.UNREADABLE: "make it readable",
    LeftOutReason.OUTSIDE: "copy the files into the folder, or name the folder that has them",
    LeftOutReason.POINTER: "get the files with `git lfs pull` or `git annex get`",
    LeftOutReason.NO_COLUMN: "name the column with --column of `swarmentum data build`",
    LeftOutReason.NOT_TEXT: "name the column with --column of `swarmentum data build`",
}


class LeftOutError(DataError):
    """More is left out than a person would expect."""


@dataclass(frozen=True)
class Left:
    """What one reason left out. `examples`: the first few, each with its place."""

    reason: LeftOutReason
    count: int
    size: int
    examples: tuple[str, ...]

    def line(self) -> str:
        """For people."""
        size = f" ({amount(self.size)})" if self.size else ""
        shown = f": {'; '.join(self.examples)}" if self.examples else ""
        more = ", ..." if len(self.examples) < self.count and self.examples else ""
        return f"{self.count:,} {self.reason.words(self.count)}{size}{shown}{more}"


@dataclass(frozen=True)
class Reading:
    """What was read of a source, and what was left out. `whole`: the reading came to the source's end.

    `counted`: the number of documents is known, and counts for the share, too.
    """

    files: int = 0
    documents: int = 0
    size: int = 0
    left: tuple[Left, ...] = ()
    notes: tuple[str, ...] = ()
    whole: bool = True
    counted: bool = True

    @property
    def share(self) -> float:
        """The part of the text that is left out, 0 to 1: of the documents or of the bytes, the larger one."""
        lost = [left for left in self.left if left.reason.lost and left.reason not in _OF_TOKENS]
        count, size = sum(left.count for left in lost), sum(left.size for left in lost)
        tokens = sum(left.size for left in self.left if left.reason in _OF_TOKENS)
        parts = [(size, self.size + size), (tokens, max(self.size, tokens))]
        parts += [(count, self.documents + count)] if self.counted else []
        return max((part / whole for part, whole in parts if whole), default=0.0)

    def read(self) -> str:
        """One line for people."""
        part = "" if self.whole else "the first part of the text: "
        return f"{part}{things(self.documents, 'document')} of {things(self.files, 'file')}, {amount(self.size)}"

    def lines(self) -> list[str]:
        """What was left out and what is to be known, a line each, for people."""
        return [f"left out: {left.line()}" for left in self.left] + list(self.notes)

    def values(self) -> dict[str, Any]:
        """For programs."""
        told = {
            left.reason.key: {"count": left.count, "bytes": left.size, "examples": list(left.examples)}
            for left in self.left
        }
        read = {"files": self.files, "documents": self.documents, "bytes": self.size, "whole": self.whole}
        return {"read": read, "left_out": told, "left_out_share": round(self.share, 6), "notes": list(self.notes)}

    def counts(self) -> dict[str, int]:
        """What a manifest names: a count for each reason."""
        return {left.reason.key: left.count for left in self.left}

    def check(self, place: str, *, allowed: bool, how: str = f"add {ALLOW}") -> None:
        """Raises LeftOutError if too much is left out. `how`: how a person allows it."""
        if allowed or self.share <= SHARE_MAX:
            return
        lost = [left for left in self.left if left.reason.lost]
        todo = list(dict.fromkeys(REMEDIES[left.reason] for left in lost if left.reason in REMEDIES))
        todo = [f"Else {', or '.join(todo)}."] if todo else []
        first = f"data: {100 * self.share:.3g} % of {place} would be left out, and more than {SHARE_MAX:.0%} needs your word:"
        told = [f"  {left.line()}" for left in lost]
        raise LeftOutError("\n".join([first, *told, f"To go on without it, {how}.", *todo]))


_OF_TOKENS: Final = (LeftOutReason.UNKNOWN_TOKEN, LeftOutReason.DROPPED)
"""Their size is in bytes of text that was read, so they are no part of what was left unread."""


@dataclass
class Tally:
    """Counts while a source is read. Each reader of the source gets the same one."""

    files: int = 0
    documents: int = 0
    size: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    """Sentences with `{}` for a count."""
    _left: dict[LeftOutReason, tuple[int, int, list[str]]] = field(default_factory=dict)

    def took(self, size: int) -> None:
        """A document of `size` bytes was read."""
        self.documents += 1
        self.size += size

    def leave(self, reason: LeftOutReason, place: str | Path, size: int = 0, *, count: int = 1) -> None:
        """`place`: the file, and the row if it is one, with what is wrong. `size`: bytes, as far as they are known."""
        known, bytes_, examples = self._left.get(reason, (0, 0, []))
        if len(examples) < EXAMPLES_KEPT and str(place):
            examples.append(printable(str(place), EXAMPLE_CHARACTERS_MAX))
        self._left[reason] = (known + count, bytes_ + size, examples)

    def note(self, words: str, count: int = 1) -> None:
        """Something that a person should know, and that leaves nothing out. No words: nothing."""
        if count and words:
            self.notes[words] = self.notes.get(words, 0) + count

    def join(self, other: Tally) -> None:
        """Add what another tally left out and noted. What it read counts already."""
        for reason, (count, size, examples) in other._left.items():
            self.leave(reason, "", size, count=count)
            kept = self._left[reason][2]
            kept += examples[: EXAMPLES_KEPT - len(kept)]
        for words, count in other.notes.items():
            self.note(words, count)

    def saved(self) -> dict[str, Any]:
        """What was left out and noted, as JSON values."""
        left = {reason.key: [count, size, examples] for reason, (count, size, examples) in self._left.items()}
        return {"left": left, "notes": self.notes}

    @classmethod
    def restored(cls, values: dict[str, Any]) -> Tally:
        """The tally that `saved` was called of."""
        left = {
            LeftOutReason[key.upper()]: (count, size, list(examples))
            for key, (count, size, examples) in values["left"].items()
        }
        return cls(notes=dict(values["notes"]), _left=left)

    def reading(self, *, whole: bool = True) -> Reading:
        """The counts so far."""
        left = tuple(
            Left(why, *self._left[why][:2], tuple(self._left[why][2])) for why in LeftOutReason if why in self._left
        )
        notes = tuple(words.format(f"{count:,}") for words, count in self.notes.items())
        return Reading(self.files, self.documents, self.size, left, notes, whole)


REPEATED_BYTES_MIN: Final = 256
"""Of a document that counts: short ones, such as answers, may be equal."""
REPEATED_KEPT: Final = 1 << 18
REPEATED_SHARE_MIN: Final = 0.01


class Repeats:
    """Counts documents that came before, byte for byte. Leaves none out.

    It remembers REPEATED_KEPT of them at most: beyond, every second one by its hash, then every fourth, and so on. A document
    that came before is then seen, or left out, as it was; the counts are estimates.
    """

    def __init__(self) -> None:
        self._seen, self._one_in = set[int](), 1
        self.count = self._repeated = self._size = 0

    def saw(self, data: bytes) -> None:
        """A document was read."""
        if len(data) < REPEATED_BYTES_MIN or (digest := hash(data)) % self._one_in:
            return
        self._size += len(data) * self._one_in
        if digest in self._seen:
            self.count += self._one_in
            self._repeated += len(data) * self._one_in
        self._seen.add(digest)
        if len(self._seen) > REPEATED_KEPT:
            self._one_in *= 2
            self._seen = {it for it in self._seen if it % self._one_in == 0}

    def words(self) -> str:
        """For people, with a place for the number; empty if they are less than REPEATED_SHARE_MIN of the text."""
        if self._repeated <= REPEATED_SHARE_MIN * self._size:
            return ""
        return (
            f"documents that were there before, such as packed and unpacked: {'about ' if self._one_in > 1 else ''}{{}} "
            f"({self._repeated / self._size:.0%} of the text); they count again, and a held-out loss may be of text that is "
            "trained on"
        )
