"""Rank 0 of a peer of several ranks: a replica that sends its calls to the other ranks, and all ranks make them.

`Lead.do` is the only way: one command at a time, from one thread. A second thread sends `alive` between commands, because
rank 0 may wait for the network for a long time. Refuses every command once a rank is gone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from node.data.samples import Samples
from node.model.gradients import GradResult
from node.optim.demo import DeMoConfig
from node.optim.layout import Layout
from node.optim.local import LocalConfig
from node.optim.second_moment import counts_of, whole_squares
from node.optim.sharded_demo import ShardedDeMo
from node.optim.spread import PIECE_ELEMENTS, Pieces, whole
from node.optim.step import Contributions, Votes
from node.optim.votes import groups as votes
from node.optim.votes.payload import Format
from node.optim.voting import check_state
from node.ranks import Launch
from node.ranks.channel import Channel, RankLost, lost_ranks, rank_device
from node.ranks.shard import AGREED, BUFFERS, COMMANDS, Order, RankShard
from node.training.maker import GradientMaker
from node.training.replica import BASE_PREFIX, Replica
from protos.assignment import Range
from protos.optimizer_config import OptimizerConfig

ALIVE_SECONDS = 10.0
"""Seconds between two `alive` commands: well below `channel.RANK_SECONDS_MAX`."""


class Lead:
    """Rank 0's end of the channel."""

    def __init__(self, launch: Launch, device: str) -> None:
        self.channel = Channel(launch, rank_device(launch, device))
        self.ranks = launch.ranks
        self._shard: RankShard | None = None
        self._one_at_a_time = threading.Lock()
        self._failed: BaseException | None = None
        self._closed = threading.Event()
        self._signs = threading.Thread(target=self._give_signs_of_life, name="ranks", daemon=True)
        self._signs.start()

    @property
    def shard(self) -> RankShard:
        """Rank 0's own shard, once built."""
        assert self._shard is not None, "build first"
        return self._shard

    def build(self, order: Order) -> None:
        """Have every rank build its shard."""
        with self._sending("build", order):
            self._shard = RankShard(order, self.channel)

    def do(self, name: str, *arguments: object, **own: object) -> Any:
        """Make one of `COMMANDS` on all ranks; `own` are arguments that only rank 0 has."""
        with self._sending(name, *arguments):
            return COMMANDS[name](self.shard, *arguments, **own)

    @contextmanager
    def _sending(self, name: str, *arguments: object) -> Iterator[None]:
        with self._one_at_a_time:
            if self._failed is not None:
                raise RankLost(f"the ranks of this peer are no longer in step: {self._failed}") from self._failed
            try:
                with lost_ranks():
                    self.channel.tell((name, arguments))
                    yield
            except AGREED:
                raise
            except BaseException as error:  # this rank broke the call off, and the others did not
                self._failed = error
                raise

    def _give_signs_of_life(self) -> None:
        torchrun = os.getppid()
        while not self._closed.wait(ALIVE_SECONDS):
            if os.getppid() != torchrun:  # torchrun was killed before it could send SIGTERM: end as after one
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                with self._sending("alive"):
                    pass
            except RankLost:
                return  # the next command raises the error

    def close(self) -> None:
        """Send `stop` to the other ranks, if they still listen."""
        self._closed.set()
        self._signs.join()
        try:
            with self._sending("stop"):
                pass
        except RankLost:
            pass
        self.channel.close()


