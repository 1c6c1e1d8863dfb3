"""A message of a stream as a zstd frame, compressed against the message before it.

A step's log entry and tick name each peer by 32 bytes, as those of the step before do. So a frame has a third of the bytes of
its message in a swarm of 500 (ADR 57). Refuses a frame that is too large, is damaged, or belongs after another message.
"""

from __future__ import annotations

from typing import Final

import zstandard

from protos.errors import Reason, Refusal

LEVEL: Final = 2
"""A higher level saves no byte here, because what does not repeat are hashes. Level 1 finds a third less with 2,000 peers."""
BYTES_MIN: Final = 2048
"""A smaller message travels as it is: the frame would save little."""


def pack(data: bytes, before: bytes) -> bytes:
    """The frame of `data`, for a reader that has `before`. The frame has a checksum of `data`."""
    # Without the sizes zstd forgets the start of a large message.
    sizes = {"source_size": len(data), "dict_size": len(before)}
    parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, **sizes, write_checksum=True)
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=_dictionary(before)).compress(data)


def unpack(frame: bytes, before: bytes, bytes_max: int) -> bytes:
    """The message of a frame. Raises Refusal MALFORMED or TOO_LARGE. `before`: what `pack` was given, byte for byte."""
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= bytes_max:
            raise Refusal(Reason.TOO_LARGE, f"a packed message of {size} bytes, at most {bytes_max}")
        return zstandard.ZstdDecompressor(dict_data=_dictionary(before)).decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise Refusal(Reason.MALFORMED, f"a packed message cannot be unpacked: {error}") from error


def _dictionary(before: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(before, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
