"""A peer of several ranks: torchrun starts one process for each device, and together they are one peer (FlexDeMo).

    channel   commands from rank 0 to the others, the error when a rank is gone, and a rank's device.
    shard     a rank's part of the model and the optimizer, and the table of commands: the calls that all ranks make at once.
    lead      rank 0: the calls of a replica. Rank 0 sends each to the others, and all ranks make it.

Rank 0 alone has an identity, a place in the overlay, the log, the text and the disk. ADR 14.

Here are torchrun's facts about a process, without torch: `join` answers a damaged link before it loads torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass


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
