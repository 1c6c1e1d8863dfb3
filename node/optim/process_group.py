"""The ranks that vote together: the given process group, or all ranks, as everywhere in torch.

Also the wrappers around a model that average its gradients, which makes votes pointless: `DistributedDataParallel` and FSDP
1. DDP cannot be seen from a list of parameters, nor if it comes after the optimizer. Its effect can: all ranks then have the
same gradient. Only after that is the program searched for a DDP.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from node.optim.exchange import GRADIENT, Part
from node.optim.second_moment import local_part

if TYPE_CHECKING:
    from node.optim.sharded_demo import ShardedDeMo

LAUNCHERS = {
    "torchrun": "WORLD_SIZE",
    "mpirun of Open MPI": "OMPI_COMM_WORLD_SIZE",
    "mpiexec": "PMI_SIZE",
    "srun": "SLURM_STEP_NUM_TASKS",  # SLURM_NTASKS is also there in a script of sbatch, which is one process
}
"""What starts several ranks, and the variable that tells each how many there are."""

WeakGroup = weakref.ref[dist.ProcessGroup]


def weak_group(group: dist.ProcessGroup | None) -> WeakGroup | None:
    """A group by a reference that does not keep it alive. Raises `ValueError` if this rank is not in it."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"process_group {group!r}: this rank is not in the group that was made; give each rank its own group"
        )
    return None if group is None else weakref.ref(group)


def group_of(given: WeakGroup | None, sharded: ShardedDeMo | None) -> dist.ProcessGroup | None:
    """The group whose ranks exchange votes; None if this peer trains alone.

    Raises `RuntimeError` if several ranks were started that torch.distributed does not know, or the given group has ended, and
    `ValueError` if a sharded model does not tell which ranks are peers.
    """
    if given is not None:
        group = given()
        if group is None:
            raise RuntimeError("the process group was destroyed before the last step of the optimizer")
        return group
    known = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    for starter, name in LAUNCHERS.items() if known == 1 else ():
        if (world := os.environ.get(name, "1")).isdecimal() and int(world) > 1:
            raise RuntimeError(
                f"{starter} started {world} ranks ({name}), and torch.distributed does not know them: call "
                "torch.distributed.init_process_group() first, or give alone=True to train each rank apart"
            )
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if sharded is not None:
        if sharded.ranks == dist.get_world_size():
            return None
        raise ValueError(
            f"the model is sharded over {sharded.ranks} of {dist.get_world_size()} ranks: give the group of one rank of each "
            'peer, process_group=mesh["peer"].get_group(), or alone=True'
        )
    return dist.group.WORLD if dist.get_world_size() > 1 else None


HOOK = (
    "register its hook that sends nothing before the first step: from "
    "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook; ddp.register_comm_hook(None, noop_hook)"
)


def check_unwrapped(module: nn.Module) -> None:
    """Raises `ValueError` for a module that averages the gradients of the ranks, or flattens its parameters."""
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            raise ValueError(
                "DistributedDataParallel sends all gradients in each step, beside the votes: give the module itself, "
                f"DeMoOptimizer(ddp.module, ...), and call it without DDP. A trainer that wraps the model by itself: {HOOK} "
                "(docs/optimizers.md)"
            )
        if type(part).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "FullyShardedDataParallel flattens parameters, so that their layout is lost: shard the model with "
                "torch.distributed.fsdp.fully_shard"
            )


def wrapper_of(parameters: Sequence[Tensor]) -> DistributedDataParallel | None:
    """A living `DistributedDataParallel` around any of the parameters. Looks at all objects: some 50 ms."""
    known = {id(parameter) for parameter in parameters}
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel) and any(id(p) in known for p in found.parameters()):
            wrapper: DistributedDataParallel = found
            return wrapper
    return None


def gradient_digest(parameters: Iterable[Tensor]) -> str | None:
    """What tells two gradients apart: the norm of each tensor. None for a gradient that is zero or not finite."""
    found = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(it).float().cpu() for it in found]) if found else torch.zeros(1)
    if not bool(norms.any()) or not bool(norms.isfinite().all()):
        return None
    return hashlib.sha256(norms.numpy().tobytes()).hexdigest()


def are_told_apart(parts: Sequence[Part], parameters: Sequence[Tensor]) -> bool:
    """Whether two ranks have voted in this step, so that nothing has to be looked at again.

    Votes do not show it: a learning rate that warms up from 0 leaves the paper's momentum empty, and own places differ always.
    Raises `ValueError` if all had one gradient that a `DistributedDataParallel` averaged, and warns otherwise.
    """
    said = [digest for part in parts if (digest := part.terms.get(GRADIENT)) is not None]
    if len(said) < 2 or len(set(said)) > 1:
        return len(said) > 1
    if wrapper_of(parameters) is not None:
        raise ValueError(
            "all ranks have the same gradient, because the model is wrapped in DistributedDataParallel, which sends all "
            "gradients in each step, beside the votes: call the model without DDP. A trainer that wraps the model by itself: "
            f"{HOOK}"
        )
    warnings.warn(
        "all ranks have the same gradient in their first step: give each rank batches of its own "
        "(DistributedSampler, or a seed for each rank), and average no gradients",
        RuntimeWarning,
        stacklevel=5,
    )
    return True


# What a `torch.amp.GradScaler` hands to an optimizer that takes it itself (`_step_supports_amp_scaling`).


class TakesScale:
    """True: a GradScaler then always calls `step`, with `found_inf` and `grad_scale`, and skips no exchange.

    Lightning asks the same before it clips gradients, and refuses to clip those that only a step unscales. `unscale` takes
    gradients that are unscaled before, so Lightning hears False, unscales and clips.
    """

    def __get__(self, optimizer: object, kind: type | None = None) -> bool:
        asks = str(sys._getframe(1).f_globals.get("__name__", ""))
        return asks.partition(".")[0] not in ("lightning", "lightning_fabric", "pytorch_lightning")


def unscale(
    found: Tensor | None, scale: Tensor | None, parameters: Iterable[Tensor], group: dist.ProcessGroup | None
) -> bool:
    """Divide the gradients by the `scale`, in place, unless the scaler `found` an infinity or NaN. False if it did.

    `scale` None: the gradients have no scale any more. `group`: ranks that share the parameters, each with a part of them.
    """
    if found is not None and group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    if found is not None and bool(found):
        return False
    if scale is not None:
        factor = scale.double().reciprocal().to(torch.float32)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
    return True
