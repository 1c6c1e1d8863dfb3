"""Messages packed against the message before them."""

import secrets

import pytest

from protos.calls import pack, unpack
from protos.errors import Reason, Refusal

KEYS = [secrets.token_bytes(32) for _ in range(2000)]
MOST = 1 << 20


def message(peers: int = 500) -> bytes:
    """As an entry and a tick of so many peers: each key twice, and a fresh hash each."""
    return b"".join(key + secrets.token_bytes(32) for key in KEYS[:peers]) + b"".join(KEYS[:peers])


@pytest.mark.parametrize("peers", [100, 500, 2000])
def test_keys_of_the_message_before_cost_nothing(peers: int) -> None:
    before, data = message(peers), message(peers)
    frame = pack(data, before)
    assert unpack(frame, before, MOST) == data
    assert len(frame) < 0.4 * len(data)


def test_the_first_message_packs_without_one_before() -> None:
    assert unpack(pack(b"x" * 5000, b""), b"", MOST) == b"x" * 5000


@pytest.mark.parametrize("before", [b"", b"another message" * 300])
def test_a_reader_with_another_message_before_is_told(before: bytes) -> None:
    data = message()
    with pytest.raises(Refusal) as raised:
        unpack(pack(data, message()), before, MOST)
    assert raised.value.reason is Reason.MALFORMED


def test_a_frame_that_says_too_much_is_not_unpacked() -> None:
    with pytest.raises(Refusal, match="1000001 bytes, at most 1000000") as raised:
        unpack(pack(bytes(1_000_001), b""), b"", 1_000_000)
    assert raised.value.reason is Reason.TOO_LARGE


@pytest.mark.parametrize("cut", [0, 3, 10, -1])
def test_a_damaged_frame_is_refused(cut: int) -> None:
    with pytest.raises(Refusal):
        unpack(pack(message(), b"")[:cut], b"", MOST)
