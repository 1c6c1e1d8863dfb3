"""One peer's parts: its replica, over the run's own model on one device or several, or over the model of a program; its files,
session and trainer. The program and the simulator both use it.

Refuses a program's model whose layout is another one than the run's. Asks no network, and reads no settings from anywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from node.blobs.payloads import Payloads
from node.config import PeerSettings
from node.data.samples import Samples
from node.mirror.snapshot_mirrors import SnapshotPlaces
from node.model.size import Effort
from node.model.spec import ModelError, ModelSpec, build, check_parameters
from node.optim.layout import Layout, difference
from node.overlay.settings import OverlaySettings
from node.ranks.lead import Lead, RanksReplica
from node.ranks.shard import Order
from node.snapshot.pieces import SnapshotManifest
from node.snapshot.store import SnapshotStore
from node.swarm.api import Swarm
from node.swarm.facts import Event
from node.swarm.runtime import Counters
from node.swarm.session import REAL, Outside, Session
from node.swarm.session import build as build_session
from node.training.exports import Copier, Exports, Following
from node.training.fork_start import Start
from node.training.held_out import Evaluator
from node.training.host_maker import HostMaker
from node.training.keeper import StepRecorder
from node.training.loop import Trainer
from node.training.maker import BuiltIn, Handover, ParametersMovedError
from node.training.need import IN_MAIN, Memory, kind_of
from node.training.optimizers import demo_config, local_config
from node.training.own_loss import other_parameter, tell_buffers
from node.training.recovery import Stopping
from node.training.replica import Replica
from node.training.resource_limits import Throttle
from node.training.telemetry import Spans, StepLog, Summary
from node.training.uplink import VoteSize
from node.wire import UpdateDoor, aggregate, is_sum, open_aggregate
from node.wire import bytes_max as aggregate_bytes_max
from protos.errors import OperatorError, Refusal
from protos.identity import Identity
from protos.invite import Invite
from protos.log import SignedEntry
from protos.optimizer_config import SIZE_KEYS
from protos.run_config import RunConfig
from protos.run_sections import ModelConfig
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
            build_session(
                invite, identity, identity_path, overlay, self.door, self.store.get, self.payloads, emit, outside,
                archive=archive, counters=counters,
            )
        )  # fmt: skip


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


DIGITS_SHOWN = 16


class SharedReplica(Replica):
    """Over the model of a program, which can write to it at any time. Only the swarm may move it."""

    def apply(self, signed: SignedEntry, updates: Iterable[Update], authors: Sequence[bytes] = ()) -> bool:
        """As `Replica.apply`. Raises ParametersMovedError if the state is not the one that was left after the entry before."""
        if isinstance(self.maker, Handover):
            self.maker.check()
        if self.digest() != self.demo.state_digest(self.step, self.digest_steps):
            raise ParametersMovedError(
                f"the program changed the model's parameters after step {self.step}. The swarm moves them, the same way on "
                "every peer: evaluate with a copy of the model (copy.deepcopy), and load no other weights. Join again to go on "
                "from the swarm's state"
            )
        return super().apply(signed, updates, authors)

    def digest(self) -> bytes:
        """As `Replica.digest`. Raises ParametersMovedError for a model that was cast."""
        if isinstance(self.maker, Handover) and any(it.dtype != torch.float32 for it in self.model.parameters()):
            self.maker.check()
        return super().digest()

    def load(self, manifest: SnapshotManifest, data: bytes | Path) -> None:
        super().load(manifest, data)
        if isinstance(self.maker, Handover):
            self.maker.loaded()


@dataclass(frozen=True)
class Own:
    """A program's own model and loop. `reads`: it trains on the run's text. `entered`: called when the peer is in the run."""

    handover: Handover
    reads: bool
    entered: Callable[[], None] = lambda: None

    @property
    def evaluates(self) -> bool:
        """Whether it can tell the held-out loss of states."""
        return self.reads and self.handover.loss is not None

    def asks(self, config: RunConfig) -> RunConfig:
        """The run without what it would ask of this machine in vain: its model's code. Raises OperatorError."""
        if config.trust.enabled and not self.reads:
            raise OperatorError(
                "the run checks votes against the samples that it hands out (trust.enabled), and this peer has joined with "
                "own_data=True: it would be excluded. Train on the batches of each share"
            )
        return config.model_copy(update={"model": ModelConfig()}) if config.model.factory is not None else config

    def replica(
        self,
        start: nn.Module | None,
        config: RunConfig,
        size: int,
        run_id: bytes,
        public_key: bytes,
        layout: bytes,
        memory: Memory = "full",
        copy_folder: Path | None = None,
        blank: bool = False,
    ) -> Replica:
        """Over the program's model. `start`: the run's own in its first state, or `blank`; `layout`: its digest, if known;
        `memory`: what this peer keeps; `copy_folder`: see `Replica`."""
        model = self.handover.model
        check_parameters(model, "model")
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32 or parameter.device != self.handover.device or parameter.is_meta:
                raise ModelError(
                    f"model: parameter {name!r} is {parameter.dtype} on {parameter.device}; expected torch.float32 on one "
                    "device: the swarm counts in whole bits. Autocast in your forward pass computes in fewer"
                )
        try:
            mine = Layout.of(model)
            theirs = None if start is None else Layout.of(start)
        except ValueError as error:
            raise ModelError(f"model: {error}") from error
        named = layout or (b"" if theirs is None else theirs.digest())
        if named and mine.digest() != named:
            raise ModelError(
                f"model: its parameters have layout {mine.digest().hex()[:DIGITS_SHOWN]}, and the run's have "
                f"{named.hex()[:DIGITS_SHOWN]}{_frozen(model, start) or difference(mine, theirs)}. "
                "Names, shapes, their order and which are tables (nn.Embedding) have to be the run's"
            )
        first = {} if start is None else dict(start.named_parameters())
        if start is not None and (other := other_parameter(dict(model.named_parameters()), first)):
            raise ModelError(
                f"model: {other}: a run's state has its frozen parameters, too, in the same names and shapes"
            )
        if start is not None and not blank:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(first[name])
        tell_buffers(model, start)
        replica = SharedReplica(
            run_id, model, config.optimizer, size, author=public_key, second=kind_of(memory, config.optimizer),
            maker=self.handover, digest_steps=config.clock.digest_steps, copy_folder=copy_folder,
        )  # fmt: skip
        replica.knows_start, replica.is_blank = start is not None, blank
        self.handover.loaded()
        return replica


