"""What a library waits for is told once it takes a while, and not before."""

import threading

import pytest

from node import imports
from node.commands.copies import _with_progress


def test_a_long_wait_is_told_once_and_a_short_one_never(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with imports.slowly("waiting for the hub"):
        pass
    monkeypatch.setattr(imports, "SILENCE_SECONDS_MAX", 0.0)
    with imports.slowly("waiting for the hub"):
        while (told := [it for it in threading.enumerate() if isinstance(it, threading.Timer)]) and told[0].is_alive():
            told[0].join(240)
    assert capsys.readouterr().err == "waiting for the hub ...\n"


def test_a_copy_is_told_where_stderr_is_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "SILENCE_SECONDS_MAX", 0.0)
    _with_progress(
        "copying it", lambda _: [it.join(240) for it in threading.enumerate() if isinstance(it, threading.Timer)]
    )
    assert capsys.readouterr().err == "copying it ...\n"
