"""What a vote says beside where it is: its sign alone, or its size on a small grid of whole numbers as well.

The grid is the same for every peer and every chunk: each chunk's voted coefficients are divided by their own size before
they are rounded, so that a peer with large gradients counts no more than another, and no peer can shout (`peak` bounds
what a payload can say). How large a chunk was travels beside it, if the method needs it, as one byte: steps of 2^(1/8).
The receivers take the median of those that have a vote there, up to a limit that the whole step sets (`agreed`). Here are the
numbers only; `payload` knows the bytes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_STEPS = 8
"""Scale codes a factor of two: a scale is off by at most 4.4 %."""

SCALE_CODE_ONE = 216
"""The code of 2^0: codes 1 to 255 are scales from 2^-26.9 to 2^4.9; 0 says that the chunk has nothing in it."""

SCALE_CODE_MAX = 255

LOUDEST_STEPS = SCALE_STEPS
"""Scale codes that a chunk's agreed scale may be above the step's loudest chunk (`agreed`): a factor of two."""


@dataclass(frozen=True)
class Grid:
    """How a coefficient becomes a whole number: `sign`, `2bit` (2 or 3) or `8bit` (0 to 127), each with a sign.

    Voted magnitudes lie close together (within 10 to 30 %): 2 and 3 leave less error than the sign alone, 1 and 3 leave more
    (measured on normal draws, all group sizes).
    """

    name: str
    size_bits: int
    """Bits of the size, beside the sign."""
    peak: int
    """The largest size; sums of n peers stay within n times it."""
    unit: float
    """The size of a chunk's mean coefficient, which the others are relative to."""


SIGN = Grid("sign", 0, 1, 1)
TWO_BIT = Grid("2bit", 1, 3, 2.5)
EIGHT_BIT = Grid("8bit", 7, 127, 32)
TWO_BIT_SMALL = 2
"""The smaller of the two sizes on the 2-bit grid."""
GRIDS = {grid.name: grid for grid in (SIGN, TWO_BIT, EIGHT_BIT)}


def quantise(selected: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Sizes on the grid for fp32 [chunks, votes], and each chunk's scale code: uint8 [chunks, votes], uint8 [chunks].

    A coefficient is about `sign * size * scale`, with `scale` as decoded from the code. The size 0 is a vote that says nothing:
    the coefficient is zero, or next to nothing beside its chunk's others (8 bits). The code is 0 where all are. Private: nobody
    else repeats it.
    """
    magnitudes = selected.abs()
    scale = _mean_of_loud(magnitudes) / grid.unit
    codes = _codes_of(scale)
    if grid is SIGN:
        sizes = (magnitudes > 0).to(torch.uint8)
    else:
        # as the code says it, unless it cannot: then what is too large for every scale is still no more than typical
        said = torch.where(codes < SCALE_CODE_MAX, scales(codes), scale).clamp_min(torch.finfo(torch.float32).tiny)
        relative = magnitudes / said[:, None]
        if grid is TWO_BIT:
            sizes = torch.where(relative > grid.unit, 3, TWO_BIT_SMALL).masked_fill_(magnitudes == 0, 0).to(torch.uint8)
        else:
            sizes = relative.round().clamp_(0, grid.peak).to(torch.uint8)
    return sizes, codes.clamp_min(1).masked_fill_((sizes == 0).all(1), 0)


def clipped(own: Tensor, said: Tensor, grid: Grid, size_max: int) -> Tensor:
    """What of fp32 `own` [chunks, votes] is beyond `size_max`, given the sizes `said` of them (int8 on the grid): else zeros.

    Only on the 8-bit grid, for peers count no vote above `size_max`. The scale is what the coefficients below it come to for a
    size of one; a chunk without any below it has nothing to be compared with, and keeps nothing.
    """
    if grid is not EIGHT_BIT:
        return torch.zeros_like(own)
    sizes = said.to(torch.int32).abs()
    inside = (sizes > 0) & (sizes <= size_max)
    scale = own.abs().masked_fill(~inside, 0.0).sum(1) / (sizes * inside).sum(1).clamp_min(1)
    most = (size_max * scale)[:, None]
    beyond = own.sign() * (own.abs() - most).clamp_min(0)
    return torch.where((sizes > size_max) & (most > 0), beyond, 0.0)


def _mean_of_loud(magnitudes: Tensor) -> Tensor:
    """The mean of the magnitudes that are not zero, fp32 [chunks] of [chunks, votes]; 0 where there is none."""
    return magnitudes.sum(1) / (magnitudes > 0).sum(1).clamp_min(1)


def _codes_of(scale: Tensor) -> Tensor:
    """The nearest code of fp32 [chunks] scales, uint8; 0 for a scale of zero."""
    steps = torch.log2(scale.clamp_min(torch.finfo(torch.float32).tiny)) * SCALE_STEPS
    codes = (steps.round() + SCALE_CODE_ONE).clamp_(1, SCALE_CODE_MAX)
    return torch.where(scale > 0, codes, 0).to(torch.uint8)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """fp32 [256]: the scale of each code. `2.0 ** (k / 8)` of eight k, correctly rounded, times exact powers of two."""
    # literals, so that no device's or library's power function has a say
    eighths = (
        "0x1.000000p+0", "0x1.172b84p+0", "0x1.306fe0p+0", "0x1.4bfdaep+0",
        "0x1.6a09e6p+0", "0x1.8ace54p+0", "0x1.ae89fap+0", "0x1.d5818ep+0",
    )  # fmt: skip
    offsets = range(-SCALE_CODE_ONE, SCALE_CODE_MAX + 1 - SCALE_CODE_ONE)
    whole = [math.ldexp(float.fromhex(eighths[k % SCALE_STEPS]), k // SCALE_STEPS) for k in offsets]
    whole[0] = 0.0
    return torch.tensor(whole, dtype=torch.float32, device=device)


def scales(codes: Tensor) -> Tensor:
    """fp32 scales of uint8 codes, the same bits on every device."""
    return _table(codes.device)[codes.long()]


def agreed(codes: Tensor) -> Tensor:
    """The scale code of each chunk, as the peers of a step agree on it: uint8 [chunks] of uint8 [peers, chunks].

    It is the median over the peers that have a vote in the chunk (a code that is not 0); 0 where nobody has one. A minority of
    those that have one moves it no further than what the others say. Where few have a vote, an attacker may be that few: so
    no scale is above twice the step's loudest, which is the median over all peers of the code of each one's loudest chunk.
    A chunk where all peers have a vote is never above it. Of an even number the upper one of the two in the middle: of two
    peers, a quiet one does not move it at all, and one that is too loud may set it.
    """
    loudest = _upper_median(codes.amax(1, keepdim=True))
    most = (loudest.to(torch.int32) + LOUDEST_STEPS).clamp_max(SCALE_CODE_MAX).to(torch.uint8)
    return torch.minimum(_upper_median(codes), most)


def _upper_median(codes: Tensor) -> Tensor:
    """The upper median of those codes of uint8 [peers, chunks] that are not 0: uint8 [chunks]; 0 where all are."""
    peers = codes.shape[0]
    loud = (codes != 0).sum(0)
    # ascending, zeros first: the loud ones are the last, and `loud div 2` of them lie below the upper median
    place = (peers - loud + loud // 2).clamp_max(peers - 1)
    return codes.sort(0).values.gather(0, place[None])[0]
