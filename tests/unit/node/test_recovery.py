"""A peer that computed its state keeps it, or stops with the evidence; one that loaded a state checks it first.

The replica, its snapshots and the log's entries are real; the swarm is a stand-in that plays the log again when it is asked to.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor, nn

from node.snapshot.pieces import SnapshotManifest, describe, iterate_pieces, pack
from node.snapshot.store import SnapshotStore
from node.swarm.facts import Resync, Snapshot
from node.training.fork_start import root_of_seed
from node.training.keeper import Keeper
from node.training.recovery import EVIDENCE, Recovery
from node.training.replica import Replica
from protos.errors import DivergedError, NetworkError, StoppedError
from protos.identity import Identity
from protos.log import Entry, SignedEntry, lr_from_bits, lr_to_bits, seal_entry
from protos.optimizer_config import OptimizerConfig
from protos.slices import Update

RUN = bytes(range(32))
COORDINATOR = Identity.from_seed(b"c" * 32)
LR = lr_to_bits(1e-2)
EVERY = 2
POISON = b"p" * 32


class Table(nn.Module):
    """A small state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(64, 64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


def replica() -> Replica:
    made = Replica(RUN, Table(), OptimizerConfig(group_size=8), 8)
    made.first_model = Table
    return made


def updates_of(step: int) -> list[Update]:
    """The votes of a step: the same for everybody who replays it."""
    author = replica()
    generator = torch.Generator().manual_seed(step)
    parameter = next(author.model.parameters())
    parameter.grad = torch.randn(parameter.shape, generator=generator)
    author.vote(step, lr_from_bits(LR))
    made = author.demo.open_votes
    return [Update(step, made.size, made.payload)]


class Log:
    """Entries 1 to n, with the digests that an honest replica has; `claims` are other digests, by step."""

    def __init__(self, steps: int, claims: dict[int, bytes] | None = None) -> None:
        truth, head = replica(), RUN
        self.digests, self.entries, self.states = {0: truth.digest()}, dict[int, SignedEntry](), dict[int, Any]()
        self.manifests: dict[int, tuple[SnapshotManifest, bytes]] = {0: truth.packed()}
        for step in range(1, steps + 1):
            claimed = (claims or {}).get(step - 1, self.digests[step - 1])
            entry = Entry(step, head, (), LR, claimed, (), 0)
            signed = seal_entry(COORDINATOR, RUN, entry)
            self.entries[step], head = signed, signed.hash
            truth.apply(signed, updates_of(step))
            self.digests[step] = truth.digest()
            self.manifests[step] = truth.packed()


class World:
    """One peer: its replica and store, and a swarm that knows only the log and some snapshots."""

    def __init__(self, folder: Path, log: Log, offered: Sequence[Snapshot] = (), *, agreed_start: bool = False) -> None:
        self.log, self.offers = log, list(offered)
        self.blobs: dict[bytes, bytes] = {}
        self.bad: list[Snapshot] = []
        self.withdrawn: set[int] = set()
        self.stopped = False
        self.waits = 0
        self.replica, self.store = replica(), SnapshotStore(folder / "pieces", 1 << 30)
        self.folder = folder
        self.told: list[tuple[int, bool]] = []
        self.keeper = Keeper(
            self.replica, self.store, folder / "private.pt", lambda m, kept: self.told.append((m.step, kept)),
            structlog.get_logger(), behind=False,
        )  # fmt: skip
        self.stores = True
        self.recovery = Recovery(
            self.replica, self, self.store, self.keeper, folder, self, structlog.get_logger(), self.follow,  # type: ignore[arg-type]
            agreed_start=agreed_start, patience_seconds=1e9,
        )  # fmt: skip

    # the swarm
    def halt(self) -> None: ...
    def restarted(self, step: int) -> None: ...
    def stored(self, step: int, root: bytes, size: int, kept: bool) -> None:
        self.told.append((step, kept))

    def is_withdrawn(self, step: int) -> bool:
        return step in self.withdrawn

    def found_bad(self, snapshot: Snapshot) -> None:
        self.bad.append(snapshot)

    def offered(self) -> tuple[Snapshot, ...]:
        return tuple(self.offers)

    def entries_about(self, step: int) -> tuple[SignedEntry | None, SignedEntry | None]:
        return self.log.entries.get(step), self.log.entries.get(step + 1)

    def fetch(self, sha256: bytes, size: int, holders: Sequence[bytes]) -> bytes:
        if sha256 not in self.blobs:
            raise NetworkError("nobody to ask")
        return self.blobs[sha256]

    # whether to stop
    def __call__(self) -> bool:
        return self.stopped

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        return self.stopped or self.waits > 5

    def serves(self, manifest: SnapshotManifest, data: bytes) -> Snapshot:
        self.blobs[manifest.root] = manifest.encoded
        for digest, piece in zip(manifest.piece_hashes, iterate_pieces(data, manifest.piece_bytes), strict=True):
            self.blobs[digest] = piece
        snapshot = Snapshot(manifest.step, manifest.root, manifest.total_bytes, (b"h" * 32,))
        self.offers.insert(0, snapshot)
        return snapshot

    # the loop
    def follow(self, store: bool = True) -> None:
        self.recovery.reached(self.replica.step, self.replica.digest())
        if store:
            self.keeper.snapshot(kept=True)

    def plays(self, until: int) -> None:
        """Apply the log; begin again wherever the replica is, when it is somewhere else."""
        while self.replica.step < until:
            signed = self.log.entries[self.replica.step + 1]
            if not self.recovery.agrees(signed):
                continue
            self.replica.apply(signed, updates_of(signed.entry.step))
            self.recovery.reached(self.replica.step, self.replica.digest())
            if self.replica.step % EVERY == 0:
                self.keeper.snapshot(kept=self.stores)


def begun(folder: Path, log: Log) -> World:
    world = World(folder, log)
    world.recovery.begin((), 0)
    world.follow()
    return world


def test_a_log_that_contradicts_a_computed_state_stops_the_peer_with_the_evidence(tmp_path: Path) -> None:
    """Honest peers took over weights of zeros because four of seven said so."""
    world = begun(tmp_path, Log(8, {5: POISON}))
    with pytest.raises(DivergedError, match="computed it again, with the same result") as stopped:
        world.plays(8)
    assert world.replica.digest() == world.log.digests[5], "its own state stands"
    evidence = json.loads((tmp_path / EVIDENCE).read_text())
    assert (evidence["step"], evidence["claimed"]) == (5, POISON.hex())
    assert evidence["computed"] == evidence["computed_again"] == world.log.digests[5].hex()
    assert EVIDENCE in str(stopped.value)
    again = World(tmp_path, world.log)
    with pytest.raises(DivergedError, match="after step 5 contradicts"):
        again.recovery.begin((), 0)
    again.withdrawn = {5}
    again.recovery.begin((), 0)
    again.plays(8)
    assert again.replica.digest() == world.log.digests[8], "the operator withdrew what was wrong"


@pytest.mark.parametrize("told_by_the_log", [True, False])
def test_a_memory_that_erred_is_found_by_computing_again(tmp_path: Path, told_by_the_log: bool) -> None:
    world = begun(tmp_path, Log(8))
    world.plays(5)
    with torch.no_grad():
        next(world.replica.model.parameters())[3, 3] += 1.0  # a bit flips
    world.replica._digest = None
    world.recovery.reached(5, world.replica.digest())
    if not told_by_the_log:
        world.recovery.told(Resync(None, "others differ", step=5))
        assert world.replica.step == 4, "back at its own snapshot"
    world.plays(8)
    assert world.replica.digest() == world.log.digests[8]
    assert not (tmp_path / EVIDENCE).exists()


def test_the_coordinators_word_alone_changes_no_state(tmp_path: Path) -> None:
    world = begun(tmp_path, Log(8))
    world.plays(5)
    world.recovery.told(Resync(None, "the snapshot that others stored", step=5))
    with pytest.raises(DivergedError, match="others stored"):
        world.plays(6)


def poisoned(log: Log, step: int, entry_hash: bytes | None = None) -> tuple[SnapshotManifest, bytes]:
    """A snapshot of weights that nobody computed, in the right form."""
    model = Table()
    with torch.no_grad():
        model.table.fill_(7.0)
    data = pack({"table": model.table.detach()})
    true, _ = log.manifests[step]
    hash_ = true.entry_hash if entry_hash is None else entry_hash
    return describe(data, run_id=RUN, step=step, entry_hash=hash_, layout_digest=true.layout_digest), data


def test_a_joiner_takes_the_snapshot_before_a_poisoned_one_and_reports_it(tmp_path: Path) -> None:
    """A late joiner loaded the poisoned snapshot without complaint."""
    log = Log(8)
    world = World(tmp_path, log)
    good = world.serves(*log.manifests[4])
    bad = world.serves(*poisoned(log, 6))
    world.recovery.begin(world.offered(), 8)
    assert world.replica.step == 4
    assert world.bad == [bad]
    world.plays(8)
    assert world.replica.digest() == log.digests[8]
    assert world.offers == [bad, good]


def test_a_joiner_whose_snapshot_was_wrong_by_the_next_entry_goes_back(tmp_path: Path) -> None:
    """The newest snapshot is the head's: nothing contradicts it yet."""
    log = Log(6)
    world = World(tmp_path, log)
    world.serves(*log.manifests[4])
    bad = world.serves(*poisoned(log, 6))
    world.recovery.begin(world.offered(), 6)
    world.follow()
    assert world.replica.step == 6
    world.log = Log(8)
    world.plays(8)
    assert world.bad == [bad]
    assert world.replica.digest() == world.log.digests[8]


@pytest.mark.parametrize("what", ["size", "log", "all"])
def test_a_snapshot_that_is_not_the_logs_is_refused(tmp_path: Path, what: str) -> None:
    log = Log(8)
    world = World(tmp_path, log)
    if what != "all":
        world.serves(*log.manifests[4])
    bad = world.serves(*(poisoned(log, 6, b"x" * 32) if what == "log" else poisoned(log, 6)))
    if what == "size":
        world.offers[0] = bad = replace(bad, total_bytes=1 << 60)
    if what == "all":
        with pytest.raises(DivergedError, match="no agreed snapshot"):
            world.recovery.begin(world.offered(), 8)
        return
    world.recovery.begin(world.offered(), 8)
    assert (world.replica.step, world.bad) == (4, [bad])


def keeping(made: Replica, name: str) -> Replica:
    made.model.register_parameter(name, nn.Parameter(torch.ones(2), requires_grad=False))
    return made


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("longer_by_more", r"it has \d+ bytes, and this peer's model has \d+"),
        ("kepu", "snapshot lacks parameters: 1 in all, such as kepu"),
    ],
)
def test_a_model_with_other_frozen_parameters_is_told_of_them(tmp_path: Path, name: str, said: str) -> None:
    """A program's: it heard that no snapshot holds, and that the operator has to withdraw them all."""
    log, other = Log(4), keeping(replica(), "kept")
    for step, entry in log.entries.items():
        other.apply(entry, updates_of(step))
    world = World(tmp_path, log)
    world.serves(*other.packed())
    keeping(world.replica, name)
    with pytest.raises(DivergedError, match=rf"log says: .*{said}.* are the run's, frozen ones, too"):
        world.recovery.begin(world.offered(), 4)


