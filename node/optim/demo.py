"""DeMo and its family: one peer's gradient becomes votes, and the votes of all peers move the parameters.

`DeMo` holds state between steps; `step` has the maths, and a backend (`backends.choose`) computes it. Momentum is private to
the peer and lives in the transform's domain. Parameters are the replicated state: `DeMo.apply` gives the same bits on
every device. `DeMo` refuses gradients that are not finite and votes that do not fit, before it changes anything. It knows no
learning rate schedule, no other peer and no clock. ADR 11 has the parts of the family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from node.optim import aggregate, folding, second_moment
from node.optim.backends.choose import Backend, Stepping, Taking, choose, compiles, wanted
from node.optim.base import Base, BaseConfig, is_table
from node.optim.exact import transforms
from node.optim.exact.transforms import Transform
from node.optim.folding import Folding, FoldingRoom
from node.optim.laid_out import LaidOut, zeros
from node.optim.layout import CHUNK_SIDE, Layout, Source, kinds_of, trainable_tensors
from node.optim.run_settings import RUN, check
from node.optim.second_moment import Kind, SecondMoment
from node.optim.step import Contributions, Decay, NonFiniteGradient, Votes, clip_scale, dense, exact_float32, look_ahead
from node.optim.votes import bits
from node.optim.votes import groups as votes
from node.optim.votes.payload import Format, Selection
from node.optim.votes.places import Draw
from node.optim.votes.values import GRIDS
from node.optim.voting import Nesterov, ParameterState, Voting, by_parameter, check_state, private_state


@dataclass(frozen=True)
class DeMoConfig:
    """A peer's settings. Only `group_size`, `top_k` and `one_in` are its own: on the rest all peers of a run must agree.

    They are those of `[optimizer]` in run.toml, which says what each does, its values and its default
    (`protos.optimizer_config`). Here stands what differs: the default is DeMo as published with group votes and signs.
    """

    beta: float = 0.999
    """Decay of the momentum a step; the reference's default (0.95 made no difference)."""
    beta2: float = 0.0
    """Decay of the peer's private second moment (`second_moment`), by which gradients are divided; 0 for none.

    The norm is not clipped then: no element is far above 1. `propose` may write into `.grad`."""
    second_moment: Kind = "whole"
    """`whole`: 4 bytes a parameter. `factored`: of each matrix, the means of its rows and columns alone."""
    momentum_type: Literal["fp32", "bf16"] = "fp32"
    """How the momentum is kept, 4 or 2 bytes a parameter. It is private, so peers may differ."""
    nesterov: float = RUN.nesterov
    """`propose` then writes into `.grad`."""
    weight_decay: float = RUN.weight_decay
    decay: Literal["all", "matrices"] = RUN.decay
    clip_norm: float | None = RUN.clip_norm
    """None for no limit."""
    group_size: int = RUN.group_size
    selection: Selection = RUN.selection
    top_k: int = RUN.top_k
    one_in: int = RUN.one_in
    seed: bytes = b""
    """What the places of `places.DRAWN` follow from, beside the step: a run's id, the same for all peers."""
    author: bytes = b""
    """What a peer's own places follow from, beside these, with selection `independent`: its public key, different for all."""
    cap: int = RUN.cap
    values: Literal["sign", "2bit", "8bit"] = "sign"
    transform: str | Transform = RUN.transform
    """A name, or one made by `transforms.given`."""
    magnitudes: bool = RUN.magnitudes
    """The momentum then takes the gradient itself, without the learning rate."""
    refused: Literal["restore", "drop"] = RUN.refused
    base: BaseConfig = BaseConfig()  # noqa: RUF009 - frozen
    """The rule that moves the parameters, given the aggregate. A name stands for that base with its defaults."""

    def __post_init__(self) -> None:
        if isinstance(self.base, str):
            object.__setattr__(self, "base", BaseConfig(self.base))
        if not isinstance(self.base, BaseConfig):
            raise TypeError(
                f'base {self.base!r} is no base: write a name such as "muon", BaseConfig("muon", momentum=0.9), or '
                "base.given(name, function) for a function of your own"
            )
        self.form.votes_a_chunk(self.size)
        check(self, RUN, but=("base", "transform") if isinstance(self.transform, Transform) else ("base",))
        if self.beta2 and self.magnitudes:
            raise ValueError(
                "magnitudes and beta2 exclude each other: divided gradients have no size of their own; set one to 0"
            )
        if self.beta2 and self.nesterov:
            raise ValueError("nesterov needs beta2 = 0: the second moment divides plain gradients")
        if isinstance(self.transform, str):
            transforms.named(self.transform)
        if self.magnitudes and self.base.name != "sgd" and self.base.function is None:
            raise ValueError(f"magnitudes have no effect with base {self.base.name!r}: only sgd keeps sizes")
        aggregate.check_cap(self.cap, self.form, self.base)

    @property
    def size(self) -> int:
        """Group size, k or `one_in`, whichever the selection has; 1 for `full`."""
        key = SIZE_KEYS.get(self.selection)
        return 1 if key is None else getattr(self, key)

    def with_size(self, size: int) -> DeMoConfig:
        """The same with another size. Raises `ValueError` for one that is not offered."""
        self.form.votes_a_chunk(size)
        match SIZE_KEYS.get(self.selection):
            case "group_size":
                return replace(self, group_size=size)
            case "top_k":
                return replace(self, top_k=size)
            case "one_in":
                return replace(self, one_in=size)
        return self

    @property
    def form(self) -> Format:
        """The payload's format. Raises `ValueError` for values that do not exist."""
        if self.values not in GRIDS:
            raise ValueError(f"values {self.values!r} are none of {', '.join(GRIDS)}")
        return Format(self.selection, GRIDS[self.values], self.magnitudes)

    def made_transform(self) -> Transform:
        """The transform itself, whether the setting names or holds it."""
        return self.transform if isinstance(self.transform, Transform) else transforms.named(self.transform)

    def method(self, transform: Transform) -> str:
        """The meaning of saved tensors: the momentum's domain, and the base that the state belongs to."""
        return f"{transform.name}, {self.base.kind}"

    def decays(self, layout: Layout) -> Decay:
        """The weight decay of each parameter; one number if it is that of all."""
        if self.decay == "all" or not self.weight_decay:
            return self.weight_decay
        left_out = (len(place.shape) < 2 or is_table(self.base, place) for place in layout.places)
        return [0.0 if out else self.weight_decay for out in left_out]

    def check_ahead(self) -> None:
        """Raises `ValueError` if a look-ahead by the learning rate is no step that the base would take."""
        if self.magnitudes:
            raise ValueError(
                "no look-ahead (`overlap`) with magnitudes: lr times a sign is no step there, and may be many times the "
                "weights; set one of them to false"
            )


