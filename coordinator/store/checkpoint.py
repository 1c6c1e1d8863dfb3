"""A run as bytes, and back: the journal keeps such checkpoints, so that a restart need not fold all records.

A checkpoint has every field of `Run` but those that the genesis gives. Refuses a run with an open step, bytes of another
version, and bytes that are not a run. The coordinator skips a refused checkpoint, and reads the records instead. ADR 2.

Every run of a journal, folded as far as it is written. From this a coordinator continues the runs of the one before.

The fold begins at the newest checkpoint that fits, and reads on from its last record. So a standby has the runs of the acting
coordinator, and no start reads a long journal. Writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from coordinator.clock import machine
from coordinator.clock.effects import EntryCommitted, Record
from coordinator.clock.life import HELD
from coordinator.clock.state import Phase, Run, changed_settings
from coordinator.store.journal import Checkpoint, Journal
from protos.changes import with_settings
from protos.envelope import parse
from protos.errors import Refusal
from protos.run_config import config_from_json
from protos.start import start_of
from protos.v1 import log_pb2

CHECKPOINT_EVERY = 250
"""Entries between two checkpoints: at most so many steps are folded after a restart. With 64 peers a step takes 0.85 ms to
fold and a checkpoint 3.3 ms to make (`python -m tests.bench restart`). This is 0.2 s a restart, and 1.5 % of a step's own
cost."""
VERSION = 3
"""The version grows when the fold of the same records gives another `Run`; tests/unit/coordinator/test_checkpoint.py checks."""
_OF_GENESIS = ("run_id", "config", "defined")
_COMPUTED = ("electors",)
"""Fields that follow from others."""
_NAMES_IN_FILE = {"checks": "audits"}
"""Fields of `Run` that have another name in a checkpoint, from before they were renamed."""


class UnfitError(ValueError):
    """A run cannot continue from this checkpoint."""


def is_due(run: Run, kept_step: int) -> bool:
    """Whether the run is to be kept now; `kept_step`: of the last checkpoint.

    Not while it is paused: a version that does not know pauses must meet the record of it, and leave the run out.
    """
    return run.phase is Phase.WAITING and not run.is_paused and run.head_step >= kept_step + CHECKPOINT_EVERY


def dump(run: Run) -> bytes:
    """A run between two steps, as canonical JSON. Two runs that are equal give the same bytes."""
    assert run.step is None, "a checkpoint is made between two steps"
    values = _runs().dump_python(run, exclude={*_OF_GENESIS, *_COMPUTED})
    fields = {_NAMES_IN_FILE.get(name, name): value for name, value in values.items()}
    return json.dumps({"version": VERSION, "run": _tagged(fields)}, sort_keys=True, separators=(",", ":")).encode()


def load(fresh: Run, body: bytes) -> Run:
    """The run that `dump` wrote; `fresh`: the same run before anything happened. UnfitError."""
    try:
        found = json.loads(body)
        version = found["version"]
        if version != VERSION:
            raise UnfitError(f"it has version {version}, and this program writes {VERSION}")
        fields = _plain(found["run"])
        fields |= {name: fields.pop(in_file) for name, in_file in _NAMES_IN_FILE.items()}
        run = _runs().validate_python({**fields, "run_id": fresh.run_id, "config": fresh.config})
        settings = changed_settings(run.changes)
        config = with_settings(fresh.config, settings) if settings else fresh.config
    except (Refusal, ValidationError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UnfitError(str(error) or repr(error)) from error
    return replace(run, config=config, defined=fresh.config)


@cache
def _runs() -> TypeAdapter[Run]:
    return TypeAdapter(Run)


def _tagged(value: Any) -> Any:
    """JSON has neither bytes nor mappings with other keys than text; a mapping's order is a part of it."""
    match value:
        case bytes():
            return {"bytes": value.hex()}
        case Enum():
            return value.value
        case Mapping():
            return {"map": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
        case frozenset() | set():
            return sorted((_tagged(item) for item in value), key=repr)
        case tuple() | list():
            return [_tagged(item) for item in value]
        case _:
            return value


def _plain(value: Any) -> Any:
    match value:
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"map": pairs}:
            return {_plain(key): _plain(item) for key, item in pairs}
        case list():
            return tuple(_plain(item) for item in value)
        case _:
            return value


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
        if newest.entry.step < self.kept_step + CHECKPOINT_EVERY:
            return None  # most entries: the run need not be folded to know it
        run = self.at(0)
        if not is_due(run, self.kept_step):
            return None
        return Checkpoint(self.number, newest.hash, dump(run))


def newest(journal: Journal, run_id: bytes, genesis: log_pb2.Genesis) -> Folded:
    """The run of the newest checkpoint that fits, or else before anything happened; the records after it are to be read."""
    fresh = run_of(run_id, genesis)
    found, unfit = journal.checkpoints(run_id)
    folded = Folded(genesis, fresh)
    for kept in found:
        try:
            run = load(fresh, kept.body)
        except UnfitError as error:
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
