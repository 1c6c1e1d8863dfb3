"""Base optimizers: they move the parameters, given the aggregate that every replica has (arXiv 2411.19870v2).

A base's state is part of the replicated state, so it must have the same bits everywhere. Arithmetic by element is one
operation at a time, and each is rounded once as IEEE 754 says. A base uses no fused multiply-add and no library's power
function, and no root of torch's (`root_`). Its `/` is correctly rounded on CPUs and CUDA. Metal's is not, and its fused
operations cannot be recognised, so there the arithmetic runs on the CPU. Matrix products (Muon) are exact in whole numbers
(`orthogonal`).

Muon orthogonalises maps and no tables: embeddings and heads, known by their names where no module says what a parameter is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from node.optim.exact.orthogonal import SIDE_MAX, ExactRoots, flush, orthogonal_chunks, orthogonalised, root_
from node.optim.layout import CHUNK_SIDE, CONVOLUTION, TABLE, Layout, ParameterPlace
from node.optim.run_settings import BASE, check
from protos.optimizer_config import BaseOptimizerConfig

TABLES = tuple(BaseOptimizerConfig.model_fields["tables"].default)
"""Names of embeddings and heads. The models of transformers have `embed_tokens`, `word_embeddings`, `embed_out` and `lm_head`.
GPT-2 and its descendants have `wte` and `wpe`, the Llama of Meta and of torchtune `tok_embeddings` and `output`, T5 `shared`,
OLMo `wte` and `ff_out`, and x-transformers `token_emb.emb` and `to_logits`."""

OUTSIDE_BLOCKS = frozenset({"head", "output", "ff_out", "shared"})
"""Names that maps have, too, in the blocks of a model (`layer.3.output`): tables have no number in a component before."""

_TENSORS = frozenset({"weight", "bias"})


def is_named_table(name: str, tables: Iterable[str]) -> bool:
    """Whether the last components of a parameter's name are one of `tables`; `*` stands for any part of a component.

    `weight` and `bias` at the end do not count, nor components that wrappers add (`_orig_mod`). Most of `tables` are one
    component; one with dots has to match as many.
    """
    parts = [part for part in name.split(".") if not part.startswith("_")]
    if len(parts) > 1 and parts[-1] in _TENSORS:
        del parts[-1]
    return any(_matches(parts, table) for table in tables)


def _matches(parts: list[str], table: str) -> bool:
    wanted = [part for part in table.split(".") if part]
    if not wanted or len(wanted) > len(parts):
        return False
    before, last = parts[: -len(wanted)], parts[-len(wanted) :]
    if table in OUTSIDE_BLOCKS and any(part.isdecimal() for part in before):
        return False
    return all(fnmatchcase(part, pattern) for part, pattern in zip(last, wanted, strict=True))


BaseName = Literal["sign", "sgd", "adamw", "muon"]
TILE_CHUNKS = 256

CHUNKS_AT_ONCE = 1024
"""Chunks that are made orthogonal at a time: scratch of some 200 KiB each."""

MUON_ONLY = {name: getattr(BASE, name) for name in ("block", "iterations", "output")}
"""Settings of `muon` alone, and the value that other bases have."""

Function: TypeAlias = Callable[[Tensor, Mapping[str, Tensor], int], Tensor]
"""A base of one's own: `(aggregate, state, count) -> update`. See `given`."""
COUNT_MAX = 2**24
"""Steps that fp32 counts exactly."""


