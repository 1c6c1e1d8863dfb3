"""What a peer knows of its run: the head of the log that it goes by, and the step that is open. Values: nothing waits here.

Whoever follows the log (`entries`, `follower`) writes it, everybody else reads it.
"""

from __future__ import annotations

from protos.log import Chain, Tick


class View:
    """One peer's, of one run. `chain` is the log's head; `tick` opened the step after it, if it is open and we were told."""

    def __init__(self, run_id: bytes, coordinator: bytes) -> None:
        self._run_id, self._coordinator = run_id, coordinator
        self.chain = Chain(run_id, coordinator)
        self.tick: Tick | None = None
        self.committed_step = 0
        """The newest entry that has arrived: read by the training thread, and a moment behind the head when the entry
        excludes this very peer."""
        self.commits_first = False
        """Whether a payload is withheld until the coordinator has its announcement (the run's configuration decides)."""
        self.admitted_at_step = 0
        """The head when the coordinator last admitted this peer."""

    def start(self, step: int, head: bytes) -> None:
        """Go by the log after `step`, whose entry has this hash; no step is open."""
        self.chain = Chain(self._run_id, self._coordinator, step, head)
        self.committed_step, self.tick = step, None

    @property
    def step(self) -> int:
        """The head's."""
        return self.chain.step

    @property
    def roster(self) -> tuple[bytes, ...]:
        """Public keys of the members of the step that was opened last; nobody before the first tick."""
        return () if self.tick is None else tuple(share.public_key for share in self.tick.roster)
