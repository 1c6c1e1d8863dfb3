"""The weights of a model as the files of transformers have them, and back.

Files of some types have other names and shapes than their modules: experts one by one, a head under the name that it had in an
earlier version. Plain modules are saved as they are. Refuses nothing: weights that do not come back are given as they were.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from node.imports import many_imports, no_progress_bar, quiet_libraries
from node.model.passes import FAILURES


def saved_form(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state`, by the model's own names, as an export has it. Of `model` only type and names count."""
    with many_imports():
        from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return dict(state)
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
    return found


def own_form(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a file by the model's own names, in fp32; as they are if they are no other form of all its parameters.

    They are another form if the model that transformers loads from them, saved again, has each of their numbers: under its
    name, or with the prefix that files of a bare model lack (GPT-2). What its type ignores, such as a mask, is left out.
    """
    with many_imports():
        from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return dict(weights)
    cls: Any = type(model)
    try:
        with quiet_libraries(), no_progress_bar():
            loaded, info = cls.from_pretrained(
                None, config=copy.deepcopy(model.config), state_dict=dict(weights), dtype=torch.float32,
                output_loading_info=True, trust_remote_code=False,
            )  # fmt: skip
            again = saved_form(loaded, loaded.state_dict())
    except FAILURES:
        return dict(weights)
    ignored = [re.compile(pattern) for pattern in cls._keys_to_ignore_on_load_unexpected or ()]

    def is_there(name: str, tensor: Tensor) -> bool:
        found = again.get(name, again.get(f"{cls.base_model_prefix}.{name}"))
        if found is None:
            return any(pattern.search(name) for pattern in ignored)
        return torch.equal(found.float(), tensor.float())

    same = not info["missing_keys"] and all(is_there(name, tensor) for name, tensor in weights.items())
    return dict(loaded.state_dict()) if same else dict(weights)


def counts_padding(model: nn.Module) -> bool:
    """Whether the model computes with the id of padding: a table (RoBERTa), or the lengths of its texts (XLM)."""
    mine = [it for it in model.modules() if "Embedding" in type(it).__name__ and type(it) is not nn.Embedding]
    tables = any(getattr(it, "padding_idx", None) is not None for it in mine)
    return tables or any(getattr(it, "pad_index", None) is not None for it in model.modules())
