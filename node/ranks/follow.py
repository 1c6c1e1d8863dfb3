"""The ranks of a peer beside rank 0 receive commands and make the calls, until rank 0 sends `stop` or is gone."""

from __future__ import annotations

import signal

import structlog
import torch

from node.config import PeerSettings
from node.donor.live import Live
from node.model.room import limit
from node.optim.step import NonFiniteGradient
from node.optim.votes.groups import NotANumber, VotesError
from node.ranks.channel import Channel, lost_ranks
from node.ranks.launch import Launch, rank_device
from node.ranks.shard import COMMANDS, RankShard
from protos.cores import usable_cores
from protos.signals import STOP_SIGNALS

AGREED = (NonFiniteGradient, NotANumber, VotesError)
"""The errors that a call raises on every rank alike. Rank 0 decides what follows."""


def follow(launch: Launch, settings: PeerSettings) -> None:
    """Follow rank 0 until it sends `stop`. Raises `RankLost` if rank 0 is gone, and the errors of a call on this rank."""
    values = Live(settings.home, settings).values
    torch.set_num_threads(values.threads or min(torch.get_num_threads(), usable_cores()))
    channel = Channel(launch, rank_device(launch, settings.device))
    limit(channel.device, values.gpu_memory)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # torchrun signals rank 0, too, and rank 0 ends the work from here on
    log = structlog.get_logger("peer").bind(rank=launch.rank)
    log.info("rank ready", ranks=launch.ranks, device=str(channel.device))
    try:
        _obey(channel)
    finally:
        channel.close()


def _obey(channel: Channel) -> None:
    shard: RankShard | None = None
    while True:
        name, arguments = channel.hear()
        match name:
            case "stop":
                return
            case "alive":
                pass
            case "build":
                shard = RankShard(arguments[0], channel)
            case _:
                assert shard is not None, f"{name} came before build"
                try:
                    with lost_ranks():
                        COMMANDS[name](shard, *arguments)
                except AGREED:
                    pass