def _frozen(model: nn.Module, start: nn.Module | None) -> str:
    """The first parameter that is trained in one of the two alone, in words. Without the run's: the first that is frozen."""
    theirs = {} if start is None else {name: it.requires_grad for name, it in start.named_parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and theirs.get(name, start is None):
            run = "the run perhaps trains it" if start is None else "the run trains it"
            return f": {name} is frozen (requires_grad=False), and {run}: call {name}.requires_grad_() before join"
        if parameter.requires_grad and not theirs.get(name, True):
            return f": the run has {name} frozen: call {name}.requires_grad_(False) before join"
    return ""


def own_start(
    spec: ModelSpec, config: RunConfig, vocabulary: int, *, begun: bool, allow_code: bool, blank: bool = False
) -> nn.Module | None:
    """The run's first state for a program's model. None if only the run's code makes it, and the person has not agreed to that:
    then the peer takes the state that the run has agreed on. Raises OperatorError if the run has not `begun` with one."""
    if spec.factory is None or allow_code:
        return build(spec, config.seed, vocabulary=vocabulary, context=config.data.context, blank=blank)
    if not begun:
        raise OperatorError(
            f"the run has no agreed state yet, and its first one comes from the code {spec.factory!r}. If you wrote or trust "
            "it, join with allow_code=True; otherwise join when other peers, or an anchor, have begun the run"
        )
    return None


def replica_of(
    spec: ModelSpec,
    config: RunConfig,
    vocabulary: int,
    size: int,
    device: torch.device,
    *,
    run_id: bytes,
    public_key: bytes,
    settings: PeerSettings,
    lead: Lead | None,
    memory: Memory,
    copy_folder: Path | None = None,
    blank: bool = False,
) -> Replica:
    """Over the run's model, in its first state, or `blank` if the peer loads an agreed state next. `memory`: what it keeps, and
    where. `copy_folder`: see `Replica`."""
    context, optimizer, digest_steps = config.data.context, config.optimizer, config.clock.digest_steps
    effort = Effort(settings.activation_checkpointing, settings.compile)
    if lead is None:
        model, maker = build(spec, config.seed, vocabulary=vocabulary, context=context, blank=blank), None
        if memory in IN_MAIN:
            maker = HostMaker(model, device, effort, stream=memory == "stream")
        else:
            model = effort.prepare(model.to(device))
        replica = Replica(
            run_id, model, optimizer, size, author=public_key, second=kind_of(memory, optimizer),
            maker=maker, digest_steps=digest_steps, copy_folder=copy_folder,
        )  # fmt: skip
        replica.is_blank = blank
        return replica
    if optimizer.method == "paper":
        raise OperatorError(
            f"this peer has {lead.ranks} devices, and the run's optimizer.method is paper, which works on one device: "
            "join without torchrun"
        )
    own, local = demo_config(optimizer, size, run_id, public_key), local_config(optimizer)
    order = Order(spec, config.seed, vocabulary, context, own, local, settings.precision, effort)
    return RanksReplica(run_id, lead, order, optimizer, size, digest_steps)


def vote_size(config: RunConfig, settings: PeerSettings, log: Any) -> int:
    """The size of this peer's votes. Raises OperatorError for one that the run's votes do not have."""
    if settings.own_size is not None and config.optimizer.selection not in SIZE_KEYS:
        log.warning(
            "vote_size has no effect: votes of this run's selection have one size", selection=config.optimizer.selection
        )
    return config.optimizer.size_of(settings.own_size)
