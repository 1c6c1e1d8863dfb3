"""As many health `Watch` streams on one connection as the coordinator takes: each held a place that peers' calls need."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.attack.base import Target

STREAMS = 4200


class WatchFlood:
    name = "watch_flood"
    what = f"opens {STREAMS} health Watch streams on one connection and keeps them open"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_flood(target, seconds))


async def _flood(target: Target, seconds: float) -> str:
    answered, refused = 0, 0
    async with target.channel(**{"grpc.use_local_subchannel_pool": 1}) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def watch() -> None:
            nonlocal answered, refused
            try:
                async for _ in stub.Watch(health_pb2.HealthCheckRequest(), timeout=seconds):
                    answered += 1
            except grpc.RpcError as error:
                refused += error.code() != grpc.StatusCode.DEADLINE_EXCEEDED

        await asyncio.gather(*(watch() for _ in range(STREAMS)))
    return f"{STREAMS} Watch streams asked for, {answered} answered, {refused} refused"


ATTACK = WatchFlood()