def test_a_joiner_waits_while_nobody_is_online(tmp_path: Path) -> None:
    """It ended with exit code 3 after 18 s."""
    log = Log(4)
    world = World(tmp_path, log)
    snapshot = world.serves(*log.manifests[4])
    blobs, world.blobs = world.blobs, {}
    waits, shown = world.wait, set[str]()

    def comes_back(seconds: float) -> bool:
        stop = waits(seconds)
        shown.add(world.recovery.loading.words)
        if world.waits == 3:
            world.blobs = blobs
        return stop

    world.wait = comes_back  # type: ignore[method-assign]
    world.recovery.begin([snapshot], 4)
    assert world.replica.digest() == log.digests[4]
    assert world.waits == 3
    assert shown == {"no peer that has the model (the snapshot of step 4) is online: waiting"}, "and `me` shows it"
    assert world.recovery.loading.words == ""
    world.blobs = {}
    away = World(tmp_path / "away", log, [snapshot])
    with pytest.raises(StoppedError):
        away.recovery.begin([snapshot], 4)


def test_a_peer_without_first_parameters_takes_no_state_but_a_later_one(tmp_path: Path) -> None:
    log = Log(4)
    world = World(tmp_path, log)
    world.replica.is_blank = True
    start = world.serves(*log.manifests[0])
    for offered in ([], [start]):
        with pytest.raises(NetworkError, match="withdrawn while this peer joined"):
            world.recovery.begin(offered, 4)
    world.recovery.begin([world.serves(*log.manifests[4])], 0)  # whatever the head is said to be: no NaN is trained on
    assert world.replica.digest() == log.digests[4]


