"""What a peer does about its relays: it takes them, keeps them, and asks again if a relay has forgotten it. No p2pd."""

from dataclasses import replace
from typing import Any

import pytest
import structlog

from node.overlay import relays as module
from node.overlay.reach import ReachResult, ReachState, Remote
from node.overlay.relays import GONE_LOOKS, VAIN_DOUBLINGS, Finder
from node.overlay.settings import OverlaySettings

RELAYS = tuple(f"/ip4/84.1.2.{number}/tcp/4001/p2p/relay{number}" for number in range(3))


class Home:
    """A peer behind a router. `takes`: relays that give it a place when p2pd starts; `held`: the places that it has."""

    def __init__(self, takes: set[str]) -> None:
        self.takes, self.settings = takes, OverlaySettings()
        self.also: tuple[str, ...] = ()
        self.held: set[str] = set()
        self.changes: list[tuple[str, ...]] = []
        self.parted = 0
        self.finder = Finder(self, self, None, "me", structlog.get_logger())  # type: ignore[arg-type]
        self.finder.ask = self.answer  # type: ignore[method-assign]

    async def answer(self) -> ReachResult:
        return ReachResult(ReachState.PRIVATE, relays=RELAYS)

    async def change(self, **settings: Any) -> None:
        self.settings = replace(self.settings, **settings)
        self.changes.append(self.settings.relays)
        self.held = self.takes & set(self.settings.relays)

    async def part(self) -> None:
        self.parted += 1
        assert self.parted == len(self.changes) + 1, "connections end before p2pd does"

    async def remotes(self) -> list[Remote]:
        return [Remote(relay.rpartition("/")[2], relay, "84.1.2.0") for relay in RELAYS]

    async def addresses(self) -> list[str]:
        own = "/ip4/192.168.1.2/tcp/4002/p2p/me"
        return [own, *(f"{relay}/p2p-circuit/p2p/me" for relay in sorted(self.held))]

    async def looks(self, most: int = 200) -> int:
        """Look until the peer asks again; how many looks that took."""
        for look in range(1, most):
            if await self.finder._should_ask():
                return look
        raise AssertionError("it never asked again")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESERVED_SECONDS_MAX", module.POLL_SECONDS)
    monkeypatch.setattr(module, "ASK_AGAIN_SECONDS", 1e9)  # what a timer would do is not asked here


async def test_relays_that_keep_a_place_stay() -> None:
    home = Home(takes=set(RELAYS))
    await home.finder.find_out()
    assert home.changes == [RELAYS[:2]]
    await home.finder.find_out()
    assert home.changes == [RELAYS[:2]], "p2pd was started again for nothing"
    assert not any([await home.finder._should_ask() for _ in range(10)])


async def test_a_relay_that_has_forgotten_this_peer_is_asked_again() -> None:
    home = Home(takes=set(RELAYS))
    await home.finder.find_out()
    home.held = set()
    assert await home.looks() == GONE_LOOKS
    await home.finder.find_out()
    assert len(home.changes) == 2


async def test_relays_that_take_nobody_are_tried_in_turn_and_ever_more_seldom() -> None:
    home = Home(takes=set())
    waited = []
    for _ in range(8):
        await home.finder.find_out()
        waited.append(await home.looks())
    assert home.changes[:4] == [RELAYS[:2], RELAYS[1:], (RELAYS[2], RELAYS[0]), RELAYS[:2]]
    assert waited == [GONE_LOOKS << min(tries, VAIN_DOUBLINGS) for tries in range(1, 9)]
    home.takes = set(RELAYS)
    await home.finder.find_out()
    home.held = set()
    assert await home.looks() <= GONE_LOOKS, "a relay that took this peer ends the patience"
