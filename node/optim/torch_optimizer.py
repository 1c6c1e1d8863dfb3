"""DeMo as a `torch.optim.Optimizer`: the same maths in an existing training script, no swarm needed.

With a `torch.distributed` process group every rank votes and applies everybody's votes: one `all_gather` of one uint8 tensor a
step, gloo or nccl. Without one it trains alone on its own votes. The optimizer refuses to average gradients: do not wrap the
model in `DistributedDataParallel`, and start all ranks from the same weights.
"""

from __future__ import annotations

import struct
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Literal, overload

import numpy as np
import torch
import torch.distributed as dist

# The module's functions take `dist.group.WORLD` as a default at import. torch imports the module with the first optimizer.
# Before `init_process_group` that default is None. After it, the functions would hold the group beyond `destroy_process_group`.
# A group that outlives that call can abort the process at exit (gloo, torch 2.13).
import torch.distributed.nn.functional
from torch import Tensor, nn

from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.layout import kinds_of
from node.optim.local import LocalConfig, LocalSteps
from node.optim.paper.demo import PaperConfig, PaperDeMo
from node.optim.sharded.demo import ShardedDeMo
from node.optim.sharded.rows import is_sharded
from node.optim.step import NonFiniteGradient
from node.optim.tables import is_named_table
from node.optim.votes import groups as votes
from node.optim.votes.places import SCHEMES

SETTINGS = {field.name for field in fields(DeMoConfig)} - {
    "beta", "beta2", "weight_decay", "group_size", "clip_norm", "refused", "seed"
}  # fmt: skip
"""Fields of `DeMoConfig` that `DeMoOptimizer` takes as keywords of that name. No votes are refused here."""

SEED_BYTES = 8
_LOST = 2**64 - 1
"""Instead of a length: this rank's momentum is no number any more."""


class ReplicasDiffer(RuntimeError):  # noqa: N818
    """The ranks hold different parameters, so that equal updates cannot make them equal. The operator's fault."""


class MomentumLost(RuntimeError):  # noqa: N818
    """A rank's momentum is not a number, so that it will never vote again. Raised on every rank, in the same step."""


