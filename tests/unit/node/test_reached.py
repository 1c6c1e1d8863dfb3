"""The digest of a state is hashed while the training goes on, and is that of the state as it was."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from node.training import progress
from node.training.progress import DigestReporter
from node.training.replica import Replica
from protos.errors import NetworkError
from tests.unit.node.test_recovery import Log, replica, updates_of


class Around:
    """What stands around: the swarm, and the recovery."""

    def __init__(self) -> None:
        self.facts: list[tuple[str, int, bytes]] = []
        self.doubts = False
        self.away = False

    def applied(self, step: int, digest: bytes) -> None:
        if self.away:
            raise NetworkError("the swarm is closed")
        self.facts.append(("told", step, digest))

    def reached(self, step: int, digest: bytes) -> None:
        self.facts.append(("reached", step, digest))


@pytest.fixture
def around() -> Around:
    return Around()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[tuple[Replica, threading.Event]]:
    """A replica whose digest takes until the event is set; at most half a second, or what a test says."""
    monkeypatch.setattr(progress, "BEHIND_BYTES_MIN", 0)
    held, go = replica(), threading.Event()
    at_once = held.demo.state_digest

    def later(step: int | None, all_in: int = 0) -> bytes:
        go.wait(getattr(request, "param", 0.5))
        return at_once(step, all_in)

    monkeypatch.setattr(held.demo, "state_digest", later)
    yield held, go
    go.set()


def made(held: Replica, around: Any) -> DigestReporter:
    return DigestReporter(held, around, around)


def test_the_state_changes_only_when_its_digest_is_there(slow: tuple[Replica, threading.Event], around: Around) -> None:
    held, go = slow
    log, states, seen = Log(4), made(held, around), list[bytes]()
    for step in range(1, 5):
        go.clear()
        held.apply(log.entries[step], updates_of(step))
        states.state(seen.append, behind=True)
        assert len(seen) == step - 1, "the training went on"
        if step % 2:
            go.set()
    states.settle()
    states.close()
    assert seen == [log.digests[step] for step in (1, 2, 3, 4)]
    for word in ("told", "reached"):
        assert [fact[1:] for fact in around.facts if fact[0] == word] == [(s, log.digests[s]) for s in (1, 2, 3, 4)]


@pytest.mark.parametrize("slow", [240.0], indirect=True)
def test_the_coordinator_hears_of_it_while_the_training_computes(
    slow: tuple[Replica, threading.Event], around: Around
) -> None:
    held, go = slow
    states, heard = made(held, around), threading.Event()
    tell = around.applied
    around.applied = lambda step, digest: (tell(step, digest), heard.set())[0]  # type: ignore[method-assign,func-returns-value]
    states.state(lambda _: None, behind=True)
    assert around.facts == []
    go.set()
    assert heard.wait(240), "nobody settled"
    assert [word for word, *_ in around.facts] == ["told"]
    states.settle()
    assert [word for word, *_ in around.facts] == ["told", "reached"]
    states.close()


@pytest.mark.parametrize("why", ["doubt", "small", "no gradient"])
def test_otherwise_it_is_hashed_at_once_and_compared_before_it_is_told(
    around: Around, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "BEHIND_BYTES_MIN", 1 << 40 if why == "small" else 0)
    around.doubts = why == "doubt"
    held, seen = replica(), list[bytes]()
    made(held, around).state(seen.append, behind=why != "no gradient")
    assert around.facts == [("reached", 0, held.digest()), ("told", 0, held.digest())]
    assert seen == [held.digest()]


def test_a_swarm_that_is_gone_ends_the_training(slow: tuple[Replica, threading.Event], around: Around) -> None:
    held, go = slow
    around.away = True
    states = made(held, around)
    states.state(lambda _: None, behind=True)
    go.set()
    with pytest.raises(NetworkError, match="closed"):
        states.settle()
    states.close()


def test_a_snapshot_that_is_loaded_waits_for_the_digest(slow: tuple[Replica, threading.Event], around: Around) -> None:
    held, _ = slow
    log, states = Log(2), made(held, around)
    states.state(lambda _: None, behind=True)
    held.load(*log.manifests[2])
    states.close()
    assert around.facts == [("told", 0, log.digests[0])]
    assert held.digest() == log.digests[2]
