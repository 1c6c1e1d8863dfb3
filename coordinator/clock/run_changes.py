"""Changes of a run's state: its next phase, or that of a peer; one peer changed, and with it all that follows from its peers;
and settings that the operator changes while the run is paused.

Refuses moves that the tables in `state.py` do not have, and to remember more than PEERS_KEPT peers.

A change of settings counts from the step after the open one. Limits that only the coordinator reads count at once. Each entry
names the settings of its step, so entries that come back to a journal that lost its end bring them along. Refuses what
`protos/changes.py` does not list, and every change of a run that is not paused. ADR 44.
"""

from __future__ import annotations

from coordinator.clock import rules
from coordinator.clock.effects import SettingsChanged
from coordinator.clock.state import (
    CHANGES_MAX,
    MOVES,
    PEER_MOVES,
    PEERS_KEPT,
    Peer,
    PeerPhase,
    Phase,
    Run,
    changed_settings,
)
from coordinator.clock.value_copy import replace
from protos.changes import RATE_KEYS, STEPS, Settings, merged, values_of, with_settings, words
from protos.errors import Refusal
from protos.identity import short
from protos.log import Entry
from protos.run_config import RunConfig


def move(run: Run, phase: Phase) -> Run:
    """The run in this phase. An illegal move is our own mistake."""
    assert phase in MOVES[run.phase], f"{run.phase} cannot become {phase}"
    return replace(run, phase=phase)


def move_peer(peer: Peer, phase: PeerPhase) -> Peer:
    """The peer in this phase. An illegal move is our own mistake."""
    assert phase in PEER_MOVES[peer.phase], f"peer {short(peer.public_key)}: {peer.phase} cannot become {phase}"
    return replace(peer, phase=phase)


def with_peer(run: Run, peer: Peer) -> Run:
    """The run with this peer, new or changed. The open step's masks follow."""
    step = None if run.step is None else rules.met(run.step, peer)
    electors = None if rules.changes_electors(run.peers.get(peer.public_key), peer) else run.electors
    peers = {**run.peers, peer.public_key: peer}
    return bounded(replace(run, step=step, electors=electors, peers=peers), peer.public_key)


def bounded(run: Run, newest: bytes = b"") -> Run:
    """Forget the absent peers with the fewest accepted votes, and their reports, while there are too many peers.

    `newest`: a peer to keep; members of the last roster are kept, too.
    """
    while len(run.peers) > PEERS_KEPT:
        kept = {newest, *run.roster}
        absent = [peer for key, peer in run.peers.items() if peer.phase is PeerPhase.ABSENT and key not in kept]
        gone = min(absent, key=lambda peer: (peer.votes_accepted, peer.public_key)).public_key
        digests, snapshots = run.reported_digests, run.reported_snapshots
        run = replace(
            run,
            electors=None,
            peers={key: peer for key, peer in run.peers.items() if key != gone},
            reported_digests={s: {k: v for k, v in r.items() if k != gone} for s, r in digests.items()},
            reported_snapshots={s: {k: v for k, v in r.items() if k != gone} for s, r in snapshots.items()},
        )
    return run


def decided_next(run: Run) -> int:
    """The newest step whose learning rate and samples are fixed: the open one has them in its tick."""
    return run.head_step + (run.step is not None)


def said(change: SettingsChanged) -> str:
    """A change for people."""
    return f"the operator changed the run from step {change.after_step + 1} on: {words(change.settings)}"


def applied(run: Run, changes: tuple[SettingsChanged, ...]) -> Run:
    """The run with these changes and no others. Raises Refusal for settings that do not fit."""
    if len(changes) > CHANGES_MAX:  # entries that came back had more of them than were counted here
        changes = (SettingsChanged(changes[-1].after_step, changed_settings(changes)),)
    defined = run.defined or run.config
    changed = replace(run, config=with_settings(defined, changed_settings(changes)), changes=changes)
    if changed.config.clock.snapshot_every == run.config.clock.snapshot_every:
        return changed
    # Periods have other numbers now. A peer that served in the present one has served in it.
    now = rules.period_of(changed, max(run.head_step, 1))
    peers = {key: replace(peer, last_period=min(peer.last_period, now)) for key, peer in run.peers.items()}
    return replace(changed, peers=peers)


def adopted(run: Run, entry: Entry) -> Run:
    """The run as its own signed entry has it: the journal may have lost the record of a change, but not what was signed."""
    if entry.settings == run.settings_at(entry.step):
        return run
    before = tuple(change for change in run.changes if change.after_step < entry.step)
    known = changed_settings(before)
    new = tuple(item for item in entry.settings if item not in known)
    if merged(known, new) != entry.settings:  # a change that no entry has: it was made on a journal without its end
        before, new = (), entry.settings
    return applied(run, (*before, SettingsChanged(entry.step - 1, new)) if new else before)


def refusal(run: Run, settings: Settings) -> str:
    """Why the settings of a run may not change so; empty if they may."""
    name = run.config.name
    if not run.is_paused:
        return (
            f"the run is not paused, and settings change only while no step opens: `swarmentum-coordinator run pause {name}` "
            "first, and `run resume` afterwards"
        )
    if not settings:
        return "no setting to change: name one, for example clock.steps=2000"
    if len(run.changes) >= CHANGES_MAX:
        return f"the run's settings changed {CHANGES_MAX} times, as often as they can: `run fork` makes a new run"
    keys = {key for key, _ in settings}
    if run.decay is not None and keys & (RATE_KEYS | {STEPS}):
        ends = f"the learning rate decays since step {run.decay.after_step}, and the run ends at step {run.decay.last_step}"
        return f"{ends}: neither {STEPS} nor the rate can change any more"
    try:
        config = with_settings(run.defined or run.config, merged(changed_settings(run.changes), settings))
    except Refusal as error:
        return error.detail
    return _no_sense(run, config, settings)


def _no_sense(run: Run, config: RunConfig, settings: Settings) -> str:
    after, steps, optimizer = decided_next(run), config.clock.steps, config.optimizer
    if config == run.config:
        return f"the run has these values already: {words(settings)}"
    if steps <= after:
        return (
            f"{STEPS} = {steps}: step {after} is {'open' if run.step else 'decided'} already; `run finish` ends the run"
        )
    if "optimizer.warmup_steps" in values_of(settings) and optimizer.warmup_steps >= steps:
        return f"the warm-up of {optimizer.warmup_steps} steps is not shorter than the run of {steps}"
    if "optimizer.decay_steps" in values_of(settings) and optimizer.schedule != "wsd":
        return (
            f"optimizer.decay_steps has no effect with schedule {optimizer.schedule}: set optimizer.schedule=wsd, too"
        )
    if optimizer.schedule == "wsd" and optimizer.decay_steps + optimizer.warmup_steps > steps:
        both = f"a decay of {optimizer.decay_steps} and a warm-up of {optimizer.warmup_steps} steps"
        return f"{both} are longer than the run of {steps}"
    return ""
