"""Who may join, apart from tickets (`test_tickets.py`) and what the operator decides (`test_peers.py`)."""

from dataclasses import replace

from coordinator.clock import admission
from coordinator.clock.state import PeerPhase
from protos.identity import peer_id
from protos.run_sections import AdmissionConfig
from tests.unit.coordinator.driver import LAYOUT, joined, key, sha
from tests.unit.coordinator.test_rules import READY, SYNCING, run_of


def test_admit_says_why_not() -> None:
    run = run_of(READY, SYNCING, max_peers=2)
    assert admission.admit(run, joined(0, LAYOUT))[0] is None, "it is here already"
    assert "full" in admission.admit(run, joined(5, LAYOUT))[1]
    assert "layout" in admission.admit(run_of(READY), joined(5, sha("other")))[1]
    listed = AdmissionConfig(mode="allow_list", allowed=[peer_id(key(1))])
    only = replace(run_of(), config=run.config.model_copy(update={"admission": listed}))
    assert admission.admit(only, joined(1, LAYOUT))[0] is None
    assert "allow-list" in admission.admit(only, joined(2, LAYOUT))[1]


def test_after_a_start_places_are_kept_for_members_that_were_not_heard_of() -> None:
    run = run_of(READY, SYNCING, PeerPhase.ABSENT)
    assert admission.may_return(run) == run.config.clock.max_peers, "before its first step, nothing is known"
    run = replace(run, roster=tuple(key(n) for n in range(4)))
    assert admission.may_return(run) == 2, "key 2 is away, and key 3 is unknown"
    hung_up = replace(run.peers[key(2)], gone=True)
    assert admission.may_return(replace(run, peers={**run.peers, key(2): hung_up})) == 1
