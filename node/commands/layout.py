"""`swarmentum layout`: the parameter layout of a run's model, without building its numbers.

`swarmentum-coordinator run create` calls it if this package is installed. The genesis then fixes the layout, and the run needs
no peer's report on it. Refuses the models that `join` refuses, and those whose modules alone fill the machine: the operator's
page asks for a layout, beside the coordinator.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from node.commands.consent import check_code
from node.commands.fit import need_of_run
from node.config import load_settings
from node.data.tokenizer import load_tokenizer
from node.model.spec import ModelSpec, build_meta, parameter_count
from node.training.methods import form_of
from protos.errors import OperatorError
from protos.run_config import RunConfig

MEMORY_BYTES_MAX: Final = 4 << 30
"""Modules without numbers take some 20 kB each. A model of 10**12 layers took 1.5 GB in 30 s, and had 300 s."""


@dataclass(frozen=True)
class LayoutFacts:
    """`votes` and `payload_bytes`: of one payload, at the run's own group size or k; 32 bytes of digest as hex.

    `state_bytes`: memory of a peer whatever its micro-batch; `sample_bytes`: activations of one sample; `disk_bytes`: on its
    disk; `snapshot_bytes`: one snapshot; `copies_bytes`: main memory of the copies that are written to the disk. None if they
    are not known before the model is built.
    """

    layout_digest: str
    parameters: int
    votes: int
    payload_bytes: int
    state_bytes: int | None = None
    sample_bytes: int | None = None
    disk_bytes: int | None = None
    snapshot_bytes: int | None = None
    copies_bytes: int | None = None


def bound_memory() -> None:
    """Let this process allocate MEMORY_BYTES_MAX at most. Linux alone counts what is mapped privately."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_BYTES_MAX:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, hard))


def layout_of(config: RunConfig, *, allow_code: bool = False) -> LayoutFacts:
    """The layout of a run's model. Raises OperatorError as `join` does, also for code without `allow_code`."""
    check_code(config, allow_code)
    spec = ModelSpec(config.model.config, config.model.factory, config.model.kwargs)
    vocabulary = load_tokenizer(config.data.tokenizer).vocabulary
    if spec.config is not None and "vocab_size" not in spec.config:
        spec = replace(spec, config={"vocab_size": vocabulary, **spec.config})
    try:
        model = build_meta(spec, vocabulary=vocabulary, context=config.data.context)
    except MemoryError:
        gb = MEMORY_BYTES_MAX >> 30
        raise OperatorError(
            f"model: its modules take more than {gb} GiB without their numbers; give it fewer"
        ) from None
    layout, form = form_of(model, config.optimizer)
    size = config.optimizer.vote_size
    votes, payload = form.votes(layout.chunks, size), form.bytes_max(layout.chunks, size)
    need = need_of_run(config, load_settings())
    facts = LayoutFacts(layout.digest().hex(), parameter_count(model), votes, payload)
    if need is None:
        return facts
    return replace(
        facts,
        state_bytes=need.state,
        sample_bytes=need.sample,
        disk_bytes=need.disk,
        snapshot_bytes=need.snapshot,
        copies_bytes=need.copies,
    )
