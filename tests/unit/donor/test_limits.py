"""Limits of what a peer takes: the disk, the GPU's memory, and the machine's sleep."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from node.blobs.payloads import Payloads
from node.doctor import lines
from node.doctor.lines import Severity
from node.donor import owner_machine
from node.donor.live import KEPT_FILE, Kept, Live, allowed, disk_for
from node.donor.owner_settings import LiveSettings
from node.model.device import DeviceMemory, limit, within
from protos.errors import OperatorError
from tests.unit.node.test_doctor import HERE

GB = 10**9
sizes = st.integers(0, 40 * GB)


def test_text_gives_way_first_then_votes_then_the_archive() -> None:
    assert allowed(None, Kept()) == Kept(20 * GB, 20 * GB, 10 * GB)
    assert allowed(30, Kept(5 * GB, 4 * GB, GB)) == Kept(20 * GB, 20 * GB, 10 * GB)
    assert allowed(12, Kept(5 * GB, 4 * GB, 10 * GB)) == Kept(12 * GB, 7 * GB, 3 * GB)
    assert allowed(8, Kept(5 * GB, 4 * GB, 10 * GB)) == Kept(8 * GB, 3 * GB, 0)
    assert allowed(2, Kept(5 * GB, 4 * GB, 10 * GB)) == Kept(2 * GB, 0, 0)


def test_what_goes_beyond_the_usual_50_gb_goes_to_whichever_needs_it() -> None:
    """So an archive of 100 GB needs 130, and votes and text keep their usual room."""
    assert disk_for(100 * GB) == 130
    assert allowed(130, Kept(100 * GB, 20 * GB, 10 * GB)) == Kept(100 * GB, 30 * GB, 10 * GB)
    assert disk_for(5 * GB) == 5


@given(disk=st.floats(0.1, 200), archive=sizes, payloads=sizes, text=sizes)
def test_once_each_store_has_given_way_all_fit(disk: float, archive: int, payloads: int, text: int) -> None:
    used = Kept(archive, payloads, text)
    for _ in range(2):
        now = allowed(disk, used)
        used = Kept(min(used.archive, now.archive), min(used.payloads, now.payloads), min(used.text, now.text))
    assert used.total <= disk * GB


def test_fewer_bytes_for_payloads_hold_from_the_next_one_on(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path, 10_000)
    for step in range(1, 6):
        payloads.put(step, bytes([step]) * 32, bytes(1000))
    payloads.bytes_max = 2000
    payloads.put(6, bytes([6]) * 32, bytes(1000))
    assert (payloads.total_bytes, payloads.dropped_step) == (2000, 4)


def test_a_part_of_a_gpu_is_the_room_of_the_peer() -> None:
    whole = DeviceMemory(10 * GB, 24 * GB)
    assert within(whole, None, GB) == whole
    assert within(whole, 0.25, GB) == DeviceMemory(5 * GB, 6 * GB)
    assert within(whole, 0.25, 7 * GB) == DeviceMemory(0, 6 * GB)
    assert within(whole, 0.75, 0) == DeviceMemory(10 * GB, 18 * GB)


def test_other_devices_refuse_a_part_of_their_memory(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert limit(cpu, None) == ""
    live = Live(tmp_path, LiveSettings(), {"gpu_memory": lambda part: limit(cpu, part)})
    with pytest.raises(ValueError, match=r"gpu_memory = 0.5: this peer computes on cpu, and only CUDA"):
        live.change("gpu_memory", "0.5")
    assert live.values.gpu_memory is None
    live = Live(tmp_path, LiveSettings(gpu_memory=0.5), {"gpu_memory": lambda part: limit(cpu, part)})
    with pytest.raises(OperatorError, match=r"gpu_memory = 0.5: .*set it off"):
        live.apply()
    (tmp_path / KEPT_FILE).write_text("gpu_memory = 0.5\n")  # of a machine that had a GPU; `set` needs a peer that runs
    with pytest.raises(OperatorError, match=r"take its line out of .*set\.toml"):
        Live(tmp_path, LiveSettings(), {"gpu_memory": lambda part: limit(cpu, part)}).apply()


def test_the_doctor_tells_each_limit() -> None:
    values = LiveSettings(gpu_memory=0.5, disk_gb=100, keep_awake=True)
    found = {line.name: line.verdict for line in lines.limits("cpu", HERE, values)}
    assert found == {"gpu_memory": Severity.PROBLEM, "disk_gb": Severity.WARNING, "keep_awake": Severity.PROBLEM}
    assert [line.verdict for line in lines.limits("cuda:0", HERE, LiveSettings(gpu_memory=0.5, disk_gb=5))] == [
        Severity.OK
    ] * 3


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A systemd-inhibit that holds nothing, and otherwise works as the real one."""
    monkeypatch.setattr(owner_machine.sys, "platform", "linux")
    (folder / "systemd-inhibit").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "systemd-inhibit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


HOLDS = 'for last; do :; done; exec "$last"'


def test_the_machine_is_kept_awake_only_while_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, HOLDS)
    kept = owner_machine.Awake(structlog.get_logger())
    kept.keep(True)
    process = kept._process
    assert process is not None
    kept.keep(True)
    assert kept._process is process
    kept.keep(False)
    assert process.poll() is not None


def test_a_system_that_refuses_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "echo 'Failed to inhibit: Access denied' >&2; exit 1")
    with capture_logs() as logs:
        kept = owner_machine.Awake(structlog.get_logger())
        kept.keep(True)
        kept.keep(True)
    assert [line["why"] for line in logs] == ["Failed to inhibit: Access denied"]


def test_without_a_program_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert owner_machine.check(False) == ""
    with pytest.raises(ValueError, match="neither systemd-inhibit nor caffeinate"):
        owner_machine.check(True)
    monkeypatch.setattr(owner_machine.sys, "platform", "win32")
    assert owner_machine.command() is None


@pytest.mark.skipif(sys.platform != "linux", reason="the inhibitor of Linux")
def test_the_inhibitor_ends_with_a_killed_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; {HOLDS}")
    script = (
        "import structlog, time; from node.donor.owner_machine import Awake; a = Awake(structlog.get_logger()); a.keep(True); "
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as peer:
        until = time.monotonic() + 240
        while not (tmp_path / "pid").exists() or not (text := (tmp_path / "pid").read_text().strip()):
            assert time.monotonic() < until
            time.sleep(0.02)
        holder = psutil.Process(int(text))
        peer.send_signal(signal.SIGKILL)
    holder.wait(240)
