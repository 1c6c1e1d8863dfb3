"""Every run of a journal, folded as far as it is written. From this a coordinator continues the runs of the one before.

The fold begins at the newest checkpoint that fits, and reads on from its last record. So a standby has the runs of the acting
coordinator, and no start reads a long journal. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import structlog

from coordinator.clock import machine
from coordinator.clock.records import EntryCommitted, Record
from coordinator.clock.regained import HELD
from coordinator.clock.state import Phase, Run
from coordinator.store import checkpoint
from coordinator.store.journal import Checkpoint, Journal
from protos.envelope import parse
from protos.errors import Refusal
from protos.run_config import config_from_json
from protos.start import start_of
from protos.v1 import log_pb2

# Decoding and folding raise these errors for a damaged record.
_UNREADABLE = (Refusal, ValueError, LookupError, TypeError, AttributeError, AssertionError)


def run_of(run_id: bytes, genesis: log_pb2.Genesis) -> Run:
    """The run of a genesis, before anything happened."""
    config = config_from_json(genesis.config_json)
    return machine.new_run(run_id, config, genesis.layout_digest, genesis.parameters, start_of(genesis))


@dataclass
class Folded:
    """A run as its journal has it. `run` is the fold of the first `number` records without those in `waiting`. The records'
    deadlines count from the moment at which a coordinator continues the run."""

    genesis: log_pb2.Genesis
    run: Run
    number: int = 0
    kept_step: int = 0
    """The step of the newest checkpoint."""
    waiting: list[Record] = field(default_factory=list)
    held: bool = False
    """The journal comes from a backup: no step opens (`regained.HELD`)."""

    def append(self, record: Record) -> None:
        """The next record of the journal."""
        self.number += 1
        if isinstance(record, EntryCommitted):
            self.run = machine.restore(self.run, self.waiting, 0)
            self.waiting = []
        self.waiting.append(record)

    def read(self, journal: Journal) -> None:
        """Read the further records of the journal. JournalError: what was read so far stays."""
        for record in journal.records(self.run.run_id, self.number):
            self.append(record)

    def at(self, now_ms: int) -> Run:
        """The run as of now. An open step stays open, with a whole deadline from now."""
        return machine.restore(self.run, self.waiting, now_ms)

    def resumed(self, now_ms: int) -> Run:
        """The run as this coordinator continues it."""
        run = self.at(now_ms)
        return replace(run, lost_until=HELD) if self.held and run.phase is not Phase.FINISHED else run

    def due(self) -> Checkpoint | None:
        """A checkpoint, if it is time for one: the newest record is the entry that makes it due."""
        if len(self.waiting) != 1 or not isinstance(newest := self.waiting[0], EntryCommitted):
            return None
        if newest.entry.step < self.kept_step + checkpoint.CHECKPOINT_EVERY:
            return None  # most entries: the run need not be folded to know it
        run = self.at(0)
        if not checkpoint.is_due(run, self.kept_step):
            return None
        return Checkpoint(self.number, newest.hash, checkpoint.dump(run))


def newest(journal: Journal, run_id: bytes, genesis: log_pb2.Genesis) -> Folded:
    """The run of the newest checkpoint that fits, or else before anything happened; the records after it are to be read."""
    fresh = run_of(run_id, genesis)
    found, unfit = journal.checkpoints(run_id)
    folded = Folded(genesis, fresh)
    for kept in found:
        try:
            run = checkpoint.load(fresh, kept.body)
        except checkpoint.UnfitError as error:
            unfit.append(f"the one of {kept.number} records cannot be read: {error}")
            continue
        if run.head_hash == kept.head_hash:
            folded = Folded(genesis, run, kept.number, run.head_step)
            break
        unfit.append(f"the one of {kept.number} records is of another entry")
    log = structlog.get_logger("coordinator").bind(run=run_id.hex()[:16], step=folded.run.head_step, peer="-")
    for why in unfit:
        log.warning("a checkpoint does not fit, so the records before it are read instead", why=why)
    return folded


class FoldedRuns:
    """Not thread-safe; `catch_up` blocks."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._runs: dict[bytes, Folded] = {}
        self.left_out: dict[bytes, str] = {}
        """Runs that cannot be read, and why: they are not served, and keep no other run from being served."""
        self.deleted: frozenset[bytes] = frozenset()
        """Ids of the runs that the operator deleted, as of the last `catch_up`."""

    def catch_up(self) -> None:
        """Read what was written since the last time. JournalError: what was read so far stays."""
        self.deleted = frozenset(self._journal.deleted())
        found = self._journal.runs()
        for run_id in (self._runs.keys() | self.left_out.keys()) - dict(found).keys():  # it was deleted
            self._runs.pop(run_id, None)
            self.left_out.pop(run_id, None)
        for run_id, genesis in found:
            if run_id in self.left_out:
                continue
            with self._leaving_out(run_id):
                if run_id not in self._runs:
                    self._runs[run_id] = newest(self._journal, run_id, parse(log_pb2.Genesis, genesis))
                self._runs[run_id].read(self._journal)

    def runs(self) -> list[Folded]:
        """Every run that a coordinator can continue."""
        found = []
        for run_id, folded in list(self._runs.items()):
            with self._leaving_out(run_id):
                folded.at(0)
                found.append(folded)
        return found

    @contextmanager
    def _leaving_out(self, run_id: bytes) -> Iterator[None]:
        """A run whose records are damaged, or of another version, is left out from then on. JournalError goes through."""
        try:
            yield
        except _UNREADABLE as error:
            folded = self._runs.pop(run_id, None)
            where = "its configuration" if folded is None else f"at record {folded.number}"
            self.left_out[run_id] = f"{where}: {str(error) or repr(error)}"
