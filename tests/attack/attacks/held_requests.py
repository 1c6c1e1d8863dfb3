"""Calls whose request never comes: gRPC counts them, and none of our code sees them before the request is there."""

import asyncio
import time

import grpc

from tests.attack.base import Target, together

CHANNELS = 40
CALLS_A_CHANNEL = 100
METHODS = ("Report", "Follow", "GetRun", "Join")


class HeldRequests:
    name = "held_requests"
    what = f"opens {CHANNELS * CALLS_A_CHANNEL} calls on {CHANNELS} connections and never sends the request"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_hold(target, seconds))


async def _hold(target: Target, seconds: float) -> str:
    ended: dict[str, int] = {}
    until = time.monotonic() + seconds

    async def hold(channel: object, number: int) -> None:
        path = f"/swarmentum.v1.CoordinatorService/{METHODS[number % len(METHODS)]}"

        async def silent() -> object:
            await asyncio.sleep(max(until - time.monotonic(), 0))
            for nothing in ():
                yield nothing

        while time.monotonic() < until - 0.2:
            call = channel.stream_unary(path)(silent(), timeout=max(until - time.monotonic(), 0.1))  # type: ignore[attr-defined]
            try:
                await call
            except grpc.RpcError as error:
                name = error.code().name
                ended[name] = ended.get(name, 0) + 1
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:  # the call's own, when its request generator has ended
                return

    async def channel() -> None:
        async with target.channel() as opened:
            await together([hold(opened, number) for number in range(CALLS_A_CHANNEL)], seconds)

    await asyncio.gather(*(channel() for _ in range(CHANNELS)))
    return f"{CHANNELS * CALLS_A_CHANNEL} calls held; ended by the other side: {ended}"


ATTACK = HeldRequests()
