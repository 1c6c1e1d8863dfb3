"""DeMo as a `torch.optim.Optimizer`: the same maths in an existing training script, no swarm needed.

With a `torch.distributed` process group every rank votes and applies everybody's votes: one `all_gather` of one uint8
tensor a step, gloo or nccl. Without one it trains alone on its own votes. It refuses to average gradients: do not wrap
the model in `DistributedDataParallel`, and start all ranks from the same weights.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, overload

import numpy as np
import torch
import torch.distributed as dist

# Its functions take `dist.group.WORLD` as a default when it is imported, which torch does on its own when the first optimizer
# is made. Before `init_process_group` that is None; after it, they would hold the group beyond `destroy_process_group`, and
# a group that outlives that can abort the process at exit (gloo, torch 2.13).
import torch.distributed.nn.functional
from torch import Tensor

from node.optim import votes
from node.optim.demo import DeMo, DeMoConfig, NonFiniteGradient
from node.optim.digest import state_digest
from node.optim.local import LocalConfig, LocalSteps
from node.optim.sharded import ShardedDeMo, is_sharded

_LENGTH = "<Q"
_LOST = 2**64 - 1
"""Instead of a length: this rank's momentum is no number any more."""


class ReplicasDiffer(RuntimeError):  # noqa: N818
    """The ranks hold different parameters, so that equal updates cannot make them equal. The operator's fault."""


class MomentumLost(RuntimeError):  # noqa: N818
    """A rank's momentum is not a number, so that it will never vote again. Raised on every rank, in the same step."""


