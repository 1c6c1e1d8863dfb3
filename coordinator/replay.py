"""Every run of a journal, folded as far as it is written: how a coordinator knows what happened before it acted.

Reads on where it stopped, so that whoever stands by has the runs of the one that acts, and takes over without reading a
long journal first. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator import machine
from coordinator.events import EntryCommitted, Record
from coordinator.journal import Journal
from coordinator.state import Run
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
class _Folding:
    """`run` is the fold of all records but the newest: those wait, because their deadlines count from the take-over."""

    genesis: log_pb2.Genesis
    run: Run
    number: int = 0
    waiting: list[Record] = field(default_factory=list)


class Replay:
    """Not thread-safe; `catch_up` blocks."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._runs: dict[bytes, _Folding] = {}
        self.left_out: dict[bytes, str] = {}
        """Runs that cannot be read, and why: they are not served, and keep no other run from being served."""

    def catch_up(self, now_ms: int) -> None:
        """Read what was written since the last time. JournalError: what was read so far stays."""
        for run_id, genesis in self._journal.runs():
            if run_id in self.left_out:
                continue
            with self._leaving_out(run_id):
                if run_id not in self._runs:
                    fresh = run_of(run_id, genesis)
                    self._runs[run_id] = _Folding(genesis, fresh)
                self._read(self._runs[run_id], now_ms)

    def _read(self, folding: _Folding, now_ms: int) -> None:
        for record in self._journal.records(folding.run.run_id, folding.number):
            folding.number += 1
            if isinstance(record, EntryCommitted):
                folding.run = machine.restore(folding.run, folding.waiting, now_ms)
                folding.waiting = []
            folding.waiting.append(record)

    def runs(self, now_ms: int) -> list[tuple[Run, log_pb2.Genesis]]:
        """Every run as of now. An open step stays open, with a whole deadline from now."""
        found = []
        for run_id, folding in list(self._runs.items()):
            with self._leaving_out(run_id):
                found.append((machine.restore(folding.run, folding.waiting, now_ms), folding.genesis))
        return found

    @contextmanager
    def _leaving_out(self, run_id: bytes) -> Iterator[None]:
        """A run whose records are damaged, or of another version, is left out from then on. JournalError goes through."""
        try:
            yield
        except _UNREADABLE as error:
            folding = self._runs.pop(run_id, None)
            where = "its configuration" if folding is None else f"at record {folding.number}"
            self.left_out[run_id] = f"{where}: {str(error) or repr(error)}"
