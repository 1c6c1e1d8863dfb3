"""What goes wrong, and when: drawn from the seed before the world begins. Knows the world's switches, not its rules."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from coordinator.clock.events import ChangeAsked, ExclusionAsked, PauseAsked, ReadmissionAsked, ResumeAsked
from protos.changes import settings_of
from tests.sim.network import COORDINATOR, Weather
from tests.sim.world import PeerProcess, World

LASTS_SECONDS_MAX = 30.0
"""Of one fault, for each minute of the world's bad time."""


@dataclass(frozen=True)
class Fault:
    """At `at` seconds, for `seconds`."""

    at: float
    seconds: float
    name: str
    who: int


def crash_peer(world: World, fault: Fault) -> Callable[[], None]:
    peer = world.peers[fault.who]
    peer.crash()
    return peer.start


def leave(world: World, fault: Fault) -> Callable[[], None]:
    """Ctrl-C, and the same command again."""
    peer = world.peers[fault.who]
    peer.leaving = True

    def comes_back() -> None:
        peer.leaving = False
        peer.start()

    return comes_back


def bad_disk(world: World, fault: Fault) -> Callable[[], None]:
    """A file of a peer's home is cut, gone or has another bit when the peer comes back from a kill, where others have all.

    But for its last announcement: without that it refuses to start, until somebody says that it may.
    """
    peer = world.peers[fault.who]
    if not _others_have_all(world, peer):
        return lambda: None
    peer.crash()
    chance = random.Random(f"{world.seed} {fault.at}")
    files = [path for path in peer.folder.rglob("*") if path.is_file() and path.name != "announced"]
    if files:
        path, kind = chance.choice(sorted(files)), chance.choice(("bit", "cut", "gone"))
        world.note(f"{peer.name}'s {path.relative_to(peer.folder)}: {kind}")
        data = bytearray(path.read_bytes())
        if kind == "gone":
            path.unlink()
        elif data:
            at = chance.randrange(len(data))
            data[at] ^= 1 << chance.randrange(8)
            path.write_bytes(data if kind == "bit" else data[:at])
    return peer.start


def lost_home(world: World, fault: Fault) -> Callable[[], None]:
    """All that a peer stored is gone, where others have all. It has its key still."""
    peer = world.peers[fault.who]
    if not _others_have_all(world, peer):
        return lambda: None
    peer.crash()
    shutil.rmtree(peer.folder, ignore_errors=True)
    return peer.start


def lost_sum(world: World, fault: Fault) -> Callable[[], None]:
    """The home of an aggregator is lost while it adds votes up, and the coordinator is killed with it, or is not."""
    ended = list[bool]()

    def look() -> None:
        run = world.coordinator.hub.runs[world.coordinator.run_id].run
        if world.coordinator.service is not None and run.step is not None and run.step.summing is not None:
            adding = [peer for peer in world.peers if peer.identity.public_key in run.step.tick.aggregators]
            peer = adding[fault.who % len(adding)]
            world.note(f"{peer.name} lost its home while it added up step {run.step.tick.step}")
            world.loop.call_later(2.0, lost_home(world, replace(fault, who=world.peers.index(peer))))
            if fault.who % 2:
                world.loop.call_later(1.0, crash_coordinator(world, fault))
        elif not ended:
            world.loop.call_later(0.01, look)

    look()
    return lambda: ended.append(True)


def old_home(world: World, fault: Fault) -> Callable[[], None]:
    """A peer's home comes back as it was when the fault began (a backup, a snapshot), where others have all.

    Not one of the step before: with that the peer may vote in the open step, though it did so before (ADR 19)."""
    peer, backup = world.peers[fault.who], world.folder / f"backup-{fault.at}"
    old_enough = world.coordinator.head_step + 2
    if peer.folder.exists():
        shutil.copytree(peer.folder, backup)

    def restored() -> None:
        old = backup.exists() and world.coordinator.head_step >= old_enough
        if old and not peer.finished and _others_have_all(world, peer):
            peer.crash()
            shutil.rmtree(peer.folder, ignore_errors=True)
            shutil.copytree(backup, peer.folder)
            world.note(f"{peer.name} has its home of {fault.at:.1f} s")
            peer.start()

    return restored


def _others_have_all(world: World, peer: PeerProcess) -> bool:
    others = [other.replica for other in world.peers if other is not peer and other.running]
    return sum(replica is not None and replica.step >= world.coordinator.head_step for replica in others) >= 2


