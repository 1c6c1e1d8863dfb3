"""How long a coordinator takes to go on with a long run: after a restart, at a fail-over, after one failed write.

The journal has a row for every record of the run, so that the database is as deep as a real one. Rows that a restart does not
read have `body_bytes` random bytes; those since the last checkpoint but one are real ticks and entries of `peers` peers.
"""

import argparse
import asyncio
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from coordinator.clock import machine, rules
from coordinator.clock.effects import EntryCommitted, Record, TickOpened
from coordinator.clock.state import Phase, Run
from coordinator.serving.hub import Hub
from coordinator.serving.metrics import Metrics
from coordinator.store import checkpoint
from coordinator.store.checkpoint import Folded, FoldedRuns, run_of
from coordinator.store.journal import _RECORDS, Checkpoint, Journal
from protos.assignment import SampleShare
from protos.identity import Identity
from protos.log import Contribution, Entry, entry_body, entry_hash, lr_to_bits, run_id_of
from protos.run_config import ClockConfig, RunConfig
from protos.tick import Tick
from protos.v1 import log_pb2

COORDINATOR = Identity.from_seed(bytes([1]) * 32)
ROWS_AT_ONCE = 20_000
RECORDS_A_STEP = 2


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--body-bytes", type=int, default=64, help="of a record that no restart reads")
    parser.add_argument("--home", type=Path, default=None, help="keep the journal here, and use the one that is there")


def measure(options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        home = options.home or Path(folder)
        path = home / "journal.sqlite3"
        if not path.exists():
            built(home, options.steps, options.peers, options.body_bytes)
        begin = time.perf_counter()
        journal = Journal(Journal.sqlite_url(home), COORDINATOR)
        hub = Hub(journal, COORDINATOR, Metrics())

        async def restored() -> tuple[int, float]:
            hub.restore()
            seconds = time.perf_counter() - begin
            [runtime] = hub.runs.values()
            await hub.stop()
            return runtime.run.head_step, seconds

        head, restart_s = asyncio.run(restored())
        replay = FoldedRuns(journal)
        begin = time.perf_counter()
        replay.catch_up()
        [folded] = replay.runs()
        cold_s = time.perf_counter() - begin
        run_id = folded.run.run_id
        for record in records(folded.at(0), 1, options.peers):  # what the other one wrote since this one last looked
            journal.append(run_id, record)
        begin = time.perf_counter()
        replay.catch_up()
        replay.runs()[0].at(0)
        failed_s = time.perf_counter() - begin
        begin = time.perf_counter()
        dumped = checkpoint.dump(machine.restore(folded.run, folded.waiting[:1], 0))
        dump_s = time.perf_counter() - begin
        found = {
            "steps": head,
            "journal_mb": round(path.stat().st_size / 1e6, 1),
            "restart_s": round(restart_s, 3),
            "standby_that_read_nothing_s": round(cold_s, 3),
            "failover_or_failed_write_s": round(failed_s, 4),
            "checkpoint_ms": round(dump_s * 1e3, 1),
            "checkpoint_bytes": len(dumped),
        }
        hub.close()
        return found


def built(home: Path, steps: int, peers: int, body_bytes: int) -> None:
    """A journal whose newest checkpoint is as old as one can be: the next entry would make another."""
    config = RunConfig(clock=ClockConfig(steps=10 * steps, batch_samples=16 * peers, min_peers=1))
    genesis = log_pb2.Genesis(config_json=config.canonical_json(), coordinator_public_key=COORDINATOR.public_key)
    run_id = run_id_of(genesis)
    journal = Journal(Journal.sqlite_url(home), COORDINATOR)
    journal.create_run(run_id, genesis)
    head = replace(run_of(run_id, genesis), head_step=steps - 2 * checkpoint.CHECKPOINT_EVERY, reason="it went on")
    number = RECORDS_A_STEP * head.head_step
    with journal._engine.connect() as connection:
        for first in range(0, number, ROWS_AT_ONCE):
            rows = [unread(run_id, n, body_bytes) for n in range(first, min(first + ROWS_AT_ONCE, number))]
            connection.execute(_RECORDS.insert(), rows)
            connection.commit()
    folded = Folded(genesis, head, number, head.head_step)
    for record in records(head, 2 * checkpoint.CHECKPOINT_EVERY - 1, peers):
        journal.append(run_id, record)
        folded.append(record)
        if (due := folded.due()) is not None:
            journal.keep(run_id, Checkpoint(due.number, due.head_hash, due.body))
            folded.kept_step = folded.at(0).head_step
    with journal._engine.connect() as connection:
        connection.execute(sa.text("PRAGMA wal_checkpoint(TRUNCATE)"))
    journal.close()


def unread(run_id: bytes, number: int, body_bytes: int) -> dict[str, object]:
    kind, step = ("tick", "entry")[number % RECORDS_A_STEP], number // RECORDS_A_STEP + 1
    return {"run_id": run_id, "number": number, "kind": kind, "step": step, "body": os.urandom(body_bytes)}


def records(run: Run, steps: int, peers: int) -> Iterator[Record]:
    """So many steps in which every peer votes."""
    keys = sorted(hashlib.sha256(b"peer %d" % n).digest() for n in range(peers))
    roster = tuple(SampleShare(key, 16) for key in keys)
    lr = lr_to_bits(1e-3)
    while steps:
        assert run.phase is Phase.WAITING
        step = run.head_step + 1
        pool, _, _ = rules.draw(run.returned_samples, run.next_sample, 16 * peers)
        tick = TickOpened(Tick(step, run.head_hash, 1, roster, pool, lr))
        run = machine.restore(run, [tick], 0)
        votes = tuple(
            Contribution(key, hashlib.sha256(key + step.to_bytes(8, "big")).digest(), 1 << 16, 16, 2048, 2.5)
            for key in keys
        )
        entry = Entry(step, run.head_hash, votes, lr, b"", (), run.next_sample)
        body = entry_body(entry)
        done = EntryCommitted(entry, body, entry_hash(body))
        run = machine.restore(run, [done], 0)
        yield from (tick, done)
        steps -= 1
