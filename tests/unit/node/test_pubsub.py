"""Messages that come on a stream: silent strangers keep no member's message out."""

import asyncio
from typing import Any
from unittest import mock

import pytest

from node.overlay import pubsub
from node.overlay.pubsub import Pubsub
from protos.identity import Identity
from tests.waiting import SECONDS_MAX

MEMBER = Identity.from_seed(bytes(32))


async def test_silent_strangers_keep_no_message_of_a_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 streams without a word held every place, and were opened again when their 5 s were over."""
    monkeypatch.setattr(pubsub, "GOSSIP_SECONDS_MAX", 3600.0)  # no silent stream ends while this test waits
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
