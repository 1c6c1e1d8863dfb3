"""The module puts a peer together, runs it, and takes it apart: the only place that knows all parts."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch

from node.admission import fit
from node.admission.consent import MachineRequest, TokenizerSource, place_of, request
from node.admission.fit import Failing, telling
from node.archive.record import Recorder
from node.blobs.payloads import Payloads
from node.building import PIECES, Home, Own, assemble, folder_of, own_start, replica_of, vote_size
from node.config import PeerSettings
from node.control.control_server import ControlServer
from node.donor.live import BYTES_A_GB, Kept, allowed
from node.export.card import facts_of
from node.export.first_look import first_look
from node.export.model_folder import check_folder, export, writer
from node.link.client import check_genesis
from node.mirror.snapshot_mirrors import SnapshotPlaces
from node.model.device import autocast, device_name, pick_device
from node.model.spec import ModelSpec, build, parameter_count, with_vocabulary
from node.owner_commands import Commands, Stop
from node.ranks import launched
from node.ranks.channel import RankLost
from node.ranks.lead import Lead
from node.snapshot.store import SnapshotStore
from node.swarm.api import Swarm
from node.swarm.facts import Agreed, Event
from node.swarm.session import Session
from node.terminal.stage import Stage
from node.text import Text, open_text
from node.training import exports
from node.training.exports import Exports, Series
from node.training.held_out import Evaluator
from node.training.loop import EVENT_SECONDS_MAX, Trainer
from node.training.maker import ParametersMovedError, Unread
from node.training.need import IN_MAIN, Memory
from node.training.replica import Replica
from node.training.resource_limits import ResourceLimits
from node.training.telemetry import Spans, Summary
from node.training.uplink import following
from protos.console import lock_home
from protos.disk import DiskError
from protos.errors import NetworkError, OperatorError, RefusedError, StoppedError
from protos.identity import Identity
from protos.invite import Invite
from protos.limits import SNAPSHOTS_GB
from protos.mistakes import NO_LICENCE
from protos.process import EXIT_INTERRUPTED
from protos.run_config import RunConfig
from protos.start import fork_values, fork_words, start_of
from protos.v1 import coordinator_pb2 as pb


@dataclass(frozen=True)
class Outcome:
    """How a peer's part in a run ended."""

    summary: Summary
    exit_code: int


def join(
    invite_link: str,
    settings: PeerSettings,
    export_to: Path | None = None,
    agree: Callable[[MachineRequest], None] = lambda asked: None,
    *,
    anchor: bool = False,
    copies: bool = False,
    series: Series | None = None,
    stage: Stage | None = None,
    own: Own | None = None,
    stop: Stop | None = None,
    licence: str = NO_LICENCE,
) -> Outcome:
    """Take part in a run until the run is finished, or Ctrl-C. Raises a SwarmentumError that names the fault.

    An `anchor` applies the others' votes and does not train; it serves the last state until Ctrl-C. A peer that `copies` ends
    with the first state that is as new as the log is now; with a `series` it stays, and exports agreed states. `agree` gets
    the run's requests of this machine before anything is built, and raises if the person does not agree. In a peer of several
    ranks this is rank 0; the others `follow`. `stage` shows the terminal view, once there is something to see. `own`: a
    program's model and loop, in another thread; then `stop` is how the program ends the peer. `licence`: for the export's card.
    """
    stage = stage or Stage()
    invite = Invite.parse(invite_link)
    if export_to is not None:
        check_folder(export_to, invite.run_id.hex())
    lock = lock_home(settings.home, "peer")
    stop = stop or Stop(stage.close)
    try:
        with stop.listening(), _leading(settings) as lead, stage:
            peer = _Peer(invite, settings, stop, stage, lead, anchor=anchor, copies=copies, series=series, own=own,
                         licence=licence)  # fmt: skip
            return peer.run(export_to, agree)
    finally:
        lock.close()


@contextmanager
def _leading(settings: PeerSettings) -> Iterator[Lead | None]:
    """The ranks that torchrun started together with this process; None if this process is alone."""
    launch = launched(os.environ)
    lead = None if launch is None else Lead(launch, settings.device)
    try:
        yield lead
    finally:
        if lead is not None:
            lead.close()


