"""A peer that takes a copy of a run's state and leaves (`swarmentum export`).

It loads a snapshot and applies the log after it, as every late peer does. The coordinator knows it as paused, so nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        self.wishes.pause()
        self._heed()
        super().follow(store)

    def run(self) -> bool:
        """Apply the log until the state is there (True), or until `stopping` (False)."""
        while self.replica.step < self.copy_at and not self.stopping():
            event = self.swarm.next_event(EVENT_SECONDS_MAX)
            self.keeper.check()
            self._heed()
            self._handle(event)
        return self.replica.step >= self.copy_at
