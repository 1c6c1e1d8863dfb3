"""The settings of a run in its present step: the genesis' own, and the operator's changes, as each entry names them. ADR 44.

Only the length of the run and the period of its snapshots count on a peer. The learning rate and the samples are in each tick.
Refuses settings that this version does not know, because this peer would then store other states than the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from node.training.ending import LastStep
from protos.changes import Settings, with_settings, words
from protos.errors import Refusal, RefusedError
from protos.run_config import ClockConfig, RunConfig


@dataclass
class EffectiveSettings:
    """One peer's, of one run. `config`: the settings of the genesis."""

    config: RunConfig
    last: LastStep
    settings: Settings = ()
    clock: ClockConfig = field(init=False)

    def __post_init__(self) -> None:
        self.clock = self.config.clock

    def told(self, settings: Settings, step: int, *, quiet: bool = False) -> None:
        """The entry of `step` names these settings. Raises RefusedError for settings that this peer cannot follow."""
        if settings == self.settings:
            return
        try:
            self.clock = with_settings(self.config, settings).clock
        except Refusal as refusal:
            raise RefusedError(
                f"entry {step} has settings that this peer cannot follow: {refusal.detail}; update swarmentum"
            ) from refusal
        if not quiet:
            new = tuple(item for item in settings if item not in self.settings)
            structlog.get_logger("peer").info("the operator changed the run", step=step, settings=words(new))
        self.settings, self.last.planned = settings, self.clock.steps