def power_cut(world: World, _: Fault) -> Callable[[], None]:
    """All peers are on one machine: what they wrote since the fault began is gone, but for what they synced."""
    before = {path.stat().st_ino for peer in world.peers for path in peer.folder.rglob("*")}

    def cut() -> None:
        for peer in world.peers:
            peer.crash()
            for path in [path for path in peer.folder.rglob("*") if path.is_file()]:
                if path.stat().st_ino not in before | world.synced:
                    path.unlink()
            peer.start()

    return cut


def crash_coordinator(world: World, _: Fault) -> Callable[[], None]:
    coordinator = world.coordinator
    if coordinator.service is None:
        return lambda: None
    coordinator.crash()
    return coordinator.start


def stopped(world: World, fault: Fault) -> Callable[[], None]:
    """A peer does nothing, or the coordinator, and nobody hears from it: SIGSTOP, or its machine sleeps, and its clock, too."""
    name = COORDINATOR if fault.who == 1 else world.peers[fault.who].name
    sleeps, since = fault.at % 2 < 1, world.loop.now
    world.loop.stop_process(name, asleep=sleeps)
    return lambda: world.loop.continue_process(name, slept=sleeps * (world.loop.now - since))


def old_journal(world: World, fault: Fault) -> Callable[[], None]:
    """The coordinator's journal comes back as it was when the fault began, where all peers keep what it lost (ADR 2)."""
    backup, coordinator = world.folder / f"journal-{fault.at}", world.coordinator
    began = coordinator.head_step
    with closing(sqlite3.connect(backup)) as copy, closing(sqlite3.connect(coordinator.path)) as journal:
        journal.backup(copy)

    def restored() -> None:
        head = coordinator.head_step
        here = [peer.keeps(began, head) for peer in world.peers]
        over = head >= world.config.clock.steps  # peers that have heard of the end leave, and keep nothing
        if coordinator.service is None or not all(here) or coordinator.full or over:
            return
        coordinator.crash()
        for path in coordinator.path.parent.glob(f"{coordinator.path.name}*"):
            path.unlink()
        shutil.copyfile(backup, coordinator.path)
        world.checkers.journal_lost()
        coordinator.start()
        world.note(f"the coordinator has its journal of {fault.at:.1f} s, of step {coordinator.head_step}")

    return restored


def partition(world: World, fault: Fault) -> Callable[[], None]:
    """Two halves; the coordinator is in one of them."""
    chance = random.Random(fault.who * 7919 + world.seed)
    names = [COORDINATOR, *(peer.name for peer in world.peers)]
    world.net.groups = {name: chance.randrange(2) for name in names}
    return world.net.groups.clear


def cut_off(world: World, fault: Fault) -> Callable[[], None]:
    """One peer alone."""
    world.net.groups[world.peers[fault.who].name] = 100 + fault.who
    return lambda: world.net.groups.pop(world.peers[fault.who].name, None) and None


def storm(world: World, _: Fault) -> Callable[[], None]:
    """A third of all packets lost, some twice, all late and out of order."""
    world.net.weather = Weather(delay=(0.02, 0.3), loss=0.3, twice=0.2, jitter=5.0)
    return lambda: setattr(world.net, "weather", Weather())


def slow_peer(world: World, fault: Fault) -> Callable[[], None]:
    peer = world.peers[fault.who]
    before, peer.compute_seconds = peer.compute_seconds, 10 * peer.compute_seconds
    return lambda: setattr(peer, "compute_seconds", min(before, peer.compute_seconds))


def full_disk(world: World, _: Fault) -> Callable[[], None]:
    world.coordinator.full = True
    return lambda: setattr(world.coordinator, "full", False)


def equivocate(world: World, fault: Fault) -> Callable[[], None]:
    """A peer with two faces: two payloads for each step. Only while the run can go on without all who ever had two."""
    peer = world.peers[fault.who]
    liars = world.liars | {peer.name}
    if len(world.peers) - len(liars) < world.config.clock.min_peers:
        return lambda: None
    world.liars = liars
    peer.equivocate(True)
    return lambda: peer.equivocate(False)


