"""The door for strangers' update payloads. In this order: size, parse, run, step, layout, range; nothing else gets in.

The announcement has the signature, and names the payload by its sha256, which the fetcher has checked. The decision is a
function of the payload's bytes, the run, the layout, the step and the log's words about the payload. So every replica decides
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from node.optim.exact.transforms import VOTE_SUM_MAX
from node.optim.votes import sums
from node.optim.votes.groups import VotesError
from node.optim.votes.payload import PLAIN, Form
from node.optim.votes.sums import borders, cut, join
from protos import slices
from protos.envelope import parse
from protos.errors import Reason, Refusal
from protos.limits import PAYLOAD_BYTES_MAX, UPDATE_HEADER_BYTES_MAX
from protos.slices import Update, encode_update
from protos.v1 import update_pb2


@dataclass(frozen=True)
class UpdateDoor:
    """Knows the run and the shape that votes must have. `chunks` is the layout's, `form` the run's, `cap` that of sums.

    `ranges`: into so many ranges a payload is cut, in slices (protos/slices.py).
    """

    run_id: bytes
    layout_digest: bytes
    chunks: int
    form: Form = PLAIN
    cap: int = VOTE_SUM_MAX
    ranges: int = 1

    @cached_property
    def parts(self) -> tuple[UpdateDoor, ...]:
        """The door of each range, for its slices of payloads and of sums; of one range, the door itself."""
        cut = borders(self.chunks, self.ranges) if self.ranges > 1 else []
        return tuple(replace(self, chunks=len(part), ranges=1) for part in cut) or (self,)

    @property
    def bytes_max(self) -> int:
        """The longest payload that can be valid, of any size that a peer may choose."""
        if self.ranges > 1:
            return min(slices.list_bytes(self.ranges) + sum(part.bytes_max for part in self.parts), PAYLOAD_BYTES_MAX)
        longest = max(self.form.bytes_max(self.chunks, size) for size in self.form.sizes)
        return min(longest + UPDATE_HEADER_BYTES_MAX, PAYLOAD_BYTES_MAX)

    def open(self, data: bytes, step: int, named_bytes: int | None = None) -> Update:
        """The votes of step `step`, or `Refusal` with the reason. `named_bytes`: the length that the log names."""
        if named_bytes is not None and len(data) != named_bytes:
            raise Refusal(Reason.OUT_OF_RANGE, f"payload of {len(data)} bytes, the log names {named_bytes}")
        if len(data) > self.bytes_max:
            raise Refusal(Reason.TOO_LARGE, f"payload of {len(data)} bytes, at most {self.bytes_max}")
        if self.ranges > 1:
            return self._joined(data, step)
        body = self.opened(parse(update_pb2.UpdatePayload, data), step)
        try:
            self.form.check(body.votes, body.size, self.chunks)
        except VotesError as error:
            raise Refusal(Reason.OUT_OF_RANGE, str(error)) from error
        canonical = len(data) - len(body.votes) <= UPDATE_HEADER_BYTES_MAX
        if not canonical:
            raise Refusal(Reason.MALFORMED, "bytes beyond the votes and their header")
        return Update(body.step, body.size, body.votes)

    def _joined(self, data: bytes, step: int) -> Update:
        """The votes of a payload in slices. Slices of several sizes count: who adds up some ranges does not see it, and who
        checks votes has to judge those that are in the sum."""
        parts = slices.split(data, self.ranges)
        updates = [door.open(part, step) for door, part in zip(self.parts, parts, strict=True)]
        return Update(step, *join([it.votes for it in updates], [it.size for it in updates], self.chunks))

    def opened(self, body: update_pb2.UpdatePayload, step: int) -> update_pb2.UpdatePayload:
        """A payload of this run, layout and step, or `Refusal`. Its votes are not looked at."""
        if body.run_id != self.run_id:
            raise Refusal(Reason.WRONG_RUN, f"payload of run {body.run_id.hex()[:16] or 'none'}")
        if body.step != step:
            raise Refusal(Reason.WRONG_STEP, f"payload of step {body.step}, expected {step}")
        if body.layout_digest != self.layout_digest:
            raise Refusal(Reason.WRONG_LAYOUT, f"payload of layout {body.layout_digest.hex()[:16] or 'none'}")
        return body


def encode(run_id: bytes, layout_digest: bytes, update: Update, chunks: int, ranges: int) -> bytes:
    """A peer's payload in a run with so many ranges."""
    cuts = cut(update.votes, update.size, chunks, ranges) if ranges > 1 else [update.votes]
    return slices.joined([encode_update(run_id, layout_digest, replace(update, votes=votes)) for votes in cuts])


