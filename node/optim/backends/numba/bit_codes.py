"""Codes of a few bits, and top-k's indices, between bytes and arrays: the kernels behind `bits` and `topk` on a CPU.

Eight codes of w bits are one word of w bytes. Three steps (halves, quarters, bytes) spread a word over eight bytes, or gather
it from them. Each step is two shifts and masks on 64 bits. The kernels work block by block, so LLVM makes vectors of the steps.
Refuses nothing: callers have checked lengths, and `topk` asks its portable path for the reason of a refusal.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from node.optim.backends.numba import emit
from node.optim.backends.numba.kernels import kernel

_BLOCK = 512
"""Words at a time: 4 KiB, which stay in the first cache level between the steps and the memory."""


_INDICES = 4096
"""Coefficients of a chunk."""


@njit(nogil=True)
def _fields(size, apart):
    """A mask of the low `size` bits of every `apart` bits."""
    if size == 64:
        return np.int64(-1)
    mask = np.int64(0)
    for start in range(0, 64, apart):
        mask |= ((np.int64(1) << size) - 1) << start
    return mask


@njit(nogil=True)
def _load(source, size, width, words):
    """`words` packed words of `width` bytes each from an address on; what lies behind `size` bytes counts as zeros."""
    within = max(0, min(len(words), (size - 8) // width + 1))
    for number in range(within):
        words[number] = emit.word_at(source + number * width)
    for number in range(within, len(words)):
        word = np.int64(0)
        for byte in range(min(width, size - number * width)):
            word |= np.int64(emit.byte_at(source + number * width + byte)) << 8 * byte
        words[number] = word


@njit(nogil=True)
def _store(words, target, size, width):
    """The inverse of `_load`. A word's store runs over the next one's place, which is written after it."""
    within = max(0, min(len(words), (size - 8) // width + 1))
    for number in range(within):
        emit.put_word(target + number * width, words[number])
    for number in range(within, len(words)):
        for byte in range(min(width, size - number * width)):
            emit.put_byte(target + number * width + byte, np.uint8(words[number] >> 8 * byte & 0xFF))


@njit(nogil=True)
def _spread(words, width):
    """Each word's eight codes to eight bytes."""
    if width == 8:
        return
    half, quarter, byte = _fields(4 * width, 64), _fields(2 * width, 32), _fields(width, 16)
    for number in range(len(words)):
        word = words[number]
        word = (word & half) | (word << (32 - 4 * width) & half << 32)
        word = (word & quarter) | (word << (16 - 2 * width) & quarter << 16)
        words[number] = (word & byte) | (word << (8 - width) & byte << 8)


@njit(nogil=True)
def _gather(words, width):
    """The inverse of `_spread`: eight bytes' codes to one word, with zeros above."""
    if width == 8:
        return
    half, quarter, byte = _fields(4 * width, 64), _fields(2 * width, 32), _fields(width, 16)
    for number in range(len(words)):
        word = words[number]
        word = (word & byte) | (word >> (8 - width) & byte << width)
        word = (word & quarter) | (word >> (16 - 2 * width) & quarter << 2 * width)
        words[number] = (word & half) | (word >> (32 - 4 * width) & half << 4 * width)


