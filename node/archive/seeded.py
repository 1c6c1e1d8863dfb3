"""Whether an archive begins with the state that the run's genesis implies: the model of its seed. ADR 26.

This needs torch and transformers, and no code of the run. Refuses models of the run's own code, and settings that depend on a
tokenizer that is not here: nothing is downloaded, and nothing is called.
"""

from __future__ import annotations

from node.archive.replay import Replay
from node.data.tokenizer import ByteTokenizer
from node.model.spec import SMALL_LLAMA, ModelError, ModelSpec, build
from node.training.replica import Replica
from protos.run_config import RunConfig

BYTES = "bytes"


def confirmed_by_seed(replay: Replay) -> bool:
    """Whether the replay began with step 0, and with the bits and the layout that every peer builds from the seed."""
    genesis = replay.genesis
    spec = _spec_of(genesis.config)
    if spec is None or replay.segments[0].step != 0 or genesis.start is not None:
        return False
    try:
        model = build(spec, genesis.config.seed)
    except ModelError:
        return False
    optimizer = genesis.config.optimizer
    made = Replica(genesis.run_id, model, optimizer, optimizer.vote_size)
    return made.layout_digest == genesis.layout.digest() and made.whole_digest() == replay.began


def _spec_of(config: RunConfig) -> ModelSpec | None:
    """The model of a run, if its settings alone say what it is."""
    if config.model.factory is not None:
        return None
    named = SMALL_LLAMA if config.model.config is None else config.model.config
    if "vocab_size" in named:
        return ModelSpec(named)
    return ModelSpec({"vocab_size": ByteTokenizer().vocabulary, **named}) if config.data.tokenizer == BYTES else None
