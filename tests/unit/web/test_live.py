"""Live streams: one message for all, bounded readers, and no waiting for a slow one."""

import asyncio
import json

import pytest

from node.web import server
from node.web.server import READER_MESSAGES_MAX, Channels, message, stream


def test_a_message_is_one_event_whatever_a_peer_is_called() -> None:
    data = message("run", {"device": "a\n\nevent: fake\ndata: {}\r\n\u2028"})
    lines = data.decode().split("\n")
    assert [line.partition(":")[0] for line in lines] == ["event", "data", "", ""]
    assert json.loads(lines[1].removeprefix("data: "))["device"].startswith("a\n\nevent")


async def test_a_reader_that_does_not_read_is_dropped_and_the_others_get_everything() -> None:
    channels = Channels()
    slow, quick = channels.enter("run"), channels.enter("run")
    assert slow is not None
    assert quick is not None
    got: list[bytes] = []

    async def keep(data: bytes) -> None:
        got.append(data)

    reading = asyncio.ensure_future(stream(quick, keep))
    sent = [b"%d" % number for number in range(READER_MESSAGES_MAX + 5)]
    for data in sent:
        channels.publish("run", data)
        await asyncio.sleep(0)
    assert slow.dropped
    assert channels.count == 1
    channels.close()
    await reading
    assert got == sent[: len(got)]
    assert len(got) > READER_MESSAGES_MAX


async def test_a_browser_that_takes_no_bytes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_SECONDS_MAX", 0.01)
    channels = Channels()
    reader = channels.enter("run")
    assert reader is not None
    channels.publish("run", b"x")
    assert await stream(reader, lambda data: asyncio.Event().wait()) is False


async def test_readers_are_bounded() -> None:
    channels = Channels(readers_max=2)
    first, second = channels.enter("a"), channels.enter("b")
    assert first is not None
    assert second is not None
    assert channels.enter("a") is None
    channels.leave("a", first)
    channels.leave("a", first)
    assert channels.enter("b") is not None
    channels.close()
    assert channels.enter("a") is None