# The sum of a step's votes as it travels: an update payload whose votes are sums. Aggregators make it; every peer opens it.
#
# Its hash stands in the step's entry, so every replica opens the same bytes: those that are no sums count as no votes
# everywhere.


def aggregate(door: UpdateDoor, updates: Sequence[Update], step: int) -> bytes:
    """The sum of votes that have passed the door, the same bytes for every order of them."""
    read = (sums.SUMMED.read(update.votes, update.size, door.chunks) for update in updates)
    size, total = sums.add_up(read, door.chunks)
    return encode_update(door.run_id, door.layout_digest, Update(step, size, sums.pack(total, door.cap)))


def is_sum(door: UpdateDoor, data: bytes, updates: Sequence[Update], step: int, hidden: int = 0) -> bool:
    """Whether these can be the bytes of the sum of these votes of one range, and of `hidden` other peers' unknown ones."""
    if not hidden:
        return data == aggregate(door, updates, step)
    try:
        size, said = _sums(door, data, step)
    except Refusal:
        return False
    smallest, total = sums.add_up((sums.SUMMED.read(it.votes, it.size, door.chunks) for it in updates), door.chunks)
    if not size or (smallest and smallest < size):
        return not smallest and not size  # a sum has the places of its smallest size
    total, cap = sums.stacked([total], size), door.cap
    least, most = np.clip(total - hidden, -cap, cap), np.clip(total + hidden, -cap, cap)
    return bool(((least <= said) & (said <= most)).all())


def bytes_max(door: UpdateDoor) -> int:
    """The longest sum that can be valid: of votes at every second place."""
    if door.ranges > 1:
        return min(slices.list_bytes(door.ranges) + sum(map(bytes_max, door.parts)), PAYLOAD_BYTES_MAX)
    places = door.chunks * sums.SUMMED.votes_a_chunk(min(sums.SUMMED.sizes))
    return min(sums.sum_bytes(places, door.cap) + UPDATE_HEADER_BYTES_MAX, PAYLOAD_BYTES_MAX)


def longest_sums(door: UpdateDoor) -> list[int]:
    """Of each range, the bytes of the longest sum that can be valid."""
    return [bytes_max(part) for part in door.parts]


def open_aggregate(
    door: UpdateDoor,
    data: bytes,
    step: int,
    named_bytes: int,
    refused: Callable[[Refusal], None] | None = None,
) -> tuple[Update, ...]:
    """Votes that add up to the sum: at most `cap` payloads. Raises `Refusal` for bytes that no aggregator makes.

    `refused`: is told of each slice that no aggregator makes, and that counts as no votes; the others count. A slice that is
    too long to be a sum is not in the data.
    """
    if door.ranges == 1 and (len(data) != named_bytes or len(data) > bytes_max(door)):
        text = f"aggregate of {len(data)} bytes, the log names {named_bytes}, and {bytes_max(door)} are the most"
        raise Refusal(Reason.OUT_OF_RANGE, text)
    here = list(range(door.ranges))
    if door.ranges > 1:
        here = slices.fitting(slices.open_list(data[: slices.list_bytes(door.ranges)]), longest_sums(door))
    by_range = dict(zip(here, slices.split(data, door.ranges, here), strict=True))
    found: list[tuple[int, sums.Sums]] = []
    for number, part in enumerate(door.parts):
        try:
            if number not in by_range:
                raise Refusal(Reason.TOO_LARGE, f"a sum of range {number} that is too long to be one")
            found.append(_sums(part, by_range[number], step))
        except Refusal as refusal:
            if refused is None:
                raise
            refused(refusal)
            found.append((0, sums.none(part.chunks)))
    size = min((size for size, _ in found if size), default=0)
    if not size:
        return ()
    whole = sums.stacked([one for _, one in found], size)
    return tuple(Update(step, size, votes) for votes in sums.ballots(whole))


def _sums(door: UpdateDoor, data: bytes, step: int) -> tuple[int, sums.Sums]:
    """The size and the sums of one range; size 0 without any."""
    body = door.opened(parse(update_pb2.UpdatePayload, data), step)
    if len(data) - len(body.votes) > UPDATE_HEADER_BYTES_MAX:
        raise Refusal(Reason.MALFORMED, "bytes beyond the sums and their header")
    if not body.size and not body.votes:
        return 0, sums.none(door.chunks)
    try:
        return body.size, sums.unpack(body.votes, door.chunks, body.size, door.cap)
    except VotesError as error:
        raise Refusal(Reason.OUT_OF_RANGE, str(error)) from error
