"""Small whole numbers packed in bits: eight codes of w bits fill w bytes, the first code lowest, on any device.

Refuses nothing: every byte string of the right length decodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH_MAX = 8
_TOGETHER = 8
"""w bytes hold exactly this many codes of w bits, whatever w."""


def packed_bytes(count: int, width: int) -> int:
    """Bytes of `count` codes of `width` bits; the last byte is filled with zeros."""
    return (count * width + 7) // 8


def pack(codes: Tensor, width: int) -> Tensor:
    """uint8 codes below 2^width (any shape) as a flat uint8 tensor of `packed_bytes(codes.numel(), width)`."""
    flat = codes.reshape(-1)
    if width == WIDTH_MAX:
        return flat
    size = packed_bytes(flat.numel(), width)
    missing = -flat.numel() % _TOGETHER
    if missing:
        flat = torch.cat((flat, flat.new_zeros(missing)))
    places = torch.arange(_TOGETHER, device=flat.device)
    word = (flat.view(-1, _TOGETHER).to(torch.int64) << (places * width)).sum(1, keepdim=True)
    return ((word >> (places[:width] * 8)) & 0xFF).to(torch.uint8).view(-1)[:size]


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse: `count` uint8 codes from flat uint8 `packed`; bits behind the last code are not read."""
    assert packed.numel() == packed_bytes(count, width), f"{packed.numel()} bytes, not {packed_bytes(count, width)}"
    if width == WIDTH_MAX:
        return packed
    missing = -packed.numel() % width
    if missing:
        packed = torch.cat((packed, packed.new_zeros(missing)))
    places = torch.arange(_TOGETHER, device=packed.device)
    word = (packed.view(-1, width).to(torch.int64) << (places[:width] * 8)).sum(1, keepdim=True)
    return ((word >> (places * width)) & ((1 << width) - 1)).to(torch.uint8).view(-1)[:count]
