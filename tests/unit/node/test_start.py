"""A peer of a fork begins at the state that the genesis names, and at no other.

The replica, the snapshots and the log are real; the swarm is the stand-in of `test_recovery`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import torch
from torch import nn

from node.admission.consent import MachineRequest
from node.commands.status import as_values, show
from node.snapshot.pieces import SnapshotManifest, iterate_pieces
from node.snapshot.store import SnapshotStore
from node.swarm.facts import Resync, Snapshot
from node.training.fork_start import Start
from node.training.keeper import Keeper
from node.training.recovery import Recovery
from node.training.replica import Replica
from protos.errors import DivergedError, StoppedError
from protos.log import Entry, SignedEntry, seal_entry
from protos.optimizer_config import OptimizerConfig
from protos.run_config import RunConfig
from protos.start import StartingState, start_body
from protos.v1 import coordinator_pb2, log_pb2
from tests.unit.node.test_recovery import COORDINATOR, LR, POISON, RUN, Log, Table, World, updates_of

FORK = b"f" * 32
STEP = 4
HOLDER = (b"h" * 32,)


class Other(nn.Module):
    """A model of as many bytes as `Table`, with another name for its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(64, 64))


def starting_state(log: Log) -> StartingState:
    manifest, _ = log.manifests[STEP]
    return StartingState(
        RUN,
        COORDINATOR.public_key,
        STEP,
        log.entries[STEP].hash,
        manifest.root,
        manifest.total_bytes,
        log.digests[STEP],
        64,
    )


class ForkLog(Log):
    """Entries of the fork, after the parent run's state."""

    def __init__(self, parent: Log, steps: int, claims: dict[int, bytes] | None = None) -> None:
        truth = Replica(FORK, Table(), OptimizerConfig(group_size=8), 8)
        manifest, data = parent.manifests[STEP]
        truth.load(replace(manifest, step=0, run_id=FORK), data)
        head = FORK
        self.digests, self.entries, self.manifests = {0: truth.digest()}, dict[int, SignedEntry](), {}
        for step in range(1, steps + 1):
            claimed = (claims or {}).get(step - 1, self.digests[step - 1] if step > 1 else b"")
            signed = seal_entry(COORDINATOR, FORK, Entry(step, head, (), LR, claimed, (), 0))
            self.entries[step], head = signed, signed.hash
            truth.apply(signed, updates_of(step))
            self.digests[step] = truth.digest()
            self.manifests[step] = truth.packed()


class ForkWorld(World):
    """One peer of a fork, in a home where it may have the parent run's snapshots."""

    def __init__(self, home: Path, log: ForkLog, start: StartingState, model: type[nn.Module] = Table) -> None:
        (home / "fork").mkdir(parents=True, exist_ok=True)
        super().__init__(home / "fork", log)
        self.replica = Replica(FORK, model(), OptimizerConfig(group_size=8), 8)
        self.named: list[tuple[int, bytes, bool]] = []
        self.start = Start(start, FORK, self.store, home / "parent")

        def stored(manifest: SnapshotManifest, kept: bool) -> None:
            self.named.append((manifest.step, self.start.named(manifest), kept))

        log_ = structlog.get_logger()
        self.keeper = Keeper(self.replica, self.store, home / "private.pt", stored, log_, behind=False)
        self.recovery = Recovery(
            self.replica, self, self.store, self.keeper, self.folder, self, log_, self.follow,  # type: ignore[arg-type]
            agreed_start=False, patience_seconds=1e9, start=self.start,
        )  # fmt: skip
        self.offers = [Snapshot(0, start.root, start.total_bytes, HOLDER)]

    def begins(self) -> None:
        self.recovery.begin(self.offers, 0)
        self.follow()

    def others_have(self, manifest: SnapshotManifest, data: bytes) -> None:
        self.blobs[manifest.root] = manifest.encoded
        for digest, piece in zip(manifest.piece_hashes, iterate_pieces(data, manifest.piece_bytes), strict=True):
            self.blobs[digest] = piece


@pytest.fixture
def parent() -> Log:
    return Log(STEP + 1)


