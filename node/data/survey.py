"""A look at a source of text before anybody trains on it: every name, and the first part of the text itself.

Reads at most SURVEY_BYTES_MAX, so that it takes seconds for any source. Downloads nothing, and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from node.data.corpus import is_tokens
from node.data.manifest import MANIFEST, ShardManifest
from node.data.shard_cache import manifest_of
from node.data.sources import HUB, Source, documents, files_of, has_rows
from node.data.tally import ALLOW, SHARE_MAX, LeftOutReason, Reading, Tally
from node.data.tokenizer import Encoder, Tokenizer
from node.data.tokens import parts_of
from node.data.walk import file_size

SURVEY_BYTES_MAX: Final = 64 << 20
ENCODED_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True)
class Survey:
    """`names`: what the names alone say, of all files. `inside`: what the text says, as far as it was read."""

    place: str
    names: Reading
    inside: Reading

    def check(self, *, allowed: bool, how: str = "add --allow-left-out") -> None:
        """See `Reading.check`."""
        self.names.check(self.place, allowed=allowed, how=how)
        self.inside.check(self.place, allowed=allowed, how=how)

    @property
    def share(self) -> float:
        """See `Reading.share`."""
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
        return Survey(source.place, Reading(), Reading(1, 1, file_size(path)))
    if (path / MANIFEST).is_file():
        _, manifest = manifest_of(path)
        shards = Reading(len(manifest.shards), 0, manifest.tokens * manifest.width, notes=left_out_of(manifest))
        return Survey(source.place, Reading(), shards)
    return survey(source)


def left_out_of(manifest: ShardManifest) -> tuple[str, ...]:
    """What was left out when a set of shards was built, for people."""
    words = {reason.key: reason.words for reason in LeftOutReason}
    told = [f"{count:,} {words.get(key, key)}" for key, count in manifest.left_out]
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
