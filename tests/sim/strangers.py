"""Fifty honest peers, an anchor, and a hundred strangers that compute nothing: `python -m tests.sim.strangers`.

The crowd of `crowd.py` in a run as `run create --anchor` makes it: an anchor's word counts, and peers check each other. The
strangers come from a hundred blocks of network addresses, collude, and are always first: with states and snapshots that nobody
computed, digests copied from the log to seem ready, payloads that nobody has, and all samples in no time. What a check finds is
given (honest votes fit their samples, the strangers' are nowhere to be found); everything that decides is real. The run is
compared with the same run without strangers.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass

import torch

from coordinator.clock.effects import Effect, EntryCommitted, NoticeKind, SendEntry, SendNotice, SendTick, SnapshotFact
from coordinator.clock.events import Claim, Connected, JoinAsked, Reported, TicketAsked
from node.optim.digest import state_digest
from protos import checks
from protos.identity import Identity
from protos.invite import Ticket
from protos.log import Verdict
from protos.run_config import ClockConfig, RunConfig, TrustConfig
from protos.slices import hash_of
from protos.tick import Tick
from tests.sim.crowd import Crowd, Member
from tests.unit.coordinator.driver import sha

GOOD, NOTHING = (60.0, 25.0), (0.0, 0.0)
TICKET = Ticket(b"a" * 16, 0, 1, "anchor", anchor=True)
COME_MS = 6_000


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `distance`: of the parameters to what they learn; `seconds`: of virtual time."""

    distance: float
    seconds: float
    stranger_votes: int
    stranger_places: int
    wrong_digests: int
    lost_honest: int


class Besieged(Crowd):
    """`crowd.Crowd` with an anchor, checks and `strangers`."""

    def __init__(self, settings: RunConfig, peers: int, strangers: int, seed: int) -> None:
        self.strangers: list[bytes] = []
        self.wrong = self.lost = 0
        super().__init__(settings, peers, seed)
        self.feed(TicketAsked(TICKET, 1))
        self.anchor = self._member(10_000)
        self.members.append(self.anchor)
        self.by_key[self.anchor.identity.public_key] = self.anchor
        self.join(self.anchor)
        self.strangers = [Identity.from_seed((20_000 + n).to_bytes(32, "big")).public_key for n in range(strangers)]
        if strangers:
            self.after(COME_MS, self.come)

    def come(self) -> None:
        """All at once, each from a block of its own."""
        for number, key in enumerate(self.strangers):
            layout = self.anchor.demo.layout
            event = JoinAsked(key, "cpu", layout.parameters, layout.digest(), (), network=f"198.{number}.0.0/24")
            self.told(self.feed(event))
            self.told(self.feed(Connected(key)))
        self.pretend()

    def join(self, member: Member) -> None:
        if member is not getattr(self, "anchor", None):
            super().join(member)
            return
        key, layout = member.identity.public_key, member.demo.layout
        member.alive = True
        event = JoinAsked(key, "cpu", layout.parameters, layout.digest(), (), TICKET, 1, anchor=True)
        self.told(self.feed(event))
        self.told(self.feed(Connected(key)))
        digest = state_digest(member.group.demo.replicated, 0)
        self.tell(member, applied=((0, digest),), snapshots=(SnapshotFact(0, hash_of(digest), 1000),))

    def leave(self, member: Member) -> None:
        if member is not self.anchor:
            super().leave(member)

    # ---- the strangers, before anybody else --------------------------------------------------------------------------

    def told(self, effects: list[Effect]) -> None:
        honest: list[Effect] = []
        for effect in effects:
            if isinstance(effect, SendNotice) and effect.kind is NoticeKind.RESYNC:
                self.lost += effect.to not in self.strangers
                continue
            if isinstance(effect, SendTick) and (effect.to is None or effect.to in self.strangers):
                tick = effect.tick
                self.after(1, lambda t=tick: self.claim(t))  # type: ignore[misc]
            if isinstance(effect, SendTick) and effect.to in self.strangers:
                continue
            if isinstance(effect, SendEntry):
                self.after(1, self.pretend)
                self.after(150, self.copy)
            honest.append(effect)
        super().told(honest)

    def pretend(self) -> None:
        """To have the state after the newest entry, and its snapshot."""
        step = self.run.head_step
        due = step % self.settings.clock.snapshot_every == 0
        stored = (SnapshotFact(step, sha("poison", step), 1),) if due else ()
        for number, key in enumerate(self.strangers):
            applied = ((step, sha("poison", step)),) if number % 4 == 0 else ()
            self.told(self.feed(Reported(key, applied=applied, snapshots=stored)))
        self.refusals.clear()

    def copy(self) -> None:
        """`GetRun` shows digests once they are agreed: most strangers report it as theirs, and seem ready."""
        step = self.run.head_step
        agreed = self.run.agreed_digests.get(step)
        for number, key in enumerate(self.strangers if agreed else ()):
            if number % 4:
                self.told(self.feed(Reported(key, applied=((step, agreed),))))  # type: ignore[arg-type]
        self.refusals.clear()

    def claim(self, tick: Tick) -> None:
        """Payloads that nobody has, held by all strangers."""
        here = [key for key in self.strangers if key in tick.places]
        held = tuple((tick.step, key, sha("nothing", tick.step, key)) for key in here)
        samples = sum(map(len, tick.pool))
        for key in here:
            nothing = sha("nothing", tick.step, key)
            claim = Claim(tick.step, tick.parent_hash, nothing, 100, samples, 1 << 50, 9e29, 0)
            self.told(self.feed(Reported(key, claim=claim, holdings=held)))
        self.refusals.clear()

    # ---- checks ------------------------------------------------------------------------------------------------------

    def committed(self) -> None:
        record = next(r for r in reversed(self.journal) if isinstance(r, EntryCommitted))
        entry, step = record.entry, record.entry.step
        if entry.parent_state_digest:
            self.wrong += entry.parent_state_digest != self.truth
        super().committed()
        self.truth = state_digest(self.groups[0].demo.replicated, step)
        payloads = {c.public_key: c.payload_sha256 for c in (*entry.contributions, *entry.trials)}
        drawn = checks.drawn(record.hash, entry, self.settings.trust.checkers)
        for member in self.members:
            key = member.identity.public_key
            found = tuple(
                Verdict(step, key, subject, payloads[subject], *(NOTHING if subject in self.strangers else GOOD))
                for subject, checkers in drawn.items()
                if key in checkers
            )
            if found and member.alive:
                self.after(60, lambda m=member, f=found: self.tell(m, verdicts=f))  # type: ignore[misc]

    truth = b""


