"""What the log of a run adds to the card of an export: who trained the model, and its losses. Changes no weights.

Without it the export is whole, too: a coordinator that is away, or a long log, costs the card these lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from node.export.card import add_ledger
from protos.errors import NetworkError, RefusedError
from protos.evaluation import figures
from protos.figures import loss_of
from protos.invite import Invite
from protos.log import SignedEntry

LEDGER_STEPS_MAX: Final = 20_000
"""The log of a longer run (some 3 kB a step) is not read for the card."""


def add_credits(link: str, folder: Path, step: int) -> None:
    """Put the run's ledger and losses into the card of the export of the state after `step`. Raises DiskError."""
    log = structlog.get_logger("peer")
    if step > LEDGER_STEPS_MAX:
        log.info("the card has no ledger: the log is long; `swarmentum ledger INVITE` shows it", step=step)
        return
    from node.archive.ledger import ledger, read

    invite = Invite.parse(link)
    try:
        entries, owners = asyncio.run(read(invite))
    except (NetworkError, RefusedError) as error:
        log.warning("the card has no ledger: the log cannot be read", step=step, why=str(error))
        return
    values = ledger(invite.run_id, entries, owners).values()
    add_ledger(folder, values, losses_of(entries, invite.run_id, step))


def losses_of(entries: Sequence[SignedEntry], run_id: bytes, step: int) -> dict[str, Any]:
    """Facts for the card: the training loss of a step, and the held-out loss of the newest evaluated state up to it."""
    facts: dict[str, Any] = {}
    found = next((signed.entry for signed in reversed(entries) if signed.entry.step == step), None)
    if found is not None:
        facts["loss of the step, nats a token"] = f"{loss_of(found.contributions):.4f}"
    held = [it for it in figures((e for s in entries for e in s.entry.evaluations), run_id) if it.step <= step]
    if held:
        last = max(held, key=lambda it: it.step)
        facts["held-out loss, nats a token"] = (
            f"{last.loss:.4f} after step {last.step}, the median of {last.count} peers"
        )
    return facts
