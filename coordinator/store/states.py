"""The states of a run that a fork can begin at: its agreed snapshots, with what the log says of their steps. ADR 5.

Reads the journal. Refuses step 0, which follows from a seed, and an entry that this coordinator did not sign.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.clock.records import SnapshotFact
from coordinator.store.journal import Journal
from protos.limits import STATES_MAX
from protos.log import open_entry
from protos.start import StartingState


def states(
    journal: Journal, run_id: bytes, coordinator: bytes, agreed_digests: Mapping[int, bytes]
) -> list[StartingState]:
    """Oldest first, at most the newest STATES_MAX. `agreed_digests`: by step, of steps that no entry follows yet.

    Raises JournalError, or Refusal for an entry that this coordinator did not sign.
    """
    facts = [fact for fact in journal.agreed_snapshots(run_id) if fact.step]
    found = (_state(journal, run_id, coordinator, fact, agreed_digests) for fact in facts[-STATES_MAX:])
    return [state for state in found if state is not None]


def _state(
    journal: Journal, run_id: bytes, coordinator: bytes, fact: SnapshotFact, agreed_digests: Mapping[int, bytes]
) -> StartingState | None:
    """None for a step whose entry this journal has lost."""
    envelopes = journal.entries(run_id, fact.step, 2)
    signed = [open_entry(data, run_id=run_id, coordinator=coordinator) for data in envelopes]
    if not signed or signed[0].entry.step != fact.step:
        return None
    digest = signed[1].entry.parent_state_digest if len(signed) > 1 else b""
    return StartingState(
        run_id,
        coordinator,
        fact.step,
        signed[0].hash,
        fact.root,
        fact.total_bytes,
        digest or agreed_digests.get(fact.step, b""),
        signed[0].entry.next_sample,
    )
