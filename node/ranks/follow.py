"""The ranks of a peer beside rank 0: hear a command, make the call, until told to stop or until rank 0 is gone."""

from __future__ import annotations

import signal

import structlog
import torch

from node.config import PeerSettings
from node.optim.step import NonFiniteGradient
from node.optim.votes.groups import NotANumber, VotesError
from node.ranks.channel import Channel, lost_ranks
from node.ranks.launch import Launch, rank_device
from node.ranks.shard import COMMANDS, Shard
from protos.signals import STOP_SIGNALS

AGREED = (NonFiniteGradient, NotANumber, VotesError)
"""What a call raises on every rank alike; rank 0 decides what follows."""


def follow(launch: Launch, settings: PeerSettings) -> None:
    """Until rank 0 says stop. Raises `RankLost` if it is gone, and what a call raised here."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    channel = Channel(launch, rank_device(launch, settings.device))
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # from here on rank 0, which torchrun tells too, ends what is going on
    log = structlog.get_logger("peer").bind(rank=launch.rank)
    log.info("rank ready", ranks=launch.ranks, device=str(channel.device))
    try:
        _obey(channel)
    finally:
        channel.close()


def _obey(channel: Channel) -> None:
    shard: Shard | None = None
    while True:
        name, arguments = channel.hear()
        match name:
            case "stop":
                return
            case "alive":
                pass
            case "build":
                shard = Shard(arguments[0], channel)
            case _:
                assert shard is not None, f"{name} came before build"
                try:
                    with lost_ranks():
                        COMMANDS[name](shard, *arguments)
                except AGREED:
                    pass
