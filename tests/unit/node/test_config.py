"""A peer's settings: flags over environment over file; a wrong value is named with its place."""

import os
from pathlib import Path

import pytest

from node.config import load_settings
from node.export.model_folder import ExportError, check_folder
from node.link.client import check_genesis
from protos.errors import OperatorError
from protos.identity import Identity
from protos.invite import Invite
from protos.log import run_id_of
from protos.run_config import RunConfig
from protos.v1 import log_pb2


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_flags_win_over_environment_over_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("swarmentum.toml").write_text('vote_size = 16\nmicro_batch = 3\ndevice = "cpu"\n')
    monkeypatch.setenv("SWARMENTUM_MICRO_BATCH", "4")
    monkeypatch.setenv("SWARMENTUM_DEVICE", "mps")
    settings = load_settings(device="cuda:1", threads=None)
    assert (settings.vote_size, settings.micro_batch, settings.device) == (16, 4, "cuda:1")


def test_a_wrong_value_in_the_file_is_named_with_its_line() -> None:
    Path("swarmentum.toml").write_text('device = "cpu"\nvote_size = 1\nspeed = 3\n')
    with pytest.raises(OperatorError) as caught:
        load_settings()
    assert (
        "swarmentum.toml:2: vote_size: expected is a whole number from 2 to 2,048, or a part such as 25%, or off"
        in str(caught.value)
    )
    assert "swarmentum.toml:3: speed: is not a known setting" in str(caught.value)


def test_a_named_file_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMENTUM_CONFIG", "/no/such.toml")
    with pytest.raises(OperatorError, match=r"/no/such\.toml"):
        load_settings()


def test_the_overlay_gets_its_part() -> None:
    overlay = load_settings(listen="127.0.0.1:4001").overlay()
    assert overlay.loopback
    assert overlay.listen(("127.0.0.1",)) == ["/ip4/127.0.0.1/tcp/4001", "/ip4/127.0.0.1/udp/4001/quic-v1"]


@pytest.mark.parametrize(
    "content", [b"device = ", b"[[[", b"\xff\xfe", b"threads = " + b"9" * 5000, b"threads = " + b"[" * 5000]
)
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swarmentum.toml").write_bytes(content)
    with pytest.raises(OperatorError, match=r"swarmentum.toml is not TOML: .*; correct the file, or move it away"):
        load_settings()


@pytest.mark.parametrize(
    "address",
    ["garbage", "1.2.3.4:5", "/ip4/1.2.3/tcp/5", "/ip4/1.2.3.4/tcp/0", "/ip4/1.2.3.4/tcp/99999", "/ip4/1.2.3.4"],
)
def test_what_is_announced_is_an_address(address: str) -> None:
    with pytest.raises(OperatorError, match="reachability") as caught:
        load_settings(reachability=[address])
    assert address.rsplit("/", maxsplit=1)[-1] in str(caught.value)


def test_addresses_that_can_be_announced() -> None:
    fine = ["/ip4/203.0.113.5/tcp/4001", "/ip6/2001:db8::1/udp/4001/quic-v1", "/dns4/example.org/tcp/4001"]
    assert load_settings(reachability=fine).overlay().announce == tuple(fine)


def test_a_run_of_a_newer_version_says_to_upgrade() -> None:
    coordinator = Identity.from_seed(bytes(32))
    newer = RunConfig().canonical_json().replace('"strict"', '"stricter"')
    genesis = log_pb2.Genesis(config_json=newer, coordinator_public_key=coordinator.public_key)
    invite = Invite(run_id_of(genesis), ("127.0.0.1:1",), coordinator.public_key, bytes(32), (), "newer")
    with pytest.raises(OperatorError, match=r"does not know its settings clock.stricter; upgrade swarmentum"):
        check_genesis(genesis, invite)


def test_a_home_that_libraries_cannot_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors reads paths in UTF-8 alone: such a peer took the swarm's states for broken ones, and waited for ever."""
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/h\xff"))
    with pytest.raises(OperatorError, match=r"home: .*h\? is no path in UTF-8"):
        load_settings(home=home)
    with pytest.raises(ExportError, match=r"export: .*h\? is no path in UTF-8"):
        check_folder(home)
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(OperatorError, match="is no path in UTF-8"):
        load_settings()
    assert load_settings(home=tmp_path / "a b#c%41 é\n").home.name == "a b#c%41 é\n"


def test_an_empty_home_is_not_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's variable that is not set: its identity and momentum lay wherever it was started."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OperatorError, match="home is empty, and would mean the working folder"):
        load_settings(home="")
    assert load_settings(home=str(tmp_path / "mine")).home == tmp_path / "mine"
