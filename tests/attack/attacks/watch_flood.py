"""As many health `Watch` streams on one connection as the coordinator takes: each held a place that peers' calls need."""

from __future__ import annotations

import asyncio
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.attack.base import Target, together

STREAMS = 4200
RETRY_SECONDS = 2.0


class WatchFlood:
    name = "watch_flood"
    what = f"opens {STREAMS} health Watch streams on one connection and keeps them open"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_flood(target, seconds))


async def _flood(target: Target, seconds: float) -> str:
    answered, refused, until = 0, 0, time.monotonic() + seconds
    async with target.channel(**{"grpc.use_local_subchannel_pool": 1}) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def watch() -> None:
            nonlocal answered, refused
            while (left := until - time.monotonic()) > 0:
                try:
                    async for _ in stub.Watch(health_pb2.HealthCheckRequest(), timeout=left):
                        answered += 1
                except grpc.RpcError as error:
                    refused += error.code() != grpc.StatusCode.DEADLINE_EXCEEDED
                    await asyncio.sleep(min(RETRY_SECONDS, left))

        await together([watch() for _ in range(STREAMS)], seconds)
    return f"{STREAMS} Watch streams asked for, {answered} answered, {refused} refused"


ATTACK = WatchFlood()
