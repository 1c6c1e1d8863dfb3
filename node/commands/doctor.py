"""`swarmentum doctor [INVITE]`: can this machine take part, what will it give, and what should be done first?

Collects facts (node/doctor), turns them into lines, prints them. Joins nothing, and changes nothing but the home's identity,
which it makes as `join` would.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from typing import Any

import structlog
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.config import PeerSettings
from node.doctor import lines, machine, run_lines, seat, swarm, texts
from node.doctor.facts import Fault, Found
from node.doctor.lines import Line, Verdict
from node.doctor.probes import side_by_side
from node.donor.conditions import State, states
from node.donor.live import Live
from node.donor.machine import Machine
from node.donor.month import Month
from protos.identity import Identity
from protos.invite import Invite
from protos.text import printable

MACHINE_SECONDS_MAX = 30.0
RUN_SECONDS_MAX = 90.0
NAME_CHARACTERS_MAX = 64
LINE_CHARACTERS_MAX = 600
STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red", Verdict.UNKNOWN: "dim"}


def examine(settings: PeerSettings, invite: Invite | None) -> tuple[list[Line], Found | None]:
    """All lines, and what was found about the run."""
    probes: dict[str, Any] = {
        "devices": lambda: machine.devices_of(settings),
        "here": lambda: machine.here(settings),
        "owner": lambda: conditions_of(settings),
        "limits": lambda: Live(settings.home, settings).values,
        "texts": lambda: texts.of_person(settings),
    }
    if invite is not None:
        probes["way"] = lambda: asyncio.run(swarm.way_to(invite))
    facts = side_by_side(probes, MACHINE_SECONDS_MAX)
    device = "" if isinstance(facts["devices"], Fault) else facts["devices"].chosen
    found = lines.of_machine(facts["devices"], facts["here"]) + lines.conditions(facts["owner"])
    found += lines.limits(device, facts["here"], facts["limits"]) + lines.texts(facts["texts"])
    if invite is None:
        return found, None
    of_run = _run(settings, invite, facts["way"])
    return found + run_lines.of_run(of_run), of_run


def conditions_of(settings: PeerSettings) -> list[State]:
    """The conditions under which the peer works, `swarmentum set` included, and whether they let it work now."""
    values = Live(settings.home, settings).values
    month = Month(settings.home, structlog.get_logger("doctor"))
    facts = Machine().facts(values)
    used = (month.up, month.down) if month.name == facts.month else (0, 0)
    return list(states(values, replace(facts, uploaded=used[0], downloaded=used[1])))


def _run(settings: PeerSettings, invite: Invite, way: swarm.Way | Fault) -> Found:
    """What can be found about a run from here."""
    name = printable(invite.run_name, NAME_CHARACTERS_MAX)
    if isinstance(way, Fault):
        return Found(name, "", way, way, way, way, way, way, way, way)
    run = way.run
    if isinstance(run, Fault):
        rest = Fault("the run is not known")
        return Found(name, way.address, way.round_trip_ms, run, rest, rest, rest, rest, rest, rest)
    folder = settings.home / "runs" / invite.run_id.hex()[:16]
    identity = Identity.load_or_create(settings.home / "identity.key")
    first = side_by_side({"asks": lambda: seat.asked(run.config, settings)}, MACHINE_SECONDS_MAX)
    probes: dict[str, Any] = {
        "inside": lambda: asyncio.run(swarm.inside(invite, identity, settings.overlay(), run)),
    }
    if not isinstance(first["asks"], Fault):  # else the run's own code could be called without consent
        probes["seat"] = lambda: seat.seat_of(run.config, settings, folder)
        probes["texts"] = lambda: texts.of_run(run.config, settings)
    unasked: dict[str, Any] = {"seat": Fault("the run asks for more than was allowed"), "texts": ()}
    facts = unasked | side_by_side(probes, RUN_SECONDS_MAX)
    inside = facts["inside"]
    if isinstance(inside, Fault):
        inside = swarm.Inside(inside, inside, inside, inside, inside)
    return Found(
        name=name,
        address=way.address,
        round_trip_ms=way.round_trip_ms,
        facts=swarm.others_of(run, inside.later),
        asks=first["asks"],
        admitted=inside.admitted,
        seat=facts["seat"],
        reach=inside.reach,
        download=inside.download,
        upload=inside.upload,
        texts=facts["texts"],
    )


def as_values(found: list[Line], run: Found | None) -> dict[str, Any]:
    """For programs."""
    told = None if run is None else run_lines.predicted(run)
    return {
        "verdict": lines.worst(found).value,
        "run": None if run is None else run.name,
        "lines": [line.values() for line in found],
        "prediction": None if told is None else asdict(told),
    }


def show(found: list[Line], run: Found | None) -> None:
    """For people. Words of a run are strangers': printable, never markup."""
    table = Table(title=None if run is None else Text(f"run {run.name}"), show_header=False, box=None)
    for overflow in ("fold", "fold", "fold"):  # a peer id is longer than a line of words
        table.add_column(overflow=overflow)
    for line in found:
        words = Text(printable(line.text, LINE_CHARACTERS_MAX))
        if line.todo:
            words.append(f"\n{printable(line.todo, LINE_CHARACTERS_MAX)}", style="bold")
        table.add_row(line.name, Text(line.verdict.value, style=STYLES[line.verdict]), words)
    console = Console()
    console.print(table)
    console.print(Text(ENDINGS[lines.worst(found)]))


ENDINGS = {
    Verdict.OK: "This machine can take part.",
    Verdict.WARNING: "This machine can take part; the warnings say what would help.",
    Verdict.PROBLEM: "This machine cannot take part yet; the problems say what to do.",
}


def doctor(settings: PeerSettings, link: str | None, *, as_json: bool) -> int:
    """Examine, print, and return the exit code: 1 for a problem, otherwise 0. Raises OperatorError for a damaged link."""
    found, run = examine(settings, None if link is None else Invite.parse(link))
    if as_json:
        print(json.dumps(as_values(found, run)), flush=True)
    else:
        show(found, run)
    return int(lines.worst(found) is Verdict.PROBLEM)
