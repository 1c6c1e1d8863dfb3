"""A run's log as one file: the definition of the run, then its signed entries in order. `swarmentum export-log` writes it.

The file is a row of records: a u32 length (big endian) and that many bytes. The first is the serialised Genesis, whose hash is
the run id; each other one is the SignedEnvelope of the next entry, from step 1 on. A reader needs nothing else to check it, and
nobody's word: `log_entries` does. Refuses to write an entry that does not hold.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from node.archive import files
from node.archive.ledger import verified
from node.link.client import CoordinatorClient
from protos.disk import writing
from protos.envelope import parse
from protos.errors import OperatorError, Refusal
from protos.invite import Invite
from protos.limits import CONFIG_JSON_BYTES_MAX
from protos.log import Chain, SignedEntry, run_id_of
from protos.v1 import log_pb2

GENESIS_BYTES_MAX = CONFIG_JSON_BYTES_MAX + (1 << 16)


def export_log(invite: Invite, path: Path, told: Callable[[int, int], None] = lambda step, of: None) -> int:
    """Read a run's whole log into a new file. Returns its last step. `told`: the steps so far, and of how many.

    Raises OperatorError if there is such a file or an entry does not hold; NetworkError; RefusedError; DiskError.
    """
    if path.exists():
        raise OperatorError(f"{path} exists already: give another name, or move it away")
    return asyncio.run(_export(invite, path, told))


async def _export(invite: Invite, path: Path, told: Callable[[int, int], None]) -> int:
    client, fresh = CoordinatorClient(invite, None), path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        await client.connect()
        facts, config = await client.get_run()  # its genesis is the run's: the client checked the hash
        chain = Chain(invite.run_id, invite.coordinator_public_key, operators=config.operators)
        with writing(path), fresh.open("wb") as file:
            files.append(file, facts.genesis.SerializeToString(deterministic=True))
            while page := (await client.entries(chain.step + 1))[0]:
                for envelope in page:
                    try:
                        chain.extend(envelope)
                    except Refusal as refusal:
                        raise OperatorError(f"entry {chain.step + 1} of the log does not hold: {refusal}") from refusal
                    files.append(file, envelope)
                told(chain.step, max(facts.head_step, chain.step))
            file.flush()
            os.fsync(file.fileno())
            fresh.rename(path)
        return chain.step
    finally:
        fresh.unlink(missing_ok=True)
        await client.close()


def log_entries(path: Path) -> tuple[bytes, Iterator[SignedEntry]]:
    """The run id of a file of `export_log`, and its entries, verified. Raises OperatorError for a file that is none."""
    genesis = genesis_in(path)
    run_id = run_id_of(genesis)
    return run_id, verified(genesis, _envelopes(path))


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


def _envelopes(path: Path) -> Iterator[bytes]:
    """The records after the first. Raises OperatorError for a file that ends inside of one: a log that was cut says so."""
    with path.open("rb") as file:
        file.seek(files.LENGTH_BYTES + int.from_bytes(file.read(files.LENGTH_BYTES), "big"))
        while prefix := file.read(files.LENGTH_BYTES):
            size = int.from_bytes(prefix, "big")
            record = file.read(min(size, files.ENTRY_RECORD_BYTES_MAX))
            if len(prefix) < files.LENGTH_BYTES or len(record) < size:
                raise OperatorError(f"{path} ends inside of an entry, or has one that is too long: it is damaged")
            yield record
