"""Streams of reports whose answers nobody reads: free identities with sessions, masks of everything, and hashes of nothing."""

import asyncio
import time
from collections import Counter

import grpc

from node.link.client import CoordinatorClient
from protos.errors import SwarmentumError
from protos.limits import HASH_BYTES, ROSTER_PEERS_MAX
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from tests.attack.base import Target
from tests.attack.joining import joined

IDENTITIES, STREAMS = 10, 40


class UnreadReports:
    name = "unread_reports"
    what = f"opens {STREAMS} streams of reports with each of {IDENTITIES} free identities, and reads no answer"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_flood(target, seconds))


async def _flood(target: Target, seconds: float) -> str:
    until, ended = time.monotonic() + seconds, Counter[str]()
    sent = await asyncio.gather(*(_identity(target, until, ended) for _ in range(IDENTITIES)))
    assert sum(sent), f"no report was sent, so this attacked nothing: {dict(ended)}"
    return f"{sum(sent)} reports sent on {IDENTITIES * STREAMS} streams; ended: {dict(ended) or 'none'}"


async def _identity(target: Target, until: float, ended: Counter[str]) -> int:
    try:
        async with joined(target) as (client, welcome):
            following = asyncio.ensure_future(anext(client.follow(welcome.head_step)))
            counts = await asyncio.gather(*(_stream(client, until, ended) for _ in range(STREAMS)))
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            return sum(counts)
    except SwarmentumError as error:
        ended[str(error)[:60]] += 1
        return 0


async def _stream(client: CoordinatorClient, until: float, ended: Counter[str]) -> int:
    call, sent = rpc.CoordinatorServiceStub(client._channel).Tell(), 0
    places = b"\xff" * (ROSTER_PEERS_MAX // 8)
    try:
        while time.monotonic() < until:
            held = pb.HeldPlaces(step=1 + sent % 1000, attempt=1, places=places, payloads_sha256=bytes(HASH_BYTES))
            async with asyncio.timeout(max(until - time.monotonic(), 0.1)):
                await call.write(client._reported(pb.ReportBody(held=held)))
            sent += 1
    except (grpc.RpcError, asyncio.InvalidStateError):
        ended[f"{(await call.code()).name} {(await call.details())[:80]}"] += 1
    except TimeoutError:
        ended["not taken any more"] += 1
    finally:
        call.cancel()
    return sent


ATTACK = UnreadReports()
