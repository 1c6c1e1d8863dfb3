"""A real swarm in which each peer has a place of its own in an internet of network namespaces, to be cut off or slowed down."""

from collections.abc import Iterable
from pathlib import Path

from tests.system.local_swarm import LocalSwarm
from tests.system.netns import PUBLIC, Internet


def places_of(names: Iterable[str]) -> dict[str, str]:
    """Addresses for `Internet`: of `pub`, where coordinator and relay are, and of each peer."""
    return {"pub": PUBLIC["pub"]} | {name: f"11.{10 + number}.0.2" for number, name in enumerate(names)}


class SpreadSwarm(LocalSwarm):
    """A swarm whose peers each have a place in an internet; coordinator and relay have the place `pub`."""

    HOST = PUBLIC["pub"]

    def __init__(self, folder: Path, run_toml: str, internet: Internet) -> None:
        self.internet = internet
        super().__init__(folder, run_toml)

    def inside(self, name: str) -> tuple[str, ...]:
        return self.internet.inside(name if name in self.internet.public else "pub")

    def address(self, name: str) -> str:
        return self.internet.public[name]
