"""Tables by their names: embeddings and heads, where no module says what a parameter is.

Muon orthogonalises maps and no tables, and `decay = "matrices"` leaves tables out. Names match by whole components, because a
part of a component says little: `time_embed.0` and `embed_dim_proj` are maps. Refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from protos.optimizer_config import BaseOptimizerConfig

TABLES = tuple(BaseOptimizerConfig.model_fields["tables"].default)
"""Names of embeddings and heads. The models of transformers have `embed_tokens`, `word_embeddings`, `embed_out` and `lm_head`.
GPT-2 and its descendants have `wte` and `wpe`, the Llama of Meta and of torchtune `tok_embeddings` and `output`, T5 `shared`,
OLMo `wte` and `ff_out`, and x-transformers `token_emb.emb` and `to_logits`."""

OUTSIDE_BLOCKS = frozenset({"head", "output", "ff_out", "shared"})
"""Names that maps have, too, in the blocks of a model (`layer.3.output`): tables have no number in a component before."""

_TENSORS = frozenset({"weight", "bias"})


def is_named_table(name: str, tables: Iterable[str]) -> bool:
    """Whether the last components of a parameter's name are one of `tables`; `*` stands for any part of a component.

    `weight` and `bias` at the end do not count, nor components that wrappers add (`_orig_mod`). Most of `tables` are one
    component; one with dots has to match as many.
    """
    parts = [part for part in name.split(".") if not part.startswith("_")]
    if len(parts) > 1 and parts[-1] in _TENSORS:
        del parts[-1]
    return any(_matches(parts, table) for table in tables)


def _matches(parts: list[str], table: str) -> bool:
    wanted = [part for part in table.split(".") if part]
    if not wanted or len(wanted) > len(parts):
        return False
    before, last = parts[: -len(wanted)], parts[-len(wanted) :]
    if table in OUTSIDE_BLOCKS and any(part.isdecimal() for part in before):
        return False
    return all(fnmatchcase(part, pattern) for part, pattern in zip(last, wanted, strict=True))