@pytest.mark.parametrize("agreed_start", [True, False])
def test_another_initial_state_is_loaded_only_where_somebody_answers_for_it(tmp_path: Path, agreed_start: bool) -> None:
    log = Log(2)
    world = World(tmp_path, log, agreed_start=agreed_start)
    start = world.serves(*poisoned(log, 0))
    if not agreed_start:
        with pytest.raises(DivergedError, match="the run's seed gives root"):
            world.recovery.begin([start], 0)
        return
    log.entries.clear()
    world.recovery.begin([start], 0)
    assert next(world.replica.model.parameters()).detach()[0, 0] == 7.0


@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize("agreed_start", [True, False])
def test_an_initial_state_below_a_bad_snapshot_is_the_seeds(tmp_path: Path, agreed_start: bool, blank: bool) -> None:
    """Behind a later snapshot that fails, the first of the run came from others, and nobody compared it with the seed."""
    for start in (Log(8).manifests[0], poisoned(Log(8), 0)):
        log = Log(8, {0: b""})
        world = World(tmp_path / start[0].root.hex()[:8], log, agreed_start=agreed_start)
        world.replica.is_blank = blank
        if blank:
            next(world.replica.model.parameters()).data.fill_(torch.nan)
        world.serves(*start)
        world.serves(*poisoned(log, 6))
        true = start[0].root == log.manifests[0][0].root
        if not true and not agreed_start:
            with pytest.raises(DivergedError, match="the run's seed gives root"):
                world.recovery.begin(world.offered(), 8)
            assert not world.store.has(start[0].root), "it is not even fetched"
            continue
        world.recovery.begin(world.offered(), 8)
        assert world.replica.step == 0
        assert next(world.replica.model.parameters()).detach()[0, 0] == (0.0 if true else 7.0)


