"""Commands from rank 0 to the other ranks of its peer, over a gloo group of their own.

Every wait has a deadline. What a rank that died or hangs looks like to the others is raised here, as `RankLost`. Refuses
nothing: the ranks of a peer trust each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Before a group exists: imported later, it holds the group beyond `destroy_process_group` (see `torch_optimizer`).
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from node.ranks.launch import Launch
from protos.errors import NetworkError

RANK_SECONDS_MAX = 300
"""How long a rank waits for another. Rank 0 waits for the network much longer, and says meanwhile that it is there."""

T = TypeVar("T")


class RankLost(NetworkError):  # noqa: N818
    """Another rank of this peer died or hangs. A peer is all of its ranks: this one ends, too."""


class Channel:
    """Made on all ranks at once; `tell` on rank 0 meets `hear` on the others."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.launch, self.device = launch, device
        timeout = timedelta(seconds=RANK_SECONDS_MAX)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with lost_ranks():
            dist.init_process_group(backend, timeout=timeout)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
            self.mesh: DeviceMesh = init_device_mesh(device.type, (launch.ranks,))

    def tell(self, what: object) -> None:
        """Send anything that pickles; returns when it is on its way."""
        with lost_ranks():
            dist.broadcast_object_list([what], group=self._group, group_src=0)

    def hear(self) -> Any:
        """What rank 0 told next."""
        box = [None]
        with lost_ranks():
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def shared(self, source: Iterator[T] | None) -> Iterator[T]:
        """What rank 0 has in `source`, one after another, on every rank."""
        if source is None:
            while (item := self.hear()) is not None:
                yield item
            return
        for item in source:
            self.tell(item)
            yield item
        self.tell(None)

    def close(self) -> None:
        """On every rank for itself; others may be gone already."""
        dist.destroy_process_group()


@contextmanager
def lost_ranks() -> Iterator[None]:
    """A collective call that another rank did not make, or not in time, is a `RankLost`."""
    try:
        yield
    except RuntimeError as error:  # gloo raises just that, and nccl a subclass
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).partition("] ")[2].partition(". This is")[0] or str(error)
        raise RankLost(f"another rank of this peer died or hangs: {reason}") from error
