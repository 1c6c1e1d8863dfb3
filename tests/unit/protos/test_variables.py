"""A mistyped variable of the environment is told, with the name that it is near to; others' variables are not."""

from pathlib import Path

import pytest

from coordinator.config import settings
from node.config import load_settings
from node.optim.backends.choose import wanted
from protos import mistakes


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mistakes._tell.cache_clear()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SWARMENTUM_DEVCE", "SWARMENTUM_DEVICE"),
        ("SWARMENTUM_MICROBATCH", "SWARMENTUM_MICRO_BATCH"),
        ("SWARMENTUM_BACKEND", "SWARMENTUM_OPTIM_BACKEND"),
        ("SWARMENTM_DEVICE", "SWARMENTUM_DEVICE"),
        ("SWARMENTUM_WHATEVER_ELSE", "no variable of this version"),
    ],
)
def test_a_variable_of_a_peer(
    name: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    load_settings()
    said = capsys.readouterr().err
    assert said.count(name) == 1
    assert meant in said
    load_settings()
    assert capsys.readouterr().err == "", "one sentence is enough"


@pytest.mark.parametrize("name", ["SWARMENTUM_COORDINATOR_LISTN", "SWARMENTUM_CORDINATOR_LISTEN"])
def test_a_variable_of_a_coordinator(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SWARMENTUM_DEVICE", "cpu")
    settings()
    assert capsys.readouterr().err == (
        f"environment: {name} does nothing. Did you mean SWARMENTUM_COORDINATOR_LISTEN? Correct it, or unset it\n"
    )


def test_the_backend_of_a_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SWARMENTUM_OPTM_BACKEND", "torch")
    monkeypatch.setenv("SWARMENTUM_DEVICE", "cpu")
    assert wanted() == "auto"
    assert capsys.readouterr().err.count("SWARMENTUM_OPTIM_BACKEND") == 1


def test_variables_that_have_another_reader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kubernetes names services in each pod, and a machine may serve a peer and a coordinator."""
    for name in (
        "SWARMENTUM_COORDINATOR_PORT_7700_TCP_ADDR",
        "SWARMENTUM_COORDINATOR_0_SERVICE_PORT",
        "SWARMENTUM_SERVICE_HOST",
        "SWARMENTUM_COORDINATOR_HOME",
        "SWARMENTUM_TEST_SLEEP",
        "SWARMENTUM_BIN",
        "SWARMENTUM_GROUP_SIZE",
        "SWARMENTUM_OPTIM_BACKEND",
        "SWARMENTUM_IDLE_COMMAND",
    ):
        monkeypatch.setenv(name, "64")
    load_settings()
    settings()
    assert "environment: " not in capsys.readouterr().err.replace("environment: group_size", "")
