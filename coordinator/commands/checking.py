"""`run check`: the mistakes of a run.toml, all at once and with their lines, and what the run will cost. Starts nothing.

`run create` makes the same check first. A mistake found here would otherwise fail on every donor's machine, after its download.
Refuses to build a model itself: `layout_of_run` asks the node package, if it is installed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coordinator.clock.aggregation import worth
from coordinator.clock.rules import learning_rate
from coordinator.commands.operator import Operator
from coordinator.commands.planning import (
    NOT_INSTALLED,
    PEAK_FLOPS,
    TextFacts,
    adds_up,
    layout_of_run,
    measured_of,
    planned,
    recipe_of,
    room_for_votes,
    text_of,
    tokens_a_second,
    with_rate,
)
from coordinator.commands.run_mistakes import mistakes
from coordinator.config import AllowCode, Json
from protos import toml_file
from protos.errors import OperatorError
from protos.mistakes import OWN_TEXT, Mistake, has_own_text
from protos.optimizer_defaults import most_bytes
from protos.run_config import RunConfig, config_from_json
from protos.run_sections import LayoutFacts, ReferenceLoss
from protos.text import HOUR, amount, duration, print_json, span

CURVE_COLUMNS = 40
PEERS_SHOWN = 8
BLOCKS = "▁▂▃▄▅▆▇█"
UP_MBIT, DOWN_MBIT = (5, 20, 100), (20, 100, 1000)
"""Uplinks and downlinks that people have at home."""
BYTES_A_MBIT = 125_000
MICRO_BATCH = 8
"""Samples at a time for the memory that `run check` prints: a peer's own default."""


def checked(file: Path) -> RunConfig:
    """The run of a file. OperatorError lists every mistake that shows without torch, with its line."""
    return surveyed(file, layout=False)[0]


def surveyed(
    file: Path, *, layout: bool, allow_code: bool = False, told: Callable[[str], None] = lambda line: None
) -> tuple[RunConfig, LayoutFacts | None, str]:
    """The run of a file; with `layout`, its layout too, or why it is not known. OperatorError lists every mistake of the text,
    or, if there is none, those of the model: to build it takes seconds."""
    read = toml_file.read(file, RunConfig)
    if read.value is None:
        raise read.error()
    found = [wrong for wrong in map(_wrong, mistakes(read.value)) if not read.touches(wrong.about)]
    if found or read.wrong:
        raise read.error(found)
    if not layout:
        return read.value, None, ""
    try:
        facts, unknown = layout_of_run(file, allow_code=allow_code, told=told)
    except OperatorError as error:
        raise read.error([_of_layout(line) for line in str(error).splitlines()]) from error
    return read.value, facts, unknown


def _wrong(mistake: Mistake) -> toml_file.Wrong:
    places: tuple[toml_file.Place, ...] = tuple(tuple(key.split(".")) for key in mistake.keys)
    return toml_file.Wrong(places[0], f"{mistake.keys[0]}: {mistake}", places)


def _of_layout(line: str) -> toml_file.Wrong:
    """What the node package says of a model begins with the key that is wrong."""
    found = re.match(r"(?:model|data)(?:\.\w+)*", line)
    place: toml_file.Place = tuple(found[0].split(".")) if found else ("model",)
    return toml_file.Wrong(place, line, (place,))


def refuse_second(
    operator: Operator, name: str, file: Path | None = None, todo: str = "another `name` in run.toml"
) -> None:
    """OperatorError if the coordinator has an unfinished run of this name: commands and people name runs by it.

    `file`: the run.toml, whose line the message then names. `todo`: what the caller can give in place of it.
    """
    if any(config_from_json(run.genesis.config_json).name == name for run in operator.list_runs(unfinished=True)):
        place = f"{file}:{toml_file.line_of(file.read_text(encoding='utf-8'), ('name',))}: " if file else ""
        raise OperatorError(f"{place}name: this coordinator has a run {name!r} already; give {todo}")


