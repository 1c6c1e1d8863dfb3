"""The ledger: each identity's contribution and all exclusions, from the log alone. The signed chain of entries proves them.

Owners are not in the log: the coordinator of an invite's run tells them, and an archive has none. ADR 35.

The log proves which payloads the coordinator accepted, and the samples and tokens that their authors claimed at that time.
The log holds no wall time, so the ledger counts uptime in clock steps.

A log as one file, which `swarmentum export-log` writes, is a row of records: a u32 length (big endian) and that many bytes.
The first is the serialised Genesis, whose hash is the run id; each other one is the SignedEnvelope of the next entry, from
step 1 on. A reader needs nothing else to check it, and nobody's word: `log_entries` does. Refuses to write an entry that
does not hold.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from node.archive import files
from node.imports import WAITING, slowly
from node.link.run_reader import RunReader, chain_before, extended
from protos.accounts import NOBODY, Account, Accounts, Excluded, Owner, account_values, owner_values, owners_of
from protos.disk import remove_left, writing
from protos.envelope import parse
from protos.errors import OperatorError, Refusal
from protos.identity import peer_id
from protos.invite import Invite, is_link
from protos.limits import CONFIG_JSON_BYTES_MAX
from protos.log import Chain, SignedEntry, run_id_of
from protos.orders import operators_of
from protos.text import amount, printable
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2

WIDTH = 130  # of the table without a terminal


@dataclass(frozen=True)
class Ledger:
    """All accounts, the most votes first; all exclusions, in order. `from_step`, `to_step`: the first and last entry read."""

    run_id: bytes
    from_step: int
    to_step: int
    head: bytes
    accounts: tuple[Account, ...]
    exclusions: tuple[Excluded, ...] = ()
    owners: Mapping[bytes, Owner] = field(default_factory=dict)
    """By public key, as far as they are known."""

    def values(self) -> dict[str, Any]:
        """The ledger as JSON values."""
        owners = {peer_id(key): owner for key, owner in self.owners.items()}
        return {
            "run": self.run_id.hex(),
            "from_step": self.from_step,
            "to_step": self.to_step,
            "head": self.head.hex(),
            "votes_accepted": sum(account.votes_accepted for account in self.accounts),
            "tokens": sum(account.tokens for account in self.accounts),
            "identities": [account_values(it, owners.get(it.id, NOBODY)) for it in self.accounts],
            "owners": owner_values(self.owners, self.accounts),
            "exclusions": [asdict(excluded) for excluded in self.exclusions],
        }


def ledger(run_id: bytes, entries: Iterable[SignedEntry], owners: Mapping[bytes, Owner] | None = None) -> Ledger:
    """The ledger of verified entries. Raises OperatorError if an entry excludes a peer with evidence that proves nothing."""
    accounts = Accounts(run_id)
    first, last, head = 0, 0, run_id
    for signed in entries:
        entry = signed.entry
        first, last, head = first or entry.step, entry.step, signed.hash
        try:
            accounts.add(entry)
        except Refusal as refusal:
            raise OperatorError(f"entry {entry.step} excludes a peer with false evidence: {refusal}") from refusal
    return Ledger(run_id, first, last, head, tuple(accounts.ordered()), tuple(accounts.exclusions), owners or {})


def of(run: str) -> Ledger:
    """The ledger of an archive's folder, of a file of `export-log`, or of the log that an invite's coordinator gives."""
    if is_link(run):
        invite = Invite.parse(run)
        with slowly(WAITING):
            entries, owners = asyncio.run(read(invite))
        return ledger(invite.run_id, entries, owners)
    genesis, log = kept(Path(run))
    return ledger(run_id_of(genesis), log)


def kept(run: Path) -> tuple[log_pb2.Genesis, Iterator[SignedEntry]]:
    """The genesis and the verified log of an archive's folder, or of a file of `export-log`.

    Raises OperatorError for a log that does not hold.
    """
    if run.is_file():
        return genesis_in(run), log_entries(run)[1]
    folder = files.find(run)
    return archived_genesis(folder), archived_entries(folder)[1]


async def read(invite: Invite) -> tuple[list[SignedEntry], dict[bytes, Owner]]:
    """A run's log as `read_log` gets it, and the owners."""
    facts, entries = await read_log(invite)
    return entries, owners_of(facts.peers)


async def read_log(invite: Invite) -> tuple[pb.GetRunResponse, list[SignedEntry]]:
    """The facts of a run, and its verified log. Raises NetworkError, RefusedError, DoesNotHoldError."""
    async with RunReader(invite) as run:
        facts, _ = await run.facts()
        return facts, [signed async for signed in run.entries()]


