"""Messages that come on a stream: silent strangers keep no member's message out."""

import asyncio
from typing import Any
from unittest import mock

from node.overlay import pubsub
from node.overlay.pubsub import Pubsub
from protos.identity import Identity

MEMBER = Identity.from_seed(bytes(32))
SECONDS_MAX = 4.0
"""Less than pubsub.GOSSIP_SECONDS_MAX, after which a silent stream is ended."""


async def test_silent_strangers_keep_no_message_of_a_member_out() -> None:
    """64 streams without a word held every place, and were opened again when their 5 s were over."""
    made, heard = Pubsub(mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock()), list[bytes]()
    made.expect([MEMBER.public_key])
    made._topics["votes"] = heard.append
    silent: list[Any] = []
    for number in range(2 * pubsub.PUSHES_MAX):
        remote = Identity.from_seed((1000 + number).to_bytes(32, "big")).peer_id
        silent.append(asyncio.ensure_future(made._on_push(remote, asyncio.StreamReader(), mock.Mock())))
    await asyncio.sleep(0)
    reader, data = asyncio.StreamReader(), b"an announcement"
    reader.feed_data(len("votes").to_bytes(2, "big") + b"votes" + len(data).to_bytes(4, "big") + data)
    async with asyncio.timeout(SECONDS_MAX):
        await made._on_push(MEMBER.peer_id, reader, mock.Mock())
    assert heard == [data]
    for task in silent:
        task.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
