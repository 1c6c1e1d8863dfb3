"""A thousand peers in virtual time: what a coordinator has to bear, and that all of them stay equal.

The coordinator's machine and its log, the payload codec and its door, the inbox and the optimizer are the real ones. What a
thousand whole peers would cost is shared: every peer has a momentum and votes of its own, but `GROUPS` of them share the
parameters (each group applies every entry and is compared), and `OBSERVERS` of them take all the gossip through a real
inbox. Peers come and go, are slow, lose messages, and one in a hundred lies about what it holds.
"""

import argparse
import heapq
import itertools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from coordinator.clock.effects import Effect, EntryCommitted, NoticeKind, SendEntry, SendNotice, SendTick, SnapshotFact
from coordinator.clock.events import Claim, Connected, Disconnected, JoinAsked, Reported, TimerFired
from node.optim.demo import DeMo
from node.optim.digest import state_digest
from node.swarm.inbox import Inbox
from node.training.optimizers import demo_config
from node.wire import UpdateDoor
from protos.envelope import Kind, seal
from protos.errors import Refusal
from protos.identity import Identity
from protos.log import Chain, SignedEntry, entry_hash, seal_entry
from protos.run_config import ClockConfig, RunConfig
from protos.slices import Update, encode_update, hash_of
from protos.tick import Tick
from protos.v1 import update_pb2
from tests.unit.coordinator.driver import RUN_ID, Harness

GROUPS, OBSERVERS = 8, 1
FLUSH_MS = 200  # real peers tell what they hold in bunches: a report at a time
CHECK_EVERY = 500  # events; the harness's checks look at everything
COORDINATOR = Identity.from_seed(b"c" * 32)


class Group:
    """A replica that many peers share: parameters, log, digest."""

    def __init__(self, config: RunConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"table": (64, 64), "bias": (64,)}
        self.named = [
            (name, torch.randn(shape, generator=generator).requires_grad_()) for name, shape in shapes.items()
        ]
        self.target = [torch.randn(tensor.shape, generator=generator) for _, tensor in self.named]
        self.demo = DeMo(self.named, demo_config(config.optimizer, 128, RUN_ID))
        self.door = UpdateDoor(RUN_ID, self.demo.layout.digest(), self.demo.layout.chunks)
        self.chain = Chain(RUN_ID, COORDINATOR.public_key)

    def apply(self, signed: SignedEntry, payloads: dict[bytes, bytes]) -> bytes:
        """The next entry; returns the state's digest."""
        entry = self.chain.extend(signed.envelope).entry
        updates = [self.door.open(payloads[c.payload_sha256], entry.step) for c in entry.contributions]
        self.demo.apply([(update.size, update.votes) for update in updates], entry.lr)
        return state_digest(self.demo.replicated, entry.step)


@dataclass
class Member:
    """One peer: its momentum, its life."""

    number: int
    identity: Identity
    group: Group
    demo: DeMo
    alive: bool = False
    life: int = 0
    mine: tuple[int, bytes, Claim] | None = None
    waiting: list[tuple[int, bytes, bytes]] = field(default_factory=list)


