"""Small whole numbers packed in bits: eight codes of w bits fill w bytes, the first code lowest, on any device.

Eight bytes are spread from w, or gathered to w, in three steps of shifts and masks on 64 bits; by a compiled kernel on a
CPU where numba is installed (`fused.codec`), else in torch, and the same bytes. Refuses nothing: every byte string of the
right length decodes.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

WIDTH_MAX = 8
_TOGETHER = 8
"""w bytes hold exactly this many codes of w bits, whatever w."""

_WORD_BITS = 64


def packed_bytes(count: int, width: int) -> int:
    """Bytes of `count` codes of `width` bits; the last byte is filled with zeros."""
    return (count * width + 7) // 8


@functools.cache
def can_compile() -> bool:
    """Whether numba is installed and compiles: `NUMBA_DISABLE_JIT=1` makes it run plain Python, which the kernels are not."""
    if find_spec("numba") is None:
        return False
    from numba import config

    return not config.DISABLE_JIT


@functools.cache
def compiled() -> Any | None:
    """The kernels for a CPU, ready to be called; None where numba does not compile. The first call takes a second."""
    if not can_compile():
        return None
    from node.optim.backends.numba import bit_codes

    bit_codes.compile_all()
    return bit_codes


def pack(codes: Tensor, width: int) -> Tensor:
    """uint8 codes below 2^width (any shape) as a flat uint8 tensor of `packed_bytes(codes.numel(), width)`."""
    flat = codes.reshape(-1)
    if width == WIDTH_MAX:
        return flat
    kernels = _kernels(flat)
    if kernels is None:
        return _pack(flat, width)
    flat = flat.contiguous()
    packed = flat.new_empty(packed_bytes(flat.numel(), width))
    kernels.pack(flat.data_ptr(), flat.numel(), width, packed.data_ptr(), packed.numel())
    return packed


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse: `count` uint8 codes from flat uint8 `packed`; bits behind the last code are not read."""
    assert packed.numel() == packed_bytes(count, width), f"{packed.numel()} bytes, not {packed_bytes(count, width)}"
    if width == WIDTH_MAX:
        return packed
    kernels = _kernels(packed)
    if kernels is None:
        return _unpack(packed, width, count)
    packed, codes = packed.contiguous(), packed.new_empty(count)
    kernels.unpack(packed.data_ptr(), packed.numel(), width, count, codes.data_ptr())
    return codes


def unpack_range(packed: Tensor, width: int, first: int, last: int) -> Tensor:
    """The codes `first` to `last - 1` of flat uint8 `packed`, which holds codes of `width` bits from bit 0 on."""
    begin = first // _TOGETHER * _TOGETHER  # a code that starts a byte
    start = begin * width // 8
    part = packed[start : start + packed_bytes(last - begin, width)]
    return unpack(part, width, last - begin)[first - begin :]


def ends_clean(packed: Tensor, width: int, count: int) -> bool:
    """Whether the bits of the last byte that are behind the last of `count` codes are zeros."""
    used = count * width % 8
    return not used or not int(packed[-1]) >> used


def join(low: Tensor, top: Tensor, width: int) -> Tensor:
    """`pack(low + 2^(width - 1) * top, width)`, of uint8 `low` below 2^(width - 1) and `top` of 0 and 1."""
    kernels = _kernels(low)
    if kernels is None:
        return pack(low | (top << (width - 1)), width)
    assert (low.shape, low.dtype) == (top.shape, top.dtype), f"{low.shape} and {top.shape}"
    low, top = low.contiguous(), top.contiguous()
    packed = low.new_empty(packed_bytes(low.numel(), width))
    kernels.join(low.data_ptr(), top.data_ptr(), low.numel(), width, packed.data_ptr(), packed.numel())
    return packed


def split(packed: Tensor, width: int, count: int) -> tuple[Tensor, Tensor]:
    """The inverse: `(low, top)`, `count` each."""
    kernels = _kernels(packed)
    if kernels is None:
        codes = unpack(packed, width, count)
        return codes & ((1 << (width - 1)) - 1), codes >> (width - 1)
    assert packed.numel() == packed_bytes(count, width), f"{packed.numel()} bytes, not {packed_bytes(count, width)}"
    packed = packed.contiguous()
    low, top = packed.new_empty(2, count)  # of two allocations malloc gives one back each time, and pages are dear
    kernels.split(packed.data_ptr(), packed.numel(), width, count, low.data_ptr(), top.data_ptr())
    return low, top


def _kernels(tensor: Tensor) -> Any | None:
    assert tensor.dtype == torch.uint8, f"{tensor.dtype} are no codes"
    return compiled() if tensor.device.type == "cpu" else None


def _pack(flat: Tensor, width: int) -> Tensor:
    words = flat.new_zeros(-(-flat.numel() // _TOGETHER), _TOGETHER)
    words.view(-1)[: flat.numel()] = flat
    word = words.view(torch.int64)
    for size, apart in _steps(width)[::-1]:
        low, shift = _fields(size, 2 * apart), apart - size
        word = (word & low) | (word >> shift & low << size)
    return word.view(torch.uint8)[:, :width].reshape(-1)[: packed_bytes(flat.numel(), width)]


def _unpack(packed: Tensor, width: int, count: int) -> Tensor:
    padded = packed.new_zeros(-(-count // _TOGETHER) * width)
    padded[: packed.numel()] = packed
    words = packed.new_zeros(-(-count // _TOGETHER), _TOGETHER)
    words[:, :width] = padded.view(-1, width)
    word = words.view(torch.int64)
    for size, apart in _steps(width):
        low, shift = _fields(size, 2 * apart), apart - size
        word = (word & low) | (word << shift & low << apart)
    return word.view(torch.uint8).view(-1)[:count]


def _steps(width: int) -> list[tuple[int, int]]:
    """Halves, quarters, bytes: the bits of a field, and how far apart a pair of them is to be."""
    return [(4 * width, 32), (2 * width, 16), (width, 8)]


def _fields(size: int, apart: int) -> int:
    """A mask of the low `size` bits of every `apart` bits of a word."""
    return sum(((1 << size) - 1) << start for start in range(0, _WORD_BITS, apart))
