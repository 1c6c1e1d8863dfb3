"""The exchange of one step between the ranks of a `DeMoOptimizer`: everybody's votes, and proof that all make the same step.

Each rank sends one body: its terms (the step's learning rates and settings), then its payload for each group of parameters. All
ranks read all bodies, so all find the same fault in the same step, and none waits for a rank that has stopped. A rank that
cannot go on says so in its body. It refuses ranks that differ in step, terms or parameters, and holds no tensor.

The first collective call has a header, and room for the longest body of the exchange before. If a body is longer, a second call
has the rest: all ranks know its length from the first.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from node.optim.votes import groups as votes

WAIT_SHOWN_SECONDS = 60
"""An exchange that takes longer says what it waits for. The backend's own time limit ends it: 10 to 30 minutes by default."""

PARAMETERS = "parameters"
"""The term that says which values a rank starts from; only in a first step, and after parameters came."""
DRIFT = "parameters of this step"
"""The term that says what a part of them is in a later step."""
NUMBER = "which optimizer"
"""The term that tells optimizers with equal settings apart; only in a first step: then their parameters may be equal, too."""
LAYOUT = "the layout or the settings"
GRADIENT = "gradient"
"""The term that two ranks must not share: of a rank that votes, until two have voted in one step."""

_HEADER = struct.Struct("<QQB")  # step, length of the body, standing
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_TERMS_BYTES = 128
"""Terms fill multiples of this, so that a learning rate with more digits does not need a second call."""
_log = logging.getLogger(__name__)


class RanksDiffer(RuntimeError):  # noqa: N818
    """The ranks are not in the same step with the same settings. Raised on every rank, before anything is applied."""


class ReplicasDiffer(RanksDiffer):
    """The ranks hold different parameters, so that equal updates cannot make them equal. The operator's fault."""


class MomentumLost(RuntimeError):  # noqa: N818
    """A rank's momentum is not a number, so that it will never vote again. Raised on every rank, in the same step."""


class ExchangeFailed(RuntimeError):  # noqa: N818
    """The backend gave up: another rank ended, or did not come to this step."""


class RankRole(IntEnum):
    """How a rank takes part in one exchange."""

    VOTES = 0
    LEFT = 1
    """It has no batch any more (torch's Join), and follows the others."""
    LOST = 2
    """Its momentum is not a number."""
    REFUSED = 3
    """It cannot go on; the terms say why."""