SIZE_KEYS = {
    "groups": "group_size", "topk": "top_k",
    "random": "one_in", "striding": "one_in", "slicing": "one_in", "independent": "one_in",
}  # fmt: skip
"""The setting that says how large the votes of a selection are; `full` has none."""


class DeMo(Voting):
    """The optimizer's state between steps: momentum `[chunks, 64, 64]`, and votes that the log has not judged.

    A step is `propose` (own gradient to own votes), then, once the log has spoken, `settle` (were they accepted?) and
    `apply` (everybody's). Parameters must be fp32, contiguous and on one device; tied weights count once. Steps count from 1,
    unless a caller says which step of the log its votes are for.
    """

    def __init__(self, source: Source, config: DeMoConfig, kinds: Mapping[str, str] | None = None) -> None:
        """`kinds`: what modules say of the parameters (`layout.kinds_of`), where `source` has none."""
        named = trainable_tensors(source)
        self.config = config
        shapes = ((name, tuple(tensor.shape)) for name, tensor in named)
        self.layout = Layout.of_shapes(shapes, kinds_of(source) if kinds is None else kinds)
        self.parameters = [tensor for _, tensor in named]
        self._laid_out = LaidOut(named)
        self._device = self.parameters[0].device
        kept = torch.bfloat16 if config.momentum_type == "bf16" else torch.float32
        shape = self.layout.chunks, CHUNK_SIDE, CHUNK_SIDE
        self._momentum = zeros(shape, kept, self._device)
        self._transform = config.made_transform()
        self._base = Base(config.base, self.layout, self._device)
        choice = wanted()
        self._backend = choose(choice, self.layout, self._device, config.form, self._transform, self._base, config.cap)
        if self._device.type == "cpu":
            bits.compiled()  # now, and not in the middle of a round
        self._pending: tuple[int, Tensor] | None = None
        self._folding: Folding | None = None
        self._folding_room: FoldingRoom | None = None
        self._taken: Tensor | None = None  # the pending votes' coefficients, if they have left the momentum already
        compiled = compiles(choice, self._device)
        moment = self.parameters, config.beta2, config.second_moment
        self._second = second_moment.made(*moment, compiled=compiled) if config.beta2 else None
        self._nesterov = Nesterov(self.parameters, config.nesterov) if config.nesterov else None
        self._step = self._proposed = 0  # of the last entry that was applied, and of the last votes

    @property
    def momentum(self) -> Tensor:
        """[chunks, 64, 64], in the transform's domain; pending votes are still in it. To be read only."""
        self._put_back()
        return self._momentum

    @property
    def base_state(self) -> dict[str, Tensor]:
        """The base optimizer's state by name: replicated, fp32, may be written into. Often empty."""
        return self._base.state

    @property
    def replicated(self) -> list[Tensor]:
        """The replicated state in a fixed order: parameters, then the base's."""
        return [*self.parameters, *self.base_state.values()]

    @property
    def backend(self) -> str:
        """The backend that makes the votes and, for the default method, applies them: "numba", "torch" or "triton"."""
        return self._backend.name

    @torch.no_grad()
    def propose(self, lr: float, step: int | None = None) -> Votes:
        """Take the gradients from `.grad` (None counts as zero) into the momentum and vote for its largest entries.

        `lr` is exact in fp32; `step` is the log's, by default the one after the last applied. The votes stay in the momentum
        until `settle`, which must come before the next `propose`. Raises `NonFiniteGradient`, or `ValueError` if a parameter or
        its gradient is not what was laid out, before anything is changed, and `votes.NotANumber` once the momentum itself has
        overflowed. Leaves `.grad` alone, unless there is a second moment (numba's kernels leave it alone then, too) or a
        Nesterov momentum. After a `folding` that is finished, its gradients are there already.
        """
        assert self._pending is None, "settle the last votes first"
        lr = exact_float32(lr)
        self.check_parameters()
        folded, self._folding, size = self._folding, None, self.config.size
        given = self._gradients(lr) if folded is None or folded.norm is None else (folded.norm, None, lr, None)
        norm, gradients, scale, second = given
        self._proposed = self._step + 1 if step is None else step
        backend = self._at(self._draw(self._proposed))
        own = gradients, self._momentum, self.config.beta, scale, size, second
        if isinstance(backend, Taking):
            packed, self._taken = backend.take(*own)
        else:
            packed = backend.vote(*own)
        self._pending = (size, packed)
        return Votes(votes.to_bytes(packed), size, norm)

    def _gradients(self, lr: float) -> tuple[float, list[Tensor | None] | None, float, SecondMoment | None]:
        """The gradients' norm, these, what they are times, and what divides them. Raises `NonFiniteGradient`."""
        gradients = [dense(parameter.grad) for parameter in self.parameters]
        norm = self._backend.norm(gradients)
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"gradient norm {norm}")
        limit = None if self._second is not None else self.config.clip_norm
        scale = clip_scale(norm, limit)
        if self._nesterov is not None:
            self._nesterov.advance(scale)
            gradients, scale = [dense(parameter.grad) for parameter in self.parameters], 1.0
        scale *= 1.0 if self.config.magnitudes else lr
        return norm, gradients, scale, second_moment.for_kernels(self._second, gradients)

    def folding(self, lr: float, changes: Callable[[], None] = lambda: None) -> Folding:
        """Take the gradients of the next votes as they are made (`node.optim.folding`), at the rate that `propose` will have.

        `changes` is called before each change of the momentum. Raises `ValueError` if the settings need all gradients at once,
        or a parameter is not what was laid out.
        """
        assert self._pending is None, "settle the last votes first"
        folding.check(self.config)
        self.check_parameters()
        assert isinstance(self._second, second_moment.FactoredMoment)
        own = self.layout, self.parameters, self._backend, self._momentum, self._second
        if self._folding_room is None:
            self._folding_room = FoldingRoom(self.layout, self.parameters, self._second)
        self._folding = Folding(*own, self._folding_room, (self.config.beta, exact_float32(lr)), changes)
        return self._folding

    def _at(self, draw: Draw) -> Backend:
        """The backend for the votes of a step, whose places may follow from `draw`."""
        return self._backend.at(draw) if isinstance(self._backend, Stepping) and self.form.drawn else self._backend

    @property
    def open_votes(self) -> Votes | None:
        """The proposal that `settle` has not been told about; its gradient norm is not kept."""
        if self._pending is None:
            return None
        return Votes(votes.to_bytes(self._pending[1]), self._pending[0], math.nan)

    @contextmanager
    def ahead(self, lr: float) -> Iterator[None]:
        """Parameters at the point that this peer expects a step later, for the gradient of a step that is late.

        `p - lr * sign(inverse(m))`, with m the momentum without the open votes, as DisTrO does. Two other rules gave the same
        loss (docs/benchmarks.md), so they are in tests/bench alone. The end undoes it bit for bit. It costs a copy of the
        parameters, and one of the momentum if its votes are still in it. Private: no other peer computes it. Raises
        `ValueError` with `magnitudes`.
        """
        self.config.check_ahead()
        with torch.no_grad():
            start = [parameter.detach().clone() for parameter in self.parameters]
            look_ahead(self.layout, self.parameters, self._residual(), self._transform, lr)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, was in zip(self.parameters, start, strict=True):
                    parameter.copy_(was)

    def _residual(self) -> Tensor:
        """The momentum without the open votes, [chunks, 64, 64]. To be read only: it may be the momentum itself."""
        if self._pending is None or self._taken is not None:
            return self._momentum
        size, packed = self._pending
        rest = self._momentum.clone()
        self._at(self._draw(self._proposed)).spend(rest, packed, size)
        return rest

    @torch.no_grad()
    def settle(self, accepted: bool) -> None:
        """Close the last proposal: accepted votes leave the momentum; what of refused ones, `config.refused` says."""
        assert self._pending is not None, "nothing was proposed"
        if not accepted and self.config.refused == "restore":
            self._put_back()
        elif self._taken is None:
            size, packed = self._pending
            self._at(self._draw(self._proposed)).spend(self._momentum, packed, size)
        self._pending = self._taken = None

    @torch.no_grad()
    def _put_back(self) -> None:
        """Pending votes that have left the momentum return to it."""
        if self._taken is not None:
            assert self._pending is not None
            backend = self._at(self._draw(self._proposed))
            assert isinstance(backend, Taking)
            size, packed = self._pending
            backend.put_back(self._momentum, packed, size, self._taken)
            self._taken = None

    @torch.no_grad()
    def apply(
        self, contributions: Contributions, lr: float, step: int | None = None, authors: Sequence[bytes] = ()
    ) -> None:
        """Move the parameters by the votes of a log entry, `(size, payload)` each, at its learning rate, for its `step`.

        `authors`: the public key of each, which selection `independent` needs.
        Bit-identical on every device, for every order of the contributions and number of threads. An empty entry
        still decays the weights. Raises `VotesError` or `ValueError` before anything is changed. Momentum is not
        touched.
        """
        lr = exact_float32(lr)
        self._laid_out.check_parameters()
        parameters = [parameter.detach() for parameter in self.parameters]
        step = self._step + 1 if step is None else step
        draw = self._draw(step, authors, len(contributions))
        self._at(draw).apply(contributions, parameters, lr, self.config.decays(self.layout))
        self._step = step

    @property
    def _method(self) -> str:
        return self.config.method(self._transform)

    def parameter_state(self) -> list[ParameterState]:
        """The live tensors of each parameter; see `by_parameter`."""
        assert self._pending is None, "settle the last votes first"
        return by_parameter(self.layout, self._momentum, self._second, self._nesterov, self.base_state)

    def resume(self, pending: None, second_counts: list[int] | None, steps: tuple[int, int]) -> None:
        """Take over what belongs to `parameter_state` beside tensors; as `ShardedDeMo.resume`, without open votes."""
        self._step, self._proposed = steps
        if self._second is not None and second_counts is not None:
            self._second.counts = list(second_counts)

    def state_dict(self) -> dict[str, Any]:
        """The private state: momentum, pending votes (or None) with their size, and the layout's digest.

        Without `base_state`, which is replicated.
        """
        own = self.layout, self._method, self.momentum, self._pending, self._second
        return private_state(*own, step=self._step, pending_step=self._proposed, nesterov=self._nesterov)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, by copy. Raises `ValueError` if it belongs to another layout or does not fit."""
        has = {"second": self._second is not None, "nesterov": self._nesterov is not None}
        check_state(state, self.layout, self._method, self._momentum.shape, **has)
        packed, size = state["pending"], state["pending_size"]
        if packed is not None:
            self.form.check(votes.to_bytes(packed), size, self.layout.chunks)
        if self._second is not None:
            self._second.load_state_dict(state["second"])
        if self._nesterov is not None:
            self._nesterov.load_state_dict(state["nesterov"])
        self._step, self._proposed = state.get("step", 0), state.get("pending_step", 0)
        self._momentum.copy_(state["momentum"])
        self._taken = self._folding = None
        self._pending = None if packed is None else (size, packed.to(self._device, copy=True))