def run(peers: int, strangers: int, steps: int, seed: int) -> tuple[Besieged, Outcome]:
    """A whole run; raises AssertionError when something does not hold."""
    clock = ClockConfig(
        steps=steps,
        batch_samples=2 * peers,
        min_peers=peers // 2,
        max_peers=max(256, 2 * (peers + strangers)),
        snapshot_every=10,
        deadline_ms_min=1_000,
        deadline_ms_max=5_000,
    )
    trust = TrustConfig(enabled=True, anchored=True)
    crowd = Besieged(replace_lr(RunConfig(clock=clock, trust=trust)), peers, strangers, seed)
    crowd.play()
    group = crowd.groups[0]
    distance = statistics.fmean(
        float((parameter.detach() - target).abs().mean())
        for (_, parameter), target in zip(group.named, group.target, strict=True)
    )
    votes = sum(c.public_key in crowd.strangers for entry in crowd.entries for c in entry.contributions)
    places = sum(key in tick.places for tick in crowd.ticks for key in crowd.strangers)
    return crowd, Outcome(distance, crowd.now / 1000, votes, places, crowd.wrong, crowd.lost)


def replace_lr(settings: RunConfig) -> RunConfig:
    """A rate at which the crowd's small model learns within some steps."""
    return settings.model_copy(update={"optimizer": settings.optimizer.model_copy(update={"lr": 2e-2})})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.strangers", description=__doc__)
    parser.add_argument("--peers", type=int, default=50)
    parser.add_argument("--strangers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    calm = run(options.peers, 0, options.steps, options.seed)[1]
    besieged = run(options.peers, options.strangers, options.steps, options.seed)[1]
    print(f"without strangers: {calm}\nwith {options.strangers}: {besieged}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