def test_the_model_of_the_seed_is_built_once_however_often_its_holders_are_away(tmp_path: Path) -> None:
    """Each try built it anew, and a peer tries for minutes."""
    log = Log(2)
    world, built = World(tmp_path, log), list[Table]()
    world.replica.first_model = lambda: built.append(Table()) or built[-1]  # type: ignore[func-returns-value]
    world.recovery.begin((), 0)
    start = Snapshot(0, log.manifests[0][0].root, log.manifests[0][0].total_bytes, ())
    for _ in range(3):
        assert not world.recovery._loaded(start)
    assert len(built) == 1


def test_the_root_of_the_seed_is_the_same_in_a_program_with_another_default_type() -> None:
    """The run's model is; the base optimizer's state was not, so a good initial state would have been refused."""
    made = Replica(RUN, Table(), OptimizerConfig(group_size=8, base="adamw"), 8)
    made.first_model = lambda: copy.deepcopy(made.model)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert root_of_seed(made) == made.packed()[0].root
    finally:
        torch.set_default_dtype(before)


def test_a_peer_of_the_first_hour_loads_the_agreed_start_where_somebody_answers_for_it(tmp_path: Path) -> None:
    """It had built and reported its own before another one was agreed, and stopped."""
    log = Log(2)
    world = World(tmp_path, log, agreed_start=True)
    world.recovery.begin((), 0)
    world.follow()
    start = world.serves(*poisoned(log, 0))
    log.entries.clear()
    world.recovery.told(Resync(start, "another snapshot is agreed", step=0))
    assert next(world.replica.model.parameters()).detach()[0, 0] == 7.0
    assert not (tmp_path / EVIDENCE).exists()