def keeps_the_parents(home: Path, parent: Log) -> Path:
    """The snapshot in this home's folder of the parent run; its file."""
    manifest, data = parent.manifests[STEP]
    SnapshotStore(home / "parent", 1 << 30).write(
        iterate_pieces(data, manifest.piece_bytes),
        manifest.total_bytes,
        lambda hashes: replace(manifest, piece_hashes=hashes),
    )
    return home / "parent" / f"{manifest.root.hex()}.state"


def test_the_state_comes_from_others_who_have_it_and_can_be_had_here_then(tmp_path: Path, parent: Log) -> None:
    world = ForkWorld(tmp_path, ForkLog(parent, 6), starting_state(parent))
    world.others_have(*parent.manifests[STEP])
    world.begins()
    assert (world.replica.step, world.replica.head) == (0, FORK)
    assert world.replica.digest() == parent.digests[STEP]
    manifest, data = parent.manifests[STEP]
    assert world.named == [(0, manifest.root, True)], "the run knows it by the parent run's root"
    assert world.store.get(manifest.root) == manifest.encoded
    pieces = [world.store.get(digest) for digest in manifest.piece_hashes]
    assert pieces == list(iterate_pieces(data, manifest.piece_bytes))
    world.plays(6)
    assert world.replica.digest() == world.log.digests[6]


def test_a_home_that_has_the_parent_runs_snapshot_asks_nobody(tmp_path: Path, parent: Log) -> None:
    file = keeps_the_parents(tmp_path, parent)
    world = ForkWorld(tmp_path, ForkLog(parent, 2), starting_state(parent))
    world.begins()
    assert world.replica.digest() == parent.digests[STEP]
    assert file.exists(), "the parent run's folder is only read"
    back = ForkWorld(tmp_path, ForkLog(parent, 2), starting_state(parent))
    file.unlink()
    back.begins()
    assert back.replica.digest() == parent.digests[STEP], "from this run's own folder, after a restart"
    assert back.store.get(starting_state(parent).root) is not None


def test_a_snapshot_that_rotted_on_the_disk_is_not_loaded(tmp_path: Path, parent: Log) -> None:
    file = keeps_the_parents(tmp_path, parent)
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    world = ForkWorld(tmp_path, ForkLog(parent, 2), starting_state(parent))
    before = world.replica.digest()
    with pytest.raises(StoppedError):
        world.begins()
    assert world.waits, "it waits for somebody who has the piece"
    assert world.replica.digest() == before
    world.others_have(*parent.manifests[STEP])
    world.waits = 0
    world.begins()
    assert world.replica.digest() == parent.digests[STEP], "the damaged piece came from others"


def test_while_nobody_has_it_the_peer_says_which_state_it_waits_for(tmp_path: Path, parent: Log) -> None:
    world = ForkWorld(tmp_path, ForkLog(parent, 2), starting_state(parent))
    world.recovery._patience_seconds = -1.0
    with pytest.raises(Exception, match=rf"the starting state \(step 4 of run {RUN.hex()[:16]}\) is online"):
        world.begins()


@pytest.mark.parametrize("wrong", ["root", "entry_hash", "run_id", "step", "total_bytes", "state_digest"])
def test_a_state_that_is_not_what_the_genesis_says_is_refused(tmp_path: Path, parent: Log, wrong: str) -> None:
    true = starting_state(parent)
    other, data = parent.manifests[STEP - 1]
    values = {
        "root": other.root,  # a snapshot of the parent run, but of another step
        "entry_hash": b"x" * 32,
        "run_id": b"x" * 32,
        "step": STEP + 1,
        "total_bytes": true.total_bytes + 1,
        "state_digest": POISON,
    }
    start = replace(true, **{wrong: values[wrong]})  # type: ignore[arg-type]
    world = ForkWorld(tmp_path, ForkLog(parent, 2), start)
    world.others_have(*parent.manifests[STEP])
    world.others_have(other, data)
    with pytest.raises(DivergedError, match="log or genesis says"):
        world.begins()
    assert not world.named, "nobody is told that it has a state"


