"""Every run of a journal, folded as far as it is written: how a coordinator knows what happened before it acted.

Begins at the newest checkpoint that fits, and reads on where it stopped, so that whoever stands by has the runs of the one
that acts, and nobody has to read a long journal. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from coordinator import checkpoint, machine
from coordinator.events import EntryCommitted, Record
from coordinator.journal import Checkpoint, Journal
from coordinator.state import Run
from protos.envelope import parse
from protos.errors import Refusal
from protos.run_config import config_from_json
from protos.v1 import log_pb2

# What decoding and folding raise for a record that is not what was written.
_UNREADABLE = (Refusal, ValueError, LookupError, TypeError, AttributeError, AssertionError)


def run_of(run_id: bytes, genesis: log_pb2.Genesis) -> Run:
    """The run of a genesis, before anything happened."""
    config = config_from_json(genesis.config_json)
    return machine.new_run(run_id, config, genesis.layout_digest, genesis.parameters)


@dataclass
class Folded:
    """A run as its journal has it. `run` is the fold of the first `number` records but the newest, which wait: the deadlines
    that these set count from the moment at which somebody goes on with the run."""

    genesis: log_pb2.Genesis
    run: Run
    number: int = 0
    kept_step: int = 0
    """Of the newest checkpoint."""
    waiting: list[Record] = field(default_factory=list)

    def take(self, record: Record) -> None:
        """The next record of the journal."""
        self.number += 1
        if isinstance(record, EntryCommitted):
            self.run = machine.restore(self.run, self.waiting, 0)
            self.waiting = []
        self.waiting.append(record)

    def read(self, journal: Journal) -> None:
        """What the journal has more. JournalError: what was read so far stays."""
        for record in journal.records(self.run.run_id, self.number):
            self.take(record)

    def at(self, now_ms: int) -> Run:
        """The run as of now. An open step stays open, with a whole deadline from now."""
        return machine.restore(self.run, self.waiting, now_ms)

    def due(self) -> Checkpoint | None:
        """A checkpoint, if it is time for one: the newest record is the entry that makes it due."""
        if len(self.waiting) != 1 or not isinstance(newest := self.waiting[0], EntryCommitted):
            return None
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
        log.warning("a checkpoint is skipped: more records are read instead", why=why)
    return folded


class Replay:
    """Not thread-safe; `catch_up` blocks."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._runs: dict[bytes, Folded] = {}
        self.left_out: dict[bytes, str] = {}
        """Runs that cannot be read, and why: they are not served, and keep no other run from being served."""

    def catch_up(self) -> None:
        """Read what was written since the last time. JournalError: what was read so far stays."""
        for run_id, genesis in self._journal.runs():
            if run_id in self.left_out:
                continue
            with self._leaving_out(run_id):
                if run_id not in self._runs:
                    self._runs[run_id] = newest(self._journal, run_id, parse(log_pb2.Genesis, genesis))
                self._runs[run_id].read(self._journal)

    def runs(self) -> list[Folded]:
        """Every run that can be gone on with."""
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
