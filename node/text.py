"""The run's training text on this machine: the tokenizer, and the samples that a step's ranges mean.

The run names the text, and the peer's owner may name another copy (`--data`). Refuses another set of shards than the run names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from node.commands.consent import STANDARD_LIBRARY
from node.config import PeerSettings
from node.data.corpus import open_corpus
from node.data.errors import DataError
from node.data.manifest import MANIFEST, Manifest, is_url, parse, sha256_of
from node.data.samples import Samples
from node.data.shards import ShardedSamples
from node.data.shelf import Cache, Folder, Shards, manifest_of
from node.data.tokenizer import Tokenizer, load_tokenizer
from protos.assignment import Range
from protos.disk import write_bytes, writing
from protos.run_config import RunConfig

if TYPE_CHECKING:
    from node.data.download import Mirrors

BYTES_A_GB: Final = 10**9


@dataclass(frozen=True)
class Text:
    """The name of the training text, its tokenizer, and its samples (None: this peer does not train)."""

    name: str
    tokenizer: Tokenizer
    samples: Samples | None = None
    dtype: str = "-"
    close: Callable[[], None] = lambda: None
    """Ends downloads."""
    shelf: Cache | None = None
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
        return Text(data.source, load_tokenizer(data.tokenizer))
    source = settings.data or data.source
    if is_url(source) or (Path(source) / MANIFEST).is_file():
        return _shards(source, config, settings, log, paced, step)
    if data.sha256 is not None:
        raise DataError(
            f"data: the run trains on one set of token shards ({data.sha256[:16]}...), and {source} is none: name a copy "
            f"of the set, a folder with a {MANIFEST}, or join without --data"
        )
    path = None if source == STANDARD_LIBRARY else Path(source)
    corpus = open_corpus(path, settings.home / "cache", tokenizer=data.tokenizer, dtype=data.dtype)
    samples = Samples(corpus.tokens, data.context, config.seed)
    return Text(corpus.name, corpus.tokenizer, samples, corpus.tokens.dtype.name)


def _shards(
    source: str, config: RunConfig, settings: PeerSettings, log: Any, paced: Callable[[int], None], step: int
) -> Text:
    from node.data.download import Mirrors  # the HTTP client takes 0.2 s to import

    data = config.data
    urls = [source, *(data.mirrors if settings.data is None else ())] if is_url(source) else []
    private = settings.allow_data or settings.data is not None
    mirrors = Mirrors(urls, private=private, log=log.warning, paced=paced)
    encoded, manifest = _manifest(source, mirrors, settings.home / "cache", data.sha256)
    tokenizer = load_tokenizer(data.tokenizer)
    if sha256_of(tokenizer.fingerprint()) != manifest.tokenizer_sha256:
        raise DataError(
            f"data: {source} has tokens of the tokenizer {manifest.tokenizer!r}, and the run's data.tokenizer is "
            f"{data.tokenizer!r}, which encodes differently; ask the run's operator"
        )
    close: Callable[[], None]
    shelf: Cache | None = None
    if urls:
        folder = settings.home / "cache" / f"shards-{sha256_of(encoded)[:16]}"
        shards = Shards(manifest, folder, tokenizer.vocabulary)

        def fetch(shard: int, told: Callable[[int], bool]) -> bool:
            return mirrors.fetch(manifest.shards[shard], manifest.width, shards.path(shard), told)

        shelf = Cache(shards, int(settings.data_gb * BYTES_A_GB), fetch)
        samples, close = ShardedSamples(manifest, shelf, data.context, config.seed), shelf.close
    else:
        here = Folder(Shards(manifest, Path(source), tokenizer.vocabulary))
        samples, close = ShardedSamples(manifest, here, data.context, config.seed), lambda: None
    first = step * config.clock.batch_samples
    samples.away((Range(first, first + 1),))
    return Text(source, tokenizer, samples, manifest.dtype, close, shelf)


def _manifest(source: str, mirrors: Mirrors, cache: Path, sha256: str | None) -> tuple[bytes, Manifest]:
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
