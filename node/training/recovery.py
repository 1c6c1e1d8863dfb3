"""A replica gets a state that counts here: from other peers' snapshot, checked against the log, or by computing it again.

A state is a function of the log and its payloads, so a replica that applied them knows the state. A peer never gives up a state
that it computed. If the log or the coordinator contradicts the state, the peer computes it again from the peer's last snapshot.
The second result shows whether memory or a disk erred. If the state stands, the peer stops and keeps the evidence.

Refuses a snapshot that is not what the log says. Refuses to load other weights over the peer's own because others say so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from node.mirror.snapshot_mirrors import MirrorReader
from node.snapshot.pieces import SnapshotManifest
from node.snapshot.store import SnapshotStore
from node.swarm.api import Swarm
from node.swarm.facts import Resync, Snapshot
from node.training.fork_start import Start, root_of_seed
from node.training.keeper import Keeper
from node.training.progress import BadSnapshotError, Divergence
from node.training.replica import Replica
from node.training.sync import Loading, fetch_snapshot
from protos.clocks import Waits
from protos.disk import write_bytes
from protos.errors import DivergedError, NetworkError, Reason, Refusal, StoppedError
from protos.log import SignedEntry

EVIDENCE = "diverged.json"
DIGESTS_KEPT = 256
RECOMPUTES_MAX = 3
WAIT_SECONDS_MIN = 0.5
WAIT_SECONDS_MAX = 15.0


class Stopping(Protocol):
    """Whether the person asked to stop; `wait` sleeps, or returns at once if the person did."""

    def __call__(self) -> bool: ...

    def wait(self, seconds: float) -> bool: ...


class Recovery:
    """One replica's. `follow(store)` follows the log from the state that is here; with `store`, it reports the snapshot, too.

    `agreed_start`: whether the peer may load an initial state that differs from the one that the peer built. The peer may in a
    run with anchors, and in a run whose operator knows the peers. `start`: of a fork, whose initial state is another run's.
    """

    def __init__(
        self,
        replica: Replica,
        swarm: Swarm,
        store: SnapshotStore,
        keeper: Keeper,
        folder: Path,
        stopping: Stopping,
        log: Any,
        follow: Callable[[bool], None],
        *,
        agreed_start: bool,
        patience_seconds: float,
        start: Start | None = None,
        mirrors: Callable[[], MirrorReader | None] = lambda: None,
    ) -> None:
        self._replica, self._swarm, self._store, self._keeper, self._folder = replica, swarm, store, keeper, folder
        self._stopping, self._log, self._follow = stopping, log, follow
        self._agreed_start = agreed_start or not replica.knows_start
        self._patience_seconds, self._start, self._mirrors = patience_seconds, start, mirrors
        self._root_of_seed = cache(partial(root_of_seed, replica))  # of a large model, and asked again in each try
        self.loading = Loading()
        self._base: Snapshot | None = None
        """The snapshot of others that this peer began with; None: this peer began with the initial state that it built, or with
        the one that the genesis names."""
        self._confirmed: int | None = None
        self._digests: dict[int, bytes] = {}
        self._doubt: Divergence | None = None
        self._recomputed = 0
        self._bad: dict[bytes, str] = {}  # root: why
        self._bytes = 0

    # ---- at the start ------------------------------------------------------------------------------------------------

    def begin(self, offered: Sequence[Snapshot], head_step: int) -> None:
        """Get a state to follow the log from: the initial state, or an agreed snapshot if the run is past the initial state."""
        self._look_for_evidence()
        self._bytes = self._replica.image().total_bytes
        newest = offered[0] if offered else None
        here = [snapshot for snapshot in offered if self._store.has(self._stored_as(snapshot.root))]
        if here:
            self._keeper.here(here[0].step, self._stored_as(here[0].root), here[0].root)
        if self._replica.is_blank and (newest is None or not newest.step):
            raise NetworkError("the run's snapshot was withdrawn while this peer joined: join again")
        if self._start is not None:
            self._start.begin()
            self.load(offered)  # no seed gives a state of this run
        elif newest is not None and newest.step == 0 and newest.root != self._keeper.root():
            self.load([newest])
        elif self._replica.is_blank or (head_step and (newest is None or newest.step)):
            self.load(offered)
        for snapshot in here:  # other peers can pull them here
            if self._store.has(self._stored_as(snapshot.root)) and snapshot.root not in self._bad:
                self._swarm.stored(snapshot.step, snapshot.root, snapshot.total_bytes, True)

    def _stored_as(self, root: bytes) -> bytes:
        return root if self._start is None else self._start.stored(root)

    def _check_start(self, snapshot: Snapshot) -> None:
        """Raises DivergedError if an initial state of others may not differ from the one that the seed gives here, and does."""
        if not self._agreed_start and snapshot.root != (root := self._root_of_seed()):
            raise DivergedError(
                f"the run's agreed initial state has root {snapshot.root.hex()[:16]}, and the run's seed gives root "
                f"{root.hex()[:16]} here. Versions of swarmentum or of the model differ, the model's first "
                "random draws differ between machines, or the run's first peers lied. Ask the run's operator to start the run "
                "with an anchor"
            )

    def _look_for_evidence(self) -> None:
        """An earlier life stopped because its state contradicted the log's."""
        path = self._folder / EVIDENCE
        try:
            step = int(json.loads(path.read_text())["step"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            step = -1
        if step >= 0 and self._swarm.is_withdrawn(step):
            self._log.info("continuing: the operator withdrew the digest that this peer's state contradicts", step=step)
            path.replace(path.with_suffix(".settled.json"))
            return
        raise DivergedError(
            f"this peer stopped earlier because its state after step {step} contradicts the run's log. Show the evidence in "
            f"{path} to the run's operator, who can withdraw wrong snapshots. To start again from the other peers' state, "
            "remove that file"
        )

    @property
    def doubts(self) -> bool:
        """Whether a state is computed again."""
        return self._doubt is not None

    # ---- what the log and the coordinator say ------------------------------------------------------------------------

    def agrees(self, signed: SignedEntry) -> bool:
        """Whether the log's digest of the state that is here equals this peer's own. If not, the peer has started again.

        Raises DivergedError if this peer's state stands against the log's.
        """
        step, claimed = signed.entry.step - 1, signed.entry.parent_state_digest
        if not claimed or self._swarm.is_withdrawn(step):
            return True
        if claimed == self._replica.digest():
            self._confirmed = step
            return True
        reason = f"the log's entry {signed.entry.step} holds the digest {claimed.hex()[:16]} for this state"
        self._contradicted(Divergence(step, self._replica.digest(), claimed, reason, signed.envelope))
        return False

    def told(self, event: Resync) -> None:
        """The coordinator says that this peer's state is not what counts."""
        own, start = self._digests.get(event.step), event.snapshot
        first = event.step == 0 and self._replica.step == 0 and self._start is None
        if first and start is not None and start.step == 0:
            self._again_from(lambda: self.load([start]), store=True)
            return
        if own is None or self._swarm.is_withdrawn(event.step):
            self._log.info("the coordinator contradicts a state that this peer did not report", why=event.reason)
            return
        if self._doubt is not None and event.step <= self._doubt.step:
            return  # the peer computes this state again already
        self._contradicted(Divergence(event.step, own, b"", f"the coordinator says: {event.reason}"))

    def lost(self, reason: str) -> None:
        """No peer that answers holds votes that the log names: this peer needs a snapshot from after them."""
        if self._doubt is not None:
            # The peer cannot compute the state in doubt again, and never gives up a state that it computed.
            self._stop(self._doubt, None)
        self._log.warning("loading a newer snapshot", step=self._replica.step, why=reason)
        at = self._replica.step
        self._again_from(lambda: self.load(self._swarm.offered(), newer_than=at), store=True)

    def reached(self, step: int, digest: bytes) -> None:
        """The replica has computed the state after a step. Raises DivergedError if a state in doubt stands."""
        self._digests[step] = digest
        while len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]
        doubt = self._doubt
        if doubt is None or step != doubt.step:
            return
        self._doubt = None
        if digest == doubt.digest or (doubt.claimed and digest != doubt.claimed):
            self._stop(doubt, digest)
        self._log.warning(
            "the state differs now that the peer has computed it again: memory or a disk of this machine erred; check them",
            step=step,
            before=doubt.digest.hex()[:16],
            now=digest.hex()[:16],
        )

    # ---- computing again ---------------------------------------------------------------------------------------------

    def _contradicted(self, doubt: Divergence) -> None:
        if self._base is not None and self._confirmed is None:
            self._reject(self._base, doubt)
            return
        self._recomputed += 1
        manifest = self._own_snapshot(doubt.step)
        if manifest is None or self._recomputed > RECOMPUTES_MAX:
            self._stop(doubt, None)
        self._log.warning("computing a contradicted state again", step=doubt.step, why=doubt.reason)

        def load() -> None:
            self._have(manifest)
            self._replica.load(manifest, self._store.file(manifest.root))
            self._keeper.adopt(manifest)

        self._doubt = doubt
        try:
            self._again_from(load, store=False)
        except (Refusal, NetworkError) as error:
            self._log.warning("the peer's own last snapshot cannot be loaded", why=str(error))
            self._stop(doubt, None)

    def _own_snapshot(self, step: int) -> SnapshotManifest | None:
        """This peer's newest snapshot from before a step that an entry confirms, or else its oldest from before that step."""
        known = [manifest for manifest in self._keeper.manifests if manifest.step < step]
        sure = [m for m in known if self._confirmed is not None and m.step <= self._confirmed]
        return sure[-1] if sure else known[0] if known else None

    def _have(self, manifest: SnapshotManifest) -> None:
        """Make sure that a snapshot that this peer computed is here, each piece verified.

        Pieces that this peer does not store, or that rotted, come from peers that store them, by the hashes that this peer
        computed. Raises Refusal, NetworkError."""
        root = manifest.root
        if self._store.has(root):
            rotten = (i for i in range(len(manifest.piece_hashes)) if self._store.piece(root, i) is None)
            if next(rotten, None) is None:
                return
            self._store.delete(root)
        if manifest.step == 0 and self._start is not None:
            self._fetch_start(self._start, self._swarm.offered())
            return
        stored = next((snapshot for snapshot in self._swarm.offered() if snapshot.root == root), None)
        if stored is None:
            raise Refusal(Reason.HASH_MISMATCH, f"the snapshot of step {manifest.step} is neither here nor agreed")
        self._fetch(stored)

    def _again_from(self, load: Callable[[], None], *, store: bool) -> None:
        """Drop all work that is under way, load another state, and follow the log from there."""
        self._swarm.halt()
        self._keeper.flush()
        load()
        self._digests = {step: digest for step, digest in self._digests.items() if step <= self._replica.step}
        self._swarm.restarted(self._replica.step)
        self._follow(store)

    def _stop(self, doubt: Divergence, again: bytes | None) -> NoReturn:
        """Keep the evidence, and stop: this peer's state stands."""
        path = self._folder / EVIDENCE
        evidence = {
            "run": self._replica.run_id.hex(),
            "step": doubt.step,
            "computed": doubt.digest.hex(),
            "computed_again": None if again is None else again.hex(),
            "claimed": doubt.claimed.hex(),
            "entry_envelope": doubt.entry.hex(),
            "said": doubt.reason,
        }
        write_bytes(path, (json.dumps(evidence, indent=2) + "\n").encode())
        twice = "computed it again, with the same result" if again == doubt.digest else "could not compute it again"
        if again is not None and again != doubt.digest:
            twice = f"computed it again, and got a third state ({again.hex()[:16]}): this machine errs"
        raise DivergedError(
            f"this peer's state after step {doubt.step} ({doubt.digest.hex()[:16]}) contradicts the state that counts: "
            f"{doubt.reason}. The peer {twice}. The peer does not load other weights. Show the evidence in {path} to the "
            "run's operator"
        )

    # ---- snapshots of others -----------------------------------------------------------------------------------------

    def _reject(self, base: Snapshot, doubt: Divergence) -> None:
        """The log contradicts the snapshot that this peer began with: the peer loads the snapshot before it."""
        self._log.error("the log contradicts the snapshot that this peer loaded", step=base.step, why=doubt.reason)
        self._bad[base.root] = doubt.reason
        self._swarm.found_bad(base)
        self._again_from(lambda: self.load(self._swarm.offered()), store=True)

    def load(self, offered: Sequence[Snapshot], newer_than: int = -1) -> None:
        """Load the newest agreed snapshot that this peer can get and that holds what the log says.

        Waits while no peer that has such a snapshot is online. Raises NetworkError when the patience is over, DivergedError if
        no snapshot holds, StoppedError if the person asked to stop.
        """
        give_up, waits = time.monotonic() + self._patience_seconds, Waits(WAIT_SECONDS_MIN, WAIT_SECONDS_MAX)
        while True:
            wanted = [s for s in offered if s.step > newer_than and s.root not in self._bad]
            if offered and not wanted and newer_than < 0:
                what = "the run's log" if self._start is None else "the run's log or genesis"
                raise DivergedError(
                    f"no agreed snapshot of this run holds what {what} says: {self._bad[offered[0].root]}. If all parameters "
                    "of this peer's model are the run's, frozen ones, too, ask the run's operator to withdraw the snapshots"
                )
            if any(self._loaded(snapshot) for snapshot in wanted):
                return
            if time.monotonic() > give_up:
                raise NetworkError(f"{self._away(wanted, newer_than)}; join again when such a peer is back")
            self.loading.waits(self._away(wanted, newer_than))
            wait = waits.next()
            self._log.warning(
                "the state is not to be had yet", why=self.loading.words, trying_again_in_seconds=round(wait)
            )
            if self._stopping.wait(wait):
                raise StoppedError("stopped while waiting for a peer that has the model")
            self.loading.ended()
            offered = self._swarm.offered()

    def _away(self, wanted: Sequence[Snapshot], newer_than: int) -> str:
        if wanted and wanted[0].step == 0 and self._start is not None:
            return f"no peer that has the starting state ({self._start.state}) is online: waiting"
        if wanted:
            return f"no peer that has the model (the snapshot of step {wanted[0].step}) is online: waiting"
        if newer_than >= 0:
            return f"no peer online has the entries after step {newer_than}, this peer's state: waiting"
        return "no snapshot of this run is agreed: waiting"

    def _loaded(self, snapshot: Snapshot) -> bool:
        """Whether the replica has loaded this snapshot. If not, the peer's log says why."""
        size, holders = snapshot.total_bytes, len(snapshot.holders)
        self._log.info("loading snapshot", step=snapshot.step, bytes=size, holders=holders)
        try:
            self._load(snapshot)
        except NetworkError as error:
            self._log.info("snapshot not loaded", step=snapshot.step, why=str(error))
            return False
        except Refusal as error:
            self._log.error("an agreed snapshot does not hold what the log says", step=snapshot.step, why=str(error))
            self._bad[snapshot.root] = error.detail
            self._swarm.found_bad(snapshot)
            return False
        finally:
            self.loading.ended()
        return True

    def _load(self, snapshot: Snapshot) -> None:
        if snapshot.total_bytes != self._bytes:
            raise BadSnapshotError(f"it has {snapshot.total_bytes} bytes, and this peer's model has {self._bytes}")
        if snapshot.step == 0 and self._start is not None:
            self._load_fork(self._start, snapshot)
            return
        if snapshot.step == 0:
            self._check_start(snapshot)
        entry, following = self._swarm.entries_about(snapshot.step)
        if snapshot.step and entry is None:
            raise NetworkError(f"the coordinator's log has no entry {snapshot.step}")
        found = self._fetch(snapshot)
        if found.run_id != self._replica.run_id or (entry is not None and found.entry_hash != entry.hash):
            raise BadSnapshotError("the snapshot's manifest names another run or log")
        self._replica.load(found, self._store.file(found.root))
        claimed = b"" if following is None else following.entry.parent_state_digest
        if self._swarm.is_withdrawn(snapshot.step):
            claimed = b""
        if claimed and claimed != self._replica.digest():
            digest = self._replica.digest().hex()[:16]
            raise BadSnapshotError(f"its state has digest {digest}, and the log's next entry says {claimed.hex()[:16]}")
        self._keeper.adopt(found)
        self._base, self._doubt = snapshot, None
        self._confirmed = snapshot.step if claimed else None

    def _fetch(self, snapshot: Snapshot) -> SnapshotManifest:
        """Have an agreed snapshot in the store, whose older ones give room."""
        digest, room = self._replica.layout_digest, self._keeper.make_room
        return fetch_snapshot(self._swarm, self._store, snapshot, digest, self._progress, room, self._mirrors())

    def _load_fork(self, start: Start, snapshot: Snapshot) -> None:
        """Become the state that the genesis names: nobody's word is needed for it, so it counts as this peer's own."""
        from_disk = start.is_here()
        found = self._fetch_start(start, [snapshot])
        self._replica.load(found, self._store.file(found.root))
        start.check(self._replica.demo.state_digest, self._replica.digest_steps)
        self._keeper.adopt(found)
        self._base, self._doubt, self._confirmed = None, None, 0
        self._log.info("starting state loaded", step=0, of=str(start.state), from_disk=from_disk)

    def _fetch_start(self, start: Start, offered: Sequence[Snapshot]) -> SnapshotManifest:
        holders = next((snapshot.holders for snapshot in offered if snapshot.step == 0), ())
        return start.fetch(self._swarm, holders, self._replica.layout_digest, self._progress, self._mirrors())

    def _progress(self, done: int, total: int) -> None:
        if self._stopping():
            raise StoppedError("stopped while loading the model")
        if self.loading.came(done, total, time.monotonic()):
            percent = 100 * done // max(total, 1)
            self._log.info("snapshot", step=self._replica.step, percent=percent, progress=self.loading.words)