class DeMoOptimizer(torch.optim.Optimizer):
    """Updates from the votes of all ranks; see `node.optim.demo`.

    `params` as for any torch optimizer, or a module: fp32, contiguous, on one device. Groups may set their own `lr`,
    `beta`, `weight_decay`, `group_size` and `clip_norm` (the norm is that of the group), all ranks the same. `lr` is rounded to
    fp32 at each step, so any scheduler works; `beta` is the group's `momentum`, which OneCycleLR cycles. Without
    `process_group` the rank trains alone, whether or not torch.distributed is initialised (pass
    `torch.distributed.group.WORLD` for all ranks).

    `settings` are the other fields of `DeMoConfig` (`decay`, `selection`, `top_k`, `one_in`, `values`, `transform`,
    `magnitudes`, `nesterov`, `base`), the same for all groups and ranks. The defaults are a run's; `beta2` None is 0.99, and 0
    with `magnitudes` or `nesterov`, which exclude it. `seed` is what random places follow from, the same for all ranks. Base
    `muon` and `decay="matrices"` have to know tables: give the module. With named parameters, names alone tell tables, and
    `muon` warns of 3 dimensions (a stack of experts, or a convolution). Parameters without names raise `ValueError`.

    `method="paper"` is DeMo v1 as published (`paper.demo`). Then `beta` None is 0.999, `beta2` is 0, and `chunk` is the longest
    side of a chunk. The only other setting is `top_k` (32). Settings of the family raise `ValueError` with it.

    With `local` of more than one step (DiLoCo) every call of `step` is a local AdamW step, and each `local.steps`-th also
    exchanges. Then `lr` is the outer learning rate, and `magnitudes` with base `sgd`, which it needs, keep how far the ranks
    went. Between exchanges ranks hold different parameters; save and compare them when `exchanged`.

    All ranks that share parameters after `fully_shard` (FSDP2) vote for them once (`sharded`). Then `process_group` has one
    rank of each peer: `mesh["peer"].get_group()` of a mesh with a dimension for peers and one for shards.

    A rank whose gradient is not finite abstains and applies the others' votes, so that replicas stay equal. `abstentions`
    counts such steps; a GradScaler skips them, too. The first step with a group compares the parameters of all ranks
    once and raises `ReplicasDiffer`. A rank whose momentum is not a number ends all ranks with `MomentumLost`.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float,
        *,
        method: Literal["demo", "paper"] = "demo",
        chunk: int = PaperConfig.chunk,
        beta: float | None = None,
        beta2: float | None = None,
        weight_decay: float = DeMoConfig.weight_decay,
        group_size: int = DeMoConfig.group_size,
        clip_norm: float | None = DeMoConfig.clip_norm,
        process_group: dist.ProcessGroup | None = None,
        local: LocalConfig | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if lr < 0:
            raise ValueError(f"learning rate {lr} is negative")
        paper = method == "paper"
        if paper:
            _check_paper(beta2, group_size, local, settings)
        elif method != "demo" or chunk != PaperConfig.chunk:
            raise ValueError(f"method {method!r} with chunk {chunk}: methods are demo, with chunks of 64, and paper")
        if unknown := settings.keys() - SETTINGS:
            raise TypeError(f"{', '.join(sorted(unknown))}: no such setting; there are {', '.join(sorted(SETTINGS))}")
        default = 0.0 if settings.get("magnitudes") or settings.get("nesterov") else 0.99
        demo = {"beta2": default if beta2 is None else beta2, "seed": seed.to_bytes(SEED_BYTES, "big", signed=True)}
        own = {"chunk": chunk} if paper else demo
        self._paper, self._settings = paper, {**own, **settings}
        self._kinds = kinds_of(params) if isinstance(params, nn.Module) else {}
        self._kinds_known = isinstance(params, nn.Module)
        self._local_config = local if local is not None and local.steps > 1 else None
        if self._local_config is not None and not settings.get("magnitudes"):
            raise ValueError(
                "local steps need `magnitudes = true` and base sgd: how far a peer went is the update's size"
            )
        self._local: LocalSteps | None = None
        self._local_done = 0
        self.abstentions = 0
        self._demos: list[DeMo | ShardedDeMo | PaperDeMo] = []
        # Weak: a group that outlives `destroy_process_group` aborts the process at exit (gloo, torch 2.13).
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self._compared = process_group is None
        beta = (PaperConfig.beta if paper else 0.95) if beta is None else beta
        options = {"momentum": beta, "weight_decay": weight_decay, "group_size": group_size, "clip_norm": clip_norm}
        given: Any = list(params.named_parameters()) if isinstance(params, nn.Module) else params
        super().__init__(given, {"lr": lr, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(_renamed(param_group))
        group = self.param_groups[-1]
        try:
            self._demos.append(self._made(group))
        except ValueError:
            del self.param_groups[-1]
            raise
        if self._local_config is not None:
            assert not self._local_done, "parameters may be added between rounds of local steps"
            self._local = LocalSteps([p for demo in self._demos for p in demo.parameters], self._local_config)

    def _made(self, group: dict[str, Any]) -> DeMo | ShardedDeMo | PaperDeMo:
        """The optimizer of one group of parameters. Raises `ValueError`."""
        config, sharded = self._config(group), is_sharded(group["params"])
        names = group.get("param_names") or [str(index) for index in range(len(group["params"]))]
        named = list(zip(names, group["params"], strict=True))
        if isinstance(config, PaperConfig):
            if sharded:
                raise ValueError("method paper works on one device, and the parameters are sharded: use method demo")
            return PaperDeMo(named, config, self._kinds)
        if not group.get("param_names") and (config.base.name == "muon" or config.decay == "matrices"):
            raise ValueError(
                'base muon and decay="matrices" treat embeddings and heads apart, which parameters without names do not tell: '
                "give the module, DeMoOptimizer(model, ...)"
            )
        if config.base.name == "muon" and not self._kinds_known:
            _warn_of_stacks(named, config.base.muon_except)
        return (ShardedDeMo if sharded else DeMo)(named, config, self._kinds)

    @property
    def exchanged(self) -> bool:
        """Whether the parameters are the replicated ones: always, without local steps."""
        return self._local_done == 0

    def _config(self, group: dict[str, Any]) -> DeMoConfig | PaperConfig:
        own = {name: group[name] for name in ("weight_decay", "clip_norm")} | {"beta": group["momentum"]}
        if self._paper:
            return PaperConfig(**own, **self._settings)
        if self._local_config is not None:
            own["clip_norm"] = None  # local steps clip their own gradients
        return DeMoConfig(**own, group_size=group["group_size"], **self._settings)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Vote with the gradients in `.grad`, exchange, apply. A collective call if there is a process group.

        With local steps, only the last of a round is collective; the others move this rank's parameters alone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._compared:
            self._compare()
        if self._local is not None and not self._step_locally(self._local):
            return loss
        rates = [float(np.float32(float(group["lr"]))) for group in self.param_groups]
        everybodys = self._everybodys([self._vote(index, lr) for index, lr in enumerate(rates)])
        for index, (demo, lr) in enumerate(zip(self._demos, rates, strict=True)):
            spoken = (theirs[index] for theirs in everybodys)
            demo.apply([(demo.size, payload) for payload in spoken if payload], lr)
        return loss

    def _step_locally(self, local: LocalSteps) -> bool:
        """One local step; True after the last of a round, with what the round came to in `.grad`.

        A step whose gradient is not finite is left out, as a GradScaler does.
        """
        if not local.borrowed:
            local.borrow()
        try:
            local.step()
        except NonFiniteGradient:
            self.abstentions += 1
        self._local_done = (self._local_done + 1) % local.config.steps
        if not self._local_done:
            local.give_back()
        return not self._local_done

    def _vote(self, index: int, lr: float) -> bytes | None:
        """This rank's votes for a group of parameters; none (empty) if it abstains, None if its momentum is lost."""
        demo = self._demos[index]
        demo.config = self._config(self.param_groups[index])
        try:
            payload = demo.propose(lr).payload
        except NonFiniteGradient:
            self.abstentions += 1
            return b""
        except votes.NotANumber:  # all ranks are told: otherwise they wait in the exchange for ever
            return None
        demo.settle(accepted=True)
        return payload

    def _everybodys(self, mine: list[bytes | None]) -> list[list[bytes]]:
        """Every peer's payloads, one for each group of parameters. Raises `MomentumLost`, on every rank alike.

        The first exchange has the lengths, and as much as payloads have without a silent vote. If a payload is longer, a
        second exchange has the rest: all ranks know its length from the first.
        """
        rooms = [demo.form.body_bytes(demo.layout.chunks, demo.size) for demo in self._demos]
        shape = struct.Struct(f"<{len(rooms)}Q")
        front = shape.pack(*(_LOST if payload is None else len(payload) for payload in mine))
        pairs = [(payload or b"", room) for payload, room in zip(mine, rooms, strict=True)]
        ballots = self._exchange(front + b"".join(payload[:room].ljust(room, b"\0") for payload, room in pairs))
        lengths = [shape.unpack_from(ballot) for ballot in ballots]
        for rank, own in enumerate(lengths):
            if _LOST in own:  # before anything is applied
                raise MomentumLost(f"the momentum of rank {rank} is not a number; load the state that it saved last")
        beyond = [[max(0, length - room) for length, room in zip(own, rooms, strict=True)] for own in lengths]
        tails = [b""] * len(ballots)
        if longest := max(map(sum, beyond)):
            tails = self._exchange(b"".join(payload[room:] for payload, room in pairs).ljust(longest, b"\0"))
        found = []
        for ballot, own, tail in zip(ballots, lengths, tails, strict=True):
            payloads, at, behind = [], shape.size, 0
            for length, room in zip(own, rooms, strict=True):
                more = max(0, length - room)
                payloads.append(ballot[at : at + min(length, room)] + tail[behind : behind + more])
                at, behind = at + room, behind + more
            found.append(payloads)
        return found

    def _exchange(self, ballot: bytes) -> list[bytes]:
        """Every peer's ballot, in the order of ranks; all have one length. One rank of a sharded peer asks for all."""
        inner = next((demo.group for demo in self._demos if isinstance(demo, ShardedDeMo)), None)
        if inner is None:
            return self._gather(ballot)
        box = [self._gather(ballot) if dist.get_rank(inner) == 0 else []]
        dist.broadcast_object_list(box, group=inner, group_src=0)
        return box[0]

    def _gather(self, ballot: bytes) -> list[bytes]:
        if self._process_group is None:
            return [ballot]
        group = self._process_group()
        assert group is not None, "the process group was destroyed before the last step"
        device = self.param_groups[0]["params"][0].device
        mine = torch.frombuffer(bytearray(ballot), dtype=torch.uint8).to(device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        return [votes.to_bytes(ballot) for ballot in everyone]

    def _compare(self) -> None:
        own = b"".join(demo.layout.digest() + state_digest(demo.replicated) for demo in self._demos)
        if len(set(self._exchange(own))) > 1:
            raise ReplicasDiffer("the ranks do not start from the same parameters")
        self._compared = True

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with each group's momentum under `demo`. Private to a rank: each saves its own, when `exchanged`."""
        assert self.exchanged, (
            "save when `exchanged`: in a round of local steps the parameters are not the replicated ones"
        )
        groups = [{**demo.state_dict(), "base": demo.base_state} for demo in self._demos]
        own = {"demo": groups, "settings": self._saved_settings}
        if self._local is not None:
            own["local"] = self._local.state_dict()
        return {**super().state_dict(), **own}

    @property
    def _saved_settings(self) -> dict[str, Any]:
        """What a momentum means, beside what each group says: its unit, and the places that follow from a seed."""
        drawn = self._settings.get("selection") in SCHEMES
        return {
            "magnitudes": bool(self._settings.get("magnitudes")),
            "seed": int.from_bytes(self._settings["seed"], "big", signed=True) if drawn else None,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state. Raises `ValueError` if it belongs to other parameters, another method or another seed.

        A state of an earlier version does not tell `magnitudes` and `seed`, and is taken over without that check.
        """
        saved = state_dict["demo"]
        for name, here in self._saved_settings.items():
            there = state_dict.get("settings", {}).get(name, here)
            if there != here:
                raise ValueError(
                    f"the saved state has {name} {there}, and this optimizer has {name} {here}: set {name} as it was"
                )
        if len(saved) != len(self._demos):
            raise ValueError(f"{len(saved)} saved parameter groups, not {len(self._demos)}")
        for demo, state in zip(self._demos, saved, strict=True):
            if {name: tensor.shape for name, tensor in state["base"].items()} != {
                name: tensor.shape for name, tensor in demo.base_state.items()
            }:
                raise ValueError("the saved state is of another base: load it with the settings that saved it")
        if (self._local is None) != ("local" not in state_dict):
            raise ValueError("the saved state and this optimizer do not both have local steps")
        rest = {key: value for key, value in state_dict.items() if key not in {"demo", "local", "settings"}}
        super().load_state_dict({**rest, "param_groups": [_renamed(group) for group in rest["param_groups"]]})
        for demo, state in zip(self._demos, saved, strict=True):
            demo.load_state_dict(state)
            for name, tensor in demo.base_state.items():
                tensor.copy_(state["base"][name])
        if self._local is not None:
            self._local.load_state_dict(state_dict["local"])


def _check_paper(beta2: float | None, group_size: int, local: LocalConfig | None, settings: dict[str, Any]) -> None:
    """Raises `ValueError` for settings that the paper's method does not have."""
    given = settings.keys() - {"top_k"}
    given |= {
        name for name, it in {"beta2": bool(beta2), "group_size": group_size != DeMoConfig.group_size}.items() if it
    }
    given |= {"local"} if local is not None and local.steps > 1 else set()
    if given:
        raise ValueError(
            f'{", ".join(sorted(given))}: the method paper has no such setting; remove it, or use method="demo"'
        )


def _warn_of_stacks(named: list[tuple[str, Tensor]], tables: tuple[str, ...]) -> None:
    """Names do not tell a convolution from a stack of experts, and Muon treats them in different ways."""
    stacks = [name for name, tensor in named if tensor.dim() == 3 and not is_named_table(name, tables)]
    if stacks:
        warnings.warn(
            f"base muon takes {', '.join(stacks)} for stacks of matrices [experts, height, width]; a convolution is one "
            "matrix, which names do not tell: give the module, DeMoOptimizer(model, ...)",
            stacklevel=6,  # whoever makes the optimizer
        )


def _renamed(group: dict[str, Any]) -> dict[str, Any]:
    """A group of parameters with what is called `beta` here, and in states saved by earlier versions, as torch's `momentum`."""
    return {("momentum" if key == "beta" else key): value for key, value in group.items()}
