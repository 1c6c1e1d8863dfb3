"""The attention that a model's configuration names: one of the library's own, and never code that it would fetch from the hub.

transformers fetches and runs a kernel if one of these keys names a repository, at any depth of the configuration. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

ATTENTION_CHOICES: Final = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
ATTENTION_KEYS: Final = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
DEPTH_MAX: Final = 16
"""Configurations hold those of their parts, two or three deep."""


def foreign_attention(config: Mapping[str, Any]) -> str:
    """The first key whose attention is not the library's own, and what is expected; empty if there is none."""
    return next(_foreign(config, "", 0), "")


def _foreign(config: Mapping[str, Any], place: str, depth: int) -> Iterator[str]:
    for key, value in config.items():
        named = value.values() if isinstance(value, Mapping) else (value,)
        if key in ATTENTION_KEYS and any(each is not None and each not in ATTENTION_CHOICES for each in named):
            yield f"{place}{key} = {value!r}: expected one of {', '.join(ATTENTION_CHOICES)}"
        elif isinstance(value, Mapping):
            if depth == DEPTH_MAX:
                yield f"{place}{key}: tables lie more than {DEPTH_MAX} deep; no model needs that"
            else:
                yield from _foreign(value, f"{place}{key}.", depth + 1)
