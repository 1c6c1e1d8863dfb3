"""Frames on the pipe from the overlay process to the watcher: uint32 length (big endian), one byte of kind, body."""

from __future__ import annotations

from protos.limits import GOSSIP_MESSAGE_BYTES_MAX

# The body is a gossiped message as it came.
MESSAGE = b"M"
# The body is the number of bytes of a message beyond the gossip limit, as decimal text.
OVERSIZED = b"O"
# The body is the number of connected subscribers of the topic, as decimal text. The frame comes every second.
STATUS = b"S"
HEADER_BYTES = 5
_KINDS = (MESSAGE, OVERSIZED, STATUS)


def frame(kind: bytes, body: bytes) -> bytes:
    """One frame."""
    assert kind in _KINDS, kind
    assert len(body) <= GOSSIP_MESSAGE_BYTES_MAX, len(body)
    return len(body).to_bytes(4, "big") + kind + body


class FrameReader:
    """Cuts a byte stream into frames. Holds at most one frame and one chunk."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[tuple[bytes, bytes]]:
        """The frames that are complete now, as (kind, body). ValueError if this is no frame stream."""
        self._rest += chunk
        frames = []
        while len(self._rest) >= HEADER_BYTES:
            size, kind = int.from_bytes(self._rest[:4], "big"), bytes(self._rest[4:HEADER_BYTES])
            if kind not in _KINDS or size > GOSSIP_MESSAGE_BYTES_MAX:
                raise ValueError(f"not a frame: kind {kind!r}, {size} bytes")
            if len(self._rest) < HEADER_BYTES + size:
                break
            frames.append((kind, bytes(self._rest[HEADER_BYTES : HEADER_BYTES + size])))
            del self._rest[: HEADER_BYTES + size]
        return frames
