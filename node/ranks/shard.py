"""A rank's shard of the model and of the optimizer, and the calls that all ranks of a peer make at once.

Refuses models that `fully_shard` cannot take apart. A trial step finds such a model before the peer joins.

`follow` is what the ranks beside rank 0 do: they receive commands and make the calls, until rank 0 sends `stop` or is gone.
"""

from __future__ import annotations

import math
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from node.config import PeerSettings
from node.data.samples import Batch
from node.donor.live import Live
from node.model.device import autocast, limit
from node.model.gradients import GradResult, Pace, loss, to_device
from node.model.size import Effort, blocks_of
from node.model.spec import ModelSpec, build
from node.optim.demo import DeMoConfig
from node.optim.digest import state_digest
from node.optim.local import LocalConfig, LocalSteps
from node.optim.second_moment import local_part
from node.optim.sharded_demo import ShardedDeMo
from node.optim.spread import Spread
from node.optim.step import Contributions, NonFiniteGradient, Votes
from node.optim.votes.groups import NotANumber, VotesError
from node.ranks import Launch
from node.ranks.channel import Channel, lost_ranks, rank_device
from protos.errors import OperatorError
from protos.process import STOP_SIGNALS, usable_cores


@dataclass(frozen=True)
class Order:
    """Rank 0's order to every rank: the model and the optimizer to build."""

    spec: ModelSpec
    seed: int
    vocabulary: int
    context: int
    optimizer: DeMoConfig
    local: LocalConfig
    precision: str
    effort: Effort = field(default_factory=Effort)

    def build(self) -> nn.Module:
        """The whole model on the CPU, the same bits on every rank."""
        return build(self.spec, self.seed, vocabulary=self.vocabulary, context=self.context)