def test_a_model_of_another_layout_is_refused(tmp_path: Path, parent: Log) -> None:
    world = ForkWorld(tmp_path, ForkLog(parent, 2), starting_state(parent), Other)
    world.others_have(*parent.manifests[STEP])
    before = world.replica.digest()
    with pytest.raises(DivergedError):
        world.begins()
    assert world.replica.digest() == before, "nothing was loaded"


def test_a_contradicted_peer_computes_again_from_the_starting_state(tmp_path: Path, parent: Log) -> None:
    keeps_the_parents(tmp_path, parent)
    world = ForkWorld(tmp_path, ForkLog(parent, 6), starting_state(parent))
    world.begins()
    world.stores = False
    world.plays(1)
    with torch.no_grad():
        next(world.replica.model.parameters())[3, 3] += 1.0  # a bit flips before the first snapshot of its own
    world.replica._digest = None
    world.recovery.reached(1, world.replica.digest())
    world.plays(6)
    assert world.replica.digest() == world.log.digests[6]
    stands = ForkWorld(tmp_path / "other", ForkLog(parent, 6, {3: POISON}), starting_state(parent))
    stands.others_have(*parent.manifests[STEP])
    stands.begins()
    with pytest.raises(DivergedError, match="computed it again, with the same result"):
        stands.plays(6)


def test_the_coordinators_word_about_step_0_changes_nothing(tmp_path: Path, parent: Log) -> None:
    keeps_the_parents(tmp_path, parent)
    world = ForkWorld(tmp_path, ForkLog(parent, 2), starting_state(parent))
    world.begins()
    wrong = Snapshot(0, b"w" * 32, 1, HOLDER)
    with pytest.raises(DivergedError, match="contradicts the state that counts"):
        world.recovery.told(Resync(wrong, "another snapshot is agreed", step=0))
    assert world.replica.digest() == parent.digests[STEP]


def test_a_peer_that_comes_later_loads_a_snapshot_of_the_fork_itself(tmp_path: Path, parent: Log) -> None:
    log = ForkLog(parent, 6)
    world = ForkWorld(tmp_path, log, starting_state(parent))
    manifest, data = log.manifests[4]
    offered: Sequence[Snapshot] = [world.serves(manifest, data), *world.offers[1:]]
    world.recovery.begin(offered, 5)
    assert (world.replica.step, world.replica.digest()) == (4, log.digests[4])


def test_a_peer_that_has_gone_on_still_gives_the_starting_state(tmp_path: Path, parent: Log) -> None:
    keeps_the_parents(tmp_path, parent)
    log, start = ForkLog(parent, 6), starting_state(parent)
    ForkWorld(tmp_path, log, start).begins()
    back = ForkWorld(tmp_path, log, start)
    assert back.store.get(start.root) is None
    back.recovery.begin([back.serves(*log.manifests[4])], 5)
    assert back.replica.step == 4
    assert back.store.get(start.root) == parent.manifests[STEP][0].encoded
    back.keeper.agreed(0, back.start.stored(start.root))
    assert back.store.get(start.root) is not None
    back.plays(6)
    assert back.store.get(start.root) is not None, "the agreed snapshot stays"
    back.keeper.agreed(4, log.manifests[4][0].root)
    assert back.store.get(start.root) is None, "its pieces went, and with them the parent run's manifest"
    assert back.named[-1] == (0, start.root, False)


def test_people_are_told_that_a_run_is_a_fork(capsys: pytest.CaptureFixture[str]) -> None:
    genesis = log_pb2.Genesis(layout_digest=bytes(32), start=start_body(starting_state(Log(STEP))))
    facts = coordinator_pb2.GetRunResponse(genesis=genesis)
    show(as_values(facts, RunConfig(), FORK))
    words = f"fork of {RUN.hex()[:16]} at step {STEP}"
    assert words in capsys.readouterr().out
    assert MachineRequest("again", 9, "m", "d", "bytes", fork=words).lines()[0].endswith(f"9 steps, a {words}")
