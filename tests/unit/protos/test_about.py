"""`--version`, `version` and `help` of both programs, as people type them."""

import json
import subprocess
import sys
from copy import copy
from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

from protos.errors import OperatorError
from protos.version import add_about

PROGRAMS = {"node": ("data", "build"), "coordinator": ("run", "check")}
"""With a command of each."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_versions_name_what_an_issue_needs(program: str) -> None:
    command = [sys.executable, "-m", program, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert {"swarmentum", "format", "Python", "torch", "hivemind", "system"} <= found.keys()
    said = CliRunner().invoke(whole(program), ["version", "--json"])
    assert json.loads(said.stdout) == found


def whole(program: str) -> typer.Typer:
    """The program's commands, with those that its `main` adds; the app of other tests stays as it is."""
    app: typer.Typer = copy(import_module(f"{program}.__main__").app)
    app.registered_commands = list(app.registered_commands)
    add_about(app)
    return app


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_of_a_command_is_that_of_its_option(program: str) -> None:
    app, runner = whole(program), CliRunner()
    words = PROGRAMS[program]
    done = runner.invoke(app, ["help", *words], prog_name=program)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == runner.invoke(app, [*words, "--help"], prog_name=program).stdout.strip()
    assert ("Take part" if program == "node" else "The coordinator") in runner.invoke(app, ["help"]).stdout
    refused = runner.invoke(app, ["help", "nope"])
    assert isinstance(refused.exception, OperatorError)
    assert "there is no command 'nope'" in str(refused.exception)
