"""Samples over shards: a permutation in each epoch, one shard or two at a time, and a cache that fills itself."""

import json
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.data.samples import Samples
from node.data.shard_cache import Cache, Folder, Shards, manifest_of
from node.data.shards import MANIFEST, Shard, ShardedSamples, ShardManifest, parse, sha256_of
from node.data.tokens import FileTokens
from protos.assignment import Range
from protos.errors import DataError

CONTEXT = 4
HASH = "0" * 64


def a_set(folder: Path, lengths: list[int]) -> ShardManifest:
    """Shards in which each token is its own place in the whole."""
    folder.mkdir(exist_ok=True)
    shards, at = [], 0
    for number, length in enumerate(lengths):
        data = np.arange(at, at + length, dtype="<u4").tobytes()
        (folder / f"{number}.bin").write_bytes(data)
        shards.append(Shard(f"{number}.bin", length, sha256_of(data)))
        at += length
    manifest = ShardManifest("bytes", HASH, 1 << 20, "uint32", tuple(shards))
    (folder / MANIFEST).write_bytes(manifest.encode())
    return manifest


def samples_of(folder: Path, lengths: list[int], context: int = CONTEXT, seed: int = 3) -> ShardedSamples:
    manifest = a_set(folder, lengths)
    return ShardedSamples(manifest, Folder(Shards(manifest, folder, 1 << 20)), context, seed)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(5, 60), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_an_epoch_has_each_window_once_and_no_held_out_one(
    lengths: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if len(lengths) == 1 and lengths[0] < 2 * CONTEXT + 1:
        lengths = [2 * CONTEXT + 1]
    samples = samples_of(tmp_path_factory.mktemp("set"), lengths, seed=seed)
    starts, at = [], 0
    for length in lengths:
        starts += [at + window * CONTEXT for window in range((length - 1) // CONTEXT)]
        at += length
    for epoch in range(2):
        batch = samples.batch(epoch * samples.windows, (epoch + 1) * samples.windows)
        assert np.array_equal(np.diff(batch, axis=1), np.ones((samples.windows, CONTEXT))), (
            "a window crosses two shards"
        )
        held_out = samples.validation()
        assert len(held_out) == samples.validation_windows >= 1
        assert sorted([*batch[:, 0].tolist(), *held_out[:, 0].tolist()]) == starts


def test_the_order_is_frozen(tmp_path: Path) -> None:
    """Peers of one run must agree on it: a change of the order is a change of the protocol."""
    samples = samples_of(tmp_path, [21, 33, 17])
    assert samples.windows == 16
    assert samples.batch(0, 16)[:, 0].tolist() == FROZEN


def test_parts_of_a_range_are_the_range_also_across_epochs(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, [41, 57, 33])
    whole = samples.batch(samples.windows - 5, 2 * samples.windows + 3)
    cuts = [samples.windows - 5, samples.windows - 1, samples.windows + 9, 2 * samples.windows + 3]
    parts = [samples.batch(start, stop) for start, stop in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert samples.batch(7, 7).shape == (0, CONTEXT + 1)
    [micro] = samples.micro_batches([Range(3, 5), Range(9, 10)], 8)
    assert np.array_equal(micro, np.concatenate([samples.batch(3, 5), samples.batch(9, 10)]))


def test_a_step_needs_one_shard_or_two(tmp_path: Path) -> None:
    """Else a peer would need the whole set on its disk."""
    wanted = list[list[int]]()
    manifest = a_set(tmp_path, [401] * 20)

    class Noting(Folder):
        def want(self, shards: list[int]) -> None:
            wanted.append(shards)

    samples = ShardedSamples(manifest, Noting(Shards(manifest, tmp_path, 1 << 20)), CONTEXT, 0)
    order = []
    for start in range(0, 2 * samples.windows, 10):
        assert samples.away([Range(start, start + 10)]) == ""
        assert 2 <= len(wanted[-1]) <= 3, "those of the step, and the next one"
        order += [shard for shard in wanted[-1][:-1] if not order or shard != order[-1]]
    assert sorted(order[:20]) == list(range(20))
    assert order[:20] != order[20:40], "an epoch has an order of its own"
    for before, now in pairwise(wanted):
        assert now[0] in before, "a step came to a shard that was not fetched ahead"


def test_a_shard_that_is_not_the_manifest_s_is_refused(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, [40, 40])
    data = bytearray((tmp_path / "1.bin").read_bytes())
    data[7] ^= 1
    (tmp_path / "1.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"1\.bin is not the file that manifest\.json names"):
        samples.batch(0, samples.windows)
    (tmp_path / "1.bin").unlink()
    with pytest.raises(DataError, match=r"lacks 1 of 2 shards, the first is 1\.bin"):
        Folder(Shards(manifest_of(tmp_path)[1], tmp_path, 1 << 20))


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    manifest = a_set(tmp_path, [40])
    samples = ShardedSamples(manifest, Folder(Shards(manifest, tmp_path, 30)), CONTEXT, 0)
    with pytest.raises(DataError, match="token 30, read as uint32, has id 30"):
        samples.batch(0, 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 2}, "format is 2"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"shards": []}, "shards is .*at least 1 item"),
        ({"shards": [{"name": "../x", "tokens": 9, "sha256": HASH}]}, "shards.0.name is '../x'"),
        ({"shards": [{"name": "x", "tokens": 0, "sha256": HASH}]}, "shards.0.tokens is '0'"),
        ({"shards": [{"name": "x", "tokens": True, "sha256": HASH}]}, "shards.0.tokens is 'True'"),
        ({"shards": [{"name": "x", "tokens": 1 << 60, "sha256": HASH}]}, "shards.0.tokens is '1152921504606846976'"),
        ({"shards": [{"name": "x", "tokens": 9, "sha256": "zz"}]}, "shards.0.sha256 is 'zz'"),
        ({"shards": [{"name": "x", "tokens": 9, "sha256": HASH}] * 2}, "two shards have one name"),
        ({"shards": [{"name": "manifest.json", "tokens": 9, "sha256": HASH}]}, "one is named manifest.json"),
        ({"shards": [7]}, "shards.0 is '7'"),
        ({"tokenizer": "x" * 2000}, "tokenizer is .*at most 1000"),
        ({"vocabulary": "many"}, "vocabulary is 'many'"),
    ],
)
def test_a_manifest_of_a_stranger_has_one_door(change: dict[str, object], why: str, tmp_path: Path) -> None:
    a_set(tmp_path, [40])
    values = json.loads((tmp_path / MANIFEST).read_bytes())
    with pytest.raises(DataError, match=why):
        parse(json.dumps({**values, **change}).encode(), "it")


def test_a_manifest_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its source may be the name of a folder that is no UTF-8, and it may name no tokenizer: a run names its hash."""
    values = json.loads(a_set(tmp_path, [40]).encode())
    del values["tokenizer"]
    found = parse(json.dumps({**values, "source": "/text/\udc80"}).encode(), "it")
    assert (found.tokenizer, found.source, found.tokens) == ("", "/text/?", 40)


def test_what_a_manifest_says_comes_back(tmp_path: Path) -> None:
    manifest = a_set(tmp_path, [40, 50])
    assert parse(manifest.encode(), "it") == manifest
    for broken in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000):
        with pytest.raises(DataError, match="is no manifest of token shards"):
            parse(broken, "it")


# ---- the cache -------------------------------------------------------------------------------------------------------


class Web:
    """Brings shards from a folder when it is let."""

    def __init__(self, source: Path, cache: Path) -> None:
        self.source, self.cache, self.fetched = source, cache, list[int]()
        self.let, self.asked = threading.Semaphore(0), threading.Semaphore(0)

    def fetch(self, shard: int, told: Callable[[int], bool]) -> bool:
        self.asked.release()
        assert self.let.acquire(timeout=240)
        if not told(0):
            return False
        self.fetched.append(shard)
        (self.cache / f"{shard}.bin").write_bytes((self.source / f"{shard}.bin").read_bytes())
        return True


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Web, Cache, ShardedSamples]]:
    source, folder = tmp_path / "source", tmp_path / "cache"
    manifest = a_set(source, [101] * 6)
    folder.mkdir()
    made = Web(source, folder)
    shards = Shards(manifest, folder, 1 << 20)
    cache = Cache(shards, 3 * 404, made.fetch)
    yield made, cache, ShardedSamples(manifest, cache, CONTEXT, 0)
    cache.close()
    made.let.release(100)
    cache._thread.join(240)
    assert not cache._thread.is_alive()


def here(samples: Samples, part: Range) -> None:
    for _ in range(2000):
        if not samples.away([part]):
            return
        threading.Event().wait(0.005)
    raise AssertionError(samples.away([part]))


def test_the_cache_fetches_what_a_step_needs_then_the_next_and_stays_bounded(
    web: tuple[Web, Cache, ShardedSamples], tmp_path: Path
) -> None:
    made, _, samples = web
    whole = samples_of(tmp_path / "other", [101] * 6, seed=0)
    part = Range(0, 4)
    assert "is being downloaded: 0 %" in samples.away([part])
    with pytest.raises(DataError, match="is being downloaded"):
        samples.batch(0, 4)
    made.let.release(100)
    for start in range(0, 3 * samples.windows, 4):
        part = Range(start, start + 4)
        here(samples, part)
        assert np.array_equal(samples.batch(start, start + 4), whole.batch(start, start + 4))
        assert len(list((tmp_path / "cache").glob("*.bin"))) <= 3
    assert len(made.fetched) >= 12, "shards that left came back"


def test_a_damaged_file_of_an_earlier_life_is_fetched_again(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "cache"
    manifest = a_set(source, [101] * 2)
    folder.mkdir()
    (folder / "0.bin").write_bytes((source / "0.bin").read_bytes())
    (folder / "1.bin").write_bytes(bytes(404))
    made = Web(source, folder)
    made.let.release(100)
    cache = Cache(Shards(manifest, folder, 1 << 20), 10**6, made.fetch)
    samples = ShardedSamples(manifest, cache, CONTEXT, 0)
    here(samples, Range(0, samples.windows))
    assert made.fetched == [1]
    assert isinstance(cache.tokens(1), FileTokens)
    cache.close()


def test_a_smaller_limit_holds_at_once_but_for_what_is_wanted(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "cache"
    manifest = a_set(source, [101] * 3)
    folder.mkdir()
    made = Web(source, folder)
    made.let.release(100)
    cache = Cache(Shards(manifest, folder, 1 << 20), 10**6, made.fetch)
    samples = ShardedSamples(manifest, cache, CONTEXT, 0)
    here(samples, Range(0, samples.windows))
    size = 404
    assert cache.total_bytes > 2 * size
    cache.want([1])
    cache.limit(size)
    assert cache.total_bytes == size
    assert isinstance(cache.tokens(1), FileTokens)
    cache.limit(0)
    assert cache.total_bytes == size
    cache.close()


FROZEN = [54, 62, 58, 8, 12, 0, 16, 4, 21, 49, 25, 33, 41, 29, 45, 37]