@dataclass(frozen=True)
class BaseConfig:
    """The base optimizer and its settings, those of `[optimizer.base]`. They are replicated, so all peers of a run agree."""

    name: str = BASE.name
    """One of BaseName; another if there is a `function`."""
    momentum: float = BASE.momentum
    nesterov: bool = BASE.nesterov
    beta1: float = BASE.beta1
    """Zero by default, because the peers' momentum already averages over time."""
    beta2: float = BASE.beta2
    eps: float = BASE.eps
    block: int = BASE.block
    iterations: int = BASE.iterations
    output: Literal["real", "sign"] = BASE.output
    muon_except: tuple[str, ...] = TABLES
    """For `muon`: matrices of these names (`is_named_table`) get the sign, as vectors do: they are tables, no maps."""

    function: Function | None = None
    """The function of a base that `given` made."""
    buffers: tuple[str, ...] = ()
    """The names of the state of a base that `given` made."""

    def __post_init__(self) -> None:
        if self.name not in get_args(BaseName) and self.function is None:
            raise ValueError(
                f"base {self.name!r} is none of {', '.join(get_args(BaseName))}; `base.given` makes others"
            )
        check(self, BASE, but=("name",))
        for name, none in MUON_ONLY.items():
            if getattr(self, name) != none and self.name != "muon":
                raise ValueError(
                    f"{name} {getattr(self, name)!r} has no effect with base {self.name!r}: only muon has it"
                )
        if self.output != "real" and not self.block:
            raise ValueError(f"output {self.output!r} needs block {CHUNK_SIDE}: whole matrices stay real")
        if self.block and (self.momentum or self.nesterov):
            raise ValueError(
                f"block {CHUNK_SIDE} has no momentum of the aggregate: chunks are made orthogonal without state; set "
                "momentum to 0 and nesterov to False, or block to 0"
            )

    @property
    def chunkwise(self) -> bool:
        """Whether the votes for a chunk alone decide its direction: no state, and no other chunk."""
        return self.name == "sign" or self.block > 0

    @property
    def kind(self) -> str:
        """What saved tensors say of the base."""
        return f"{self.name} by chunks" if self.block else self.name

    @property
    def state_names(self) -> tuple[str, ...]:
        """The fp32 buffers of the replicated state, each the size of the parameters."""
        if self.function is not None:
            return self.buffers
        return {
            "sign": (),
            "sgd": ("momentum",) if self.momentum else (),
            "adamw": ("momentum", "square") if self.beta1 else ("square",),
            "muon": ("momentum",) if self.momentum else (),
        }[self.name]


BY_CHUNKS = BaseConfig("muon", block=CHUNK_SIDE, iterations=2)
"""The default of a run and of `DeMoOptimizer`: it learns best at its bytes (docs/benchmarks.md)."""


def given(name: str, function: Function, buffers: tuple[str, ...] = ()) -> BaseConfig:
    """A base optimizer of one's own: `function(aggregate, state, count) -> update`.

    `aggregate` is fp32 [count, 64, 64]: the sum of all peers' votes, at a root mean square of 1 over the model. With
    `magnitudes`, it has the size that the peers say. `state` has fp32 tensors of that shape under the names `buffers`. They are
    zeros at first, and the function writes them in place. `count` is the number of the step, from 1. The caller subtracts `lr`
    times the result (fp32, the same shape) from the parameters. The function gets some chunks at a time.

    Replicas stay equal if the function works element by element, one correctly rounded operation at a time. It may use `mul`,
    `add` (without `alpha`), `sub`, `div`, `sqrt`, `sign` and `maximum`. It must not use `addcmul`, `lerp`, `pow`, `exp` or a
    matrix product. It always computes on a CPU, with roots that are correctly rounded. It must give zero for an
    aggregate and a state of zeros, so that parameters without a gradient stay. Raises `ValueError` for a name that is taken.
    """
    if name in get_args(BaseName) or not name.isidentifier():
        raise ValueError(
            f"base {name!r}: a name of one's own has letters, digits and _, and is none of {', '.join(get_args(BaseName))}"
        )
    if "count" in buffers or len(set(buffers)) < len(buffers):
        raise ValueError(f"the state of base {name!r} has names that are taken: {', '.join(buffers)}")
    return BaseConfig(name, function=function, buffers=tuple(buffers))


def is_table(config: BaseConfig, place: ParameterPlace) -> bool:
    """Whether a parameter is a table: by the type of its module, or else by its name. A convolution is none."""
    return place.kind == TABLE or (place.kind != CONVOLUTION and is_named_table(place.name, config.muon_except))


