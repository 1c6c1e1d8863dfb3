"""The file of live tensors is the file that safetensors writes, whenever it is read."""

import errno
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from node.snapshot.image import DISK_TILE_BYTES, DiskRoom, Image, MemoryRoom, SpareDisk, SpareMemory
from node.snapshot.pieces import describe
from node.snapshot.store import SnapshotStore
from protos.disk import DiskError

names = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__" and name.isprintable())
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    layout=st.dictionaries(names, st.tuples(shapes, st.sampled_from([torch.float32, torch.uint8, torch.int64]))),
    piece=st.integers(1, 70),
    read=st.integers(0, 12),
)
def test_it_has_the_bytes_of_safetensors_and_keeps_them(
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]], piece: int, read: int
) -> None:
    state: dict[str, Tensor] = {name: torch.randint(0, 200, shape).to(dtype) for name, (shape, dtype) in layout.items()}
    whole = save({name: tensor.clone() for name, tensor in state.items()})
    image = Image(state)
    assert image.total_bytes == len(whole)
    pieces, found = image.pieces(piece), list[bytes]()
    for _, part in zip(range(read), pieces, strict=False):
        found.append(bytes(part))
    image.detach()
    for tensor in state.values():
        tensor.add_(1)
    found += [bytes(part) for part in pieces]
    assert b"".join(found) == whole
    assert image.detached
    assert all(len(part) == piece for part in found[:-1])


def test_tied_tensors_are_there_once_and_strided_ones_whole() -> None:
    base = torch.randn(4, 6)
    whole = save({"a": base.clone(), "t": base.t().contiguous()})
    assert b"".join(map(bytes, Image({"a": base, "b": base, "t": base.t()}).pieces(7))) == whole


def test_a_state_that_changes_all_the_time_is_read_as_it_was() -> None:
    """A reader on another thread, and a writer that detaches before each change."""
    tensor = torch.zeros(300_000)
    for turn in range(20):
        tensor.fill_(turn)
        image, found = Image({"t": tensor}), list[bytes]()
        reader = threading.Thread(target=lambda image=image, found=found: found.extend(map(bytes, image.pieces(4096))))
        reader.start()
        image.detach()
        tensor.fill_(-1.0)
        reader.join()
        assert b"".join(found) == save({"t": torch.full((300_000,), float(turn))})


def test_the_memory_of_a_copy_is_that_of_the_next_one() -> None:
    spare, tensor = SpareMemory(), torch.zeros(1000)

    def copied(value: float) -> tuple[Image, int]:
        tensor.fill_(value)
        image = Image({"t": tensor}, spare=spare)
        image.detach()
        tensor.fill_(-1.0)
        room = image._rest[1]
        assert isinstance(room, MemoryRoom)
        return image, room.memory.ctypes.data

    def read(image: Image) -> bytes:
        return b"".join(map(bytes, image.pieces(64)))

    first, memory = copied(1.0)
    second, other = copied(2.0)
    assert memory != other, "the first is not read yet"
    assert read(first) == save({"t": torch.full((1000,), 1.0)})
    third, again = copied(3.0)
    assert again == memory
    assert read(second) == save({"t": torch.full((1000,), 2.0)})
    assert read(third) == save({"t": torch.full((1000,), 3.0)})


def test_memory_that_is_too_small_is_not_used() -> None:
    spare = SpareMemory()
    spare.give(spare.take(10))
    assert len(spare.take(1000).memory) >= 1000
    small, large = spare.take(10), spare.take(20)
    spare.give(large)
    spare.give(small)
    assert spare.take(5) is large


@pytest.mark.parametrize("read", [0, 1, 5])
def test_a_copy_on_the_disk_is_the_file_and_leaves_nothing_there(tmp_path: Path, read: int) -> None:
    state = {"a": torch.randn(DISK_TILE_BYTES // 4 + 7), "b": torch.randn(3, 500_000), "c": torch.randn(9).bfloat16()}
    whole = save({name: tensor.clone() for name, tensor in state.items()})
    image = Image(state, spare=SpareDisk(tmp_path / "run"))
    pieces, found = image.pieces(300_000), list[bytes]()
    for _, part in zip(range(read), pieces, strict=False):
        found.append(bytes(part))
    image.detach()
    assert image.detached
    for tensor in state.values():
        tensor.fill_(-1.0)
    found += [bytes(part) for part in pieces]
    assert b"".join(found) == whole
    assert not list((tmp_path / "run").iterdir())


def test_a_disk_copy_is_bit_exact_while_the_tensors_change(tmp_path: Path) -> None:
    spare, tensor = SpareDisk(tmp_path), torch.zeros(3_000_000)
    for turn in range(10):
        tensor.fill_(float(turn))
        image, found = Image({"t": tensor}, spare=spare), list[bytes]()
        reader = threading.Thread(
            target=lambda image=image, found=found: found.extend(map(bytes, image.pieces(1 << 20)))
        )
        ahead = threading.Thread(target=image.detach)
        reader.start()
        ahead.start()
        image.detach()
        tensor.fill_(-1.0)
        reader.join()
        ahead.join()
        assert b"".join(found) == save({"t": torch.full((3_000_000,), float(turn))})


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_copy_on_the_disk_becomes_the_snapshot_and_is_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    monkeypatch.setattr("protos.disk.SYNC_BYTES", 1_000_000)
    store, tensor = SnapshotStore(tmp_path / "s", 1 << 30), torch.randn(700_000)
    data = save({"t": tensor.clone()})
    manifest = describe(
        data, run_id=bytes(32), step=1, entry_hash=bytes(32), layout_digest=bytes(32), piece_bytes=300_000
    )
    spare = SpareDisk(tmp_path / ("other" if elsewhere else "s"))
    image, written = Image({"t": tensor}, spare=spare), list[int]()
    if elsewhere:  # a rename does not reach another disk
        monkeypatch.setattr(DiskRoom, "become", lambda *_: False)

    def become(path: Path) -> bool:
        there = image.become(path)
        tensor.fill_(-1.0)
        written.append(path.stat().st_size if path.exists() else 0)
        return there

    kept = store.write(image.pieces(300_000), len(data), lambda hashes: replace(manifest, piece_hashes=hashes), become)
    assert kept == manifest
    assert written == [0 if elsewhere else len(data)]
    assert store.file(kept.root).read_bytes() == data
    assert sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file()) == [".manifest", ".state"]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "s").iterdir()}
    assert len(modes) == 1, "who may read the manifest may read the state"


def test_a_copy_in_memory_becomes_no_file_and_one_that_a_kill_left_goes(tmp_path: Path) -> None:
    assert not Image({"t": torch.zeros(9)}).become(tmp_path / "file")
    image = Image({"t": torch.zeros(9)}, spare=SpareDisk(tmp_path))
    image.detach()
    assert list(tmp_path.iterdir())
    SnapshotStore(tmp_path, 1 << 20)  # of the next life
    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_no_copy_is_a_disk_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be written"):
        Image({"t": torch.zeros(9)}, spare=SpareDisk(tmp_path / "file")).detach()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskError, match="No space left"):
        Image({"t": torch.zeros(9)}, spare=SpareDisk(tmp_path)).detach()
