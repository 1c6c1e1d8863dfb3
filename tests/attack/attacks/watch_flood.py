"""As many health `Watch` streams on one connection as the coordinator takes: each held a place that peers' calls need."""

import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.attack.base import Target

STREAMS = 4200
RETRY_SECONDS = 2.0


class WatchFlood:
    name = "watch_flood"
    what = f"opens {STREAMS} health Watch streams on one connection and keeps them open"

    def run(self, target: Target, seconds: float) -> str:
        """With gRPC's threaded client: its asyncio client hangs for good, the GIL held, in one of three such floods."""
        until, refused, asked = time.monotonic() + seconds, 0, 0
        with target.threaded_channel() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            calls: list[grpc.Call] = []
            while time.monotonic() < until:
                ended = [call for call in calls if not call.is_active()]
                refused += len(ended)
                calls = [call for call in calls if call.is_active()]
                while len(calls) < STREAMS and time.monotonic() < until:
                    calls.append(stub.Watch(health_pb2.HealthCheckRequest()))
                    asked += 1
                time.sleep(min(RETRY_SECONDS, max(until - time.monotonic(), 0)))
            held = sum(call.is_active() for call in calls)
            for call in calls:
                call.cancel()
        refused += len(calls) - held
        return f"{asked} Watch streams asked for, {refused} ended by the coordinator, {held} open at the end"


ATTACK = WatchFlood()
