"""`swarmentum layout`: the parameter layout of a run's model, without building its numbers, and a dry run of a small copy.

`swarmentum-coordinator run create` calls it if this package is installed. The genesis then fixes the layout, and the run needs
no peer's report on it. A run whose model fails the dry run, or its export, is not created. Refuses the models that `join`
refuses, and those whose modules alone fill the machine: the operator's page asks for a layout, beside the coordinator.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final

from node.admission.consent import check_code
from node.admission.fit import counted, sample_bytes, short_sample_bytes, spec_of
from node.config import load_settings
from node.data.tokenizer import load_tokenizer
from node.export.first_look import tried
from node.model.dry_run import check_keys, shapes_of
from node.model.spec import ModelSpec, parameter_count, with_vocabulary
from node.training.optimizers import form_of
from protos import toml_file
from protos.errors import OperatorError, SwarmentumError
from protos.limits import SNAPSHOT_PIECE_BYTES, SNAPSHOT_PIECES_MAX
from protos.run_config import RunConfig
from protos.run_sections import LayoutFacts
from protos.text import print_json

MEMORY_BYTES_MAX: Final = 4 << 30
"""Modules without numbers take some 20 kB each. A model of 10**12 layers took 1.5 GB in 30 s, and had 300 s."""

PARAMETERS_MAX: Final = SNAPSHOT_PIECES_MAX * SNAPSHOT_PIECE_BYTES // 4
SECONDS_MAX: Final = 20.0
"""Of computing, for the count and for the dry run."""


class TookTooLongError(SwarmentumError):
    """Something took more seconds of this machine's processor than it may."""


@contextmanager
def limited(what: str, seconds: float = SECONDS_MAX) -> Iterator[None]:
    """Raise TookTooLongError in the main thread once this process has computed for so many seconds. A busy machine changes
    nothing."""

    def stop(_signal: int, _frame: object) -> None:
        raise TookTooLongError(f"{what} took more than {seconds:g} s of computing")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def bound_memory() -> None:
    """Let this process allocate MEMORY_BYTES_MAX at most. Linux alone counts what is mapped privately."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_BYTES_MAX:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, hard))


def layout_of(config: RunConfig, *, allow_code: bool = False) -> LayoutFacts:
    """The layout of a run's model, after a dry run of it.

    Raises OperatorError as `join` does, also for code without `allow_code`, and for what a dry run finds.
    """
    check_code(config, allow_code)
    spec = ModelSpec(config.model.config, config.model.factory, config.model.kwargs)
    tokenizer = load_tokenizer(config.data.tokenizer)
    if spec.config is not None:
        spec = replace(spec, config=with_vocabulary(spec.config, tokenizer.vocabulary))
    with limited("counting its model"):
        facts = _counted(spec, config, tokenizer.vocabulary)
    try:
        with limited("a dry run of its model"):
            return replace(facts, **tried(spec, tokenizer, config.data.context))
    except TookTooLongError as error:
        return replace(facts, untried=str(error))


def _counted(spec: ModelSpec, config: RunConfig, vocabulary: int) -> LayoutFacts:
    try:
        check_keys(spec)
        model = shapes_of(spec, vocabulary=vocabulary, context=config.data.context)
    except MemoryError:
        gb = MEMORY_BYTES_MAX >> 30
        raise OperatorError(
            f"model: its modules take more than {gb} GiB without their numbers; give it fewer"
        ) from None
    if (count := parameter_count(model)) > PARAMETERS_MAX:
        raise OperatorError(
            f"model: it has {count:,} parameters, and a run's snapshots hold {PARAMETERS_MAX:,} at most"
        )
    layout, form = form_of(model, config.optimizer)
    size = config.optimizer.vote_size
    votes, payload = form.votes(layout.chunks, size), form.bytes_max(layout.chunks, size)
    settings = load_settings(home=Path())  # none is used, and the user of a container may have none
    found = counted(config, settings)
    facts = LayoutFacts(layout.digest().hex(), count, votes, payload)
    if found is None:
        return facts
    need = found.need(config).on("cuda")
    sparing = settings.model_copy(update={"memory": "small", "activation_checkpointing": True, "compile": False})
    least = replace(found, sample=0).need(config, memory="small").on("cuda")
    own = spec_of(config)
    sparing_found = replace(found, short=partial(short_sample_bytes, own, config, sparing))
    host = sparing_found.need(config, memory="host")
    stream = sparing_found.need(config, memory="stream").on("cuda").memory(1)
    return replace(
        facts,
        least_state_bytes=least.memory(1),
        least_sample_bytes=sample_bytes(own, config, sparing),
        host_card_bytes=host.on("cuda").memory(1),
        host_main_bytes=host.main(1),
        stream_card_bytes=None if found.size.no_stream else stream,
        state_bytes=need.state,
        sample_bytes=need.sample,
        disk_bytes=need.disk,
        snapshot_bytes=need.snapshot,
        copies_bytes=need.copies,
    )


def print_layout(file: Path, *, allow_code: bool, as_json: bool) -> None:
    """Print the layout of a run.toml's model; for programs, also that it took too long."""
    try:
        facts = layout_of(toml_file.load(file, RunConfig), allow_code=allow_code)
    except TookTooLongError as error:
        if not as_json:
            raise
        print_json({"unknown": str(error)})
        return
    if as_json:
        print_json(asdict(facts))
        return
    for line in (*facts.notes, *([f"not run: {facts.untried}"] if facts.untried else [])):
        print(line)
    print(f"layout {facts.layout_digest}, {facts.parameters} parameters, {facts.votes} votes a payload")