class Crowd(Harness):
    """Virtual time in ms; events of the machine as in the unit tests' driver, in batches as real peers send them."""

    def __init__(self, settings: RunConfig, peers: int, seed: int) -> None:
        self.events = 0
        super().__init__(settings)
        self.random = random.Random(seed)
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.groups = [Group(settings) for _ in range(GROUPS)]
        self.members = [self._member(number) for number in range(peers)]
        self.by_key = {member.identity.public_key: member for member in self.members}
        self.inboxes = [Inbox(RUN_ID) for _ in range(OBSERVERS)]
        self.payloads: dict[bytes, bytes] = {}
        self.said: list[tuple[int, bytes, bytes]] = []
        self.flushed = 0
        self.flushing = False
        for member in self.members:
            self.after(self.random.randrange(2_000), lambda m=member: self.join(m))  # type: ignore[misc]

    def _member(self, number: int) -> Member:
        group = self.groups[number % GROUPS]
        return Member(
            number, Identity.from_seed(number.to_bytes(32, "big")), group, DeMo(group.named, group.demo.config)
        )

    def check(self) -> None:
        """Everything now and then: it looks at all that there is."""
        self.events += 1
        if self.events % CHECK_EVERY == 0:
            super().check()

    # ---- time --------------------------------------------------------------------------------------------------------

    def after(self, delay: int, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.order), what))

    def play(self) -> None:
        """To the end of the run."""
        while not self.run.finished_told:
            timer = self.timer
            at = self.queue[0][0] if self.queue else None
            assert at is not None or timer is not None, f"nothing will ever happen again: {self.run.reason}"
            self.now = max(self.now, min(t for t in (at, timer) if t is not None))
            if timer is not None and timer <= self.now:
                self.told(self.feed(TimerFired()))
            else:
                heapq.heappop(self.queue)[2]()
        super().check()

    def tell(self, member: Member, **facts: object) -> None:
        """A report; one in fifty is lost, and told again."""
        if not member.alive:
            return
        life = member.life
        if self.random.random() < 0.02:
            self.after(200, lambda: self.tell(member, **facts) if member.life == life else None)
            return
        self.told(self.feed(Reported(member.identity.public_key, **facts)))  # type: ignore[arg-type]
        self.refusals.clear()

    # ---- what the coordinator says -----------------------------------------------------------------------------------

    def told(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendTick):
                everyone = self.members if effect.to is None else [self.by_key[effect.to]]
                self.after(10, lambda e=everyone, t=effect.tick: self.opened(e, t))  # type: ignore[misc]
            elif isinstance(effect, SendEntry):
                self.committed()
            elif isinstance(effect, SendNotice):
                assert effect.kind is not NoticeKind.RESYNC, effect.reason
        self.announced.clear()

    def opened(self, members: list[Member], tick: Tick) -> None:
        """Every roster member computes, some slowly."""
        roster = {share.public_key for share in tick.roster}
        for inbox in self.inboxes:
            inbox.open_step(tick.step, roster)
        for member in members:
            if member.alive and member.identity.public_key in roster:
                slow = 10 if member.number % 97 == 0 else 1
                delay = int(self.random.uniform(200, 600)) * slow
                self.after(delay, lambda m=member, life=member.life: self.vote(m, life, tick))  # type: ignore[misc]

    def vote(self, member: Member, life: int, tick: Tick) -> None:
        """Propose, encode, announce; others hear of it in batches."""
        if member.life != life or not member.alive or tick.step != self.run.head_step + 1:
            return
        key = member.identity.public_key
        if member.mine is None or member.mine[0] != tick.step:
            generator = torch.Generator().manual_seed(1000 * tick.step + member.number)
            for (_, parameter), target in zip(member.group.named, member.group.target, strict=True):
                parameter.grad = parameter.detach() - target + torch.randn(parameter.shape, generator=generator)
            votes = member.demo.propose(tick.lr)
            data = encode_update(RUN_ID, member.demo.layout.digest(), Update(tick.step, votes.size, votes.payload))
            samples = next(share.samples for share in tick.roster if share.public_key == key)
            sha256 = hash_of(data)
            self.payloads[sha256] = data
            claim = Claim(tick.step, tick.parent_hash, sha256, len(data), samples, samples * 8, 1.0, 400)
            member.mine = tick.step, sha256, claim
        _, sha256, claim = member.mine
        held = (tick.step, key, sha256)
        self.said.append(held)
        self._gossip(member, claim)
        lie = ((tick.step, key, bytes(32)),) if member.number % 100 == 1 else ()
        self.tell(member, claim=claim, holdings=(*lie, held))
        if not self.flushing:
            self.flushing = True
            self.after(FLUSH_MS, lambda: self._heard(tick))

    def _gossip(self, member: Member, claim: Claim) -> None:
        said = update_pb2.Announcement(
            step=claim.step,
            parent_hash=claim.parent_hash,
            payload_sha256=claim.payload_sha256,
            payload_bytes=claim.payload_bytes,
            samples=claim.samples,
            tokens=claim.tokens,
            loss=claim.loss,
            compute_ms=claim.compute_ms,
        )
        raw = seal(member.identity, Kind.KIND_ANNOUNCEMENT, RUN_ID, said).SerializeToString(deterministic=True)
        for inbox in self.inboxes:
            try:
                inbox.offer(raw, member.group.door.bytes_max)
            except Refusal:
                continue

    def _heard(self, tick: Tick) -> None:
        """What has been said since the last time reaches everyone, but for what is lost."""
        self.flushing = False
        batch = tuple(held for held in self.said[self.flushed :] if held[0] == self.run.head_step + 1)
        self.flushed = len(self.said)
        for member in self.members:
            if member.alive and self.random.random() > 0.01:
                delay = 20 + self.random.randrange(80)
                self.after(delay, lambda m=member, life=member.life: m.life == life and self.tell(m, holdings=batch))  # type: ignore[misc]

    def committed(self) -> None:
        """All replicas apply the entry and say so; now and then somebody comes or goes."""
        record = next(r for r in reversed(self.journal) if isinstance(r, EntryCommitted))
        signed = seal_entry(COORDINATOR, RUN_ID, record.entry)
        assert signed.hash == record.hash == entry_hash(record.body)
        digests = {group.apply(signed, self.payloads) for group in self.groups}
        assert len(digests) == 1, f"replicas differ after step {record.entry.step}"
        accepted = {c.public_key for c in record.entry.contributions}
        for inbox in self.inboxes:
            inbox.move_head(record.entry.step, signed.hash)
        self.said.clear()
        self.flushed = 0
        self.payloads.clear()
        digest, step = digests.pop(), record.entry.step
        for member in self.members:
            if member.mine is not None:
                member.demo.settle(member.identity.public_key in accepted)
                member.mine = None
            if member.alive:
                delay = 10 + self.random.randrange(50)
                self.after(delay, lambda m=member: self._applied(m, step, digest))  # type: ignore[misc]
        for member in self.random.sample(self.members, max(1, len(self.members) // 100)):
            self.after(self.random.randrange(300), lambda m=member: self.leave(m) if m.alive else self.join(m))  # type: ignore[misc]

    def _applied(self, member: Member, step: int, digest: bytes) -> None:
        stored = ()
        if step % self.settings.clock.snapshot_every == 0 or step == self.settings.clock.steps:
            stored = (SnapshotFact(step, hash_of(digest), 1000),)  # type: ignore[assignment]
        self.tell(member, applied=((step, digest),), snapshots=stored)

    # ---- coming and going --------------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        key, layout = member.identity.public_key, member.demo.layout
        member.alive, member.life = True, member.life + 1
        self.told(self.feed(JoinAsked(key, "cpu", layout.parameters, layout.digest(), ())))
        self.told(self.feed(Connected(key)))
        step = self.run.head_step
        digest = state_digest(member.group.demo.replicated, step)
        stored = (SnapshotFact(0, hash_of(digest), 1000),) if step == 0 else ()
        self.tell(member, applied=((step, digest),), snapshots=stored)

    def leave(self, member: Member) -> None:
        member.alive = False
        self.told(self.feed(Disconnected(member.identity.public_key, leaving=self.random.random() < 0.5)))


def run(peers: int, steps: int, seed: int) -> Crowd:
    """Play a whole run; raises AssertionError when something does not hold."""
    clock = ClockConfig(
        steps=steps,
        batch_samples=2 * peers,
        min_peers=peers // 2,
        max_peers=peers,
        snapshot_every=10,
        deadline_ms_min=1_000,
        deadline_ms_max=5_000,
    )
    crowd = Crowd(RunConfig(clock=clock), peers, seed)
    crowd.play()
    return crowd


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.crowd", description=__doc__)
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    crowd = run(options.peers, options.steps, options.seed)
    votes = sum(len(entry.contributions) for entry in crowd.entries)
    took = time.perf_counter() - began
    print(
        f"{options.peers} peers, {len(crowd.entries)} steps, {votes} votes accepted, {crowd.events} events in {took:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