@dataclass(frozen=True)
class Findings:
    """A checked run.toml. `config`: with what the file leaves open. `facts`: None, and `unknown` says why.

    `said`: what there is to say about the run, a line each; of `run check` and `run create` alike. `gave_up`: why the model was
    not run, although this machine could have run it.
    """

    config: RunConfig
    facts: LayoutFacts | None
    unknown: str
    said: tuple[str, ...]
    gave_up: str = ""

    def refuse_unchecked(self) -> None:
        """OperatorError for a run whose model this machine was to run, and did not."""
        if self.gave_up:
            raise OperatorError(
                f"model: it is not checked: {self.gave_up}. With --no-layout the run is created all the same, and its first "
                "anchor or its first peers check the model"
            )


def findings_of(
    file: Path,
    *,
    anchor: bool,
    layout: bool = True,
    local: bool = True,
    allow_code: bool = False,
    told: Callable[[str], None] = lambda line: None,
) -> Findings:
    """Check a run.toml. OperatorError lists every mistake with its line.

    `layout`: build its model to know the layout. `local`: also with a tokenizer that the run names on this machine.
    `allow_code`: also with code that the run names, which the operator trusts.
    """
    unknown = ""
    if layout and not (local and allow_code):
        here = toml_file.read(file, RunConfig).value
        unknown = "" if here is None else _not_to_build(here, local=local)
    config, facts, more = surveyed(file, layout=layout and not unknown, allow_code=allow_code, told=told)
    gave_up = more if facts is None and more != NOT_INSTALLED else "" if facts is None else facts.untried
    unknown = unknown or more
    if facts is not None and facts.reference is not None:
        reference = ReferenceLoss.model_validate(facts.reference)
        config = config.model_copy(update={"model": config.model.model_copy(update={"reference": reference})})
    config, said = planned(config, None if facts is None else facts.votes, anchor=anchor)
    room = "" if facts is None else room_for_votes(config, facts.payload_bytes)
    config, rate = with_rate(config, None if facts is None else facts.parameters)
    notes = () if facts is None else facts.notes
    told_all = tuple(filter(None, (recipe_of(config), rate, measured_of(config), said, room, *notes)))
    return Findings(config, facts, unknown, told_all, gave_up)


def to_stderr(line: str) -> None:
    """For people who wait; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def _not_to_build(config: RunConfig, *, local: bool) -> str:
    """What a run needs of this machine to be built, and its caller may not use; empty for nothing.

    `local`: the caller is in a shell of this machine, and has not agreed to code.
    """
    shell = "`run check` and `run create` in a shell build it"
    if config.model.factory is not None:
        if not local:
            return f"model.factory names code, and this page runs no code; {shell} with --allow-code"
        return "model.factory names code, and none was run; if you know and trust it, use --allow-code"
    if not local and config.data.tokenizer != "bytes" and Path(config.data.tokenizer).exists():
        return f"data.tokenizer names a folder of this machine, and this page reads none; {shell}"
    return ""


@dataclass(frozen=True)
class Cost:
    """Of one peer among `peers`, while a step takes `step_seconds`; bytes and seconds."""

    peers: int
    step_seconds: float
    up_bytes_hour: float
    down_bytes_hour: float
    memory_bytes: int | None
    disk_bytes: int | None
    copies_bytes: int | None
    run_seconds: float
    least_memory_bytes: int | None
    """Of one sample at a time, with activation checkpointing and memory = small."""
    exchange_seconds: dict[str, float]
    """What a step's votes take at so many Mbit/s up."""
    join_seconds: dict[str, float]
    """What the state takes at so many Mbit/s down, from holders that are faster."""
    computing_seconds: dict[str, float]
    """What the gradients of the whole run take, if each peer has such a card: `recipes.tokens_a_second`, not measured."""