class RankShard:
    """One rank's part of a peer. Every public method is one of `COMMANDS`, and collective."""

    def __init__(self, order: Order, channel: Channel) -> None:
        self._channel = channel
        self._rank, self._ranks = channel.launch.rank, channel.launch.ranks
        self._device = channel.device
        self._autocast = autocast(channel.device, order.precision)
        self.model = order.effort.prepare(order.build())
        try:
            shard(self.model, channel.mesh)
            self.demo = ShardedDeMo(self.model, order.optimizer)
            self.local = LocalSteps(self.demo.parameters, order.local) if order.local.steps > 1 else None
        except ValueError as error:
            raise OperatorError(f"a peer of several ranks cannot train this model: {error}") from error
        self._ahead = ExitStack()
        self._try()

    def _try(self) -> None:
        """Make a trial step. The step refuses, before the peer joins, a model whose parts cannot be gathered one by one."""
        try:
            with lost_ranks(), self._autocast:
                loss(self.model, torch.zeros(1, 3, dtype=torch.int64, device=self._device)).backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError, ValueError) as error:
            raise OperatorError(f"a peer of several ranks cannot train this model: {error}") from error
        self.model.zero_grad(set_to_none=True)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def gradients(self, source: Iterator[Batch] | None = None) -> GradResult:
        """As `accumulate_gradients`, over rank 0's `source`. A rank takes its share of the rows of each batch.

        A rank without rows computes the first row without effect, because it has to take part in gathering the parameters.
        """
        self.model.zero_grad(set_to_none=True)
        total, tokens, samples = torch.zeros((), device=self._device), 0, 0
        pace = Pace(self._device)
        for batch in self._channel.shared(source):
            rows = torch.as_tensor(batch)
            mine = rows.tensor_split(self._ranks)[self._rank]
            with self._autocast:
                found = loss(self.model, to_device(mine if len(mine) else rows[:1], self._device)) * len(mine)
            found.backward()  # type: ignore[no-untyped-call]
            total += found.detach()
            samples += len(rows)
            tokens += rows[:, 1:].numel()
            pace.tick()
        if not samples:
            return GradResult(math.nan, 0, 0)
        # `fully_shard` has taken the mean over the ranks.
        there = [local_part(p.grad) for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(there, self._ranks / samples)
        dist.all_reduce(total, group=self.demo.group)
        return GradResult(total.item() / samples, tokens, samples)

    # ---- the optimizer -----------------------------------------------------------------------------------------------

    def configure(self, config: DeMoConfig) -> None:
        """Set another size of the votes."""
        self.demo.config = config

    def propose(self, lr: float, step: int | None = None) -> Votes:
        """See `DeMo`. The gradients are freed."""
        votes = self.demo.propose(lr, step)
        self.model.zero_grad(set_to_none=True)
        return votes

    def settle(self, accepted: bool) -> None:
        self.demo.settle(accepted)

    def apply(
        self, contributions: Contributions, lr: float, step: int | None = None, authors: Sequence[bytes] = ()
    ) -> None:
        self.demo.apply(contributions, lr, step, authors)

    def ahead(self, lr: float) -> None:
        """Enter `DeMo.ahead`."""
        self._ahead.enter_context(self.demo.ahead(lr))

    def back(self) -> None:
        """Leave `DeMo.ahead`."""
        self._ahead.close()

    def borrow(self) -> None:
        self._inner.borrow()

    def step_locally(self, lr_factor: float) -> None:
        self._inner.step(lr_factor)

    def give_back(self) -> None:
        self._inner.give_back()

    @property
    def _inner(self) -> LocalSteps:
        assert self.local is not None, "the run has no local steps"
        return self.local

    # ---- the state ---------------------------------------------------------------------------------------------------

    def digest(self, step: int | None, all_in: int) -> bytes:
        """See `state_digest`, of the replicated state."""
        return state_digest(self.demo.replicated, step, all_in)

    # ---- tensors, by name --------------------------------------------------------------------------------------------

    def read(self, name: str, first: int, last: int) -> Tensor:
        """The elements `first` to `last - 1` of a whole tensor, flat."""
        return torch.cat(list(self._spread(name).pieces(first, last)))

    def write(self, name: str, source: Tensor | None = None) -> None:
        """Write a whole tensor that rank 0 has."""
        self._spread(name).fill(source)

    def resume(
        self, pending: tuple[int, bytes] | None, second_counts: list[int] | None, steps: tuple[int, int]
    ) -> None:
        self.demo.resume(pending, second_counts, steps)

    def resume_locally(self, groups: list[dict[str, Any]], steps: dict[int, Tensor]) -> None:
        """Load a saved state of the local AdamW: `steps` of each parameter that has some. Rank 0 writes the buffers later."""
        parts = [local_part(parameter) for parameter in self._inner.parameters]
        state = {i: {"step": step, **{key: torch.zeros_like(parts[i]) for key in BUFFERS}} for i, step in steps.items()}
        self._inner.load_state_dict({"state": state, "param_groups": groups})

    def _spread(self, name: str) -> Spread:
        """`model.NAME`, `gradient.INDEX`, `base.NAME`, `private.NAME` (see `ShardedDeMo`), `local.BUFFER.INDEX` (AdamW's)."""
        kind, _, rest = name.partition(".")
        match kind:
            case "model":
                return Spread.of(self.model.get_parameter(rest))  # type: ignore[arg-type]
            case "gradient":
                parameter = self.demo.parameters[int(rest)]
                of = parameter if parameter.grad is None else parameter.grad
                local = local_part(of).detach()
                return self.demo.rows_of(torch.zeros_like(local) if of is parameter else local, parameter)
            case "base":
                return self.demo.base_spread[rest]
            case "private":
                return self.demo.private_spread[rest]
            case _:
                buffer, _, index = rest.partition(".")
                local = self._inner.state_dict()["state"][int(index)][buffer]
                return self.demo.rows_of(local, self.demo.parameters[int(index)])


BUFFERS: Final = ("exp_avg", "exp_avg_sq")
"""AdamW's buffers, under torch's names."""

COMMANDS: Final[dict[str, Callable[..., Any]]] = {
    "gradients": RankShard.gradients,
    "configure": RankShard.configure,
    "propose": RankShard.propose,
    "settle": RankShard.settle,
    "apply": RankShard.apply,
    "ahead": RankShard.ahead,
    "back": RankShard.back,
    "borrow": RankShard.borrow,
    "step_locally": RankShard.step_locally,
    "give_back": RankShard.give_back,
    "digest": RankShard.digest,
    "read": RankShard.read,
    "write": RankShard.write,
    "resume": RankShard.resume,
    "resume_locally": RankShard.resume_locally,
}
"""The commands that rank 0 may send, beside `build` (with an `Order`), `alive` and `stop`."""


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """`fully_shard` over all ranks. The call gathers each block of a list when the block is needed, and the rest with the
    model."""
    from torch.distributed.fsdp import fully_shard  # half a second that peers of one device do not need

    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for prefix, block in blocks_of(model):
        own = [name for parameter in block.parameters() for name in names[id(parameter)]]
        if own and all(name.startswith(f"{prefix}.") for name in own):  # tied weights stay with the model
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


AGREED = (NonFiniteGradient, NotANumber, VotesError)
"""The errors that a call raises on every rank alike. Rank 0 decides what follows."""


def follow(launch: Launch, settings: PeerSettings) -> None:
    """Follow rank 0 until it sends `stop`. Raises `RankLost` if rank 0 is gone, and the errors of a call on this rank."""
    values = Live(settings.home, settings).values
    torch.set_num_threads(values.threads or min(torch.get_num_threads(), usable_cores()))
    channel = Channel(launch, rank_device(launch, settings.device))
    limit(channel.device, values.gpu_memory)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # torchrun signals rank 0, too, and rank 0 ends the work from here on
    log = structlog.get_logger("peer").bind(rank=launch.rank)
    log.info("rank ready", ranks=launch.ranks, device=str(channel.device))
    try:
        _obey(channel)
    finally:
        channel.close()


def _obey(channel: Channel) -> None:
    shard: RankShard | None = None
    while True:
        name, arguments = channel.hear()
        match name:
            case "stop":
                return
            case "alive":
                pass
            case "build":
                shard = RankShard(arguments[0], channel)
            case _:
                assert shard is not None, f"{name} came before build"
                try:
                    with lost_ranks():
                        COMMANDS[name](shard, *arguments)
                except AGREED:
                    pass
