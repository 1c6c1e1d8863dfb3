"""The sum of a step's votes as it travels: an update payload whose votes are sums. Aggregators make it; every peer opens it.

Its hash stands in the step's entry, so every replica opens the same bytes: those that are no sums count as no votes everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from node.optim.votes import sums
from node.optim.votes.groups import VotesError
from node.wire.codec import Update, encode_update
from node.wire.validate import UpdateDoor
from protos.envelope import parse
from protos.errors import Reason, Refusal
from protos.limits import PAYLOAD_BYTES_MAX, UPDATE_HEADER_BYTES_MAX
from protos.v1 import update_pb2


def aggregate(door: UpdateDoor, updates: Sequence[Update], step: int) -> bytes:
    """The sum of votes that have passed the door, the same bytes for every order of them."""
    read = (sums.SUMMED.read(update.votes, update.size, door.chunks) for update in updates)
    size, total = sums.add_up(read, door.chunks)
    return encode_update(door.run_id, door.layout_digest, Update(step, size, sums.pack(total, door.cap)))


def bytes_max(door: UpdateDoor) -> int:
    """The longest sum that can be valid: of votes at every second place."""
    places = door.chunks * sums.SUMMED.votes_a_chunk(min(sums.SUMMED.sizes))
    return min(sums.sum_bytes(places, door.cap) + UPDATE_HEADER_BYTES_MAX, PAYLOAD_BYTES_MAX)


def open_aggregate(door: UpdateDoor, data: bytes, step: int, named_bytes: int) -> tuple[Update, ...]:
    """Votes that add up to the sum: at most `cap` payloads. Raises `Refusal` for bytes that no aggregator makes."""
    if len(data) != named_bytes or len(data) > bytes_max(door):
        text = f"aggregate of {len(data)} bytes, the log names {named_bytes}, and {bytes_max(door)} are the most"
        raise Refusal(Reason.OUT_OF_RANGE, text)
    body = door.opened(parse(update_pb2.UpdatePayload, data), step)
    if len(data) - len(body.votes) > UPDATE_HEADER_BYTES_MAX:
        raise Refusal(Reason.MALFORMED, "bytes beyond the sums and their header")
    if not body.size and not body.votes:
        return ()
    try:
        found = sums.unpack(body.votes, door.chunks, body.size, door.cap)
    except VotesError as error:
        raise Refusal(Reason.OUT_OF_RANGE, str(error)) from error
    return tuple(Update(step, body.size, votes) for votes in sums.ballots(found))