@kernel
def unpack(packed, size, width, count, codes):
    """`count` bytes at the address `codes`, of `width` bits each in `size` bytes at the address `packed`."""
    words = np.empty(_BLOCK, dtype=np.int64)
    for first in range(0, count, 8 * _BLOCK):
        block = words[: (min(8 * _BLOCK, count - first) + 7) // 8]
        begin = first // 8 * width
        _load(packed + begin, size - begin, width, block)
        _spread(block, width)
        _store(block, codes + first, count - first, 8)


@kernel
def pack(codes, count, width, packed, size):
    """The inverse of `unpack`."""
    words = np.empty(_BLOCK, dtype=np.int64)
    for first in range(0, count, 8 * _BLOCK):
        block = words[: (min(8 * _BLOCK, count - first) + 7) // 8]
        begin = first // 8 * width
        _load(codes + first, count - first, 8, block)
        _gather(block, width)
        _store(block, packed + begin, size - begin, width)


@kernel
def split(packed, size, width, count, low, top):
    """As `unpack`, each code cut in its `width - 1` low bits and its top bit."""
    words, others = np.empty(_BLOCK, dtype=np.int64), np.empty(_BLOCK, dtype=np.int64)
    below, one = _fields(width - 1, 8), _fields(1, 8)
    for first in range(0, count, 8 * _BLOCK):
        block = words[: (min(8 * _BLOCK, count - first) + 7) // 8]
        begin = first // 8 * width
        _load(packed + begin, size - begin, width, block)
        if len(block) == _BLOCK and count - first >= 8 * _BLOCK:
            emit.split_words(words.ctypes.data, _BLOCK, width, low + first, top + first)
        else:
            _spread(block, width)
            other = others[: len(block)]
            for number in range(len(block)):
                other[number] = block[number] >> (width - 1) & one
                block[number] &= below
            _store(block, low + first, count - first, 8)
            _store(other, top + first, count - first, 8)


@kernel
def join(low, top, count, width, packed, size):
    """The inverse of `split`."""
    words, others = np.empty(_BLOCK, dtype=np.int64), np.empty(_BLOCK, dtype=np.int64)
    for first in range(0, count, 8 * _BLOCK):
        block = words[: (min(8 * _BLOCK, count - first) + 7) // 8]
        other = others[: len(block)]
        begin = first // 8 * width
        _load(low + first, count - first, 8, block)
        _load(top + first, count - first, 8, other)
        for number in range(len(block)):
            block[number] |= other[number] << (width - 1)
        _gather(block, width)
        _store(block, packed + begin, size - begin, width)


@kernel
def index_gaps(chosen, modulus, pairs, string):
    """The parts of top-k's code for ascending int64 `chosen` [chunks, k]; returns the bits of the quotients' string.

    Remainders as int64 `pairs`; uint8 `string`, zeros before, must hold any quotients that indices can have. Returns -1
    for what is no index, or not ascending.
    """
    place, number, first = 0, 0, 0
    for chunk in range(chosen.shape[0]):
        last = np.int64(-1)
        for index in range(chosen.shape[1]):
            gap = chosen[chunk, index] - last - 1
            last = chosen[chunk, index]
            if gap < 0 or last >= _INDICES:
                return -1
            quotient = gap // modulus
            remainder = gap - quotient * modulus
            place += quotient + 1
            string[(place - 1) >> 3] |= np.uint8(1 << ((place - 1) & 7))
            if index & 1:
                pairs[number] = first + modulus * remainder
                number += 1
            first = remainder
    return place


@kernel
def index_sums(low, high, modulus, source, size, chosen):
    """The inverse: int32 `chosen` [chunks, k] from uint8 planes of the pairs and `size` bytes of quotients.

    Returns whether `index_gaps` could have made them; if not, `chosen` holds anything. `high` may be empty.
    """
    flat = chosen.reshape(-1)
    found, before, longest = 0, np.int64(-1), np.int64(_INDICES)
    for start in range(0, size, 8):
        word = np.int64(0)
        if start + 8 <= size:
            word = emit.word_at(source + start)
        else:
            for byte in range(start, size):
                word |= np.int64(emit.byte_at(source + byte)) << 8 * (byte - start)
        while word:
            if found == len(flat):
                return False
            place = 8 * start + emit.trailing_zeros(word)
            flat[found] = min(place - before - 1, longest)
            before = place
            found += 1
            word &= word - 1
    if found != len(flat) or before >> 3 != size - 1:
        return False
    # n // modulus of n below 2^16 and a modulus of at most 2^8: the product's error is too small to reach the next
    inverse, pair, sound = (1 << 32) // modulus + 1, 0, True
    for chunk in range(chosen.shape[0]):
        index = np.int64(-1)
        for number in range(0, chosen.shape[1], 2):
            remainders = np.int64(low[pair])
            if len(high):
                remainders |= np.int64(high[pair]) << 8
            pair += 1
            second = remainders * inverse >> 32
            sound &= second < modulus
            index += chosen[chunk, number] * modulus + remainders - second * modulus + 1
            chosen[chunk, number] = index
            index += chosen[chunk, number + 1] * modulus + second + 1
            chosen[chunk, number + 1] = index
        sound &= index < _INDICES
    return sound


def compile_all() -> None:
    """Run every kernel on nothing: compiled now, or read from the cache, and not in the middle of a round."""
    unpack(0, 0, 8, 0, 0)
    pack(0, 0, 8, 0, 0)
    split(0, 0, 8, 0, 0, 0)
    join(0, 0, 0, 8, 0, 0)
    plane = np.empty(0, dtype=np.uint8)
    index_gaps(np.empty((0, 4), dtype=np.int64), 8, np.empty(0, dtype=np.int64), plane)
    index_sums(plane, plane, 8, 0, 0, np.empty((0, 4), dtype=np.int32))
