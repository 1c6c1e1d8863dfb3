"""What must hold whatever happens. Knows no faults; is told what the parts do and compares."""

from collections.abc import Iterable

from coordinator.clock.effects import EntryCommitted, Record
from coordinator.clock.state import DIGEST_STEPS_KEPT, DURATIONS_KEPT, PEERS_KEPT, SNAPSHOT_STEPS_KEPT, Run
from node.blobs.blobs import STREAMS_KEPT_MAX
from node.swarm.entries import ENTRIES_AHEAD_MAX
from node.swarm.facts import SNAPSHOTS_KEPT
from node.swarm.inbox import STEPS_AHEAD_MAX
from node.swarm.session import Session
from protos.equivocation import prove_exclusion
from protos.errors import DivergedError
from protos.limits import APPLIED_MAX, ROSTER_PEERS_MAX
from protos.log import SignedEntry
from protos.run_config import RunConfig
from tests.unit.coordinator.driver import Harness

HEALED_STEPS = 3


class Checkers:
    """Every assertion names the step and the peer."""

    def __init__(self) -> None:
        self.entries: dict[int, bytes] = {}
        self.digests: dict[int, bytes] = {}
        self._heads: dict[str, int] = {}
        self._committed, self._lost, self._returned = 0, False, False
        self._corrupted: dict[str, int] = {}
        self.two_faced: set[bytes] = set()
        self.heard: dict[bytes, int] = {}
        self.excluded: dict[bytes, int] = {}
        self.removed: set[bytes] = set()
        """Whom the operator asked to exclude."""
        self.lost: set[int] = set()
        """Steps in which a peer never votes, as it told the coordinator."""

    def entry(self, peer: str, signed: SignedEntry) -> None:
        """An entry arrived with all its payloads: every peer sees the same at each step."""
        step = signed.entry.step
        seen = self.entries.setdefault(step, signed.hash)
        assert seen == signed.hash, f"{peer} was given another entry {step} than others"
        assert signed.entry.parent_hash == self.entries.get(step - 1, signed.entry.parent_hash), (
            f"entry {step} breaks the chain"
        )

    def applied(self, peer: str, step: int, digest: bytes) -> None:
        """A replica reached a state: all replicas are equal after each step."""
        if peer in self._corrupted:
            assert step <= self._corrupted[peer] + HEALED_STEPS, f"{peer}'s bad replica was not noticed"
            if self.digests.get(step) != digest:
                return
            if step > self._corrupted[peer]:
                del self._corrupted[peer]
        seen = self.digests.setdefault(step, digest)
        assert seen == digest, f"{peer}'s replica differs from the others after step {step}"

    def corrupted(self, peer: str, step: int) -> None:
        """Its replica was changed behind its back after this step: for a few steps it may differ, then no more."""
        self._corrupted[peer] = step

    def lied(self, public_key: bytes, step: int) -> None:
        """Somebody heard a second payload of this peer for a step."""
        self.heard.setdefault(public_key, step)

    def ended(self, peer: str, error: Exception) -> None:
        """A peer gave up. The network may be bad enough for that; replicas may never differ."""
        assert not isinstance(error, DivergedError), f"{peer}: {error}"
        assert "bug in the network side" not in str(error), f"{peer}: {error} {error.__cause__!r}"

    def coordinator_started(self, run: Run) -> None:
        """After a crash everything that anyone was told is there."""
        told = 0 if self._lost else max(self.entries, default=0)
        self._lost = False
        assert run.head_step >= max(told, self._committed), (
            f"the head was {max(told, self._committed)}, now {run.head_step}"
        )
        self._committed = run.head_step

    def journal_lost(self) -> None:
        """The coordinator gets an older journal: peers give back what it lost."""
        self._lost, self._returned, self._committed = True, True, 0

    def coordinator(self, run: Run) -> None:
        """Its memory is bounded, and entries only grow."""
        assert run.head_step >= self._committed, "the head went back"
        self._committed = run.head_step
        assert len(run.durations_ms) <= DURATIONS_KEPT
        assert len(run.agreed_digests) <= DIGEST_STEPS_KEPT + 2
        assert len(run.reported_digests) <= (DIGEST_STEPS_KEPT + 2 if run.anchored else 3)
        assert len(run.reported_snapshots) <= SNAPSHOT_STEPS_KEPT + 1
        assert len(run.peers) <= PEERS_KEPT
        self.lost |= {peer.silence[0] for peer in run.peers.values() if peer.silence is not None and peer.silence[3]}
        if run.step is not None:
            members = len(run.step.tick.roster)
            assert len(run.step.claims) <= members
            assert len(run.step.held) <= members
            assert len(run.step.named) <= members * members

    def buffers(self, peer: str, session: Session) -> None:
        """A peer's memory of the network is bounded."""
        assert len(session.parts.announcements._inbox._seen) <= ROSTER_PEERS_MAX * STEPS_AHEAD_MAX, peer
        assert session.parts.entries.waiting <= ENTRIES_AHEAD_MAX, peer
        assert len(session.parts.outbox.applied) <= APPLIED_MAX, peer
        assert len(session.parts.outbox.holdings) <= 2 * ROSTER_PEERS_MAX, peer
        assert len(session.parts.snapshots) <= SNAPSHOTS_KEPT, peer
        kept = session.fetcher.streams.kept.values()
        assert all(len(streams) <= STREAMS_KEPT_MAX for streams in kept), peer

    def journal(self, records: Iterable[Record], run_id: bytes, config: RunConfig) -> None:
        """At the end: the journal holds every entry that anyone saw, in one chain, every sample at most once."""
        kept = list(records)
        for record in kept:
            if isinstance(record, EntryCommitted):
                assert set(record.entry.readmitted) <= self.removed, "nobody else is readmitted"
                for exclusion in record.entry.exclusions:
                    if exclusion.by_operator:
                        assert exclusion.public_key in self.removed, "the operator did not say so"
                        continue
                    assert prove_exclusion(exclusion, run_id).step <= record.entry.step + STEPS_AHEAD_MAX
                    assert exclusion.public_key in self.two_faced, "an honest peer was excluded"
                    assert exclusion.public_key not in self.excluded, "excluded twice"
                    self.excluded[exclusion.public_key] = record.entry.step
        in_journal = {r.entry.step: r.hash for r in kept if isinstance(r, EntryCommitted)}
        for step, seen in self.entries.items():
            assert in_journal.get(step) == seen, f"entry {step} was seen and is not in the journal"
        harness = Harness(config, run_id=run_id)
        harness.lost_steps, harness.returning = self.lost, self._returned
        harness.load(kept)