def is_map(config: BaseConfig, place: ParameterPlace) -> bool:
    """Whether the core of a parameter has chunks of one matrix each, which is no table.

    A stack `[experts, height, width]` has none: its rows are experts, so a chunk is a part of 64 of them.
    """
    stack = len(place.shape) == 3 and place.kind != CONVOLUTION
    return place.core_chunks > 0 and not stack and not is_table(config, place)


class Base:
    """A base optimizer over the buffer of a layout. If it is `chunkwise`, it has no state, and callers use `direct_chunks`.

    `chunks`: how many of the chunks are here, if not all (`sharded_demo`). The caller then calls `advance` and `finish`.
    Raises `ValueError` for a matrix that Muon cannot orthogonalise.
    """

    def __init__(self, config: BaseConfig, layout: Layout, device: torch.device, chunks: int | None = None) -> None:
        self.config, self.layout = config, layout
        self._device = torch.device("cpu") if device.type == "mps" else device
        for place in layout.places if config.name == "muon" and not config.block else ():
            if self._maps(place) and max(self._matrices(place)[1:]) > SIDE_MAX:
                raise ValueError(f"parameter {place.name} of {place.shape}: muon takes sides of at most {SIDE_MAX}")
        kept = (layout.chunks if chunks is None else chunks, CHUNK_SIDE, CHUNK_SIDE)
        self.state = {name: torch.zeros(kept, dtype=torch.float32, device=self._device) for name in config.state_names}
        """The replicated state by name, fp32. Digests and snapshots hold it; a snapshot that is loaded writes into it."""
        if not config.chunkwise:
            self.state["count"] = torch.zeros(1, dtype=torch.float32)

        self.maps = torch.zeros(layout.chunks, dtype=torch.bool)
        """Which chunks of the layout are made orthogonal alone; the others become signs. Only if `config.block`."""
        for place in layout.places if config.block else ():
            self.maps[place.first_chunk : place.first_chunk + place.core_chunks] = is_map(config, place)

    @property
    def count(self) -> int:
        """Steps so far."""
        return int(self.state["count"]) if self.state else 0

    @torch.no_grad()
    def direct_chunks(self, update: Tensor, first: int) -> Tensor:
        """Turn the aggregate of the chunks from `first` on, at any scale, into the update, in place: fp32 [count, 64, 64].

        For bases that are `chunkwise`. Adding zero turns -0 into 0: Metal's sign keeps the sign of a zero, which would reach
        a parameter that is -0.
        """
        maps = self.maps[first : first + len(update)]
        own = maps.nonzero()[:, 0].to(update.device)
        for start in range(0, len(own), CHUNKS_AT_ONCE):
            here = own[start : start + CHUNKS_AT_ONCE]
            update[here] = orthogonal_chunks(update[here].to(self._device), self.config.iterations).to(update.device)
        if self.config.output == "sign" or not bool(maps.any()):
            return update.sign_().add_(0.0)
        rest = (~maps).nonzero()[:, 0].to(update.device)
        update[rest] = update[rest].sign_().add_(0.0)
        return update

    @torch.no_grad()
    def direct(self, update: Tensor) -> Tensor:
        """Turn the aggregate, fp32 [chunks, 64, 64], into the update, in place. The caller subtracts lr times the update."""
        if self.config.chunkwise:
            return self.direct_chunks(update, 0)
        here = self.advance(update.to(self._device))
        if self.config.name == "muon":
            self._muon(here)
        return here if here is update else update.copy_(here)

    @torch.no_grad()
    def advance(self, update: Tensor) -> Tensor:
        """The part that works element by element, in place: the whole rule, except for `muon`. Counts a step."""
        assert self.count < COUNT_MAX, "more steps than fp32 counts"
        if self.state:
            self.state["count"] += 1
        match self.config.name:
            case "sgd" | "muon":
                for tile in self._tiles(update):
                    update[tile] = self._momentum(tile, update[tile])
            case "adamw":
                self._adamw(update)
            case _:
                self._given(update)
        return update

    @torch.no_grad()
    def finish(self, place: ParameterPlace, matrix: Tensor) -> Tensor:
        """The rest of the rule, for one whole parameter after `advance`, fp32 [height, width]."""
        if self.config.name != "muon" or self.config.chunkwise:
            return matrix
        if not self._maps(place):
            return matrix.sign_().add_(0.0)
        for part in matrix.view(self._matrices(place)):
            part.copy_(orthogonalised(part, self.config.iterations))
        return matrix

    def _maps(self, place: ParameterPlace) -> bool:
        """Whether Muon orthogonalises a parameter: a matrix, or a stack of them, and no table."""
        return not is_table(self.config, place) and len(place.shape) > 1 and min(self._matrices(place)[1:]) > 1

    def _matrices(self, place: ParameterPlace) -> tuple[int, int, int]:
        """Number, height and width of a parameter's matrices: one for each expert of `[experts, height, width]`.

        A convolution is one flattened matrix."""
        if len(place.shape) == 3 and place.kind != CONVOLUTION:
            return place.shape[0], place.shape[1], place.shape[2]
        return 1, place.height, place.width

    def _tiles(self, update: Tensor) -> Iterator[slice]:
        for first in range(0, len(update), TILE_CHUNKS):
            yield slice(first, first + TILE_CHUNKS)

    def _momentum(self, tile: slice, update: Tensor) -> Tensor:
        """`b = mu * b + u`; b, or `u + mu * b` with nesterov."""
        if not self.config.momentum:
            return update
        mu = float(np.float32(self.config.momentum))
        momentum = self.state["momentum"][tile]
        flush(momentum.mul_(mu).add_(update))
        return flush(momentum.mul(mu).add_(update)) if self.config.nesterov else momentum

    def _adamw(self, update: Tensor) -> None:
        """`u' = m^ / (sqrt(v^) + eps)` with the bias corrections of Adam; decay is the parameters' own."""
        beta1, beta2 = (float(np.float32(beta)) for beta in (self.config.beta1, self.config.beta2))
        # The host computes these in fp64 from products alone, and rounds once.
        first, second = (_fp32(1 / (1 - _power(beta, self.count))) for beta in (beta1, beta2))
        rest1, rest2, eps = _fp32(1 - beta1), _fp32(1 - beta2), _fp32(self.config.eps)
        for tile in self._tiles(update):
            part = update[tile]
            square = self.state["square"][tile]
            flush(square.mul_(beta2).add_(part.mul(part).mul_(rest2)))
            if beta1:
                momentum = self.state["momentum"][tile]
                flush(momentum.mul_(beta1).add_(part.mul(rest1)))
                part = momentum.mul(first)
            update[tile] = part / root_(square.mul(second)).add_(eps)

    def _given(self, update: Tensor) -> None:
        assert self.config.function is not None
        for tile in self._tiles(update):
            state = {name: self.state[name][tile].cpu() for name in self.config.buffers}
            with ExactRoots():  # type: ignore[no-untyped-call]
                moved = self.config.function(update[tile].to("cpu", copy=True), state, self.count)
            if moved.shape != update[tile].shape or moved.dtype != torch.float32:
                raise ValueError(
                    f"base {self.config.name!r} gave {moved.dtype} {tuple(moved.shape)}, not fp32 {tuple(update[tile].shape)}"
                )
            for name, buffer in state.items():
                self.state[name][tile] = flush(buffer)
            update[tile] = flush(moved)

    def _muon(self, update: Tensor) -> None:
        """Make matrices orthogonal, at a root mean square of 1. The rest becomes a sign."""
        for place in self.layout.places:
            alone = Layout((place,), self.layout.core_chunks, self.layout.pool_elements)
            whole = torch.empty(place.shape, dtype=torch.float32, device=update.device)
            alone.scatter(update, [whole])
            whole = self.finish(place, whole.view(place.height, place.width)).view(place.shape)
            for part, chunk in alone.pairs([whole], update):
                assert part is not None
                chunk.copy_(part)


def _power(base: float, exponent: int) -> float:
    """`base ** exponent` from multiplications alone: a library's power function may differ in its last bit."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _fp32(value: float) -> float:
    return float(np.float32(value))
