"""`swarmentum doctor [INVITE]`: can this machine take part, what will it give, and what should be done first?

Collects facts (node/doctor), turns them into lines, prints them. Joins nothing, and changes nothing but the home's identity,
which it makes as `join` would.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import structlog
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.config import PeerSettings
from node.doctor import lines, machine_probes, run_lines, swarm
from node.doctor.doctor_facts import Fault, Found, fault_of
from node.doctor.lines import Line, Severity
from node.donor.live import Live, Month
from node.donor.owner_machine import Machine
from node.donor.owner_settings import State, states
from protos.errors import SwarmentumError
from protos.identity import Identity
from protos.invite import Invite
from protos.process import join_or_leave
from protos.text import print_json, printable

MACHINE_SECONDS_MAX = 30.0
RUN_SECONDS_MAX = 90.0
NAME_CHARACTERS_MAX = 64
LINE_CHARACTERS_MAX = 600
NAME_COLUMNS, VERDICT_COLUMNS = 14, 12
STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red", Severity.UNKNOWN: "dim"}


Tell = Callable[[Sequence[Line]], None]
Say = Callable[[str], None]


def _nothing(_: object) -> None:
    """Nobody looks on."""


def examine(
    settings: PeerSettings, invite: Invite | None, tell: Tell = _nothing, say: Say = _nothing
) -> tuple[list[Line], Found | None]:
    """All lines, and what was found about the run. `tell` gets lines as they come; `say` hears what takes time now."""
    probes: dict[str, Any] = {
        "devices": lambda: machine_probes.devices_of(settings),
        "here": lambda: machine_probes.here(settings),
        "owner": lambda: conditions_of(settings),
        "limits": lambda: Live(settings.home, settings).values,
        "texts": lambda: machine_probes.of_person(settings),
    }
    if invite is not None:
        probes["way"] = lambda: asyncio.run(swarm.way_to(invite))
    shown = {"devices": lines.of_devices, "here": lines.of_here, "owner": lines.conditions, "texts": lines.texts}
    say(f"looking at this machine (at most {MACHINE_SECONDS_MAX:.0f} s)")
    facts = side_by_side(
        probes, MACHINE_SECONDS_MAX, lambda name, fact: tell(shown[name](fact)) if name in shown else None
    )
    device = "" if isinstance(facts["devices"], Fault) else facts["devices"].chosen
    limits = lines.limits(device, facts["here"], facts["limits"])
    tell(limits)
    found = lines.of_devices(facts["devices"]) + lines.of_here(facts["here"]) + lines.conditions(facts["owner"])
    found += limits + lines.texts(facts["texts"])
    if invite is None:
        return found, None
    of_run = _run(settings, invite, facts["way"], tell, say)
    tell(run_lines.of_seat(of_run))
    return found + run_lines.of_run(of_run), of_run


def conditions_of(settings: PeerSettings) -> list[State]:
    """The conditions under which the peer works, `swarmentum set` included, and whether they let it work now."""
    values = Live(settings.home, settings).values
    month = Month(settings.home, structlog.get_logger("doctor"))
    facts = Machine().facts(values)
    up, down = month.of(facts.month)
    return list(states(values, replace(facts, uploaded=up, downloaded=down)))


def _run(settings: PeerSettings, invite: Invite, way: swarm.Way | Fault, tell: Tell, say: Say) -> Found:
    """What can be found about a run from here."""
    before = _before(invite, way)
    tell(run_lines.of_way(before))
    if isinstance(way, Fault) or isinstance(way.run, Fault):
        return before
    run = way.run
    say(f"measuring this machine with the run's model, and the way to its peers (at most {RUN_SECONDS_MAX:.0f} s)")
    folder = settings.home / "runs" / invite.run_id.hex()[:16]
    identity = Identity.load_or_create(settings.home / "identity.key")
    peers = 1 + swarm.others_of(run, run).ready  # this one, too
    first = side_by_side({"asks": lambda: machine_probes.asked(run.config, settings)}, MACHINE_SECONDS_MAX)
    probes: dict[str, Any] = {
        "inside": lambda: asyncio.run(swarm.inside(invite, identity, settings.overlay(), run)),
    }
    if not isinstance(first["asks"], Fault):  # else the run's own code could be called without consent
        probes["seat"] = lambda: machine_probes.seat_of(run.config, settings, folder, peers)
        probes["texts"] = lambda: machine_probes.of_run(run.config, settings)
    unasked: dict[str, Any] = {"seat": Fault("the run asks for more than was allowed"), "texts": ()}
    facts = unasked | side_by_side(probes, RUN_SECONDS_MAX)
    inside = facts["inside"]
    if isinstance(inside, Fault):
        inside = swarm.Inside(inside, inside, inside, inside, inside)
    return replace(
        before,
        facts=swarm.others_of(run, inside.later),
        asks=first["asks"],
        admitted=inside.admitted,
        seat=facts["seat"],
        reach=inside.reach,
        download=inside.download,
        upload=inside.upload,
        texts=facts["texts"],
    )


def _before(invite: Invite, way: swarm.Way | Fault) -> Found:
    """What the coordinator's first answer says, and nothing that must be measured."""
    name = printable(invite.run_name, NAME_CHARACTERS_MAX)
    if isinstance(way, Fault):
        return Found(name, "", way, way, way, way, way, way, way, way)
    facts = way.run if isinstance(way.run, Fault) else swarm.others_of(way.run, way.run)
    rest = Fault("the run is not known")
    return Found(name, way.address, way.round_trip_ms, facts, rest, rest, rest, rest, rest, rest)


