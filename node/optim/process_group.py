"""The ranks that vote together: the given process group, or all ranks, as everywhere in torch."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from node.optim.sharded.demo import ShardedDeMo

WeakGroup = weakref.ref[dist.ProcessGroup]


def weak_group(group: dist.ProcessGroup | None) -> WeakGroup | None:
    """A group by a reference that does not keep it alive. Raises `ValueError` if this rank is not in it."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"process_group {group!r}: this rank is not in the group that was made; give each rank its own group"
        )
    return None if group is None else weakref.ref(group)


def group_of(given: WeakGroup | None, sharded: ShardedDeMo | None) -> dist.ProcessGroup | None:
    """The group whose ranks exchange votes; None if this peer trains alone.

    Raises `RuntimeError` if several ranks were started that torch.distributed does not know, or the given group has ended, and
    `ValueError` if a sharded model does not tell which ranks are peers.
    """
    if given is not None:
        group = given()
        if group is None:
            raise RuntimeError("the process group was destroyed before the last step of the optimizer")
        return group
    if not (dist.is_available() and dist.is_initialized()):
        world = os.environ.get("WORLD_SIZE", "1")
        if world.isdecimal() and int(world) > 1:
            raise RuntimeError(
                f"torchrun started {world} ranks, and torch.distributed does not know them: call "
                "torch.distributed.init_process_group() first, or give alone=True to train each rank apart"
            )
        return None
    if sharded is not None:
        if sharded.ranks == dist.get_world_size():
            return None
        raise ValueError(
            f"the model is sharded over {sharded.ranks} of {dist.get_world_size()} ranks: give the group of one rank of each "
            'peer, process_group=mesh["peer"].get_group(), or alone=True'
        )
    return dist.group.WORLD if dist.get_world_size() > 1 else None
