"""DeMo as a `torch.optim.Optimizer`: the same maths in an existing training script, no swarm needed.

With a `torch.distributed` process group every rank votes and applies everybody's votes: one `all_gather` of one uint8
tensor a step, gloo or nccl. Without one it trains alone on its own votes. It refuses to average gradients: do not wrap
the model in `DistributedDataParallel`, and start all ranks from the same weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from node.optim import votes
from node.optim.demo import DeMo, DeMoConfig, NonFiniteGradient
from node.optim.digest import state_digest

_ABSTAINS, _VOTES = 0, 1


class ReplicasDiffer(RuntimeError):  # noqa: N818
    """The ranks hold different parameters, so that equal updates cannot make them equal. The operator's fault."""


class DeMoOptimizer(torch.optim.Optimizer):
    """Sign updates from everybody's group votes; see `node.optim.demo`.

    `params` as for any torch optimizer: fp32, contiguous, on one device; groups may set their own `lr`, `beta`,
    `weight_decay`, `group_size` and `clip_norm` (the norm is that of the group), all ranks the same. `lr` is rounded
    to fp32 at each step, so any scheduler works. `process_group` None: alone, whether or not torch.distributed is
    initialised (pass `torch.distributed.group.WORLD` for all ranks).

    A rank whose gradient is not finite abstains and applies the others' votes (`abstentions` counts; as a GradScaler
    skips such a step), so that replicas stay equal. The first step with a group compares the parameters of all ranks
    once and raises `ReplicasDiffer`.
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
    ) -> None:
        if lr < 0:
            raise ValueError(f"learning rate {lr} is negative")
        self.abstentions = 0
        self._demos: list[DeMo] = []
        # Weak: a group that outlives `destroy_process_group` aborts the process at exit (gloo, torch 2.13).
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self._compared = process_group is None
        options = {"beta": beta, "weight_decay": weight_decay, "group_size": group_size, "clip_norm": clip_norm}
        super().__init__(params, {"lr": lr, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names") or [str(index) for index in range(len(group["params"]))]
        self._demos.append(DeMo(zip(names, group["params"], strict=True), _config(group)))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Vote with the gradients in `.grad`, exchange, apply. A collective call if there is a process group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._compared:
            self._compare()
        rates = [float(np.float32(float(group["lr"]))) for group in self.param_groups]
        ballot = b"".join(self._vote(index, lr) for index, lr in enumerate(rates))
        ballots = self._exchange(ballot)
        for index, lr in enumerate(rates):
            self._apply(index, lr, ballots)
        return loss

    def _vote(self, index: int, lr: float) -> bytes:
        """One byte that says whether this rank votes, then its votes (zeros if it does not)."""
        demo = self._demos[index]
        demo.config = _config(self.param_groups[index])
        try:
            payload = demo.propose(lr).payload
        except NonFiniteGradient:
            self.abstentions += 1
            return bytes([_ABSTAINS]) + bytes(votes.vote_bytes(demo.layout.chunks, demo.config.group_size))
        demo.settle(accepted=True)
        return bytes([_VOTES]) + payload

    def _apply(self, index: int, lr: float, ballots: list[bytes]) -> None:
        sizes = [1 + votes.vote_bytes(demo.layout.chunks, demo.config.group_size) for demo in self._demos]
        first = sum(sizes[:index])
        own = [ballot[first : first + sizes[index]] for ballot in ballots]
        demo = self._demos[index]
        demo.apply([(demo.config.group_size, part[1:]) for part in own if part[0] == _VOTES], lr)

    def _exchange(self, ballot: bytes) -> list[bytes]:
        """Every rank's ballot, in the order of ranks; all are of one length."""
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
        own = b"".join(demo.layout.digest() + state_digest(demo.parameters) for demo in self._demos)
        if len(set(self._exchange(own))) > 1:
            raise ReplicasDiffer("the ranks do not start from the same parameters")
        self._compared = True

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with each group's momentum under `demo`. Private to a rank: each saves its own."""
        return {**super().state_dict(), "demo": [demo.state_dict() for demo in self._demos]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state. Raises `ValueError` if it belongs to other parameters."""
        saved = state_dict["demo"]
        if len(saved) != len(self._demos):
            raise ValueError(f"{len(saved)} saved parameter groups, not {len(self._demos)}")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "demo"})
        for demo, state in zip(self._demos, saved, strict=True):
            demo.load_state_dict(state)


def _config(group: dict[str, Any]) -> DeMoConfig:
    return DeMoConfig(group["beta"], group["weight_decay"], group["clip_norm"], group["group_size"])
