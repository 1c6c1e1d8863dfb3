"""The compiled codec against the portable one: the same bytes, the same codes, the same refusals."""

import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.optim.votes import bits, topk
from node.optim.votes import groups as votes
from node.optim.votes.groups import VotesError

pytest.importorskip("numba")

WIDTHS = st.integers(1, 8)
# around whole words, and around the blocks that the kernels work in
COUNTS = st.one_of(st.integers(0, 70), st.integers(4080, 4112), st.integers(0, 20_000))


def portable():
    return mock.patch.object(bits, "compiled", return_value=None)


def random_bytes(count, seed):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


@settings(max_examples=150, deadline=None)
@given(WIDTHS, COUNTS, st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_codes_are_packed_and_unpacked_alike(width, count, offset, seed):
    codes = (random_bytes(count + offset, seed) & ((1 << width) - 1))[offset:]  # from an address of any alignment
    packed = bits.pack(codes, width)
    assert torch.equal(bits.unpack(packed, width, count), codes)
    with portable():
        assert torch.equal(bits.pack(codes, width), packed)
        assert torch.equal(bits.unpack(packed, width, count), codes)


@settings(max_examples=150, deadline=None)
@given(WIDTHS, COUNTS, st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_any_bytes_are_split_and_joined_alike(width, count, offset, seed):
    packed = random_bytes(bits.packed_bytes(count, width) + offset, seed)[offset:]
    low, top = bits.split(packed, width, count)
    joined = bits.join(low, top, width)
    assert torch.equal(bits.unpack(packed, width, count), low | top << (width - 1))
    with portable():
        assert all(map(torch.equal, bits.split(packed, width, count), (low, top)))
        assert torch.equal(bits.join(low, top, width), joined)
    whole = count * width // 8
    assert torch.equal(joined[:whole], packed[:whole]), "every bit that belongs to a code comes back"


@settings(max_examples=60, deadline=None)
@given(WIDTHS, COUNTS, st.integers(0, 2**32 - 1))
def test_nothing_around_the_result_is_written(width, count, seed):
    codec = bits.compiled()
    packed, size = random_bytes(bits.packed_bytes(count, width), seed), bits.packed_bytes(count, width)
    room = torch.full((3, count + 32), 0xA5, dtype=torch.uint8)
    starts = [plane[16:].data_ptr() for plane in room]
    codec.split(packed.data_ptr(), size, width, count, *starts[:2])
    codec.join(*starts[:2], count, width, starts[2], size)
    for plane, used in zip(room, (count, count, size), strict=True):
        assert bool((plane[:16] == 0xA5).all())
        assert bool((plane[16 + used :] == 0xA5).all())


def test_a_tensor_of_other_strides_is_read_right():
    codes = random_bytes(4000, 0).view(40, 100) & 31
    assert torch.equal(bits.pack(codes.T, 5), bits.pack(codes.T.contiguous(), 5))
    assert torch.equal(bits.pack(codes[:, ::3], 5), bits.pack(codes[:, ::3].contiguous(), 5))
    every = random_bytes(1000, 0)
    assert all(map(torch.equal, bits.split(every[::2], 4, 1000), bits.split(every[::2].contiguous(), 4, 1000)))


@pytest.mark.parametrize("group_size", votes.GROUP_SIZES)
def test_votes_are_coded_alike(group_size):
    payload = random_bytes(votes.vote_bytes(7, group_size), group_size).numpy().tobytes()
    found = votes.decode(payload, group_size, 7)
    assert votes.encode(*found, group_size) == payload
    with portable():
        assert all(map(torch.equal, votes.decode(payload, group_size, 7), found))
        assert votes.encode(*found, group_size) == payload


def outcome(data, k, chunks):
    """The indices, or why there are none."""
    try:
        return topk.decode(data, k, chunks).tolist()
    except VotesError as error:
        return str(error)


def assert_same_outcome(data, k, chunks):
    compiled = outcome(data, k, chunks)
    with portable():
        assert outcome(data, k, chunks) == compiled
    return compiled


def random_indices(chunks, k, seed):
    scores = torch.rand(chunks, 4096, generator=torch.Generator().manual_seed(seed))
    return scores.topk(k).indices.sort(1).values


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(topk.SIZES), st.integers(0, 5), st.integers(0, 2**20), st.data())
def test_changed_bytes_are_indices_or_refused_alike(k, chunks, seed, data):
    chosen = random_indices(chunks, k, seed)
    coded = topk.encode(chosen, k)
    with portable():
        assert topk.encode(chosen, k) == coded
    assert assert_same_outcome(coded, k, chunks) == chosen.tolist()
    raw = bytearray(coded)
    for _ in range(data.draw(st.integers(1, 8))):
        kind = data.draw(st.sampled_from(["flip", "flip", "set", "cut", "add"]))
        place = data.draw(st.integers(0, max(0, len(raw) - 1)))
        if kind == "flip" and raw:
            raw[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "set" and raw:
            raw[place] = data.draw(st.sampled_from([0, 1, 128, 255]))
        elif kind == "cut":
            del raw[place:]
        elif kind == "add":
            raw += bytes([data.draw(st.sampled_from([0, 1, 128, 255]))])
    assert_same_outcome(bytes(raw), k, chunks)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(topk.SIZES), st.integers(0, 4), st.integers(0, 2**20), st.sampled_from([0, 1, 16, 128, 255]))
def test_random_bytes_of_any_length_are_judged_alike(k, chunks, seed, fill):
    random = np.random.default_rng(seed)
    shortest, longest = topk._plane_bytes(chunks, k), topk.bytes_max(chunks, k)
    raw = bytearray(random.bytes(int(random.integers(max(0, shortest - 1), longest + 2))))
    start = int(random.integers(0, len(raw) + 1))
    raw[start:] = bytes([fill]) * (len(raw) - start)
    assert_same_outcome(bytes(raw), k, chunks)


def test_every_kind_of_refusal_is_the_same():
    k, chosen = 32, random_indices(3, 32, 0)
    coded = topk.encode(chosen, k)
    planes = topk._plane_bytes(3, k)
    short = topk.encode(chosen[:2], k)[topk._plane_bytes(2, k) :]
    hostile = {
        "bytes of indices": coded[: planes - 1],
        "a remainder": b"\xff" * planes + coded[planes:],
        "gaps of": coded[:planes] + short,
        "bytes behind": coded + b"\0",
        "beyond": coded[:planes] + np.packbits([0] * 46 + [1] * 96, bitorder="little").tobytes(),
    }
    for reason, data in hostile.items():
        assert reason in assert_same_outcome(data, k, 3)


def test_indices_that_do_not_ascend_are_our_own_mistake():
    for wrong in ([[3, 2, 4, 5]], [[1, 1, 2, 3]], [[-1, 0, 1, 2]], [[0, 1, 2, 4096]]):
        with pytest.raises(AssertionError, match="ascending"):
            topk.encode(torch.tensor(wrong), 4)


def test_importing_votes_does_not_import_numba_and_coding_and_the_step_work_without_it():
    program = (
        "import sys; from node.optim import demo\n"
        "from node.optim.votes import bits, topk, groups as votes\n"
        "assert 'numba' not in sys.modules; sys.modules['numba'] = None\n"
        "import torch\n"
        "assert bits.compiled() is None\n"
        "assert votes.encode(*votes.decode(bytes(range(56)), 64, 1), 64) == bytes(range(56))\n"
        "print(demo.DeMo([('p', torch.nn.Parameter(torch.zeros(3)))], demo.DeMoConfig()).backend)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=270, check=True)
    assert done.stdout.strip() == "torch"