def show(found: Ledger) -> None:
    """For people."""
    table = Table(Column("identity", no_wrap=True), "votes", "samples", "tokens", "payloads", "steps", "uptime")
    for a in found.accounts:
        steps, sent = f"{a.first_step} to {a.last_step}", amount(a.payload_bytes)
        table.add_row(
            a.id,
            str(a.votes_accepted),
            str(a.samples),
            f"{a.tokens:,}",
            sent,
            steps,
            f"{a.uptime:.1%}",
        )
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(
        f"Run {found.run_id.hex()[:16]}, steps {found.from_step} to {found.to_step} of its log:", highlight=False
    )
    console.print(table)
    for owner in owner_values(found.owners, found.accounts):
        line = f"{owner['votes_accepted']} votes, {owner['tokens']:,} tokens, identities: {owner['identities']}"
        console.print(f"{owner['name']}: {line}", highlight=False, markup=False, soft_wrap=True)
    for excluded in found.exclusions:
        for text in _lines(excluded):
            console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def _lines(excluded: Excluded) -> list[str]:
    if excluded.by_operator:
        evidence = "none: the operator's decision, as the coordinator wrote it down"
    elif excluded.proven:
        evidence = f"payloads {', '.join(payload[:16] for payload in excluded.payloads)}, signatures checked"
    else:
        evidence = f"{excluded.verdicts} verdicts of {excluded.checkers} peers, as the coordinator wrote them down"
    lines = [f"step {excluded.step}: {excluded.id} {excluded.reason}", f"    evidence: {evidence}"]
    if excluded.readmitted_step is not None:
        lines.append(f"    readmitted by the operator in step {excluded.readmitted_step}")
    return lines


def archived_genesis(folder: Path) -> log_pb2.Genesis:
    """The definition of an archive's run."""
    return parse(log_pb2.Genesis, (folder / files.GENESIS).read_bytes())


def archived_entries(folder: Path) -> tuple[bytes, Iterator[SignedEntry]]:
    """The run id, and the archive's entries, verified. Raises OperatorError for a log that does not hold."""
    genesis = archived_genesis(folder)
    run_id = run_id_of(genesis)
    return run_id, verified(genesis, _envelopes(folder))


def _envelopes(folder: Path) -> Iterator[bytes]:
    for segment in files.segments(folder):
        try:
            yield from files.records(segment.path(files.LOG), files.ENTRY_RECORD_BYTES_MAX)
        except Refusal as refusal:
            raise OperatorError(f"the log does not hold: {refusal}") from refusal


def verified(genesis: log_pb2.Genesis, envelopes: Iterable[bytes]) -> Iterator[SignedEntry]:
    """Entries that follow each other, signed by the coordinator, with the orders that they need. The first has any step."""
    chain: Chain | None = None
    run_id, coordinator = run_id_of(genesis), genesis.coordinator_public_key
    for envelope in envelopes:
        chain = chain or chain_before(run_id, coordinator, operators_of(genesis), envelope)
        yield extended(chain, envelope)


GENESIS_BYTES_MAX = CONFIG_JSON_BYTES_MAX + (1 << 16)


def export_log(invite: Invite, path: Path, told: Callable[[int, int], None] = lambda step, of: None) -> int:
    """Read a run's whole log into a new file. Returns its last step. `told`: the steps so far, and of how many.

    Raises OperatorError if there is such a file or an entry does not hold; NetworkError; RefusedError; DiskError.
    """
    if path.exists():
        raise OperatorError(f"{path} exists already: give another name, or move it away")
    return asyncio.run(_export(invite, path, told))


async def _export(invite: Invite, path: Path, told: Callable[[int, int], None]) -> int:
    step, fresh = 0, path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        with writing(path), fresh.open("wb") as file:
            async with RunReader(invite) as run:
                with slowly(WAITING):
                    facts, _ = await run.facts()  # its genesis is the run's: the client checked the hash
                files.append(file, facts.genesis.SerializeToString(deterministic=True))
                async for signed in run.entries():
                    files.append(file, signed.envelope)
                    step = signed.entry.step
                    told(step, max(facts.head_step, step))
            file.flush()
            os.fsync(file.fileno())
            fresh.rename(path)
        return step
    finally:
        remove_left(fresh)


def log_entries(path: Path) -> tuple[bytes, Iterator[SignedEntry]]:
    """The run id of a file of `export_log`, and its entries, verified. Raises OperatorError for a file that is none."""
    genesis = genesis_in(path)
    run_id = run_id_of(genesis)
    return run_id, verified(genesis, _records_after_first(path))


def genesis_in(path: Path) -> log_pb2.Genesis:
    """The definition of the run of a file of `export_log`. Raises OperatorError for a file that is none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(files.LENGTH_BYTES), "big")
            first = file.read(size) if 0 < size <= GENESIS_BYTES_MAX else b""
        genesis = parse(log_pb2.Genesis, first)
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}") from error
    except Refusal as refusal:
        raise OperatorError(f"{path} is no log of a run: `swarmentum export-log` writes one ({refusal})") from refusal
    if not first:
        raise OperatorError(f"{path} is no log of a run: `swarmentum export-log` writes one")
    return genesis


def _records_after_first(path: Path) -> Iterator[bytes]:
    """The records after the first. Raises OperatorError for a file that ends inside of one: a log that was cut says so."""
    with path.open("rb") as file:
        file.seek(files.LENGTH_BYTES + int.from_bytes(file.read(files.LENGTH_BYTES), "big"))
        while prefix := file.read(files.LENGTH_BYTES):
            size = int.from_bytes(prefix, "big")
            record = file.read(min(size, files.ENTRY_RECORD_BYTES_MAX))
            if len(prefix) < files.LENGTH_BYTES or len(record) < size:
                raise OperatorError(f"{path} ends inside of an entry, or has one that is too long: it is damaged")
            yield record