def cost_of(config: RunConfig, facts: LayoutFacts, peers: int, step_seconds: float) -> Cost:
    """A peer sends its payload to each other peer, or to a few of them that pass it on, and gets everybody's. With aggregators
    it sends the payload to these and takes their sum, or is one of them now and then."""
    payloads = float(peers - 1)
    several = config.clock.aggregators if adds_up(config) else 0
    if several and worth(peers, several, config.optimizer.cap):
        payloads = several + math.log2(2 * config.optimizer.cap + 1)
    sent = payloads * facts.payload_bytes
    others = sent * HOUR / step_seconds
    micro_batch = min(MICRO_BATCH, config.clock.batch_samples)
    memory = None if facts.state_bytes is None else facts.state_bytes + micro_batch * (facts.sample_bytes or 0)
    least = None if facts.least_state_bytes is None else facts.least_state_bytes + (facts.least_sample_bytes or 0)
    tokens = config.clock.steps * config.clock.batch_samples * config.data.context
    cards = {card: tokens_a_second(facts.parameters, flops) for card, flops in PEAK_FLOPS.items()}
    return Cost(
        peers,
        step_seconds,
        others,
        others,
        memory,
        facts.disk_bytes,
        facts.copies_bytes,
        config.clock.steps * step_seconds,
        least,
        {f"{rate}": round(sent / (rate * BYTES_A_MBIT), 3) for rate in UP_MBIT},
        {f"{rate}": round((facts.snapshot_bytes or 0) / (rate * BYTES_A_MBIT), 1) for rate in DOWN_MBIT},
        {card: round(tokens / (peers * rate), 1) for card, rate in cards.items()},
    )


def curve(config: RunConfig, columns: int = CURVE_COLUMNS) -> str:
    """The learning rate over the run's steps as a line of blocks, the highest for the peak rate."""
    steps, lr = config.clock.steps, config.optimizer.lr
    places = [1 + round(column * (steps - 1) / max(columns - 1, 1)) for column in range(min(columns, steps))]
    rates = [learning_rate(config.optimizer, steps, step) / lr if lr else 0.0 for step in places]
    return "".join(BLOCKS[round(rate * (len(BLOCKS) - 1))] for rate in rates)