@dataclass(frozen=True)
class Part:
    """One rank's part of an exchange."""

    step: int
    terms: dict[str, Any]
    """What has to be equal on all ranks, by name; of `REFUSED` the reason alone."""
    payloads: list[bytes]
    """One for each group of parameters; empty if the rank abstains."""
    taking: RankRole = RankRole.VOTES

    def body(self) -> bytes:
        terms = json.dumps(self.terms).encode()
        parts = [terms.ljust(-len(terms) // _TERMS_BYTES * -_TERMS_BYTES), *self.payloads]
        return _COUNT.pack(len(parts)) + b"".join(_LENGTH.pack(len(part)) for part in parts) + b"".join(parts)


def part_of(step: int, taking: int, body: bytes) -> Part:
    """A part from what another rank of this program sent."""
    (count,) = _COUNT.unpack_from(body)
    at, parts = _COUNT.size + count * _LENGTH.size, []
    for index in range(count):
        (length,) = _LENGTH.unpack_from(body, _COUNT.size + index * _LENGTH.size)
        parts.append(body[at : at + length])
        at += length
    return Part(step, json.loads(parts[0]), parts[1:], RankRole(taking))


def check_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """The terms that all ranks have, before anything is applied. Raises on every rank alike if they differ."""
    for rank, part in enumerate(parts):
        if part.taking is RankRole.REFUSED:
            raise RanksDiffer(f"rank {rank} cannot go on: {part.terms['reason']}")
    for rank, part in enumerate(parts):
        if part.taking is RankRole.LOST:
            raise MomentumLost(f"the momentum of rank {rank} is not a number; load the state that it saved last")
    if len({part.step for part in parts}) > 1:
        steps = ", ".join(f"rank {rank} in step {part.step}" for rank, part in enumerate(parts))
        raise RanksDiffer(
            f"the ranks are in different steps ({steps}): load the states that all ranks saved in one step"
        )
    voting = [(rank, part.terms) for rank, part in enumerate(parts) if part.taking is RankRole.VOTES]
    assert voting, "torch's Join ends once all ranks have left"
    first, terms = voting[0]
    for rank, theirs in voting[1:]:
        for name in sorted(
            (terms.keys() | theirs.keys()) - {GRADIENT}, key=lambda name: (name in (PARAMETERS, DRIFT, NUMBER), name)
        ):
            if terms.get(name) != theirs.get(name):
                raise _differ(name, (first, terms.get(name)), (rank, theirs.get(name)))
    return terms


def _differ(name: str, one: tuple[int, Any], other: tuple[int, Any]) -> RanksDiffer:
    if name == PARAMETERS:
        return ReplicasDiffer(
            f"the ranks do not start from the same parameters (rank {one[0]} and rank {other[0]}): set the seed before "
            "the model is made, or load the same weights on all ranks"
        )
    if name == DRIFT:
        return ReplicasDiffer(
            f"the ranks have not the same parameters any more (rank {one[0]} and rank {other[0]}): something moved them on one "
            "rank, such as load_state_dict on rank 0 alone, or an average that was not taken back: load one state on all ranks"
        )
    if name == NUMBER:
        return RanksDiffer(
            f"the ranks step different optimizers that have equal settings: rank {one[0]} number {one[1]}, and rank {other[0]} "
            f"number {other[1]} of those without a step. Make them in one order on all ranks, and step them in one order"
        )
    here, there = (str(np.float32(value)) if isinstance(value, float) else str(value) for _, value in (one, other))
    if here == there:
        here, there = str(one[1]), str(other[1])
    mend = "settings and schedule; call scheduler.step() on all ranks or on none, in a skipped step, too"
    if name == LAYOUT:
        mend = "names and shapes of parameters in the same order, and the same settings"
    return RanksDiffer(
        f"the ranks differ in {name}: rank {one[0]} has {here}, and rank {other[0]} has {there}. All ranks need the same {mend}"
    )


def terms_of_shards(terms: dict[str, Any], group: dist.ProcessGroup) -> tuple[dict[str, Any], RanksDiffer | None]:
    """The terms of a peer whose ranks share its parameters, and what is wrong if these ranks have different ones.

    Each rank's DRIFT is that of its own rows; the peer's is of all. A collective call: all ranks find the same.
    """
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, terms, group=group)
    rows = [theirs.pop(DRIFT, "") for theirs in everyone]
    try:
        check_parts([Part(0, theirs, []) for theirs in everyone])
    except RanksDiffer as error:
        return terms, error
    return (terms | {DRIFT: " ".join(rows)} if any(rows) else terms), None


class Exchange:
    """The collective calls of all steps over one process group; `inner`: the ranks that share one peer's parameters."""

    def __init__(
        self, group: dist.ProcessGroup, device: Callable[[], torch.device], inner: dist.ProcessGroup | None
    ) -> None:
        # Weak: a group that outlives `destroy_process_group` aborts the process at exit (gloo, torch 2.13).
        self._group, self._device, self._inner = weakref.ref(group), device, inner
        self._room = 0

    def parts(self, mine: Part) -> list[Part]:
        """Every rank's part, in the order of ranks. A collective call. Raises `ExchangeFailed`."""
        body, room = mine.body(), self._room
        front = _HEADER.pack(mine.step, len(body), mine.taking) + body[:room].ljust(room, b"\0")
        with self._waits(mine.step):
            ballots = self._everybodys(front)
            heads = [_HEADER.unpack_from(ballot) for ballot in ballots]
            beyond = max(length for _, length, _ in heads) - room
            tails = [b""] * len(ballots)
            if beyond > 0:
                tails = self._everybodys(body[room:].ljust(beyond, b"\0"))
        found = []
        for (step, length, taking), ballot, tail in zip(heads, ballots, tails, strict=True):
            whole = ballot[_HEADER.size :] + tail
            found.append(part_of(step, taking, whole[:length]))
        self._room = max(length for _, length, _ in heads)
        return found

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks. Raises `RuntimeError` if the group was destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed before the last step of the optimizer")
        return group

    def _everybodys(self, ballot: bytes) -> list[bytes]:
        """Every peer's ballot; all have one length. One rank of a sharded peer asks for all."""
        if self._inner is None:
            return self._gather(ballot)
        box = [self._gather(ballot) if dist.get_rank(self._inner) == 0 else []]
        dist.broadcast_object_list(box, group=self._inner, group_src=0)
        return box[0]

    def _gather(self, ballot: bytes) -> list[bytes]:
        group = self.group
        mine = torch.frombuffer(bytearray(ballot), dtype=torch.uint8).to(self._device())
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        return [votes.to_bytes(theirs) for theirs in everyone]

    @contextmanager
    def _waits(self, step: int) -> Iterator[None]:
        timer = threading.Timer(WAIT_SHOWN_SECONDS, _log.warning, (_WAITS, step, WAIT_SHOWN_SECONDS))
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:  # dist.DistError, too
            if self._group() is None:
                raise
            raise ExchangeFailed(_FAILED.format(step=step, error=error)) from error
        finally:
            timer.cancel()


_WAITS = (
    "step %d has waited %d seconds for the votes of other ranks. Does each rank have as many batches? If not, train under "
    "torch.distributed.algorithms.join.Join([optimizer])."
)
_FAILED = (
    "the exchange of step {step} failed: another rank has ended, or has fewer batches than this one (train under "
    "torch.distributed.algorithms.join.Join([optimizer])). The backend says: {error}"
)
