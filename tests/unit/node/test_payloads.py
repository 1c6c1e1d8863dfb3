"""Payloads in memory: what is used stays there, within a bound, so that many pullers do not cost a hash each."""

import hashlib
import shutil
from pathlib import Path

import pytest
import structlog

from node.blobs import payloads
from node.blobs.payloads import Payloads
from protos import slices
from protos.disk import DiskError
from tests.unit.small_disk import fill, small_disk

MEMORY = 1_000


class Hashing:
    """Stands for `hashlib` in the module, and counts the payloads that are hashed again."""

    def __init__(self) -> None:
        self.count = 0

    def sha256(self, data: bytes) -> object:
        self.count += 1
        return hashlib.sha256(data)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Hashing:
    counting = Hashing()
    monkeypatch.setattr(payloads, "hashlib", counting)
    monkeypatch.setattr(payloads, "RECENT_BYTES_MAX", MEMORY)
    return counting


def kept(store: Payloads, number: int, size: int, step: int = 1, *, own: bool = False) -> bytes:
    """The hash of a new payload that is kept."""
    data = bytes([number]) * size
    sha256 = hashlib.sha256(data).digest()
    assert store.put(step, sha256, data, own=own)
    return sha256


def in_memory(store: Payloads) -> int:
    """Bytes; what the store counts is what it has."""
    recent = sum(map(len, store._recent.values()))
    assert store._recent_bytes == recent
    return recent + len(store._own[1])


def test_what_was_used_last_stays_in_memory(tmp_path: Path, hashed: Hashing) -> None:
    store = Payloads(tmp_path)
    first, second = kept(store, 1, 400), kept(store, 2, 400)
    assert store.get(first) == b"\x01" * 400
    kept(store, 3, 400)
    assert store.get(first) == b"\x01" * 400
    assert hashed.count == 0, "the first is older, but somebody has used it since"
    assert store.get(second) == b"\x02" * 400
    assert hashed.count == 1


