"""torchrun's facts about a process, and the device of a rank. Refuses devices that are not a rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Launch:
    """One process among those of a peer."""

    rank: int
    """Rank 0 leads."""
    ranks: int
    local_rank: int
    """The number of this rank among the ranks on this machine."""
    local_ranks: int


def launched(environment: Mapping[str, str]) -> Launch | None:
    """The facts that torchrun gave this process; None without torchrun, or if this is torchrun's only process."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    launch = Launch(*(int(environment[name]) for name in names))
    return launch if launch.ranks > 1 else None


def rank_device(launch: Launch, name: str) -> torch.device:
    """The device of a rank for the setting `device`: `auto`, `cpu` or `cuda`. With `cuda`, each rank has its own device."""
    import torch  # takes seconds, and a command that only asks for its rank does not need it

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
