"""A small Llama whose forward pass takes a while in which this machine's cores are free, as with a GPU of its own.

So that many peers on few cores keep the pace of their steps, whatever else the cores do: starting processes, for one.
"""

import time
from typing import Any

from torch import nn

from node.model.spec import ModelSpec, build


def make(config: dict[str, Any], seconds: float) -> nn.Module:
    """For `model.factory`; the weights' seed comes from the caller's random state. `seconds`: of a forward pass."""
    model = build(ModelSpec(config), seed=0)
    model.register_forward_pre_hook(lambda module, given: time.sleep(seconds))
    return model
