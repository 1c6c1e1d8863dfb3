"""An optimizer's private state as a dict, and the checks before such a dict is taken over. Holds no state itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from node.optim.layout import Layout
from node.optim.nesterov import Nesterov
from node.optim.second_moment import Moment


def private_state(
    layout: Layout,
    method: str,
    momentum: Tensor,
    pending: tuple[int, Tensor] | None,
    second: Moment | None,
    *,
    step: int = 0,
    pending_step: int = 0,
    nesterov: Nesterov | None = None,
) -> dict[str, Any]:
    """The state under the keys of every optimizer here; `pending` is `(size, payload as uint8)`.

    `method` says what the tensors mean: a state of another method does not fit, whatever its shapes. `step` is that of
    the last entry, and `pending_step` that of the pending votes.
    """
    size, packed = pending or (None, None)
    return {
        "layout": layout.digest().hex(),
        "method": method,
        "momentum": momentum,
        "pending": packed,
        "pending_size": size,
        "second": None if second is None else second.state_dict(),
        "nesterov": None if nesterov is None else nesterov.state_dict(),
        "step": step,
        "pending_step": pending_step,
    }


def check_state(
    state: Mapping[str, Any],
    layout: Layout,
    method: str,
    shape: Sequence[int],
    *,
    second: bool,
    nesterov: bool = False,
) -> None:
    """Raises `ValueError` unless `state` is of this layout and method, and its momentum has this shape.

    The state also has to have a second moment and a Nesterov momentum if this optimizer has them (`second`, `nesterov`), and
    otherwise none. A state of an earlier version has no Nesterov momentum.
    """
    if state["layout"] != layout.digest().hex():
        raise ValueError(
            "the saved momentum belongs to another model (the layouts differ): load a state that this model saved"
        )
    if state["method"] != method:
        raise ValueError(
            f"the saved state is of method {state['method']!r}, not {method!r}: load it with the settings that saved it"
        )
    if state["momentum"].shape != tuple(shape):
        raise ValueError(
            f"the saved momentum has shape {tuple(state['momentum'].shape)}, not {tuple(shape)}: the saved state is damaged"
        )
    if second != (state["second"] is not None):
        saved, here = ("no", "a") if second else ("a", "no")
        raise ValueError(
            f"the saved state has {saved} second moment, and this optimizer has {here} second moment: set beta2 as it was"
        )
    if nesterov != (state.get("nesterov") is not None):
        saved, here = ("no", "a") if nesterov else ("a", "no")
        raise ValueError(
            f"the saved state has {saved} Nesterov momentum, and this optimizer has {here} Nesterov momentum: set nesterov as "
            "it was"
        )
