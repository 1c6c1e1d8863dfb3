"""A peer that takes a copy of a run's state and leaves (`swarmentum export`), or one of each agreed state (`--every`).

It loads a snapshot and applies the log after it, as every late peer does. The coordinator knows it as paused, so nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.swarm.events import Agreed, Event
from node.training.exports import Exports
from node.training.loop import EVENT_SECONDS_MAX, Trainer


@dataclass
class Copier(Trainer):
    """A trainer without samples that is no anchor. It ends with a state of step `copy_at` or later."""

    copy_at: int = 0

    @property
    def is_anchor(self) -> bool:
        """Never: its reports count for nothing, and it needs no anchor's ticket."""
        return False

    def follow(self, store: bool = False) -> None:
        """See `Trainer.follow`. The coordinator hears of the pause before it hears of a state, so no step asks this peer."""
        self.wishes.pause("this command copies the state, and trains in no step")
        self._sync_pause()
        super().follow(store)

    def run(self) -> bool:
        """Apply the log until the state is there (True), or until `stopping` (False)."""
        while self.replica.step < self.copy_at and not self.stopping():
            event = self.swarm.next_event(EVENT_SECONDS_MAX)
            self.keeper.check()
            self._sync_pause()
            self.handle(event)
        return self.replica.step >= self.copy_at


@dataclass
class Following(Copier):
    """A copier that stays to the end of the run, and exports the agreed states."""

    exports: Exports | None = None

    def follow(self, store: bool = False) -> None:
        """See `Copier.follow`. The state that this peer begins with may be due.

        Before the first step, the first peers have to agree on the initial state. This peer is one of them, so it stores it.
        """
        super().follow(store or self.replica.step == 0)
        for snapshot in self.swarm.offered():
            self._agreed(snapshot.step, snapshot.root)
        self._reached()

    def run(self) -> bool:
        """Apply the log until the run is finished (True), or until `stopping` (False)."""
        while not self.stopping():
            event = self.swarm.next_event(EVENT_SECONDS_MAX)
            self.keeper.check()
            self._sync_pause()
            before = self.replica.step
            self.handle(event)
            if self.replica.step == before + 1:
                self._reached()
            if self.last.is_over(self.replica.step, awaits=self._exports.awaits(self.replica.step)):
                break
        return self.last.is_here(self.replica.step)

    def handle(self, event: Event | None) -> None:
        super().handle(event)
        if isinstance(event, Agreed):
            self._agreed(event.snapshot.step, event.snapshot.root)

    @property
    def _exports(self) -> Exports:
        assert self.exports is not None, "given when it is made"
        return self.exports

    def _reached(self) -> None:
        step = self.replica.step
        if self._exports.wants(step, self.last.step):
            self.keeper.flush()  # it may be computing the root
            self._exports.reached(step, self.keeper.root())

    def _agreed(self, step: int, root: bytes) -> None:
        self._exports.agreed(step, root)
