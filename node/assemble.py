"""The module puts the parts of one peer together: its files, session and trainer. The program and the simulator both use it.

Refuses to build a model or to read settings; node/app.py does that for the program, tests/sim/world.py for the simulator.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from node.blobs.payloads import Payloads
from node.data.samples import Samples
from node.mirror.snapshot_mirrors import SnapshotPlaces
from node.overlay.settings import OverlaySettings
from node.snapshot.store import SnapshotStore
from node.swarm.api import Swarm
from node.swarm.facts import Event
from node.swarm.session import REAL, Outside, Session, build
from node.swarm.view import Counters
from node.training.exports import Copier, Exports, Following
from node.training.fork_start import Start
from node.training.held_out import Evaluator
from node.training.keeper import StepRecorder
from node.training.loop import Trainer
from node.training.maker import BuiltIn
from node.training.recovery import Stopping
from node.training.replica import Replica
from node.training.resource_limits import Throttle
from node.training.telemetry import Spans, StepLog, Summary
from node.training.uplink import VoteSize
from node.wire import UpdateDoor, aggregate, is_sum, open_aggregate
from node.wire import bytes_max as aggregate_bytes_max
from protos.errors import Refusal
from protos.identity import Identity
from protos.invite import Invite
from protos.run_config import RunConfig
from protos.slices import Update
from protos.start import RUN_DIGITS_SHOWN, StartingState

PIECES = "pieces"
"""Of a run's folder: the snapshots."""


def folder_of(run_id: bytes) -> str:
    """The name of a run's folder in a peer's home."""
    return run_id.hex()[:RUN_DIGITS_SHOWN]


class LateDoor:
    """The payload door of a run whose layout is known only once the model is built; a peer joins after that."""

    door: UpdateDoor | None = None

    @property
    def bytes_max(self) -> int:
        """The longest payload that passes."""
        return self._known().bytes_max

    def open(self, data: bytes, step: int, named_bytes: int | None = None) -> Any:
        return self._known().open(data, step, named_bytes)

    def part(self, number: int) -> LateDoor:
        """The door of one range's slices."""
        found = copy(self)
        found.door = self._known().parts[number]
        return found

    @property
    def aggregate_bytes_max(self) -> int:
        """The longest sum of votes that passes."""
        return aggregate_bytes_max(self._known())

    def aggregate(self, updates: Sequence[Update], step: int) -> bytes:
        return aggregate(self._known(), updates, step)

    def is_sum(self, data: bytes, updates: Sequence[Update], step: int, hidden: int = 0) -> bool:
        return is_sum(self._known(), data, updates, step, hidden)

    def open_aggregate(
        self, data: bytes, step: int, named_bytes: int, refused: Callable[[Refusal], None] | None = None
    ) -> tuple[Update, ...]:
        return open_aggregate(self._known(), data, step, named_bytes, refused)

    def fit(self, replica: Replica, cap: int) -> None:
        """The model is built: from now on the door takes payloads of its layout, and sums with the run's `cap`."""
        demo, of = replica.demo, (replica.run_id, replica.layout_digest)
        self.door = UpdateDoor(*of, demo.layout.chunks, demo.form, cap, replica.ranges)

    def _known(self) -> UpdateDoor:
        assert self.door is not None, "the model is built before the run is joined"
        return self.door


@dataclass(frozen=True)
class Home:
    """The files of one peer in one run, and the door that foreign payloads pass on their way there."""

    folder: Path
    store: SnapshotStore
    payloads: Payloads
    door: LateDoor = field(default_factory=LateDoor)

    def session(
        self,
        invite: Invite,
        identity: Identity,
        identity_path: Path,
        overlay: OverlaySettings,
        emit: Callable[[Event], Awaitable[None]],
        outside: Outside = REAL,
        *,
        archive: bool = False,
        counters: Counters | None = None,
    ) -> Session:
        """The peer's network side. Call it on the network thread's loop."""
        return Session(
            build(
                invite,
                identity,
                identity_path,
                overlay,
                self.door,
                self.store.get,
                self.payloads,
                emit,
                outside,
                archive=archive,
                counters=counters,
            )
        )


def assemble(
    home: Home,
    config: RunConfig,
    replica: Replica,
    swarm: Swarm,
    samples: Samples | None,
    summary: Summary,
    stopping: Stopping,
    *,
    patience_seconds: float,
    micro_batch: int,
    autocast: Any,
    anchored: bool = False,
    vote_size: VoteSize | None = None,
    archive: StepRecorder | None = None,
    behind: bool = True,
    places: SnapshotPlaces | None = None,
    start: StartingState | None = None,
    copy_at: int | None = None,
    exports: Exports | None = None,
    throttle: Throttle | None = None,
    evaluator: Evaluator | None = None,
    spans: Spans | None = None,
) -> Trainer:
    """The peer's training side, once the model is built. See `Trainer` for the arguments; `copy_at`: a `Copier`.

    `exports`: of a copier that stays. `start`: of a fork. This peer looks for it among its snapshots of the parent run, in
    the folder beside `home.folder`.
    """
    if samples is not None and isinstance(replica.maker, BuiltIn):
        replica.maker.ready(config.data.context)  # before others wait for this peer
    replica.ranges = config.clock.ranges
    home.door.fit(replica, config.optimizer.cap)
    parent = None if start is None else home.folder.with_name(folder_of(start.run_id)) / PIECES
    make: Callable[..., Trainer] = Trainer if copy_at is None else partial(Copier, copy_at=copy_at)
    if exports is not None:
        make = partial(Following, exports=exports)
    return make(
        config=config,
        replica=replica,
        swarm=swarm,
        samples=samples,
        store=home.store,
        private_path=home.folder / "private.pt",
        micro_batch=micro_batch,
        autocast=autocast,
        summary=summary,
        steps=StepLog(home.folder / "steps.jsonl"),
        stopping=stopping,
        anchored=anchored,
        patience_seconds=patience_seconds,
        vote_size=vote_size,
        archive=archive,
        behind=behind,
        places=places or SnapshotPlaces(),
        start=None if start is None or parent is None else Start(start, replica.run_id, home.store, parent),
        throttle=throttle or Throttle(),
        evaluator=evaluator,
        spans=spans or Spans(),
    )
