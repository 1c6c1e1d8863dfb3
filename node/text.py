"""The run's training text on this machine: the tokenizer, and the samples that a step's ranges mean.

The run names the text, and the peer's owner may name another copy (`--data`). Refuses another set of shards than the run names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.admission.consent import STANDARD_LIBRARY
from node.config import PeerSettings
from node.data.corpus import Corpus, left_out_of, open_corpus
from node.data.samples import MixedSamples, Samples
from node.data.shard_cache import Cache, Folder, Shards, manifest_of
from node.data.shards import MANIFEST, ShardedSamples, ShardManifest, parse, sha256_of
from node.data.tally import Reading
from node.data.text_files import reason_of_name
from node.data.tokenizer import Tokenizer, run_tokenizer, sha256_of_tokenizer
from node.data.tokens import BLOCK_BYTES, BLOCKS
from node.donor.live import Kept, allowed
from protos.address import is_web
from protos.assignment import Range, phases
from protos.disk import write_bytes, writing
from protos.errors import DataError
from protos.mistakes import OWN_TEXT
from protos.run_config import RunConfig

if TYPE_CHECKING:
    from node.data.download import Mirrors


@dataclass(frozen=True)
class Text:
    """The name of the training text, its tokenizer, and its samples (None: this peer does not train)."""

    name: str
    tokenizer: Tokenizer
    samples: Samples | None = None
    dtype: str = "-"
    close: Callable[[], None] = lambda: None
    """Ends downloads."""
    shelves: tuple[Cache, ...] = ()
    """Of text that comes from the web."""


def open_text(
    config: RunConfig,
    settings: PeerSettings,
    log: Any,
    paced: Callable[[int], None],
    *,
    trains: bool = True,
    step: int = 0,
) -> Text:
    """Open the run's text. A peer that does not train needs only its tokenizer. `step`: the samples of the step after it come
    first. `paced`: see `Mirrors`. Raises OperatorError or NetworkError."""
    data = config.data
    if not trains:
        return Text(data.source, run_tokenizer(data.tokenizer, data.tokenizer_sha256))
    if data.mix:
        return _mixture(config, settings, log, paced, step)
    return _one(Named(settings.data or data.source, data.mirrors, data.sha256), config, settings, log, paced, step)


@dataclass(frozen=True)
class Named:
    """A source as the run names it, or this machine's own copy of it."""

    source: str
    mirrors: tuple[str, ...]
    sha256: str | None
    part: int = 1
    """Of how many sources that share the disk."""


def _mixture(config: RunConfig, settings: PeerSettings, log: Any, paced: Callable[[int], None], step: int) -> Text:
    """Each source of `data.mix`. With --data, a folder that has each source under its name."""
    mix, texts = config.data.mix, list[Text]()
    with ExitStack() as opened:
        for each in mix:
            own = each.source if settings.data is None else str(_own(Path(settings.data), each.name))
            named = Named(own, each.mirrors, each.sha256, len(mix))
            texts.append(_one(named, config, settings, log, paced, None))
            opened.callback(texts[-1].close)
        found = [text.samples for text in texts if text.samples is not None]
        samples = MixedSamples(found, phases(config.data.weights(), config.clock.batch_samples), config.seed)
        first = step * config.clock.batch_samples
        samples.away((Range(first, first + 1),))
        shelves = tuple(shelf for text in texts for shelf in text.shelves)
        names = ", ".join(f"{each.name}: {text.name}" for each, text in zip(mix, texts, strict=True))
        return Text(names, texts[0].tokenizer, samples, texts[0].dtype, opened.pop_all().close, shelves)


def _own(folder: Path, name: str) -> Path:
    """This machine's copy of a source of a mixture: DIR/NAME, or DIR/NAME with an ending."""
    named = [folder / name, *sorted(folder.glob(f"{name}.*"))]
    found = [path for path in named if path.exists() and reason_of_name(path.name) is None]
    if len(found) > 1:
        raise DataError(
            f"data: --data {folder} has {len(found)} copies of {name!r} ({', '.join(path.name for path in found)}), and one is "
            "meant: move the others away"
        )
    if not found:
        raise DataError(
            f"data: --data {folder} has no {name!r}, and the run trains on a mixture: give a folder that has each source under "
            "its name, as files or folders, or join without --data"
        )
    return found[0]


def _one(
    named: Named, config: RunConfig, settings: PeerSettings, log: Any, paced: Callable[[int], None], step: int | None
) -> Text:
    data, source = config.data, named.source
    if source == OWN_TEXT:  # `request` asks for --data before; a folder of this name is not meant
        raise DataError("data: each peer of this run brings its own text: join with --data PATH")
    if is_web(source) or (Path(source) / MANIFEST).is_file():
        return _shards(named, config, settings, log, paced, step)
    if named.sha256 is not None:
        raise DataError(
            f"data: the run trains on one set of token shards ({named.sha256[:16]}...), and {source} is none: name a copy "
            f"of the set, a folder with a {MANIFEST}, or join without --data"
        )
    path = None if source == STANDARD_LIBRARY else Path(source)
    corpus = open_corpus(
        path,
        settings.home / "cache",
        tokenizer=data.tokenizer,
        tokenizer_sha256=data.tokenizer_sha256,
        dtype=data.dtype,
        allow_left_out="left_out" in settings.allow,
    )
    _tell(corpus.name, corpus.reading, log)
    _tell_change(corpus, settings.home / "cache", log)
    samples = Samples(corpus.tokens, data.context, config.seed)
    return Text(corpus.name, corpus.tokenizer, samples, corpus.tokens.dtype.name)