class _Peer:
    """One peer in one run; `run` has the phases of its life in order."""

    def __init__(
        self,
        invite: Invite,
        settings: PeerSettings,
        stop: Stop,
        stage: Stage,
        lead: Lead | None = None,
        *,
        anchor: bool = False,
        copies: bool = False,
        series: Series | None = None,
        own: Own | None = None,
        licence: str = NO_LICENCE,
    ) -> None:
        self.invite, self.settings, self.stop, self.lead, self.anchor = invite, settings, stop, lead, anchor
        self.stage, self.copies, self.trains = stage, copies, not (anchor or copies)
        self.series, self.own, self.licence = series, own, licence
        self.evaluates = False
        self.memory: Memory = "full"
        self.identity_path = settings.home / "identity.key"
        self.identity = Identity.load_or_create(self.identity_path)
        self.folder = settings.home / "runs" / folder_of(invite.run_id)
        store = SnapshotStore(self.folder / PIECES, int(SNAPSHOTS_GB * BYTES_A_GB))
        payloads = Payloads(self.folder / "payloads", allowed(settings.disk_gb, Kept()).payloads)
        self.home = Home(self.folder, store, payloads)
        self.log = structlog.get_logger("peer").bind(peer=self.identity.peer_id[-8:], step=0)
        self.lent = ResourceLimits(settings, self._device, alone=lead is None, trains=self.trains, log=self.log)

    def run(self, export_to: Path | None, agree: Callable[[MachineRequest], None]) -> Outcome:
        """Connect, build, join, train, export, leave."""
        swarm = Swarm(self._session, self.stop)
        trainer: Trainer | None = None
        finished, started = False, time.monotonic()
        with ExitStack() as ends:
            ends.callback(swarm.close, leaving=True)
            spans = exports.trace(self.settings, self.invite.run_id, self.identity, ends, self.log)
            try:
                facts, config, text, replica, micro_batch = self._start(swarm, agree)
                ends.callback(text.close)
                if facts.phase == pb.Phase.PHASE_FINISHED:
                    self.log.info("the run is finished: loading its last state", step=facts.head_step)
                trainer = self._trainer(config, replica, swarm, text, facts, micro_batch, spans)
                ends.callback(trainer.keeper.close)
                ends.callback(trainer.reached.close)
                if trainer.evaluator is not None:
                    ends.callback(trainer.evaluator.close)
                ends.callback(trainer.steps.close)
                summary = trainer.summary
                self.lent.watch(trainer, self.home.payloads, text.shelves)
                ends.callback(self.lent.close)
                ends.enter_context(closing(self._door(trainer, started)))
                exports.metrics(self.settings, trainer, swarm.counters, ends, self.log)
                exports.track(self.settings, trainer, self.invite.run_id, self.folder, self.log)
                trainer.enter(list(facts.bootstrap))
                if self.own is not None:
                    self.own.entered()
                finished = summary.finished = trainer.run()
                if finished and self.anchor:
                    self._serve_on(trainer, swarm)
                trainer.finish()
                if trainer.archive is not None:
                    trainer.archive.close()
                summary.state_digest = replica.whole_digest().hex()
                if export_to is not None:
                    summary.checkpoint = str(self._export(replica, text, config, export_to))
            except (NetworkError, RefusedError, StoppedError, DiskError, ParametersMovedError) as error:
                if trainer is not None and trainer.wishes.ending is not None:
                    self.stop.ask()
                self._keep_momentum(trainer, error)
                raise
        summary.copy_counters(swarm.counters)
        summary.gave(trainer.standing.given, time.monotonic() - started)
        return Outcome(summary, 0 if finished or trainer.wishes.ending is not None else EXIT_INTERRUPTED)

    def _device(self) -> torch.device:
        """The one that this process computes on. Raises DeviceError."""
        if self.own is not None:
            return self.own.handover.device
        return pick_device(self.settings.device) if self.lead is None else self.lead.channel.device

    def _start(
        self, swarm: Swarm, agree: Callable[[MachineRequest], None]
    ) -> tuple[pb.GetRunResponse, RunConfig, Text, Replica, int]:
        """Facts, settings, text, replica and micro-batch: all before this peer joins. What fails is told to the operator."""
        # Rank 0 has to tell the other ranks of the peer before it ends.
        saves = self.stop.nothing_to_save() if self.lead is None else nullcontext()
        tell = (lambda _: None) if "failures" in self.settings.decline else swarm.tell_failure
        with saves, telling(tell) as stage:
            stage.reason = Failing.JOIN_FAILURE_VERSION
            # A command that only copies the state ends soon if nobody answers; a peer waits for its coordinator.
            patience = 0.0 if self.copies and self.series is None else self.settings.overlay().patience_seconds
            facts = swarm.connect(anchor=self.anchor, patience_seconds=patience)
            config = check_genesis(facts.genesis, self.invite)
            self.log.info("run found", run=config.name, steps=config.clock.steps, head=facts.head_step)
            self.evaluates = self._evaluates(config, facts)
            asked = self._asks(config)
            fork, stage.reason = fork_values(facts.genesis), None
            agree(asked if fork is None else replace(asked, fork=fork_words(fork)))
            stage.reason = Failing.JOIN_FAILURE_DEVICE
            device = self._device()
            ranks = 1 if self.lead is None else self.lead.ranks
            stage.reason = Failing.JOIN_FAILURE_MEMORY
            micro_batch, self.memory = fit.check(
                config, self.settings, self.folder, device,
                trains=self.trains, stores=not self.copies, ranks=ranks, own=self.own is not None,
            )  # fmt: skip
            stage.reason = Failing.JOIN_FAILURE_OTHER
            text, replica = self._build(config, device, swarm, facts)
        return facts, config, text, replica, micro_batch

    def _asks(self, config: RunConfig) -> MachineRequest:
        """What the run wants of this machine. Raises OperatorError for what the person has not allowed."""
        trains = self.trains or self.evaluates
        if self.own is None:
            return request(config, self.settings, os.path.exists, trains=trains)
        return request(self.own.asks(config), self.settings, os.path.exists, trains=self.own.reads)

    def _session(self, emit: Callable[[Event], Awaitable[None]]) -> Session:
        settings = self.settings
        return self.home.session(
            self.invite, self.identity, self.identity_path, settings.overlay(), emit,
            archive=settings.archive, counters=self.lent.counters,
        )  # fmt: skip

    def _door(self, trainer: Trainer, started: float) -> ControlServer:
        """The owner's door, and the terminal view, which asks it."""
        home, stage = self.settings.home, self.stage
        stage.open(home)
        commands = Commands(
            trainer,
            self.invite.run_id,
            self.stop.ask,
            started=started,
            recent=stage.recent,
            log_file=lambda: stage.log_file,
            lent=self.lent,
        )
        return ControlServer(home, commands.all())

    def _serve_on(self, trainer: Trainer, swarm: Swarm) -> None:
        """Serve the last state as an anchor of a finished run, for as long as the operator wants. It may be agreed only now."""
        self.log.info("the run is finished; serving its last state until Ctrl-C", step=trainer.replica.step)
        while not self.stop():
            if isinstance(event := swarm.next_event(EVENT_SECONDS_MAX), Agreed):
                trainer.handle(event)

    def _keep_momentum(self, trainer: Trainer | None, failed: Exception) -> None:
        """Save the momentum, so that a peer that comes back has its unspent votes, even after a network failure.

        A momentum that was never loaded is not saved."""
        if trainer is None or not trainer.entered:
            return
        try:
            if isinstance(failed, ParametersMovedError):  # a snapshot that waits is perhaps none of the swarm's state
                trainer.keeper.abandon()
                trainer.replica.save_private(trainer.private_path)
            else:
                trainer.finish()
        except (DiskError, RankLost) as error:
            self.log.warning("the momentum cannot be saved", step=trainer.replica.step, why=str(error))

    def _build(
        self, config: RunConfig, device: torch.device, swarm: Swarm, facts: pb.GetRunResponse
    ) -> tuple[Text, Replica]:
        spec = ModelSpec(config.model.config, config.model.factory, config.model.kwargs)
        if place_of(config.data.tokenizer, os.path.exists) is TokenizerSource.HUB:
            self.log.info("downloading the tokenizer, unless this machine has it", tokenizer=config.data.tokenizer)
        text = self._text(config, swarm, facts.head_step)
        vocabulary = text.tokenizer.vocabulary
        if spec.config is not None:
            spec = replace(spec, config=with_vocabulary(spec.config, vocabulary))
        size, run_id, key = vote_size(config, self.settings, self.log), self.invite.run_id, self.identity.public_key
        blank = facts.head_step > 0 and facts.snapshot.step > 0  # then this peer loads that state
        if self.own is not None:
            begun, code = facts.HasField("snapshot"), "code" in self.settings.allow
            start = own_start(spec, config, vocabulary, begun=begun, allow_code=code, blank=blank)
            layout, copies = facts.genesis.layout_digest, self.folder / PIECES
            replica = self.own.replica(start, config, size, run_id, key, layout, self.memory, copies, blank)
        else:
            # then somebody's machine has tried the model
            known = bool(facts.genesis.layout_digest) or facts.head_step > 0
            first_look(spec, text.tokenizer, config, self.log, known=known)
            replica = replica_of(
                spec, config, vocabulary, size, device,
                run_id=run_id, public_key=key, settings=self.settings, lead=self.lead,
                memory=self.memory, copy_folder=self.folder / PIECES, blank=blank,
            )  # fmt: skip
        replica.first_model = partial(build, spec, config.seed, vocabulary=vocabulary, context=config.data.context)
        model = {"parameters": parameter_count(replica.model), "device": str(device), "data": text.name}
        self.log.info("model", **model, size=size, dtype=text.dtype)
        return text, replica

    def _text(self, config: RunConfig, swarm: Swarm, step: int) -> Text:
        """The run's text. An anchor reads it for held-out losses only, and does without if it cannot."""
        opened = partial(open_text, config, self.settings, self.log, swarm.loaded, step=step)
        if self.trains or not self.evaluates:
            return opened(trains=self.trains if self.own is None else self.own.reads)
        try:
            return opened(trains=True)
        except (OperatorError, NetworkError) as error:
            self.log.warning("no held-out losses: this anchor cannot read the run's text", why=str(error))
            return opened(trains=False)

    def _trainer(
        self,
        config: RunConfig,
        replica: Replica,
        swarm: Swarm,
        text: Text,
        facts: pb.GetRunResponse,
        micro_batch: int,
        spans: Spans,
    ) -> Trainer:
        settings, samples, archive, series = self.settings, text.samples, None, None
        if self.series is not None:
            series = Exports(self.series, partial(self._export, replica, text, config), config.clock, self.log)
        if settings.archive:
            genesis = facts.genesis.SerializeToString(deterministic=True)
            room = allowed(self.lent.live.values.disk_gb, Kept()).archive
            archive = Recorder(self.folder / "archive", room, genesis, replica)
        self.home.store.make_fit(4 * sum(it.numel() for it in replica.state.values()), settings.snapshots_kept)
        ranks = 1 if self.lead is None else self.lead.ranks
        name = device_name(replica.maker.device, ranks)
        return assemble(
            self.home,
            config,
            replica,
            swarm,
            (samples or Unread()) if self.trains else None,
            Summary(self.identity.peer_id, name, self.memory, fit.why(self.memory, settings)),
            self.stop,
            patience_seconds=settings.overlay().patience_seconds,
            micro_batch=micro_batch,
            autocast=autocast(replica.maker.device, "bf16" if self.memory in IN_MAIN else settings.precision),
            anchored=facts.anchored,
            vote_size=following(
                config, settings.uplink_part, replica.payload_bytes, metered=settings.upload_gb is not None
            ),
            archive=archive,
            places=SnapshotPlaces(settings.snapshots_kept, settings.mirror, "data" in settings.allow),
            start=start_of(facts.genesis),
            copy_at=facts.head_step if self.copies else None,
            exports=series,
            throttle=self.lent.throttle,
            spans=spans,
            evaluator=self._evaluator(config, replica, swarm, text, micro_batch),
        )

    def _evaluates(self, config: RunConfig, facts: pb.GetRunResponse) -> bool:
        """Whether this peer reports held-out losses: an anchor, or a peer of a run without anchors."""
        wanted = bool(config.evaluation.every) and "evaluation" not in self.settings.decline and not self.copies
        return wanted and (self.own is None or self.own.evaluates) and (self.anchor or not facts.anchored)

    def _evaluator(
        self, config: RunConfig, replica: Replica, swarm: Swarm, text: Text, micro_batch: int
    ) -> Evaluator | None:
        if not self.evaluates or text.samples is None:
            return None
        read = partial(text.samples.validation, config.evaluation.samples)
        model = replica.model_to_evaluate()
        loss = None if self.own is None else self.own.handover.loss
        write = writer(config, text.tokenizer) if self.own is None else None
        tell = swarm.evaluated
        return Evaluator(config, replica, self.home.store, read, tell, micro_batch, self.log, write, model, loss)

    def _export(self, replica: Replica, text: Text, config: RunConfig, path: Path) -> Path:
        card = facts_of(
            config,
            self.invite.run_id,
            steps=replica.step,
            state_digest=replica.whole_digest().hex(),
            log_head=replica.head.hex(),
            parameters=replica.demo.layout.parameters,
        )
        return export(replica.whole_model(), text.tokenizer, path, card, self.licence)
