"""The paper's aggregate, with the same bits everywhere: the mean over a coefficient's senders, and the sign of its inverse.

Every number below is a whole number in fp64, smaller than 2^53, so that sums are exact in any order, on any device:

    a value             q 2^(24 - (E - e)). E is the largest exponent of the chunk. Below 2^39, rounded half to even.
    the sum             of at most 2^12 peers. Below 2^51.
    the mean            divided (correctly rounded by IEEE 754), rounded, then 2^17 times coarser. At most 2^22.
    the basis           round(2^18 D). D is the orthonormal DCT of a side. A row's absolute sum is at most
                        2^18 sqrt(128) < 2^21.6.
    after one side      below 2^43.6. Then 2^18 times coarser, rounded: below 2^25.6.
    after both sides    below 2^47.2.

A coefficient without a sender is 0. Source: arXiv 2411.19870v1, algorithm 1, and the published code's mean over the senders.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim.paper.coefficient_payload import VALUE_BITS, Cut, Spoken

UNIT_BITS = 24
"""A value keeps so many bits below the unit of the chunk's largest exponent."""
COARSER_BITS = 17
BASIS_BITS = 18
PEERS_MAX = 4096


class Mean:
    """The mean of one tensor: add every peer's votes, in any order; then call `direction`."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._spoken: list[Spoken] = []

    def add(self, spoken: Spoken) -> None:
        """Add one peer's votes. At most PEERS_MAX peers: a log entry has fewer."""
        assert len(self._spoken) < PEERS_MAX
        self._spoken.append(spoken)

    def coefficients(self) -> npt.NDArray[np.float64]:
        """fp64 whole numbers [chunks, high * wide], each chunk in units of its own; 0 for a coefficient without a sender."""
        cut = self._cut
        total = np.zeros((cut.chunks, cut.elements))
        senders = np.zeros((cut.chunks, cut.elements), np.int16)
        largest = np.full(cut.chunks, np.iinfo(np.int16).min, np.int16)
        for it in self._spoken:
            largest = np.where(it.speaks, np.maximum(largest, it.exponents), largest)
        for it in self._spoken:
            rows = np.flatnonzero(it.speaks)
            shift = UNIT_BITS - (largest[rows] - it.exponents[rows]).astype(np.int32)
            values = np.rint(np.ldexp(it.values[rows].astype(np.float64), shift[:, None]))
            total[rows[:, None], it.where[rows]] += values
            senders[rows[:, None], it.where[rows]] += 1
        mean = np.rint(total / np.maximum(senders, 1))
        return np.asarray(np.rint(np.ldexp(mean, -COARSER_BITS)))

    def direction(self, device: torch.device) -> Tensor:
        """The sign of the inverse transform, in the parameter's shape: int8 -1, 0 or 1 on `device`."""
        cut = self._cut
        where = torch.device("cpu") if device.type == "mps" else device  # Metal has no fp64
        chunks = torch.from_numpy(self.coefficients()).to(where).view(cut.chunks, cut.high, cut.wide)
        down, across = basis(cut.high).to(where), basis(cut.wide).to(where)
        rows = torch.matmul(down.T, chunks).mul_(2.0**-BASIS_BITS).round_()
        return cut.merge(torch.matmul(rows, across).sign_().to(torch.int8)).to(device)


@cache
def orthonormal(side: int) -> npt.NDArray[np.float64]:
    """The DCT-II of a side, orthonormal: [frequencies, places]."""
    frequency, place = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    turn = (frequency * (2 * place + 1)) % (4 * side)  # reduced in integers, so no cosine has a large argument
    matrix: npt.NDArray[np.float64] = np.sqrt(2 / side) * np.cos(np.pi * turn / (2 * side))
    matrix[0] = np.sqrt(1 / side)
    return matrix


@cache
def basis(side: int) -> Tensor:
    """`round(2^18 D)`, fp64 [side, side]. The CPU makes it, so all devices have the same; a test pins its hash."""
    return torch.from_numpy(np.rint(2.0**BASIS_BITS * orthonormal(side)))


def directions(cuts: Iterable[Cut], votes: Iterable[Iterable[Spoken]], device: torch.device) -> list[Tensor]:
    """The direction of every tensor, from every peer's votes for each.

    `votes` may be generators: the votes of one tensor are gone before those of the next are asked for.
    """
    found, peers = [], [iter(peer) for peer in votes]
    for cut in cuts:
        mean = Mean(cut)
        for peer in peers:
            mean.add(next(peer))
        found.append(mean.direction(device))
    return found


assert VALUE_BITS + UNIT_BITS == 39
