"""One peer with several devices (FlexDeMo, arXiv 2502.06728): FSDP2 shards the model, and the peer votes once.

`fully_shard` averages gradients over the peer's ranks, as always. Each rank then keeps the momentum of its share of the
chunks and votes for them. The shares put together are the peer's one payload. It has the same bytes as on a single device, up
to the rounding of the private momentum. With a base that is chunkwise, applying needs no communication: every rank decides the
chunks that its shard touches, exactly. Another base keeps its state by share, and all ranks put one parameter's direction at a
time together. The layout is that of the whole model, so peers with one device and with eight take part in one run.

Refuses parameters that are sharded in another way than along their first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from node.optim import aggregate
from node.optim.base import Base
from node.optim.demo import DeMoConfig
from node.optim.laid_out import LaidOut, is_dealt, is_dtensor
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE, Layout, ParameterPlace, kinds_of, named_tensors, tile_chunks
from node.optim.second_moment import SecondMoment, local_part
from node.optim.spread import Pieces, Spread, checked, fill_share, matrix_of
from node.optim.step import (
    Contributions,
    NonFiniteGradient,
    Votes,
    accumulate,
    apply_real,
    as_tensor,
    clip_scale,
    exact_float32,
    spend_ballot,
)
from node.optim.votes.groups import NotANumber
from node.optim.votes.payload import Choice
from node.optim.voting import Nesterov, ParameterState, Voting, check_state, own_tensors, private_state

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedDeMo(Voting):
    """As `DeMo`, on every rank of a peer at once: all calls are collective over the ranks that share the model.

    `source` is the module after `fully_shard`, or its named parameters: DTensors in fp32, on a mesh of one dimension.
    """

    backend = "torch"

    def __init__(
        self,
        source: nn.Module | Iterable[tuple[str, Tensor]],
        config: DeMoConfig,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        """`kinds`: what modules say of the parameters (`layout.kinds_of`), where `source` has none."""
        named = named_tensors(source)
        self.config = config
        self.parameters = [checked(name, tensor) for name, tensor in named]
        shapes = ((name, tuple(tensor.shape)) for name, tensor in named)
        self.layout = Layout.of_shapes(shapes, kinds_of(source) if kinds is None else kinds)
        if not self.layout.chunks:
            raise ValueError("no parameter to train: all are frozen (requires_grad is False) or empty")
        self._laid_out = LaidOut([(name, tensor) for (name, _), tensor in zip(named, self.parameters, strict=True)])
        mesh = self.parameters[0].device_mesh
        self.group = mesh.get_group()
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._device = self.parameters[0].to_local().device
        self._tile_chunks = tile_chunks(self._device)
        self._transform = config.made_transform()
        self.share = self._share(self.rank)
        self._momentum = torch.zeros(len(self.share), CHUNK_SIDE, CHUNK_SIDE, dtype=torch.float32, device=self._device)
        self._pending: tuple[int, bytes] | None = None
        self._base = Base(config.base, self.layout, self._device, len(self.share))
        self._second: SecondMoment | None = SecondMoment(self.parameters, config.beta2) if config.beta2 else None
        if config.second_moment != "whole":
            raise ValueError(
                "second_moment 'factored' needs whole matrices, and ranks have parts of them: take 'whole'"
            )
        self._nesterov = Nesterov(self.parameters, config.nesterov) if config.nesterov else None
        self.step = self.pending_step = 0  # as `DeMo` counts them

    def _share(self, rank: int) -> range:
        """The chunks whose momentum a rank keeps: equal shares, each a whole number of bytes in any format."""
        groups = math.ceil(self.layout.chunks / self.ranks)
        return range(self.layout.chunks)[rank * groups : (rank + 1) * groups]

    @property
    def momentum(self) -> Tensor:
        """fp32 [share, 64, 64] of this rank's chunks, in the transform's domain. To be read only."""
        return self._momentum

    @property
    def replicated(self) -> list[Tensor | Pieces]:
        """As `DeMo.replicated`, to be read by all ranks at once."""
        return [*map(Spread.of, self.parameters), *self.base_spread.values()]

    @property
    def base_state(self) -> dict[str, Tensor]:
        """As `DeMo.base_state`, of this rank's chunks."""
        return self._base.state

    @property
    def base_spread(self) -> dict[str, Spread]:
        """As `DeMo.base_state`, to be read and written by all ranks at once."""
        state = self.base_state
        single = {name: Spread(t, t.shape, self.group, dealt=False) for name, t in state.items() if t.ndim == 1}
        return {name: single.get(name) or self._chunks_of(t) for name, t in state.items()}

    @property
    def private_spread(self) -> dict[str, Spread]:
        """The momentum and, if they exist, the second moment and Nesterov momentum of every parameter, as in `DeMo`."""
        spread = {"momentum": self._chunks_of(self._momentum)}
        if self._nesterov is not None:
            both = zip(self._nesterov.momenta, self.parameters, strict=True)
            spread |= {f"nesterov.{i}": self.rows_of(own, parameter) for i, (own, parameter) in enumerate(both)}
        if self._second is not None:
            pairs = zip(self._second.squares, self.parameters, strict=True)
            spread |= {f"square.{i}": self.rows_of(square, parameter) for i, (square, parameter) in enumerate(pairs)}
        return spread

    def _chunks_of(self, share: Tensor) -> Spread:
        return Spread(share, (self.layout.chunks, CHUNK_SIDE, CHUNK_SIDE), self.group)

    def rows_of(self, local: Tensor, parameter: DTensor) -> Spread:
        """A rank's tensor for its rows of a parameter, `local`, as one tensor over all ranks."""
        return Spread(local, parameter.shape, self.group, dealt=is_dealt(parameter))

    @property
    def method(self) -> str:
        """As `DeMo.state_dict` says it: what saved tensors mean."""
        return self.config.method(self._transform)

    @property
    def open_votes(self) -> Votes | None:
        return None if self._pending is None else Votes(self._pending[1], self._pending[0], math.nan)

    def resume(
        self, pending: tuple[int, bytes] | None, second_counts: list[int] | None, steps: tuple[int, int] = (0, 0)
    ) -> None:
        """Take over a saved state's parts beside `private_spread`: open votes `(size, payload)`, `second_counts`, and the
        steps of the last entry and of the open votes."""
        self._pending = pending
        self.step, self.pending_step = steps
        if self._second is not None and second_counts is not None:
            self._second.counts = list(second_counts)

    def parameter_state(self) -> list[ParameterState]:
        """As `DeMo.parameter_state`, of this rank: its share of the chunks stands with the first parameter."""
        assert self._pending is None, "settle the last votes first"
        states = [ParameterState(own) for own in own_tensors(len(self.parameters), self._second, self._nesterov)]
        states[0].private["momentum"] = self._momentum
        states[0].replicated.update({f"base_{name}": tensor for name, tensor in self.base_state.items()})
        return states

    @torch.no_grad()
    def propose(self, lr: float, step: int | None = None) -> Votes:
        """As `DeMo.propose`; every rank gets the peer's whole payload."""
        assert self._pending is None, "settle the last votes first"
        lr = exact_float32(lr)
        self.check_parameters()
        norm = self._norm()
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"gradient norm {norm}")
        limit = self.config.clip_norm
        if self._second is not None:
            self._second.divide([parameter.grad for parameter in self.parameters])
            limit = None
        scale = clip_scale(norm, limit)
        if self._nesterov is not None:
            self._nesterov.advance(scale)
            scale = 1.0
        gradients = fill_share(self.layout, self.share, self._whole_gradients(), self._device)
        scale *= 1.0 if self.config.magnitudes else lr
        size, form = self.config.size, self.form
        self.pending_step = self.step + 1 if step is None else step
        draw = self._draw(self.pending_step)
        chosen: list[Choice] | None = []
        for first in range(0, len(self.share), self._tile_chunks):
            tile = slice(first, first + self._tile_chunks)
            coefficients = self._transform.forward(gradients[tile])
            accumulated = accumulate(self._momentum[tile], coefficients, self.config.beta, scale)
            try:
                at = self.share.start + first
                chosen = None if chosen is None else [*chosen, form.choose(accumulated, size, draw=draw, first=at)]
            except NotANumber:
                chosen = None  # all ranks have to hear of it
        payload = form.encode(self._everybodys(chosen), size)
        self._pending = (size, payload)
        return Votes(payload, size, norm)

    def _whole_gradients(self) -> Iterator[Tensor | None]:
        """One whole gradient at a time, put together from all ranks."""
        for parameter in self.parameters:
            gradient = parameter.grad
            yield gradient.full_tensor() if is_dtensor(gradient) else gradient

    def _norm(self) -> float:
        """The norm of the peer's whole gradient, from the shards; what is not sharded counts on one rank."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter in self.parameters:
            if parameter.grad is not None and (is_dealt(parameter) or self.rank == 0):
                squares += local_part(parameter.grad).double().square().sum()
        dist.all_reduce(squares, group=self.group)
        return math.sqrt(float(squares)) if bool(squares.isfinite()) else math.inf

    def _everybodys(self, chosen: Sequence[Choice] | None) -> list[Choice]:
        """All ranks' choices, in the order of the chunks; None is a rank that cannot choose: `NotANumber` on every rank."""
        gathered: list[list[Choice] | None] = [None] * self.ranks
        mine = None if chosen is None else [choice.cpu() for choice in chosen]
        dist.all_gather_object(gathered, mine, group=self.group)
        found = [theirs for theirs in gathered if theirs is not None]
        if len(found) < self.ranks:
            raise NotANumber("the momentum of a rank holds NaN")
        return [choice for theirs in found for choice in theirs]

    @torch.no_grad()
    def settle(self, accepted: bool) -> None:
        """As `DeMo.settle`, each rank for its own chunks."""
        assert self._pending is not None, "nothing was proposed"
        if accepted or self.config.refused == "drop":
            self._spend(self._momentum)
        self._pending = None

    def _spend(self, momentum: Tensor) -> None:
        """Take the pending votes out of this rank's `momentum`, fp32 [share, 64, 64]."""
        assert self._pending is not None, "nothing was proposed"
        if not len(self.share):
            return
        size, payload = self._pending
        packed = self.form.read(payload, size, self.layout.chunks, self._draw(self.pending_step))
        ballot = packed.to(self._device).ballot(self.share.start, self.share.stop)
        spend_ballot(momentum.view(-1, CHUNK_ELEMENTS), ballot, self.form)

    @contextmanager
    def ahead(self, lr: float) -> Iterator[None]:
        """As `DeMo.ahead`, on every rank at once."""
        self.config.check_ahead()
        parts = [local_part(parameter).detach() for parameter in self.parameters]
        with torch.no_grad():
            start = [part.clone() for part in parts]
            expected = self._momentum.clone()
            if self._pending is not None:
                self._spend(expected)
            for rows, direction in self._directed(self._transform.inverse(expected).sign_()):
                rows.sub_(direction, alpha=lr)
        try:
            yield
        finally:
            with torch.no_grad():
                for part, was in zip(parts, start, strict=True):
                    part.copy_(was)

    @torch.no_grad()
    def apply(
        self, contributions: Contributions, lr: float, step: int | None = None, authors: Sequence[bytes] = ()
    ) -> None:
        """As `DeMo.apply`, each rank for its own shard; the same bits as on one device."""
        lr = exact_float32(lr)
        self._laid_out.check_parameters()
        step = self.step + 1 if step is None else step
        grows, cap = aggregate.grows(self.form, self.config.base), self.config.cap
        draw = self._draw(step, authors, len(contributions))
        total = aggregate.VoteSum(self.layout.chunks, self._device, self.form, grows=grows, draw=draw, cap=cap)
        for size, payload in contributions:
            total.add(size, payload)
        self.step = step
        if not self.config.base.chunkwise:
            for (rows, direction), own in zip(self._directed(self._advance(total)), self._decays, strict=True):
                apply_real(rows, direction, lr, own)
            return
        pool = self._directions(total, range(self.layout.core_chunks, self.layout.chunks)).view(-1)
        for parameter, place, own in zip(self.parameters, self.layout.places, self._decays, strict=True):
            self._move(parameter, place, total, pool, lr, own)

    @property
    def _decays(self) -> Sequence[float]:
        """Weight decay of each parameter."""
        found = self.config.decays(self.layout)
        return [found] * len(self.parameters) if isinstance(found, int | float) else found

    def _advance(self, total: aggregate.VoteSum) -> Tensor:
        """As `Family.apply` up to the base optimizer's `advance`, of this rank's chunks: fp32 [share, 64, 64]."""
        out = torch.empty_like(self._momentum)
        squares = 0
        for first in range(self.share.start, self.share.stop, self._tile_chunks):
            last = min(first + self._tile_chunks, self.share.stop)
            part = out[first - self.share.start : last - self.share.start]
            squares += aggregate.update(total, first, last, self._transform, part)
        if self.form.scaled:
            factors = aggregate.mean_factors(total, self._transform)
            out.mul_(factors[self.share.start : self.share.stop, None, None])
        else:
            summed = torch.tensor(squares, dtype=torch.int64, device=self._device)
            dist.all_reduce(summed, group=self.group)
            out.mul_(aggregate.unit_factor(total, self._transform, int(summed)))
        return self._base.advance(out)

    def _directed(self, share: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's rows of each parameter as a matrix, and their direction, from all ranks' `share` of the chunks."""
        spread = self._chunks_of(share)
        pool = spread.rows(self.layout.core_chunks, self.layout.chunks).view(-1)
        for parameter, place in zip(self.parameters, self.layout.places, strict=True):
            core = spread.rows(place.first_chunk, place.first_chunk + place.core_chunks)
            matrix = self._base.finish(place, matrix_of(place, core, pool))
            first, last = self._rows(parameter, place)
            yield local_part(parameter).detach().view(last - first, place.width), matrix[first:last]

    def _move(
        self, parameter: DTensor, place: ParameterPlace, total: aggregate.VoteSum, pool: Tensor, lr: float, decay: float
    ) -> None:
        local = parameter.to_local()
        first, last = self._rows(parameter, place)
        if first == last:
            return
        rows = local.view(last - first, place.width)
        high, wide = place.core_height, place.core_width
        low, top = min(first, high), min(last, high)
        if low < top and wide:
            across = wide // CHUNK_SIDE
            blocks = range(low // CHUNK_SIDE, math.ceil(top / CHUNK_SIDE))
            chunks = range(place.first_chunk + blocks.start * across, place.first_chunk + blocks.stop * across)
            found = self._directions(total, chunks).view(len(blocks), across, CHUNK_SIDE, CHUNK_SIDE)
            matrix = found.transpose(1, 2).reshape(len(blocks) * CHUNK_SIDE, wide)
            offset = blocks.start * CHUNK_SIDE
            apply_real(rows[: top - first, :wide], matrix[low - offset : top - offset], lr, decay)
        right = place.width - wide
        if low < top and right:
            strip = pool[place.pool_offset : place.pool_offset + high * right].view(high, right)
            apply_real(rows[: top - first, wide:], strip[low:top], lr, decay)
        low = max(first, high)
        if low < last and place.width:
            begin = place.pool_offset + high * right
            strip = pool[begin : begin + (place.height - high) * place.width].view(-1, place.width)
            apply_real(rows[low - first :], strip[low - high : last - high], lr, decay)

    def _rows(self, parameter: DTensor, place: ParameterPlace) -> tuple[int, int]:
        """The rows of the parameter, seen as a matrix, that this rank holds: as `torch.chunk` deals them out."""
        if not is_dealt(parameter):
            return 0, place.height
        height, each = place.shape[0], math.ceil(place.shape[0] / self.ranks)
        first, last = min(self.rank * each, height), min((self.rank + 1) * each, height)
        assert parameter.to_local().shape[0] == last - first, f"{place.name} is not dealt out in equal parts"
        return first, last

    def _directions(self, total: aggregate.VoteSum, chunks: range) -> Tensor:
        """The direction of some chunks: fp32 [count, 64, 64]."""
        out = torch.empty(len(chunks), CHUNK_SIDE, CHUNK_SIDE, dtype=torch.float32, device=self._device)
        for first in range(chunks.start, chunks.stop, self._tile_chunks):
            last = min(first + self._tile_chunks, chunks.stop)
            part = out[first - chunks.start : last - chunks.start]
            if aggregate.is_narrow(self.form, self._transform, self.config.cap):  # the base is chunkwise here
                aggregate.inverse(total.sums(first, last), out=part)
            else:
                aggregate.update(total, first, last, self._transform, part)
            self._base.direct_chunks(part, first)
        return out

    @property
    def _own_method(self) -> str:
        return f"{self.method}, rank {self.rank} of {self.ranks}"

    def state_dict(self) -> dict[str, Any]:
        """This rank's part. It is private, and only the same rank of as many ranks can take it over."""
        pending = (
            None if self._pending is None else (self._pending[0], as_tensor(self._pending[1], torch.device("cpu")))
        )
        own = self.layout, self._own_method, self._momentum, pending, self._second
        return private_state(*own, step=self.step, pending_step=self.pending_step, nesterov=self._nesterov)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, by copy. Raises `ValueError` if it belongs to another model, method or rank."""
        has = {"second": self._second is not None, "nesterov": self._nesterov is not None}
        check_state(state, self.layout, self._own_method, self._momentum.shape, **has)
        if self._second is not None:
            self._second.load_state_dict(state["second"])
        if self._nesterov is not None:
            self._nesterov.load_state_dict(state["nesterov"])
        self.step, self.pending_step = state.get("step", 0), state.get("pending_step", 0)
        packed = state["pending"]
        self._momentum.copy_(state["momentum"])
        self._pending = None if packed is None else (state["pending_size"], packed.cpu().numpy().tobytes())
