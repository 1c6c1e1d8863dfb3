"""This peer's checks of other peers' votes, as the log draws them: on the plain gradient, which changes nothing. ADR 16."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from node.data.samples import Samples
from node.optim.demo import DeMoConfig
from node.optim.votes.places import Draw
from node.swarm.api import Swarm
from node.swarm.events import Committed
from node.training import vote_checks
from node.training.recovery import Stopping
from node.training.replica import Replica
from protos.assignment import Range
from protos.run_config import TrustConfig
from protos.tick import Tick


class Checker:
    """One peer's, of a run with checks. `me`: this peer's public key. See `Trainer` for the other arguments."""

    def __init__(
        self,
        me: bytes,
        trust: TrustConfig,
        replica: Replica,
        samples: Samples,
        swarm: Swarm,
        micro_batch: int,
        autocast: Any,
        stopping: Stopping,
        log: Any,
    ) -> None:
        self._me, self._trust, self._replica, self._samples, self._swarm = me, trust, replica, samples, swarm
        self._micro_batch, self._autocast, self._stopping, self._log = micro_batch, autocast, stopping, log
        self.ticks: dict[int, Tick] = {}  # by step

    def opened(self, tick: Tick) -> None:
        """A step is open, perhaps before the entry of the step before is applied."""
        self.ticks = vote_checks.newest(self.ticks, tick)

    def check(self, event: Committed) -> None:
        """Check other peers' votes, if the entry draws this peer, at the state on which they were computed."""
        demo = self._replica.demo
        tick = self.ticks.get(event.signed.entry.step)
        mine = [] if tick is None else vote_checks.due(self._me, self._trust, tick, event.signed)
        if tick is None or not mine:
            return
        own = demo.config
        assert isinstance(own, DeMoConfig), "`RunConfig` refuses checks of other votes"

        def gradient(ranges: tuple[Range, ...]) -> Tensor:
            if away := self._samples.away(ranges):
                raise vote_checks.NoGradient(away)
            by = self._replica.maker.checker
            over = self._replica.mean_gradient(
                self._samples, ranges, self._micro_batch, self._autocast, self._stopping, by
            )
            if over.samples < sum(map(len, ranges)):
                raise vote_checks.NoGradient("this peer is about to stop")
            return vote_checks.transformed(demo.layout, self._replica.whole_gradients(), own.transform)

        try:
            step, seed = event.signed.entry.step, own.seed
            votes = {
                key: vote_checks.seen_votes(
                    own.form, update.votes, update.size, demo.layout.chunks, Draw(seed, step, (key,))
                )
                for key, update in event.by_author.items()
            }
            found = vote_checks.verdicts(self._me, mine, self._trust, tick, event.signed, votes, gradient)
        except vote_checks.NoGradient as error:
            self._log.info(
                "skipping the check of other peers' votes: this peer cannot compute the gradient",
                step=event.signed.entry.step,
                why=str(error),
            )
            return
        if found:
            self._swarm.found(found)
            self._log.info("checked", step=event.signed.entry.step, peers=len(found))