def as_values(found: list[Line], run: Found | None) -> dict[str, Any]:
    """For programs."""
    told = None if run is None else run_lines.predicted(run)
    return {
        "verdict": lines.worst(found).value,
        "name": None if run is None else run.name,
        "lines": [line.values() for line in found],
        "prediction": None if told is None else asdict(told),
    }


class DoctorPrinter:
    """Prints lines for people as they come. Words of a run are strangers': printable, never markup."""

    def __init__(self) -> None:
        self._console, self._busy = Console(), Console(stderr=True).status("")

    def __enter__(self) -> DoctorPrinter:
        return self

    def __exit__(self, *_: object) -> None:
        self._busy.stop()

    def say(self, what: str) -> None:
        """What takes time now: a line that moves on a terminal, and a plain line elsewhere."""
        if self._busy.console.is_terminal:
            self._busy.update(f"{what} ...")
            self._busy.start()
        else:
            print(f"{what} ...", file=sys.stderr, flush=True)

    def tell(self, found: Sequence[Line]) -> None:
        """A row for each line."""
        table = Table.grid(padding=(0, 2))
        for width in (
            NAME_COLUMNS,
            VERDICT_COLUMNS,
            None,
        ):  # the same in each table, so that rows stand under each other
            table.add_column(width=width, overflow="fold")
        for line in found:
            words = Text(printable(line.text, LINE_CHARACTERS_MAX))
            if line.todo:
                words.append(f"\n{printable(line.todo, LINE_CHARACTERS_MAX)}", style="bold")
            table.add_row(line.name, Text(line.verdict.value, style=STYLES[line.verdict]), words)
        if found:
            self._console.print(table)

    def end(self, found: Sequence[Line]) -> None:
        """The verdict."""
        self._busy.stop()
        self._console.print(Text(ENDINGS[lines.worst(found)]))


ENDINGS = {
    Severity.OK: "This machine can take part.",
    Severity.WARNING: "This machine can take part; the warnings say what would help.",
    Severity.PROBLEM: "This machine cannot take part yet; the problems say what to do.",
}


def doctor(settings: PeerSettings, link: str | None, *, as_json: bool) -> int:
    """Examine, print, and return the exit code: 1 for a problem, otherwise 0. Raises OperatorError for a damaged link."""
    invite = None if link is None else Invite.parse(link)
    if as_json:
        found, run = examine(settings, invite)
        print_json(as_values(found, run))
    else:
        with DoctorPrinter() as screen:
            found, _ = examine(settings, invite, screen.tell, screen.say)
            screen.end(found)
    return int(lines.worst(found) is Severity.PROBLEM)


def _nobody(_name: str, _fact: Any) -> None:
    """Nobody waits for the facts one by one."""


def side_by_side(
    probes: Mapping[str, Callable[[], Any]], seconds_max: float, told: Callable[[str, Any], None] = _nobody
) -> dict[str, Any]:
    """The fact of each probe, by its name, or its Fault. A probe that fails, or does not end in time, stops no other.

    `told` gets each name and fact as it comes, in this thread. The program does not wait for the end of a thread that hangs.
    """
    came: queue.Queue[tuple[str, Any]] = queue.Queue(len(probes))

    def run(name: str, probe: Callable[[], Any]) -> None:
        try:
            came.put((name, probe()))
        except (SwarmentumError, OSError, RuntimeError, ValueError) as error:
            came.put((name, fault_of(error)))

    threads = [threading.Thread(target=run, args=it, daemon=True) for it in probes.items()]
    for thread in threads:
        thread.start()
    found: dict[str, Any] = {}
    until = time.monotonic() + seconds_max
    while len(found) < len(probes):
        try:
            name, fact = came.get(timeout=max(until - time.monotonic(), 0.001))
        except queue.Empty:
            break
        found[name] = fact
        told(name, fact)
    for thread in threads:
        join_or_leave(thread, 0.0)
    late = Fault(f"no answer within {seconds_max:.0f} s")
    for name in probes.keys() - found.keys():
        told(name, late)
    return {name: found.get(name, late) for name in probes}
