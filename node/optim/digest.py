"""The digest that proves replicas equal: SHA-256 over the bits of the parameters.

The digest refuses to round: -0 and 0 differ, and so do two NaNs of different payload.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from node.optim.spread import Pieces

DIGEST_BYTES_MAX = 64 * 2**20
"""What a step hashes of a state that is larger: about 40 ms, where 200 MB took 113 ms (one EPYC core)."""

_LABEL = b"swarmentum-state-1"
_FP32_BYTES = 4


def state_digest(
    tensors: Sequence[Tensor | Pieces],
    step: int | None = None,
    all_in: int = 0,
    *,
    bytes_max: int | None = None,
) -> bytes:
    """32 bytes over fp32 tensors in the order of the layout, as little-endian rows, back to back.

    With `step` None everything is hashed, as at a snapshot. Otherwise the bytes are cut in parts of `bytes_max`
    (DIGEST_BYTES_MAX; the last may be shorter), and part `step mod parts` is hashed. `all_in`: parts are so large that at most
    so many cover everything; 0, as in runs of earlier versions: no larger than `bytes_max`. The hash begins with a label, the
    size in bytes, the part and the number of parts. Each number is a little-endian 64-bit integer, so digests of different
    parts never compare equal.
    """
    size = _FP32_BYTES * sum(tensor.numel() for tensor in tensors)
    bytes_max = part_bytes(size, all_in, bytes_max)
    part, parts = part_of(size, step, all_in, bytes_max=bytes_max)
    whole = size if step is None else bytes_max
    hasher = hashlib.sha256(_LABEL + struct.pack("<QQQ", size, part, parts))
    for piece in _elements(tensors, part * whole // _FP32_BYTES, (part + 1) * whole // _FP32_BYTES):
        hasher.update(piece.cpu().numpy().astype("<f4", copy=False).data)
    return hasher.digest()


def part_bytes(size: int, all_in: int, bytes_max: int | None = None) -> int:
    """Bytes of a part of a state of `size` bytes: whole elements."""
    bytes_max = DIGEST_BYTES_MAX if bytes_max is None else bytes_max
    assert bytes_max > 0, "a part is whole elements"
    assert bytes_max % _FP32_BYTES == 0, "a part is whole elements"
    return max(bytes_max, -(-size // (all_in * _FP32_BYTES)) * _FP32_BYTES) if all_in else bytes_max


def part_of(size: int, step: int | None, all_in: int = 0, *, bytes_max: int | None = None) -> tuple[int, int]:
    """The part of a state of `size` bytes that the digest of a step covers, and the number of parts."""
    parts = 1 if step is None else max(1, -(-size // part_bytes(size, all_in, bytes_max)))
    return (0 if step is None else step % parts), parts


def _elements(tensors: Sequence[Tensor | Pieces], first: int, last: int) -> Iterator[Tensor]:
    """The elements `first` to `last - 1` of all tensors put end to end, as flat tensors."""
    offset = 0
    for tensor in tensors:
        assert tensor.dtype == torch.float32, "the replicated state is fp32"
        low, high = max(first - offset, 0), min(last - offset, tensor.numel())
        if low < high:
            if isinstance(tensor, Tensor):
                yield tensor.detach().reshape(-1)[low:high]
            else:
                yield from tensor.pieces(low, high)
        offset += tensor.numel()
