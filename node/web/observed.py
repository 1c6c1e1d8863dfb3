"""What happened between two looks at a run, from the coordinator's facts: peers that came and went, phases, snapshots. Pure.

The texts of the facts are a stranger's. `Book.tell` makes them printable.
"""

from __future__ import annotations

from collections.abc import Iterator

from protos.identity import peer_id
from protos.limits import DEVICE_CHARACTERS_MAX, PUBLIC_KEY_BYTES
from protos.phases import phase_word
from protos.v1 import coordinator_pb2 as pb


def peers_of(facts: pb.GetRunResponse, peers_max: int) -> list[pb.PeerStatus]:
    """The peers with a whole public key: at most `peers_max`, those that are here first."""
    return [peer for peer in facts.peers if len(peer.public_key) == PUBLIC_KEY_BYTES][:peers_max]


def here(facts: pb.GetRunResponse) -> dict[bytes, pb.PeerStatus]:
    """The peers that are connected."""
    whole = peers_of(facts, len(facts.peers))
    return {peer.public_key: peer for peer in whole if peer.phase != pb.PeerPhase.PEER_PHASE_ABSENT}


def happenings(before: pb.GetRunResponse | None, now: pb.GetRunResponse) -> Iterator[tuple[str, str]]:
    """(kind, text) of each event between two looks, in the order in which a person reads them."""
    if before is None:
        return
    then, present = here(before), here(now)
    for key in present.keys() - then.keys():
        device = present[key].device[:DEVICE_CHARACTERS_MAX]
        yield "joined", f"{peer_id(key)} is connected ({device})"
    for key in then.keys() - present.keys():
        yield "left", f"{peer_id(key)} is not connected any more"
    for key in present.keys() & then.keys():
        if present[key].paused != then[key].paused:
            yield "paused", f"the owner of {peer_id(key)} {'paused it' if present[key].paused else 'lets it go on'}"
        if present[key].standing != then[key].standing:
            why = f": {present[key].standing_reason}" if present[key].standing_reason else ""
            yield "standing", f"{peer_id(key)} is {present[key].standing}{why}"
    if now.HasField("snapshot") and now.snapshot.step != (before.snapshot.step if before.HasField("snapshot") else -1):
        yield "snapshot", f"the snapshot of step {now.snapshot.step} is agreed"
    if phase_word(before) != phase_word(now):
        yield "phase", f"the run is {phase_word(now)}: {now.reason}"
