"""What an auditor reads of a run, made from its log file alone: so anybody with the log makes the same files again.

Each function writes a file or gives its text. Refuses a log that does not hold. What the log does not know is not in these
files: wall time, reasons of a peer that left by itself, and what the coordinator says beside the log.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from node.archive.ledger import genesis_in, ledger, log_entries
from protos.changes import values_of
from protos.disk import writing
from protos.errors import OperatorError
from protos.identity import peer_id
from protos.log import Exclusion, SignedEntry, run_id_of
from protos.orders import order_values
from protos.run_config import config_from_json
from protos.start import fork_values
from protos.text import as_line
from protos.version import own_misfit

LOG: Final = "run.log"
FROM_LOG: Final = "from-log"
FROM_COORDINATOR: Final = "from-coordinator"
DATA: Final = "data"
SUMS: Final = "SHA256SUMS"
README: Final = "README.md"
AWAY_STEPS: Final = 3
"""Steps without accepted votes after which a peer counts as away: it may be late for one or two."""


class _Presence:
    """The steps from which and to which each identity's votes counted."""

    def __init__(self) -> None:
        self._spans: dict[bytes, list[list[int]]] = {}

    def add(self, key: bytes, step: int) -> None:
        spans = self._spans.setdefault(key, [])
        if spans and step - spans[-1][1] <= AWAY_STEPS:
            spans[-1][1] = step
        else:
            spans.append([step, step])

    def rows(self, head: int, excluded: dict[str, str]) -> Iterator[dict[str, Any]]:
        """A row for each identity, the first to vote first. `excluded`: why, by peer id."""
        for key, spans in sorted(self._spans.items(), key=lambda it: (it[1][0], it[0])):
            who, here = peer_id(key), head - spans[-1][1] < AWAY_STEPS
            why = excluded.get(who) or (None if here else "the log does not say: it left, was away or too late")
            yield {"peer": who, "voted": spans, "in_the_last_steps": here, "why_not": why}


def write_from_log(log: Path, folder: Path) -> dict[str, Any]:
    """Write all files that follow from the log into a new folder; returns the facts of run.json.

    Raises OperatorError for a log that does not hold or is of another version, Refusal, DiskError.
    """
    genesis = genesis_in(log)
    if why_not := own_misfit(genesis):
        raise OperatorError(why_not)
    run_id, presence = run_id_of(genesis), _Presence()
    config = config_from_json(genesis.config_json)
    with writing(folder), ExitStack() as opened:
        folder.mkdir()
        steps, changes, exclusions, orders = (
            opened.enter_context((folder / f"{name}.jsonl").open("w", encoding="utf-8"))
            for name in ("steps", "changes", "exclusions", "orders")
        )
        before: dict[str, Any] = {}

        def told(signed: SignedEntry) -> SignedEntry:
            nonlocal before
            entry, settings = signed.entry, values_of(signed.entry.settings)
            for contribution in entry.contributions:
                presence.add(contribution.public_key, entry.step)
            steps.write(as_line(_step(signed)) + "\n")
            if settings != before:
                changes.write(as_line({"from_step": entry.step, "settings": settings}) + "\n")
                before = settings
            for order in entry.orders:
                orders.write(as_line(order_values(entry.step, order)) + "\n")
            for exclusion in entry.exclusions:
                exclusions.write(as_line(_excluded(entry.step, exclusion)) + "\n")
            for key in entry.readmitted:
                exclusions.write(as_line({"step": entry.step, "peer": peer_id(key), "readmitted": True}) + "\n")
            return signed

        found = ledger(run_id, map(told, log_entries(log)[1]))
        why = {
            it.id: f"excluded in step {it.step}: {it.reason}" for it in found.exclusions if it.readmitted_step is None
        }
        _write_rows(folder / "peers.jsonl", presence.rows(found.to_step, why))
        _write_rows(folder / "ledger.json", [found.values()])
        facts = {
            "run": run_id.hex(),
            "name": config.name,
            "format": genesis.format_version,
            "coordinator_public_key": genesis.coordinator_public_key.hex(),
            "layout_digest": genesis.layout_digest.hex(),
            "fork": fork_values(genesis),
            "last_step": found.to_step,
            "head": found.head.hex(),
            "settings": config.model_dump(mode="json"),
        }
        _write_rows(folder / "run.json", [facts])
    return facts