def _tell(name: str, reading: Reading | None, log: Any) -> None:
    """What was left out of text on this machine, a line for each reason."""
    if reading is None:
        return
    for line in reading.lines():
        log.warning("training text", data=name, read=reading.read(), why=line)


def _tell_change(corpus: Corpus, folder: Path, log: Any) -> None:
    """Say so if the text of a name is another one than when a peer of this home last read it for such a run."""
    tokens = corpus.tokens
    digest = hashlib.sha256(len(tokens).to_bytes(8, "little"))
    for start in range(0, len(tokens), max(len(tokens) // BLOCKS, 1)):
        digest.update(tokens[start : start + BLOCK_BYTES].tobytes())
    _tell_other(corpus.name, corpus.tokenizer, tokens.dtype.name, digest.digest(), folder, log)


def _tell_other(name: str, tokenizer: Tokenizer, dtype: str, digest: bytes, folder: Path, log: Any) -> None:
    such = f"{sha256_of_tokenizer(tokenizer)} {dtype} ".encode()
    file = folder / f"text-{sha256_of(such + os.fsencode(Path(name).absolute()))[:16]}"
    with writing(file):
        before = file.read_bytes() if file.exists() else b""
        if before == digest:
            return
        folder.mkdir(parents=True, exist_ok=True)
    if before:
        log.warning(
            "the training text is another one than at the last start",
            data=name,
            why="this peer's votes are of the text that is there now: put the earlier one back if that is not meant",
        )
    write_bytes(file, digest)


def _shards(
    named: Named, config: RunConfig, settings: PeerSettings, log: Any, paced: Callable[[int], None], step: int | None
) -> Text:
    from node.data.download import Mirrors  # the HTTP client takes 0.2 s to import

    data, source = config.data, named.source
    urls = [source, *(named.mirrors if settings.data is None else ())] if is_web(source) else []
    if urls and named.sha256 is None and settings.data is None:
        raise DataError(f"data: the run names {source} without a hash, so its server could give each peer another text")
    private = "data" in settings.allow or settings.data is not None
    mirrors = Mirrors(urls, private=private, log=log.warning, paced=paced)
    encoded, manifest = _manifest(source, mirrors, settings.home / "cache", named.sha256)
    for line in left_out_of(manifest):
        log.info("training text", data=source, why=line)
    tokenizer = run_tokenizer(data.tokenizer, data.tokenizer_sha256)
    if sha256_of(tokenizer.fingerprint()) != manifest.tokenizer_sha256:
        raise DataError(
            f"data: {source} has tokens of the tokenizer {manifest.tokenizer!r}, and the run's data.tokenizer is "
            f"{data.tokenizer!r}, which encodes differently; ask the run's operator"
        )
    if named.sha256 is None:
        digest = hashlib.sha256(encoded).digest()
        _tell_other(source, tokenizer, manifest.dtype, digest, settings.home / "cache", log)
    close: Callable[[], None]
    shelf: Cache | None = None
    if urls:
        folder = settings.home / "cache" / f"shards-{sha256_of(encoded)[:16]}"
        shards = Shards(manifest, folder, tokenizer.vocabulary)

        def fetch(shard: int, told: Callable[[int], bool]) -> bool:
            return mirrors.fetch(manifest.shards[shard], manifest.width, shards.path(shard), told)

        shelf = Cache(shards, allowed(settings.disk_gb, Kept()).text // named.part, fetch)
        samples, close = ShardedSamples(manifest, shelf, data.context, config.seed), shelf.close
    else:
        here = Folder(Shards(manifest, Path(source).absolute(), tokenizer.vocabulary))
        samples, close = ShardedSamples(manifest, here, data.context, config.seed), lambda: None
    if step is not None:
        first = step * config.clock.batch_samples
        samples.away((Range(first, first + 1),))
    return Text(source, tokenizer, samples, manifest.dtype, close, () if shelf is None else (shelf,))


def _manifest(source: str, mirrors: Mirrors, cache: Path, sha256: str | None) -> tuple[bytes, ShardManifest]:
    """The manifest of a folder or of the web. One of the web that the run names is kept, for a start without a network."""
    if not mirrors.urls:
        encoded, manifest = manifest_of(Path(source))
        if sha256 is not None and sha256_of(encoded) != sha256:
            raise DataError(
                f"data: {source} is another set of token shards ({sha256_of(encoded)[:16]}...) than the run trains on "
                f"({sha256[:16]}...); join without --data, or name a copy of that set"
            )
        return encoded, manifest
    if sha256 is not None:
        folder = cache / f"shards-{sha256[:16]}"
        if (folder / MANIFEST).is_file():
            encoded, manifest = manifest_of(folder)
            if sha256_of(encoded) == sha256:
                return encoded, manifest
    encoded = mirrors.manifest(sha256)
    manifest = parse(encoded, source)
    folder = cache / f"shards-{sha256_of(encoded)[:16]}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / MANIFEST, encoded)
    return encoded, manifest
