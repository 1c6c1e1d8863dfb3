"""The door for strangers' update payloads. In this order: size, parse, run, step, layout, range; nothing else gets in.

The announcement has the signature, and names the payload by its sha256, which the fetcher has checked. The decision is a
function of the payload's bytes, the run, the layout, the step and the log's words about the payload. So every replica decides
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node.optim.exact.dct import VOTE_SUM_MAX
from node.optim.votes import sums
from node.optim.votes.form import Form
from node.optim.votes.groups import VotesError
from node.optim.votes.payload import PLAIN
from node.wire.codec import Update, encode_update
from protos.envelope import parse
from protos.errors import Reason, Refusal
from protos.limits import PAYLOAD_BYTES_MAX, UPDATE_HEADER_BYTES_MAX
from protos.v1 import update_pb2


@dataclass(frozen=True)
class UpdateDoor:
    """Knows the run and the shape that votes must have. `chunks` is the layout's, `form` the run's, `cap` that of sums."""

    run_id: bytes
    layout_digest: bytes
    chunks: int
    form: Form = PLAIN
    cap: int = VOTE_SUM_MAX

    @property
    def bytes_max(self) -> int:
        """The longest payload that can be valid, of any size that a peer may choose."""
        longest = max(self.form.bytes_max(self.chunks, size) for size in self.form.sizes)
        return min(longest + UPDATE_HEADER_BYTES_MAX, PAYLOAD_BYTES_MAX)

    def open(self, data: bytes, step: int, named_bytes: int | None = None) -> Update:
        """The votes of step `step`, or `Refusal` with the reason. `named_bytes`: the length that the log names."""
        if named_bytes is not None and len(data) != named_bytes:
            raise Refusal(Reason.OUT_OF_RANGE, f"payload of {len(data)} bytes, the log names {named_bytes}")
        if len(data) > self.bytes_max:
            raise Refusal(Reason.TOO_LARGE, f"payload of {len(data)} bytes, at most {self.bytes_max}")
        body = self.opened(parse(update_pb2.UpdatePayload, data), step)
        try:
            self.form.check(body.votes, body.size, self.chunks)
        except VotesError as error:
            raise Refusal(Reason.OUT_OF_RANGE, str(error)) from error
        canonical = len(data) - len(body.votes) <= UPDATE_HEADER_BYTES_MAX
        if not canonical:
            raise Refusal(Reason.MALFORMED, "bytes beyond the votes and their header")
        return Update(body.step, body.size, body.votes)

    def opened(self, body: update_pb2.UpdatePayload, step: int) -> update_pb2.UpdatePayload:
        """A payload of this run, layout and step, or `Refusal`. Its votes are not looked at."""
        if body.run_id != self.run_id:
            raise Refusal(Reason.WRONG_RUN, f"payload of run {body.run_id.hex()[:16] or 'none'}")
        if body.step != step:
            raise Refusal(Reason.WRONG_STEP, f"payload of step {body.step}, expected {step}")
        if body.layout_digest != self.layout_digest:
            raise Refusal(Reason.WRONG_LAYOUT, f"payload of layout {body.layout_digest.hex()[:16] or 'none'}")
        return body


# The sum of a step's votes as it travels: an update payload whose votes are sums. Aggregators make it; every peer opens it.
#
# Its hash stands in the step's entry, so every replica opens the same bytes: those that are no sums count as no votes
# everywhere.


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
