"""Commands from rank 0 to the other ranks of its peer, over a gloo group of their own.

Every wait has a deadline. If another rank died or hangs, the channel raises `RankLost`. Refuses nothing, because the ranks of
a peer trust each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from node.ranks import Launch
from protos.errors import NetworkError


def rank_device(launch: Launch, name: str) -> torch.device:
    """The device of a rank for the setting `device`: `auto`, `cpu` or `cuda`. With `cuda`, each rank has its own device."""
    from node.model.device import DeviceError

    if name not in {"auto", "cpu", "cuda"}:
        raise DeviceError(
            f"device = {name!r}: of {launch.ranks} ranks each takes a device of its own; choose auto, cuda or cpu "
            "(CUDA_VISIBLE_DEVICES says which ones)"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if count < launch.local_ranks:
        raise DeviceError(
            f"torchrun starts {launch.local_ranks} ranks here, and this machine has {count} CUDA devices: "
            f"--nproc-per-node {count}, or --device cpu"
        )
    return torch.device("cuda", launch.local_rank)


RANK_SECONDS_MAX = 300
"""How long a rank waits for another. Rank 0 waits for the network much longer, and sends `alive` to the others meanwhile."""

T = TypeVar("T")


class RankLost(NetworkError):  # noqa: N818
    """Another rank of this peer died or hangs. A peer is all of its ranks, so this rank ends, too."""


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
        """Send any value that pickles. Returns when the value is on its way."""
        with lost_ranks():
            dist.broadcast_object_list([what], group=self._group, group_src=0)

    def hear(self) -> Any:
        """The next value that rank 0 sent."""
        box = [None]
        with lost_ranks():
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def shared(self, source: Iterator[T] | None) -> Iterator[T]:
        """The values of rank 0's `source`, one after another, on every rank."""
        if source is None:
            while (item := self.hear()) is not None:
                yield item
            return
        for item in source:
            self.tell(item)
            yield item
        self.tell(None)

    def close(self) -> None:
        """Close this rank's end. Other ranks may be gone already."""
        dist.destroy_process_group()


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Raise `RankLost` for a collective call that another rank did not make, or not in time."""
    try:
        yield
    except RuntimeError as error:  # gloo raises RuntimeError itself, and nccl a subclass
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).partition("] ")[2].partition(". This is")[0] or str(error)
        raise RankLost(f"another rank of this peer died or hangs: {reason}") from error