def test_a_state_in_doubt_is_not_given_up_because_votes_are_lost(tmp_path: Path) -> None:
    world = begun(tmp_path, Log(8, {5: POISON}))
    world.plays(5)
    assert not world.recovery.agrees(world.log.entries[6]), "computing again, from step 4"
    world.serves(*poisoned(world.log, 6))
    with pytest.raises(DivergedError, match="could not compute it again"):
        world.recovery.lost("no peer that answers holds the votes of step 5 any more")
    assert (tmp_path / EVIDENCE).exists()


@pytest.mark.parametrize(
    ("agreed", "tells"), [((6, 4), [(6, True), (4, True), (6, True)]), ((4,), [(4, True), (4, True)])]
)
def test_a_new_life_tells_of_the_agreed_snapshots_that_its_disk_has(
    tmp_path: Path, agreed: tuple[int, ...], tells: list[tuple[int, bool]]
) -> None:
    """Joiners are sent there. What it stored and nobody agreed on is deleted, and it tells nothing of it."""
    log = Log(8)
    begun(tmp_path, log).plays(6)
    again = World(tmp_path, log)
    assert [manifest.step for manifest in again.store.manifests()] == [4, 6]
    roots = {manifest.step: manifest for manifest in again.store.manifests()}
    again.recovery.begin([Snapshot(s, roots[s].root, roots[s].total_bytes, (b"h" * 32,)) for s in agreed], 8)
    again.follow()
    assert [manifest.step for manifest in again.store.manifests()] == sorted(agreed)
    assert again.told == tells


def test_a_new_life_keeps_the_agreed_snapshot_when_room_is_made(tmp_path: Path) -> None:
    """The coordinator told of it in the life before. Nobody has the newer one: the last copy of a state was deleted for it."""
    log = Log(8)
    begun(tmp_path, log).plays(6)
    again = World(tmp_path, log)
    size = again.store.manifests()[0].total_bytes
    again.store.bytes_max = 5 * size // 2
    roots = {manifest.step: manifest for manifest in again.store.manifests()}
    known = {**roots, 8: log.manifests[8][0]}
    again.recovery.begin([Snapshot(s, known[s].root, size, (b"h" * 32,)) for s in (8, 4)], 8)
    assert again.replica.step == 4
    again.follow()
    again.plays(8)
    assert [manifest.step for manifest in again.store.manifests()] == [4, 8]


def test_the_agreed_snapshot_stays_on_the_disk_until_another_one_is_agreed(tmp_path: Path) -> None:
    """An anchor was away for three snapshot periods: nobody had what joiners are offered."""
    world = begun(tmp_path, Log(14))
    world.plays(4)
    agreed = world.keeper.manifests[-1]
    world.keeper.agreed(agreed.step, agreed.root)
    world.plays(14)
    assert [manifest.step for manifest in world.store.manifests()] == [4, 12, 14]
    assert (10, False) in world.told, "the coordinator is told what is not here any more"
    world.keeper.agreed(14, world.store.manifests()[-1].root)
    assert [manifest.step for manifest in world.store.manifests()] == [12, 14]


def test_a_memory_that_erred_is_found_with_a_snapshot_that_others_store(tmp_path: Path) -> None:
    """A peer that was not drawn computed the root, and knows by it what the others' pieces are."""
    world = begun(tmp_path, Log(8))
    world.stores = False
    world.plays(5)
    assert [m.step for m in world.store.manifests()] == [0]
    assert [m.step for m in world.keeper.manifests] == [0, 2, 4]
    assert not world.store.has(world.log.manifests[4][0].root)
    with torch.no_grad():
        next(world.replica.model.parameters())[3, 3] += 1.0  # a bit flips
    world.replica._digest = None
    world.recovery.reached(5, world.replica.digest())
    world.serves(*world.log.manifests[4])
    world.plays(8)
    assert world.replica.digest() == world.log.digests[8]
    assert not (tmp_path / EVIDENCE).exists()
    assert world.store.has(world.log.manifests[4][0].root)