def false_sums(world: World, fault: Fault) -> Callable[[], None]:
    """An aggregator that leaves all votes but one out of its sums. One at a time: two that lie alike are believed."""
    peer = world.peers[fault.who]
    if any(other.lies_in_sums for other in world.peers):
        return lambda: None
    peer.lies_in_sums = True
    return lambda: setattr(peer, "lies_in_sums", False)


def misname(world: World, fault: Fault) -> Callable[[], None]:
    """A peer that names a wrong length of its payloads to the coordinator: they count as nothing, on every replica."""
    peer = world.peers[fault.who]
    peer.misname(True)
    return lambda: peer.misname(False)


def bit_flip(world: World, fault: Fault) -> Callable[[], None]:
    """Bad memory: a weight of one replica changes. Not after the run's last step, which no later one could tell of."""
    peer = world.peers[fault.who]
    others = [other for other in world.peers if other is not peer and other.running and other.replica is not None]
    if not peer.running or peer.replica is None or len(others) < 2:
        return lambda: None
    if 0 < peer.replica.step < world.config.clock.steps:
        world.checkers.corrupted(peer.name, peer.replica.step)
        bits = peer.replica.demo.parameters[0].detach().view(torch.int32)  # type: ignore[attr-defined]
        bits[fault.who, fault.who] ^= 1
    return lambda: None


def exclude(world: World, fault: Fault) -> Callable[[], None]:
    """The operator removes a peer, here or away, and lets it come back."""
    key = world.peers[fault.who].identity.public_key
    world.operate(ExclusionAsked(key, "its machine is gone"))
    return lambda: world.operate(ReadmissionAsked(key))


def change(world: World, fault: Fault) -> Callable[[], None]:
    """The operator pauses the run, and lets it go on with another length, other snapshots, and another rate and batch."""
    values = {
        "clock.steps": world.config.clock.steps + 2 * fault.who,
        "clock.snapshot_every": (2, 3, 7)[fault.who % 3],
        "clock.batch_samples": 12 + 4 * fault.who,
        "optimizer.lr": 1e-3 * (1 + fault.who),
    }
    world.operate(PauseAsked("other settings"))
    world.operate(ChangeAsked(settings_of(values)))
    return lambda: world.operate(ResumeAsked())


def full_peer_disk(world: World, fault: Fault) -> Callable[[], None]:
    peer = world.peers[fault.who]
    peer.full = True
    return lambda: setattr(peer, "full", False)


FAULTS = {
    "crash-peer": crash_peer,
    "crash-coordinator": crash_coordinator,
    "partition": partition,
    "cut-off": cut_off,
    "storm": storm,
    "stopped": stopped,
    "slow-peer": slow_peer,
    "equivocate": equivocate,
    "full-disk": full_disk,
    "full-peer-disk": full_peer_disk,
}
"""By name; each returns what ends it."""

ALONE = {
    "false-sums": false_sums,
    "bit-flip": bit_flip,
    "misname": misname,
    "exclude": exclude,
    "change": change,
    "leave": leave,
    "bad-disk": bad_disk,
    "lost-home": lost_home,
    "old-home": old_home,
    "old-journal": old_journal,
    "lost-sum": lost_sum,
    "power-cut": power_cut,
}
"""Those that are only drawn when they are asked for: where memory is bad and others crash, the wrong replica may be all that is
left; where nobody names the right length, every step is empty; and an operator's decisions are no faults."""


def drawn(chance: random.Random, peers: int, names: list[str], seconds: float) -> list[Fault]:
    """Between none and a dozen a minute, overlapping, in the first `seconds`; afterwards all is well."""
    minutes = round(seconds / 60)
    found = []
    for _ in range(minutes * chance.randrange(13)):
        at, lasts = chance.uniform(0.0, seconds), chance.uniform(0.2, LASTS_SECONDS_MAX * minutes)
        found.append(Fault(at, min(lasts, seconds - at), chance.choice(names), chance.randrange(peers)))
    return sorted(found, key=lambda fault: fault.at)


def schedule(world: World, faults: list[Fault]) -> None:
    """Let them happen in time."""
    for fault in faults:
        world.loop.call_later(fault.at, _begin, world, fault)


def _begin(world: World, fault: Fault) -> None:
    world.note(f"{fault.name} {fault.who} for {fault.seconds:.1f} s")
    end = (FAULTS | ALONE)[fault.name](world, fault)
    world.loop.call_later(fault.seconds, end)