class RemoteTensor:
    """A tensor of the peer, by its name on the ranks (`RankShard`): `Pieces` that only rank 0 reads and writes."""

    def __init__(self, lead: Lead, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._lead, self._name = lead, name

    def numel(self) -> int:
        """Elements of the whole tensor."""
        return torch.Size(self.shape).numel()

    def pieces(self, first: int, last: int) -> Iterator[Tensor]:
        for low in range(first, last, PIECE_ELEMENTS):
            yield self._lead.do("read", self._name, low, min(low + PIECE_ELEMENTS, last))

    def copy_(self, source: Tensor) -> None:
        assert tuple(source.shape) == self.shape, f"{self._name} is {self.shape}, not {tuple(source.shape)}"
        self._lead.do("write", self._name, source=source)


class LedDeMo:
    """`DeMo` as a replica calls it, on all ranks at once. The saved state equals the state that one device would save."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @property
    def _own(self) -> ShardedDeMo:
        return self._lead.shard.demo

    @property
    def config(self) -> DeMoConfig:
        """The same on every rank."""
        return self._own.config

    @property
    def form(self) -> Format:
        return self._own.form

    @property
    def size(self) -> int:
        return self._own.size

    @size.setter
    def size(self, size: int) -> None:
        self._lead.do("configure", self.config.with_size(size))

    @property
    def layout(self) -> Layout:
        """The layout of the whole model."""
        return self._own.layout

    @property
    def pending(self) -> bool:
        return self._own.pending

    @property
    def open_votes(self) -> Votes | None:
        return self._own.open_votes

    @property
    def base_state(self) -> dict[str, Tensor | Pieces]:
        return {n: RemoteTensor(self._lead, f"base.{n}", s.shape, s.dtype) for n, s in self._own.base_spread.items()}

    def propose(self, lr: float, step: int | None = None) -> Votes:
        found: Votes = self._lead.do("propose", lr, step)
        return found

    def settle(self, accepted: bool) -> None:
        self._lead.do("settle", accepted)

    def apply(
        self, contributions: Contributions, lr: float, step: int | None = None, authors: Sequence[bytes] = ()
    ) -> None:
        self._lead.do("apply", list(contributions), lr, step, list(authors))

    @contextmanager
    def ahead(self, lr: float) -> Iterator[None]:
        self._lead.do("ahead", lr)
        try:
            yield
        finally:
            self._lead.do("back")

    def state_digest(self, step: int | None, all_in: int = 0) -> bytes:
        found: bytes = self._lead.do("digest", step, all_in)
        return found

    def whole_gradients(self) -> list[Tensor | None]:
        """As `OwnDeMo.whole_gradients`: on the CPU of rank 0, 4 bytes a parameter beside those of the check."""
        own = enumerate(self._own.parameters)
        return [whole(RemoteTensor(self._lead, f"gradient.{index}", parameter.shape)) for index, parameter in own]

    @property
    def _private(self) -> dict[str, RemoteTensor]:
        spreads = self._own.private_spread
        return {name: RemoteTensor(self._lead, f"private.{name}", spread.shape) for name, spread in spreads.items()}

    def state_dict(self) -> dict[str, Any]:
        """As `DeMo.state_dict`, whole: a later life may have another number of ranks."""
        momentum, *rest = (whole(part) for part in self._private.values())
        counts, open_votes = self._own.second_counts, self.open_votes
        payload = None if open_votes is None else torch.frombuffer(bytearray(open_votes.payload), dtype=torch.uint8)
        return {
            "layout": self.layout.digest().hex(),
            "method": self._own.method,
            "momentum": momentum,
            "pending": payload,
            "pending_size": None if open_votes is None else open_votes.size,
            "second": None if counts is None else {"counts": list(counts), "squares": rest},
            "nesterov": {"momenta": rest} if self.config.nesterov else None,  # a second moment excludes it
            "step": self._own.step,
            "pending_step": self._own.pending_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, of any number of devices. Raises `ValueError`, nothing changed, if the state does not fit."""
        parts, second, nesterov = list(self._private.values()), state["second"], state.get("nesterov")
        has = {"second": self._own.second_counts is not None, "nesterov": self.config.nesterov > 0}
        check_state(state, self.layout, self._own.method, parts[0].shape, **has)
        rest = () if second is None else whole_squares(second, [place.shape for place in self.layout.places])
        saved = [state["momentum"].float(), *(rest if nesterov is None else nesterov["momenta"])]
        if [tuple(tensor.shape) for tensor in saved] != [part.shape for part in parts]:
            raise ValueError("the saved moments belong to other parameters: load a state that this model saved")
        pending = None
        if state["pending"] is not None:
            pending = state["pending_size"], votes.to_bytes(state["pending"])
            self.form.check(pending[1], pending[0], self.layout.chunks)
        for part, tensor in zip(parts, saved, strict=True):
            part.copy_(tensor)
        steps = state.get("step", 0), state.get("pending_step", 0)
        self._lead.do("resume", pending, None if second is None else counts_of(second), steps)


class LedLocal:
    """`LocalSteps` as a replica calls it, on all ranks at once."""

    def __init__(self, lead: Lead, config: LocalConfig) -> None:
        self._lead, self.config = lead, config

    def borrow(self) -> None:
        self._lead.do("borrow")

    def step(self, lr_factor: float = 1.0) -> None:
        self._lead.do("step_locally", lr_factor)

    def give_back(self) -> None:
        self._lead.do("give_back")

    def _part(self, buffer: str, index: int) -> RemoteTensor:
        return RemoteTensor(self._lead, f"local.{buffer}.{index}", self._lead.shard.demo.parameters[index].shape)

    def state_dict(self) -> dict[str, Any]:
        """As `LocalSteps.state_dict`, whole."""
        local = self._lead.shard.local
        assert local is not None, "made for a run with local steps"
        own = local.state_dict()
        state = {
            index: {"step": had["step"], **{buffer: whole(self._part(buffer, index)) for buffer in BUFFERS}}
            for index, had in own["state"].items()
        }
        return {"state": state, "param_groups": own["param_groups"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, of any number of devices."""
        saved = state["state"]
        self._lead.do("resume_locally", state["param_groups"], {index: had["step"] for index, had in saved.items()})
        for index, had in saved.items():
            for buffer in BUFFERS:
                self._part(buffer, index).copy_(had[buffer])


class RanksReplica(Replica):
    """A replica whose parameters and momentum lie on all ranks of this peer: an image of them is a copy."""

    live = False

    def __init__(
        self, run_id: bytes, lead: Lead, order: Order, optimizer: OptimizerConfig, size: int, digest_steps: int = 0
    ) -> None:
        lead.build(order)
        self._lead, self._order = lead, order
        local = LedLocal(lead, order.local) if order.local.steps > 1 else None
        demo = LedDeMo(lead)
        super().__init__(run_id, lead.shard.model, optimizer, size, demo=demo, local=local, digest_steps=digest_steps)

    def mean_gradient(
        self,
        samples: Samples,
        ranges: Iterable[Range],
        micro_batch: int,
        autocast: Any,
        should_stop: Callable[[], bool],
        by: GradientMaker | None = None,
    ) -> GradResult:
        """Every rank enters its own autocast (`Order.precision`), and has up to `micro_batch` samples at a time."""

        def batches() -> Iterator[Any]:
            for batch in samples.micro_batches(ranges, micro_batch * self._lead.ranks):
                if should_stop():
                    return
                yield batch

        found: GradResult = self._lead.do("gradients", source=batches())
        return found

    @property
    def state(self) -> dict[str, Tensor | Pieces]:
        model = {n: RemoteTensor(self._lead, f"model.{n}", p.shape, p.dtype) for n, p in self.model.named_parameters()}
        return {**model, **{f"{BASE_PREFIX}{name}": part for name, part in self.demo.base_state.items()}}

    def model_to_evaluate(self) -> nn.Module:
        """As `Replica.model_to_evaluate`: no device has the whole model, and no other rank is asked for it later."""
        return self._order.build()

    def whole_model(self) -> nn.Module:
        """As `Replica.whole_model`: a copy on the CPU."""
        model, state = self._order.build(), self.state
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(whole(state[name]))
        return model
