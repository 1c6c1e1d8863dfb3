"""What tests of several folders share."""

from pathlib import Path

import pytest


@pytest.fixture
def built_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run without the processes that build a factory once more: `ByName` in tests/unit/model/test_dry_run.py has them."""
    from node.model import other_process

    monkeypatch.setattr(other_process, "PROCESSES", 0)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, built_here_alone: None) -> None:
    """What `swarmentum layout` says of a model, without the seconds in which its process loads torch."""
    from coordinator.commands import checking
    from node.commands.model_layout import layout_of
    from protos import toml_file
    from protos.run_config import RunConfig
    from protos.run_sections import LayoutFacts

    def layout(file: Path, *, allow_code: bool, told: object) -> tuple[LayoutFacts, str]:
        return layout_of(toml_file.load(file, RunConfig), allow_code=allow_code), ""

    monkeypatch.setattr(checking, "layout_of_run", layout)