def _step(signed: SignedEntry) -> dict[str, Any]:
    entry, parts = signed.entry, signed.entry.contributions
    return {
        "step": entry.step,
        "entry": signed.hash.hex(),
        "state_digest_before": entry.parent_state_digest.hex(),
        "learning_rate": entry.lr,
        "samples": sum(part.samples for part in parts),
        "tokens": sum(part.tokens for part in parts),
        "votes": {peer_id(part.public_key): part.payload_sha256.hex() for part in parts},
        "sum_of_votes": None if entry.aggregate is None else entry.aggregate.sha256.hex(),
    }


def _excluded(step: int, exclusion: Exclusion) -> dict[str, Any]:
    """With all evidence that the entry has, the signed announcements in base64."""
    pair = exclusion.equivocation
    verdicts = [
        {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(verdict).items()}
        for verdict in exclusion.evidence
    ]
    return {
        "step": step,
        "peer": peer_id(exclusion.public_key),
        "reason": exclusion.reason,
        "by_operator": exclusion.by_operator,
        "verdicts": verdicts,
        "announcements": [] if pair is None else [base64.b64encode(it).decode() for it in (pair.first, pair.second)],
    }


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(as_line(row) + "\n" for row in rows), encoding="utf-8")


def sums(folder: Path) -> str:
    """The text of SHA256SUMS: every file of the folder, as `sha256sum --check` reads it."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(folder)}\n")
    return "".join(lines)


def readme(facts: dict[str, Any], sources: list[dict[str, Any]]) -> str:
    """How to read and verify the folder. `sources`: none for a folder that was made from a log file alone."""
    kept = sum(source["manifest"] is not None for source in sources)
    said = f"""- `{FROM_COORDINATOR}/` is the coordinator's word when the folder was made: peers and owners with their standing
  (`status.json`), and `end`, if the operator ended the run. Its signature holds for `end` alone.
- `{DATA}/sources.json` names each text of the run, and the manifest of its token shards, whose SHA-256 the definition
  has. Here: {kept} manifests of {len(sources)} sources. Text on the peers' machines is not here, and nobody can check it.
"""
    return f"""# Run {facts["name"]}, steps 1 to {facts["last_step"]}

Run id `{facts["run"]}`. Its coordinator's key is `{facts["coordinator_public_key"]}`.

## Verify it

Compare the run id with one that you have from elsewhere, for example from the invite link. Then, in this folder:

```console
sha256sum --check --quiet {SUMS}
swarmentum ledger {LOG} --run {facts["run"]}
swarmentum audit-folder {LOG} again && diff -r {FROM_LOG} again/{FROM_LOG}
```

1. No file was damaged. Nobody signs the sums: the next two commands find fraud.
2. The log is that run's: definition, signatures, chain and the evidence of exclusions.
3. Everything in `{FROM_LOG}` follows from the log.

Whether the model's state follows from the votes, `swarmentum verify` says of an archive, which holds payloads and states.

## What is here

- `{LOG}` is the definition of the run and every signed entry, as `swarmentum export-log` writes it.
- `{FROM_LOG}/run.json` has the settings of the run, `changes.jsonl` each change of them by the operator.
- `{FROM_LOG}/steps.jsonl` has each step: hash of the entry, digest of the state before it, and the hash of each peer's votes.
- `{FROM_LOG}/peers.jsonl` has each identity: the steps from which and to which its votes counted ({AWAY_STEPS} steps without
  votes end a span), and why it is not there now. The log has no wall time, and no reason for a peer that left by itself.
- `{FROM_LOG}/exclusions.jsonl` has each exclusion with its evidence, and each readmission. `orders.jsonl` has each order of
  the operators with all who signed, in a run whose operators have keys. `ledger.json` has the sums.
{said if sources else ""}"""
