"""A peer's settings: flags over environment over file; a wrong value is named with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.config import load_settings
from protos.errors import OperatorError


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_flags_win_over_environment_over_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("swarmentum.toml").write_text('group_size = 16\nmicro_batch = 3\ndevice = "cpu"\n')
    monkeypatch.setenv("SWARMENTUM_MICRO_BATCH", "4")
    monkeypatch.setenv("SWARMENTUM_DEVICE", "mps")
    settings = load_settings(device="cuda:1", threads=None)
    assert (settings.group_size, settings.micro_batch, settings.device) == (16, 4, "cuda:1")


def test_a_wrong_value_in_the_file_is_named_with_its_line() -> None:
    Path("swarmentum.toml").write_text('device = "cpu"\ngroup_size = 100\nspeed = 3\n')
    with pytest.raises(OperatorError) as caught:
        load_settings()
    assert "swarmentum.toml:2: group_size" in str(caught.value)
    assert "swarmentum.toml:3: speed: is not a known setting" in str(caught.value)


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(OperatorError, match="listen"):
        load_settings(listen="everywhere")


def test_a_named_file_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMENTUM_CONFIG", "/no/such.toml")
    with pytest.raises(OperatorError, match=r"/no/such\.toml"):
        load_settings()


def test_the_overlay_gets_its_part() -> None:
    overlay = load_settings(listen="127.0.0.1:4001").overlay()
    assert overlay.loopback
    assert overlay.listen() == ["/ip4/127.0.0.1/tcp/4001", "/ip4/127.0.0.1/udp/4001/quic-v1"]
