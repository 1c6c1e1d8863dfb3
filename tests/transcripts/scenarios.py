"""The six rounds. Peers: ada (80 ms a step), bob (110 ms), cid (140 ms), dan; virtual time, no chance."""

from collections.abc import Callable

from coordinator.clock.events import Reported
from protos.equivocation import Offence
from protos.log import Equivocation
from tests.transcripts.render import Transcript
from tests.unit.coordinator.driver import PlayedPeer, config, key, sha


def swarm(steps: int = 2, peers: int = 3, **clock: object) -> Transcript:
    """Honest peers that start together."""
    usual: dict[str, object] = {"min_peers": 3, "batch_samples": 12, "snapshot_every": 10}
    return Transcript(config(steps=steps, **{**usual, **clock}), peers)


def quiet() -> Transcript:
    """A quiet step: three peers start a run, and the first step is decided when a quorum holds all three payloads."""
    made = swarm()
    made.play(lambda: made.run.head_step == 1)
    return made


def late() -> Transcript:
    """A late vote: cid takes 60 s for a step in which the others take 0.1 s. The deadline decides without it."""
    made = swarm(steps=3, min_peers=2)
    made.play(lambda: made.run.head_step == 1)
    made.begin("Step 1 is decided, and step 2 is open. From now on cid needs 60 s for a step.")
    made.peers[2].compute_ms = 60_000
    made.play(lambda: made.run.head_step == 2)
    return made


def killed() -> Transcript:
    """A peer is killed in the middle of a step. The step goes on without it, and its samples go back to the pool."""
    made = swarm(steps=3, min_peers=2)
    made.play(lambda: made.run.head_step == 1 and made.run.step is not None)
    made.begin("Step 1 is decided, and step 2 is open.")
    made.play(lambda: made.run.step is not None and len(made.run.step.claims) == 1)
    made.note("cid is killed.")
    made.kill(made.peers[2])
    made.play(lambda: made.run.head_step == 2)
    return made


def equivocation() -> Transcript:
    """Two payloads for one step: bob sees two announcements that cid signed, and reports them. cid is excluded at once."""
    made = swarm(steps=3, min_peers=2)
    made.play(lambda: made.run.head_step == 1 and made.run.step is not None)
    made.begin("Step 1 is decided, and step 2 is open.")
    proof = Equivocation(b"one announcement", b"another announcement")
    made.note("bob has heard two announcements of step 2 that cid signed.")
    made.event(Reported(key(1), offences=(Offence(key(2), 2, (sha(1), sha(2)), proof),)))
    made.play(lambda: made.run.head_step == 2)
    return made


def take_over() -> Transcript:
    """A take-over: the coordinator dies in an open step, and another one goes on from the journal."""
    made = swarm()
    made.play(lambda: made.run.step is not None)
    made.begin("Step 1 is open.")
    made.play(lambda: made.run.step is not None and len(made.run.step.claims) == 2)
    made.crash()
    made.play(lambda: made.run.head_step == 1)
    return made


def late_joiner() -> Transcript:
    """A late joiner: dan comes after step 1, replays the log, and takes part from the next step on."""
    made = swarm(steps=3)
    made.play(lambda: made.run.head_step == 1)
    made.begin("Step 1 is decided, and step 2 is open. dan joins.")
    made.peers.append(PlayedPeer(3, 90))
    made.connect(made.peers[3])
    made.play(lambda: made.run.head_step == 3)
    return made


SCENARIOS: dict[str, Callable[[], Transcript]] = {
    "quiet": quiet,
    "late": late,
    "killed": killed,
    "equivocation": equivocation,
    "take-over": take_over,
    "late-joiner": late_joiner,
}


def written(name: str) -> str:
    """The whole text of a transcript."""
    scenario = SCENARIOS[name]
    return f"# {scenario.__doc__}\n\n{scenario().text()}"
