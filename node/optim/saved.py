"""An optimizer's private state as a dict, and the checks before such a dict is taken over. Holds no state itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from node.optim.layout import Layout
from node.optim.second_moment import SecondMoment


def private_state(
    layout: Layout, method: str, momentum: Tensor, pending: tuple[int, Tensor] | None, second: SecondMoment | None
) -> dict[str, Any]:
    """The state under the keys of every optimizer here; `pending` is `(size, payload as uint8)`.

    `method` says what the tensors mean: a state of another method does not fit, whatever its shapes.
    """
    size, packed = pending or (None, None)
    return {
        "layout": layout.digest().hex(),
        "method": method,
        "momentum": momentum,
        "pending": packed,
        "pending_size": size,
        "second": None if second is None else second.state_dict(),
    }


def check_state(state: Mapping[str, Any], layout: Layout, method: str, shape: Sequence[int], *, second: bool) -> None:
    """Raises `ValueError` unless `state` is of this layout and method, and its momentum has this shape.

    The state also has to have a second moment if this optimizer has one (`second`), and otherwise none.
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
