"""The size of this peer's votes follows the bytes that the lines carry in the time that a step allows. Pure; knows no clock.

The module assumes that a payload's time to another peer, as the pullers report it, grows with the payload's bytes. The size
moves one place at a time. The size moves up (more bytes) only if the larger payload should take clearly less than the budget.
The size moves down as soon as the present payload takes more. Up to the run's size, the typical puller decides. Beyond it the
slowest does, whose downlink carries everybody's votes. Refuses to guess: without reports nothing changes. Refuses to send
less than the run asks for where that does not help: far away, a small payload takes as long as a large one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from node.blobs.blobs import Took
from protos.optimizer_config import SIZE_KEYS
from protos.optimizer_defaults import most_bytes
from protos.run_config import ClockConfig, RunConfig

REPORTS_KEPT = 5
"""How many arrivals and computations a median is over."""

ROOM = 0.7
"""A larger payload must fit in this part of the budget, so that the size does not swing."""

TRIED_AGAIN = 100
"""Steps until fewer bytes than the run's are tried again, after they did not help."""

LATER_MIN = 2
"""Reports on a payload count when so many later ones are out: those of slow peers come last."""

SENT_MAX = 16
"""Published payloads without a report."""


class VoteSize:
    """Chooses among `payload_bytes`, from each size (group size or k) to the bytes of its payload; `size` is the run's.

    `most`: bytes of the largest payload, by the clock's settings in force and the number of peers that vote. The run's own
    bytes are always allowed.
    """

    def __init__(
        self,
        payload_bytes: Mapping[int, int],
        size: int,
        budget: float,
        most: Callable[[ClockConfig, int], int] | None = None,
    ) -> None:
        assert size in payload_bytes, f"{size} is none of {sorted(payload_bytes)}"
        self._run_bytes = payload_bytes[size]
        self._bytes = dict(payload_bytes)
        self._sorted = sorted(self._bytes, key=lambda choice: self._bytes[choice])
        self._order = self._sorted
        self.size = size
        self._budget, self._most = budget, most
        self._sent: dict[bytes, int] = {}
        self._arrivals: deque[Took] = deque(maxlen=REPORTS_KEPT)
        self._computed: deque[float] = deque(maxlen=REPORTS_KEPT)
        self._fell_at: float | None = None
        """What larger payloads took, if the last move was below the run's size."""
        self._rests = 0
        """Steps without a move down: the last one did not help."""

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest payload that it may choose."""
        return self._bytes[self._order[-1]]

    def sent(self, sha256: bytes, size: int) -> None:
        """This peer has published a payload of `size`, without a report so far. The oldest payloads are forgotten."""
        self._sent[sha256] = size
        while len(self._sent) > SENT_MAX:
            del self._sent[next(iter(self._sent))]

    def heard(self, took_of: Callable[[bytes], Took | None]) -> None:
        """Take the reports on published payloads: `took_of` says how long each took, None without a report. The newest
        `LATER_MIN` wait: what is fast has arrived of them, and what is slow has not."""
        for sha256, size in list(self._sent.items())[:-LATER_MIN]:
            took = took_of(sha256)
            if took is not None:
                self.arrived(size, took)
                del self._sent[sha256]

    def arrived(self, size: int, took: Took) -> None:
        """A payload of `size` took so long to reach others. A report on an earlier size is too old to count."""
        if size == self.size:
            self._arrivals.append(took)

    def computed(self, milliseconds: float) -> None:
        """This peer's computation of a step took so long. The budget is a part of this time."""
        self._computed.append(milliseconds)

    def limit(self, clock: ClockConfig, peers: int) -> None:
        """More peers may vote now, or the operator has changed how many votes joiners need: what is too large now is not chosen
        from now on."""
        if self._most is None:
            return
        most = max(self._most(clock, peers), self._run_bytes)
        self._order = [size for size in self._sorted if self._bytes[size] <= most]
        if self.size not in self._order:
            self._move(len(self._order) - 1)

    def fit(self, took_of: Callable[[bytes], Took | None], computed_ms: float, clock: ClockConfig, peers: int) -> int:
        """The size for this step of so many `peers`, after all that was heard and a computation of so long, with `clock` in
        force."""
        self.limit(clock, peers)
        self.heard(took_of)
        self.computed(computed_ms)
        return self.choose()

    def choose(self) -> int:
        """The size for the next step."""
        if len(self._arrivals) < REPORTS_KEPT or not self._computed:
            return self.size
        allowed, place, took = (
            self._budget * median(self._computed),
            self._order.index(self.size),
            self._took(self.size),
        )
        fell_at, self._fell_at, self._rests = self._fell_at, None, max(self._rests - 1, 0)
        if fell_at is not None and took > self._halfway(place) * fell_at:
            self._rests = TRIED_AGAIN
            self._move(place + 1)
        elif took > allowed and place > 0:
            if self._bytes[self.size] <= self._run_bytes:
                if self._rests:
                    return self.size
                self._fell_at = took
            self._move(place - 1)
        elif place + 1 < len(self._order):
            larger = self._order[place + 1]
            if self._took(larger) * self._bytes[larger] / self._bytes[self.size] < ROOM * allowed:
                self._move(place + 1)
        return self.size

    def _halfway(self, place: int) -> float:
        """Between the part of the time that a smaller payload takes if bytes decide it, and all of it, if the distance does."""
        return (1 + self._bytes[self._order[place]] / self._bytes[self._order[place + 1]]) / 2

    def _took(self, size: int) -> float:
        """What the present payloads took to those whom `size` must suit."""
        return median(it.slowest if self._bytes[size] > self._run_bytes else it.typical for it in self._arrivals)

    def _move(self, place: int) -> None:
        self.size = self._order[place]
        self._arrivals.clear()


def following(
    config: RunConfig, budget: float | None, payload_bytes: Mapping[int, int], *, metered: bool
) -> VoteSize | None:
    """What lets the size of the votes follow the lines, if it may. It only falls if the owner's month is `metered`: the peer
    would pause sooner."""
    optimizer = config.optimizer
    if budget is None or optimizer.selection not in SIZE_KEYS:
        return None
    own = payload_bytes[optimizer.vote_size]

    def most(clock: ClockConfig, peers: int) -> int:
        return own if metered else most_bytes(own, optimizer.selection, clock.snapshot_every, peers)

    follows = VoteSize(payload_bytes, optimizer.vote_size, budget, most)
    follows.limit(config.clock, config.clock.min_peers)
    return follows