class DeMoOptimizer(torch.optim.Optimizer):
    """Updates from everybody's votes; see `node.optim.demo`.

    `params` as for any torch optimizer: fp32, contiguous, on one device; groups may set their own `lr`, `beta`,
    `weight_decay`, `group_size` and `clip_norm` (the norm is that of the group), all ranks the same. `lr` is rounded
    to fp32 at each step, so any scheduler works. `process_group` None: alone, whether or not torch.distributed is
    initialised (pass `torch.distributed.group.WORLD` for all ranks). `method` are the other fields of `DeMoConfig`
    (`beta2`, `selection`, `top_k`, `values`, `transform`, `magnitudes`, `base`), the same for all groups and ranks.

    With `local` of more than one step (DiLoCo) every call of `step` is a local AdamW step, and each `local.steps`-th also
    exchanges: then `lr` is the outer learning rate, and `magnitudes` with base `sgd` keep how far the ranks went. Between
    exchanges ranks hold different parameters; save and compare them when `exchanged`.

    Parameters of a model after `fully_shard` (FSDP2) are voted for once by all ranks that share them (`sharded`): then
    `process_group` is that of the peers, one rank of each (`mesh["peer"].get_group()` of a mesh with a dimension for peers
    and one for shards).

    A rank whose gradient is not finite abstains and applies the others' votes (`abstentions` counts; as a GradScaler
    skips such a step), so that replicas stay equal. The first step with a group compares the parameters of all ranks
    once and raises `ReplicasDiffer`. A rank whose momentum is not a number ends all ranks with `MomentumLost`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float,
        *,
        beta: float = DeMoConfig.beta,
        weight_decay: float = DeMoConfig.weight_decay,
        group_size: int = DeMoConfig.group_size,
        clip_norm: float | None = DeMoConfig.clip_norm,
        process_group: dist.ProcessGroup | None = None,
        local: LocalConfig | None = None,
        **method: Any,
    ) -> None:
        if lr < 0:
            raise ValueError(f"learning rate {lr} is negative")
        allowed = {field.name for field in fields(DeMoConfig)} - {"beta", "weight_decay", "group_size", "clip_norm"}
        allowed -= {"refused"}  # nobody refuses votes here
        if unknown := method.keys() - allowed:
            raise TypeError(f"{', '.join(sorted(unknown))}: no such setting; there are {', '.join(sorted(allowed))}")
        self._method = method
        self._local_config = local if local is not None and local.steps > 1 else None
        self._local: LocalSteps | None = None
        self._local_done = 0
        self.abstentions = 0
        self._demos: list[DeMo | ShardedDeMo] = []
        # Weak: a group that outlives `destroy_process_group` aborts the process at exit (gloo, torch 2.13).
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self._compared = process_group is None
        options = {"beta": beta, "weight_decay": weight_decay, "group_size": group_size, "clip_norm": clip_norm}
        super().__init__(params, {"lr": lr, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names") or [str(index) for index in range(len(group["params"]))]
        named = list(zip(names, group["params"], strict=True))
        self._demos.append((ShardedDeMo if is_sharded(group["params"]) else DeMo)(named, self._config(group)))
        if self._local_config is not None:
            assert not self._local_done, "parameters may be added between rounds of local steps"
            self._local = LocalSteps([p for demo in self._demos for p in demo.parameters], self._local_config)

    @property
    def exchanged(self) -> bool:
        """Whether the parameters are the replicated ones: always, without local steps."""
        return self._local_done == 0

    def _config(self, group: dict[str, Any]) -> DeMoConfig:
        own = {name: group[name] for name in ("beta", "weight_decay", "clip_norm", "group_size")}
        if self._local_config is not None:
            own["clip_norm"] = None  # local steps clip their own gradients
        return DeMoConfig(**own, **self._method)

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
        ballot = b"".join(self._vote(index, lr) for index, lr in enumerate(rates))
        ballots = self._exchange(ballot)
        self._check_momentum(ballots)
        for index, lr in enumerate(rates):
            self._apply(index, lr, ballots)
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

    def _vote(self, index: int, lr: float) -> bytes:
        """The length of this rank's votes and the votes; zero if it abstains. Padded to what every rank's fit in."""
        demo = self._demos[index]
        demo.config = self._config(self.param_groups[index])
        payload = b""
        try:
            payload = demo.propose(lr).payload
        except NonFiniteGradient:
            self.abstentions += 1
        except votes.NotANumber:  # said to all: who waits in the exchange would wait for ever
            return struct.pack(_LENGTH, _LOST) + bytes(self._room(demo))
        else:
            demo.settle(accepted=True)
        return struct.pack(_LENGTH, len(payload)) + payload.ljust(self._room(demo), b"\0")

    @staticmethod
    def _room(demo: DeMo | ShardedDeMo) -> int:
        return demo.config.form.bytes_max(demo.layout.chunks, demo.config.size)

    def _check_momentum(self, ballots: list[bytes]) -> None:
        """Before anything is applied, on every rank alike. Raises `MomentumLost`."""
        first = 0
        for demo in self._demos:
            lengths = [struct.unpack_from(_LENGTH, ballot, first)[0] for ballot in ballots]
            if _LOST in lengths:
                raise MomentumLost(
                    f"the momentum of rank {lengths.index(_LOST)} is not a number; load the state that it saved last"
                )
            first += struct.calcsize(_LENGTH) + self._room(demo)

    def _apply(self, index: int, lr: float, ballots: list[bytes]) -> None:
        head = struct.calcsize(_LENGTH)
        first = sum(head + self._room(demo) for demo in self._demos[:index])
        demo = self._demos[index]
        entry = []
        for ballot in ballots:
            (length,) = struct.unpack_from(_LENGTH, ballot, first)
            if length:
                entry.append((demo.config.size, ballot[first + head : first + head + length]))
        demo.apply(entry, lr)

    def _exchange(self, ballot: bytes) -> list[bytes]:
        """Every peer's ballot, in the order of ranks; all are of one length. Of a sharded peer one rank asks for all."""
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
        own = {"demo": groups} if self._local is None else {"demo": groups, "local": self._local.state_dict()}
        return {**super().state_dict(), **own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state. Raises `ValueError` if it belongs to other parameters or another method."""
        saved = state_dict["demo"]
        if len(saved) != len(self._demos):
            raise ValueError(f"{len(saved)} saved parameter groups, not {len(self._demos)}")
        for demo, state in zip(self._demos, saved, strict=True):
            if {name: tensor.shape for name, tensor in state["base"].items()} != {
                name: tensor.shape for name, tensor in demo.base_state.items()
            }:
                raise ValueError(f"the saved state is not one of base {demo.config.base.name}")
        if (self._local is None) != ("local" not in state_dict):
            raise ValueError("the saved state and this optimizer do not both have local steps")
        super().load_state_dict({key: value for key, value in state_dict.items() if key not in {"demo", "local"}})
        for demo, state in zip(self._demos, saved, strict=True):
            demo.load_state_dict(state)
            for name, tensor in demo.base_state.items():
                tensor.copy_(state["base"][name])
        if self._local is not None:
            self._local.load_state_dict(state_dict["local"])
