"""A task of a session that fails ends the session once, whatever else fails because of it."""

import asyncio

from node.swarm.facts import Event
from node.swarm.runtime import Counters, Runtime, View
from protos.identity import Identity

ADA = Identity.from_seed(bytes(32))


async def test_the_first_failure_is_said_and_what_follows_is_not() -> None:
    said: list[Event] = []

    async def emit(event: Event) -> None:
        said.append(event)
        raise ValueError("nobody listens")

    async def fail() -> None:
        raise TypeError("of our own")

    runtime = Runtime(ADA.public_key, emit, Counters(), View(bytes(32), ADA.public_key))
    runtime.spawn(fail())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not runtime.tasks
    assert ["of our own" in str(event) for event in said] == [True]
    await runtime.stop()
