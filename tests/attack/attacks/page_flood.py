"""Pages of the log, hundreds at a time: each page was read by the thread that writes the clock's journal."""

import asyncio
import time

import grpc

from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from tests.attack.base import Target, together

CHANNELS = 10
CALLS_A_CHANNEL = 60


class PageFlood:
    name = "page_flood"
    what = f"asks for pages of the log and facts of the run, {CHANNELS * CALLS_A_CHANNEL} at a time, without a pause"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_flood(target, seconds))


async def _flood(target: Target, seconds: float) -> str:
    run_id, until = target.invite.run_id, time.monotonic() + seconds
    answered, refused = 0, 0

    async def ask(stub: rpc.CoordinatorServiceStub, number: int) -> None:
        nonlocal answered, refused
        while time.monotonic() < until:
            try:
                if number % 4:
                    await stub.ListEntries(pb.ListEntriesRequest(run_id=run_id, from_step=1 + number % 64), timeout=10)
                else:
                    await stub.GetRun(pb.GetRunRequest(run_id=run_id), timeout=10)
                answered += 1
            except grpc.RpcError:
                refused += 1
                await asyncio.sleep(0.02)

    async def channel() -> None:
        async with target.channel() as opened:
            stub = rpc.CoordinatorServiceStub(opened)
            await together([ask(stub, number) for number in range(CALLS_A_CHANNEL)], seconds)

    await asyncio.gather(*(channel() for _ in range(CHANNELS)))
    return f"{answered / seconds:.0f} calls a second answered, {refused / seconds:.0f} refused"


ATTACK = PageFlood()
