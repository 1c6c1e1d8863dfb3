"""Tensors that PyTorch has spread over the ranks of a peer (DTensor), told from others without the import of their module.

A DTensor cannot exist before its module is imported. The import takes half a second of CPU
time, and most peers have one device.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MODULE = "torch.distributed.tensor"


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether this is a tensor as `fully_shard` makes them."""
    # another thread may be in the middle of the import: a program's own loop has one
    kind = getattr(sys.modules.get(MODULE), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def is_dealt(parameter: DTensor) -> bool:
    """Whether each rank has some of the rows. Otherwise each rank has all of them."""
    return parameter.placements[0].is_shard()
