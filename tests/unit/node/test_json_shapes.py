"""docs/json.md names the keys that commands print with --json: all of them, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest

from coordinator.commands.showing import line_of
from node.commands.doctor import as_values as doctor_values
from node.commands.status import as_values as status_values
from node.doctor.lines import Line, Verdict
from node.doctor.predict import Prediction
from node.training.telemetry import Summary
from protos.about import versions
from protos.run_config import RunConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2

PAGE = (Path(__file__).parents[3] / "docs" / "json.md").read_text()
CONFIG = RunConfig.model_validate({"name": "tiny", "model": {"config": {"model_type": "llama"}}})
FACTS = pb.GetRunResponse(
    genesis=log_pb2.Genesis(config_json=CONFIG.canonical_json()), peers=[pb.PeerStatus(public_key=bytes(32))]
)


def named(begin: str) -> set[str]:
    """The keys of the first table after a text of the page."""
    table = PAGE.split(begin, 1)[1].split("|---|---|\n", 1)[1].split("\n\n", 1)[0]
    return {key for row in table.splitlines() for key in re.findall(r"`([\w-]+)`", row.split("|")[1])}


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
    ],
    ids=["status", "peers", "join", "doctor", "version", "run list"],
)
def test_the_page_names_the_keys(begin: str, keys: Iterable[str]) -> None:
    assert named(begin) == set(keys)


def test_the_page_names_what_is_inside_of_the_doctors_answer() -> None:
    said = PAGE.split("## `swarmentum doctor`")[1].split("##")[0]
    for key in (*Line("clock", Verdict.OK, "").values(), *(it.name for it in fields(Prediction))):
        assert f"`{key}`" in said
