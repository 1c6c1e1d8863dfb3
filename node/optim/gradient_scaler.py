"""What a `torch.amp.GradScaler` hands to an optimizer that takes it itself (`_step_supports_amp_scaling`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


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