def test_one_large_payload_is_hashed_for_the_first_puller_only(tmp_path: Path, hashed: Hashing) -> None:
    large = kept(Payloads(tmp_path), 1, MEMORY * 3 // 4)
    store = Payloads(tmp_path)
    for _ in range(3):
        assert store.get(large) == b"\x01" * (MEMORY * 3 // 4)
    assert hashed.count == 1


def test_the_own_payload_is_never_hashed_again_and_memory_is_bounded(tmp_path: Path, hashed: Hashing) -> None:
    store, size = Payloads(tmp_path), 3 * MEMORY
    for step in range(1, 6):
        own = kept(store, step, size, step, own=True)
        for number in range(20):
            kept(store, 10 * step + number + 50, 100 * step + number, step)
            assert store.get(own) == bytes([step]) * size
            assert in_memory(store) <= MEMORY + size
    assert hashed.count == 0


def test_the_own_payload_of_the_step_before_counts_as_used_last(tmp_path: Path, hashed: Hashing) -> None:
    store = Payloads(tmp_path)
    before, other = kept(store, 1, 400, own=True), kept(store, 2, 400)
    own = kept(store, 3, 400, 2, own=True)
    assert not store.put(2, own, b"\x03" * 400, own=True), "announced again"
    assert all(store.get(name) for name in (before, other, own))
    assert (hashed.count, in_memory(store)) == (0, 1200)
    store.forget_until(2)
    assert [store.get(name) for name in (before, other, own)] == [None] * 3
    assert in_memory(store) == 0


def test_the_own_payload_of_an_earlier_life_is_read_once(tmp_path: Path, hashed: Hashing) -> None:
    own = kept(Payloads(tmp_path), 1, 2 * MEMORY, own=True)
    store = Payloads(tmp_path)
    assert store.keep_own(own)
    assert all(store.get(own) for _ in range(3))
    assert hashed.count == 1
    assert not store.keep_own(b"n" * 32), "not here"
    assert store.get(own), "and the one before stays"
    assert hashed.count == 1


def test_of_a_step_with_a_sum_the_sum_alone_stays(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path / "payloads")
    data = {hashlib.sha256(it).digest(): it for it in (b"one", b"two", b"sum", b"other")}
    for sha256, it in data.items():
        payloads.put(8 if it == b"other" else 7, sha256, it, own=it == b"one")
    total = hashlib.sha256(b"sum").digest()
    payloads.keep_only(7, {total})
    assert {it for sha256, it in data.items() if payloads.get(sha256) is not None} == {b"sum", b"other"}
    assert payloads.total_bytes == 8


def test_a_list_that_names_more_than_it_says_is_no_payload(tmp_path: Path) -> None:
    """A liar's blob may name one large blob thousands of times, as slices of a byte: all of it would be in memory at once."""
    store, large = Payloads(tmp_path), bytes(1000)
    store.put(1, hashlib.sha256(large).digest(), large)
    for count in (2, 5000):
        head = slices.list_of([slices.Slice(hashlib.sha256(large).digest(), 1)] * count)
        name = hashlib.sha256(head).digest()
        store.put(1, name, head)
        assert store.whole(name, 2) is None
    right = slices.joined([large, b"other"])
    assert store.put_whole(1, right, 2)
    assert store.whole(slices.hash_of(right, 2), 2) == right
    within = slices.joined([b"no", b"list of two"])
    store.put(1, hashlib.sha256(within).digest(), within)
    assert store.whole(hashlib.sha256(within).digest(), 2) is None, "its name is the hash of its list"


def test_a_nearly_full_disk_keeps_the_votes_of_the_step_before(tmp_path: Path) -> None:
    """They went with the first vote of the next step. If all disks of a swarm were short, a slow peer found them nowhere."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        store = Payloads(disk / "payloads")
        before = [kept(store, number, 150_000, step=1) for number in (1, 2)]
        store.put_whole(2, bytes([3]) * 300_000, 1)
        assert store.total_bytes > shutil.disk_usage(disk).free
        assert all(store.get(name) for name in before)
        kept(store, 4, 150_000, step=3)
        assert not any(store.get(name) for name in before)
        assert store.dropped_step == 1


def test_votes_of_others_give_way_on_a_full_disk_and_put_no_peer_out_of_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk, structlog.testing.capture_logs() as lines:
        store = Payloads(disk / "payloads")
        names = [kept(store, number, 100_000, step=number) for number in range(1, 20)]
        assert store.get(names[-1]) == bytes([19]) * 100_000
        assert 0 < store.dropped_step < 18
        assert [line["why"] for line in lines] == ["the disk is nearly full"]
        assert store.total_bytes <= shutil.disk_usage(disk).free, "snapshots need room, too"
        left = [path.name for path in store.folder.iterdir()]
        assert len(left) == 19 - store.dropped_step, "nothing half written stays"
        with pytest.raises(DiskError):
            kept(store, 20, 2 << 20, step=20)
        assert store.total_bytes == 0, "no room was to be had for it"
        kept(store, 21, 200_000, step=21)
        fill(disk)
        kept(store, 22, 5000, step=22)
        assert store.dropped_step == 21, "another program has filled the disk"
        with pytest.raises(DiskError):
            kept(store, 23, 500_000, step=23)


@pytest.mark.parametrize("ranges", [1, 2])
def test_votes_of_one_s_own_stay_on_a_full_disk_also_after_a_restart(tmp_path: Path, ranges: int) -> None:
    """The only author of the last step dropped it for the next one's votes, ended all the same, and the run waited for ever."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        store = Payloads(disk / "payloads")
        mine = slices.joined([b"1" * 20_000] * ranges)
        name = slices.hash_of(mine, ranges)
        store.put_whole(1, mine, ranges)
        others = kept(store, 2, 20_000)
        fill(disk)
        for life in (store, Payloads(disk / "payloads")):
            life.keep_mine(name, ranges)
            life.keep_mine(b"n" * 32, ranges)  # lost
            with pytest.raises(DiskError):
                life.put_whole(2, slices.joined([b"3" * 200_000] * ranges), ranges)
            assert life.whole(name, ranges) == mine
            assert life.get(others) is None
        life.forget_until(1)
        assert life.total_bytes == 0
