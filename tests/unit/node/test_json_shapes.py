"""docs/json.md names the keys that commands print with --json: all of them, and no other."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from coordinator.__main__ import app as coordinator_app
from coordinator.commands.peers import row_of, rows_of
from coordinator.commands.run_life import line_of, shown
from coordinator.commands.signing import OrderState
from coordinator.serving.served_coordinator import Serving
from coordinator.store.backup import BackupSummary
from node.__main__ import app as node_app
from node.archive.verify import Verification
from node.commands.doctor import as_values as doctor_values
from node.commands.model_layout import LayoutFacts
from node.commands.start_from import Started
from node.commands.status import as_values as status_values
from node.data.tally import Reading
from node.doctor.lines import Line, Severity
from node.doctor.run_lines import Prediction
from node.service.manager import Installed
from node.training.telemetry import Summary
from protos.invite import Invite
from protos.orders import OperatorOrder, SignedOrder, order_body
from protos.run_config import RunConfig
from protos.run_facts import PublicRun
from protos.start import StartingState
from protos.text import as_line
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2, ticket_pb2
from protos.version import versions

PAGE = (Path(__file__).parents[3] / "docs" / "json.md").read_text()
CONFIG = RunConfig.model_validate({"name": "tiny", "model": {"config": {"model_type": "llama"}}})
FACTS = pb.GetRunResponse(
    genesis=log_pb2.Genesis(config_json=CONFIG.canonical_json()), peers=[pb.PeerStatus(public_key=bytes(32))]
)


def named(begin: str) -> set[str]:
    """The keys of the first table after a text of the page."""
    table = PAGE.split(begin, 1)[1].split("|---|---|\n", 1)[1].split("\n\n", 1)[0]
    return {key for row in table.splitlines() for key in re.findall(r"`([\w-]+)`", row.split("|")[1])}


def listed(command: str) -> set[str]:
    """The keys in a command's row of the two tables of other commands."""
    rows = [row.split("|")[1:3] for row in PAGE.splitlines() if row.startswith("| `")]
    [keys] = [keys for names, keys in rows if f"`{command}`" in re.findall(r"`[\w -]+`", names)]
    return set(re.findall(r"`([\w-]+)`", keys))


def commands(command: Any, *path: str) -> Iterator[str]:
    """The names of all commands that take --json."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *path, name)
    if any("--json" in option.opts for option in command.params):
        yield " ".join(path)


PUBLIC = PublicRun(Invite(bytes(32), ("h:1",), bytes(32), bytes(32), (), "tiny"), CONFIG, FACTS, 1).values()
STATUS = status_values(FACTS, CONFIG, bytes(32))


@pytest.mark.parametrize(
    ("begin", "keys"),
    [
        ("## `swarmentum status`", STATUS),
        ("Each of `peers`", STATUS["peers"][0]),
        ("## `swarmentum join`", [it.name for it in fields(Summary)]),
        ("## `swarmentum doctor`", doctor_values([], None)),
        ("## `swarmentum version`", versions()),
        ("One object a run", line_of(FACTS)),
        ("## `swarmentum runs`", PUBLIC),
    ],
    ids=["status", "peers", "join", "doctor", "version", "run list", "runs"],
)
def test_the_page_names_the_keys(begin: str, keys: Iterable[str]) -> None:
    assert named(begin) == set(keys)


@pytest.mark.parametrize("app", [node_app, coordinator_app], ids=["swarmentum", "swarmentum-coordinator"])
def test_the_page_names_each_command_with_json(app: typer.Typer) -> None:
    names = list(commands(typer.main.get_command(app)))
    assert len(names) > 20
    assert [name for name in names if not re.search(rf"[ `]{name}`", PAGE)] == []


def test_the_page_names_the_keys_of_the_other_commands() -> None:
    ticket = ticket_pb2.Ticket(ticket_id=bytes(16))
    assert listed("verify") == {it.name for it in fields(Verification)}
    assert listed("layout") == {it.name for it in fields(LayoutFacts)} | {"unknown"}
    assert listed("service status") == {it.name for it in fields(Installed)}
    assert listed("serve") == {it.name for it in fields(Serving)} | {"event", "serving"}
    assert listed("backup") == {it.name for it in fields(BackupSummary)} | {"file"}
    assert listed("invite list") == {*row_of(ticket), "invite"}
    assert set(rows_of(FACTS)[0]) - set(STATUS["peers"][0]) == listed("peer list") - {"peers", "status"}
    signed = SignedOrder(order_body(OperatorOrder(bytes(16), 0, finishes=True)))
    assert listed("order list") == set(OrderState(bytes(32), signed, 2).values())
    begun = StartingState(bytes(32), bytes(32), 1, bytes(32), bytes(32), 1, bytes(32), 0)
    assert listed("start-from") == {*Started(begun, b"", 1, "hub").values(), "file"}
    assert listed("data survey") == {*Reading().values(), "source", "lines"}
    assert set(shown(FACTS)) - set(line_of(FACTS)) == {"failures", "settings"}


def test_the_page_names_the_version_of_its_keys() -> None:
    assert re.findall(r"This is version (\d+)", PAGE) == [versions()["json"]]


def test_a_number_that_is_not_finite_is_null() -> None:
    told = as_line({"loss": math.nan, "rows": [{"rate": math.inf}, (1.5, -math.inf)]})
    assert json.loads(told) == {"loss": None, "rows": [{"rate": None}, [1.5, None]]}


def test_the_page_names_what_is_inside_of_the_doctors_answer() -> None:
    said = PAGE.split("## `swarmentum doctor`")[1].split("##")[0]
    for key in (*Line("clock", Severity.OK, "").values(), *(it.name for it in fields(Prediction))):
        assert f"`{key}`" in said