def check(
    file: Annotated[Path, typer.Argument(metavar="RUN_TOML", help="The run's configuration.")],
    peers: Annotated[int, typer.Option(min=1, help="For how many peers.")] = PEERS_SHOWN,
    step_seconds: Annotated[float, typer.Option(min=0.001, help="For steps of so many seconds.")] = 10.0,
    anchor: Annotated[bool, typer.Option("--anchor", help="As `run create --anchor`.")] = False,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Check a run.toml, and print what the run will cost its peers. Needs no coordinator, and starts nothing."""
    findings = findings_of(file, anchor=anchor, allow_code=allow_code, told=to_stderr)
    texts = texts_of(findings.config)
    config, facts = findings.config, findings.facts
    notes = [*notes_of(findings), *(f"Text {text.place}: {line}" for text in texts for line in text.lines)]
    cost, verdict = None if facts is None else cost_of(config, facts, peers, step_seconds), verdict_of(findings)
    if as_json:
        layout = None if facts is None else vars(facts)
        told = {"name": config.name, "layout": layout, "cost": cost and vars(cost), "notes": notes, "verdict": verdict}
        print_json(told | {"texts": [{"place": text.place, **(text.values or {})} for text in texts]})
    else:
        _show(config, facts, cost, (verdict, *notes))
    if findings.gave_up:
        raise typer.Exit(1)


def verdict_of(findings: Findings) -> str:
    """What was looked at, and that it has no mistakes: never more than that."""
    if findings.gave_up:
        return f"not checked: {findings.gave_up}. No mistakes were found in the rest"
    if findings.facts is None:
        return f"no mistakes found in its text. Its model is not checked here: {findings.unknown}"
    return "no mistakes found"


def notes_of(findings: Findings) -> list[str]:
    """What `run check` says of a run, besides its costs."""
    unknown = findings.unknown and f"Costs are not known: {findings.unknown}."
    return list(filter(None, (unknown, *findings.said, _own_text(findings.config))))


def texts_of(config: RunConfig) -> list[TextFacts]:
    """The texts that the run names and that this machine has."""
    named = [source for source, _, _ in config.data.sources()]
    return [text_of(source) for source in named if source not in ("stdlib", OWN_TEXT) and Path(source).exists()]


def _own_text(config: RunConfig) -> str:
    """A note about data that peers do not have by themselves."""
    if has_own_text(config.data.sources()):
        whom = "" if config.admission.mode != "open" else " Choose who may join: admission.mode invite or allow_list."
        return (
            "Each peer brings its own text with --data, and it stays there. Nobody can check a peer's votes, its samples or "
            f"its loss, and votes can leak samples.{whom}"
        )
    own = [source for source, _, sha256 in config.data.sources() if source != "stdlib" and sha256 is None]
    if not own:
        return ""
    what = "a folder with each source under its name" if config.data.mix else "it"
    return f"Each peer needs its own copy of the data ({', '.join(map(repr, own))}), and names {what} with --data."


def _show(config: RunConfig, facts: LayoutFacts | None, cost: Cost | None, said: tuple[str, ...]) -> None:
    """`said`: the verdict, then the notes."""
    console, (verdict, *notes) = Console(soft_wrap=True, highlight=False), said
    console.print(f"Run {config.name}: {verdict}.", markup=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    for label, value in rows_of(config, facts, cost):
        table.add_row(label, value)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)


def rows_of(config: RunConfig, facts: LayoutFacts | None, cost: Cost | None) -> Iterator[tuple[str, str]]:
    """The costs and figures of a run, for people."""
    if facts is not None and cost is not None:
        yield "parameters", f"{facts.parameters:,}"
        yield "payload, a peer and step", amount(facts.payload_bytes)
        yield (
            f"traffic, {cost.peers} peers, {cost.step_seconds:g} s a step",
            f"{amount(cost.up_bytes_hour)} up, {amount(cost.down_bytes_hour)} down a peer and hour",
        )
        clock, own = config.clock, facts.payload_bytes
        most = most_bytes(own, config.optimizer.selection, clock.snapshot_every, cost.peers)
        if most > own:
            yield (
                "while all uplinks have room",
                f"up to {amount(most)} a payload, and {most / own:.2g} times the traffic (vote_size)",
            )
        memory = "not known before the model is built" if cost.memory_bytes is None else amount(cost.memory_bytes)
        yield f"memory = full, micro-batch {min(MICRO_BATCH, config.clock.batch_samples)}", memory
        if cost.least_memory_bytes is not None:
            yield "memory = small, at least", amount(cost.least_memory_bytes)
        if facts.host_card_bytes is not None and facts.host_main_bytes is not None:
            card, main = amount(facts.host_card_bytes), amount(facts.host_main_bytes)
            yield "or with memory = host", f"{card} of a GPU, {main} of main memory"
            if facts.stream_card_bytes is not None:
                yield "or with memory = stream", f"{amount(facts.stream_card_bytes)} of a GPU, {main} of main memory"
        if cost.copies_bytes is not None:
            yield "main memory for copies", amount(cost.copies_bytes)
        if cost.disk_bytes is not None:
            yield "disk", amount(cost.disk_bytes)
        yield f"a step's votes at {_rates(UP_MBIT)} up", _times(cost.exchange_seconds)
        if facts.snapshot_bytes:
            yield f"to join at {_rates(DOWN_MBIT)} down", _times(cost.join_seconds)
        yield "the whole run", duration(cost.run_seconds)
        for card, seconds in cost.computing_seconds.items():
            yield f"compute time on {cost.peers} x {card} (estimate)", duration(seconds)
    tokens = config.clock.steps * config.clock.batch_samples * config.data.context
    yield "steps, tokens", f"{config.clock.steps:,}, {tokens:,}"
    yield f"learning rate, to {config.optimizer.lr:g}", curve(config)


def _rates(rates: tuple[int, ...]) -> str:
    return ", ".join(map(str, rates)) + " Mbit/s"


def _times(seconds: dict[str, float]) -> str:
    return ", ".join(map(span, seconds.values()))
