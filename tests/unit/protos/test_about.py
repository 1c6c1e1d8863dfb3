"""`--version`, `version` and `help` of both programs, as people type them."""

import json
import subprocess
import sys

import pytest


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)


@pytest.mark.parametrize("program", ["node", "coordinator"])
def test_versions_name_what_an_issue_needs(program: str) -> None:
    done = run(program, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert {"swarmentum", "format", "Python", "torch", "hivemind", "system"} <= found.keys()
    assert json.loads(run(program, "version", "--json").stdout) == found


@pytest.mark.parametrize(("program", "words"), [("node", ("data", "build")), ("coordinator", ("run", "check"))])
def test_help_of_a_command_is_that_of_its_option(program: str, words: tuple[str, ...]) -> None:
    done = run(program, "help", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == run(program, *words, "--help").stdout.strip()
    assert ("Take part" if program == "node" else "The coordinator") in run(program, "help").stdout
    refused = run(program, "help", "nope")
    assert refused.returncode == 2
    assert "there is no command 'nope'" in refused.stderr
