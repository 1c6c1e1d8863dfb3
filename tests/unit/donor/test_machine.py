"""Facts of the machine: programs that answer as the real ones do (their output as recorded), and this machine's own."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from node.doctor.lines import Severity, conditions
from node.donor import owner_machine
from node.donor.owner_machine import DRAWS_BYTES_MIN, GpuPrograms
from node.donor.owner_settings import LiveSettings, states

GNOME = "(uint64 83125,)\n"
LOGIND = "b true\nt {}\n"
IOREG = '    | |   "HIDIdleTime" = 4500123456\n'


def answers(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Only these programs are on the PATH; each is a shell script."""
    monkeypatch.delenv("SWARMENTUM_IDLE_COMMAND", raising=False)
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_gnome_says_it_best_and_logind_is_asked_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    since = int((time.time() - 600) * 1_000_000)
    answers(tmp_path, monkeypatch, gdbus=f"printf '{GNOME}'", busctl=f"printf '{LOGIND.format(since)}'")
    assert owner_machine.idle_seconds() == (83.125, "")
    answers(tmp_path, monkeypatch, gdbus="echo 'Error: GDBus.Error' >&2; exit 1")
    found, why = owner_machine.idle_seconds()
    assert (found, why) == (pytest.approx(600, abs=30), "")
    answers(tmp_path, monkeypatch, busctl=f"printf 'b false\\nt {since}\\n'")
    assert owner_machine.idle_seconds() == (0.0, "")


@pytest.mark.parametrize(
    ("prints", "seconds"), [("7100", 7.1), ("'(uint32 4200,)'", 4.2), ("idle for 90 ms", 0.09), ("unknown", None)]
)
def test_a_command_of_the_owner_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str, seconds: float | None
) -> None:
    answers(tmp_path, monkeypatch, mine=f'test "$1" = "a b" && echo {prints}', gdbus=f"printf '{GNOME}'")
    monkeypatch.setenv("SWARMENTUM_IDLE_COMMAND", "mine 'a b'")
    found, why = owner_machine.idle_seconds()
    assert (found, why == "") == (seconds, seconds is not None)


@pytest.mark.parametrize("command", ["gone", "mine", "'", " "])
def test_a_command_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    answers(tmp_path, monkeypatch, mine="echo 5; exit 1", gdbus=f"printf '{GNOME}'")
    monkeypatch.setenv("SWARMENTUM_IDLE_COMMAND", command)
    assert owner_machine.idle_seconds() == (None, f"SWARMENTUM_IDLE_COMMAND={command} prints no number")


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense", "printf '\\377'"])
def test_no_answer_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    answers(tmp_path, monkeypatch, gdbus=script, busctl=script)
    assert owner_machine.idle_seconds() == (None, owner_machine.NOBODY_ANSWERS)


def test_a_program_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_machine, "ANSWER_SECONDS_MAX", 0.2)
    answers(tmp_path, monkeypatch, gdbus=f"exec {sys.executable} -c 'import time; time.sleep(600)'")
    began = time.monotonic()
    assert owner_machine.idle_seconds()[0] is None
    assert time.monotonic() - began < 300


def test_macos_says_nanoseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_machine.sys, "platform", "darwin")
    answers(tmp_path, monkeypatch, ioreg=f"printf '%s' '{IOREG}'")
    assert owner_machine.idle_seconds() == (pytest.approx(4.5, abs=0.01), "")
    answers(tmp_path, monkeypatch, ioreg="exit 1")
    assert owner_machine.idle_seconds() == (None, "ioreg does not say")


def test_a_machine_is_asked_only_for_what_a_setting_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, gdbus=f"echo asked >> {tmp_path}/asked; printf '{GNOME}'")
    facts = owner_machine.Machine().facts(LiveSettings())
    assert (facts.idle_seconds, facts.on_mains, facts.gpu_programs) == (None, True, ())
    assert not (tmp_path / "asked").exists()
    assert owner_machine.Machine().facts(LiveSettings(only_when_idle=60)).idle_seconds == 83.125
    local = time.localtime()
    assert (facts.minute - (local.tm_wday * 1440 + local.tm_hour * 60 + local.tm_min)) % (7 * 1440) in (0, 7 * 1440 - 1)


def test_a_battery_is_on_mains_only_if_the_system_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for plugged, expected in ((True, True), (False, False), (None, False)):
        battery = SimpleNamespace(percent=50, secsleft=100, power_plugged=plugged)
        monkeypatch.setattr(psutil, "sensors_battery", lambda battery=battery: battery)
        assert owner_machine.on_mains() is expected
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    assert owner_machine.on_mains()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_the_programs_are_not_known() -> None:
    programs = GpuPrograms(family=os.getppid())
    assert programs.others() is None
    assert programs.others() is None


def test_programs_on_a_gpu_are_told_without_this_peer_the_desktop_and_what_only_draws_a_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVML's own names and types; a real process stands for each program, for the driver gives process ids only."""
    import pynvml

    with subprocess.Popen(["sleep", "60"]) as own:
        child = psutil.Process(own.pid)
        foreign = next(process for process in psutil.process_iter() if process.pid == 1)

        def on(pid: int, size: int | None) -> SimpleNamespace:
            return SimpleNamespace(pid=pid, usedGpuMemory=size)

        computing, drawing = [on(os.getpid(), 10**9), on(child.pid, None)], [on(foreign.pid, DRAWS_BYTES_MIN - 1)]
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: number)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: computing)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetGraphicsRunningProcesses", lambda handle: drawing)
        programs = GpuPrograms()
        assert programs.others() == ()
        drawing.append(on(foreign.pid, DRAWS_BYTES_MIN))
        assert programs.others() == (foreign.name(),)
        drawing.clear()
        computing.append(on(foreign.pid, None))
        assert programs.others() == (foreign.name(),)
        monkeypatch.setattr("node.donor.owner_machine.DESKTOP", frozenset({foreign.name()}))
        assert programs.others() == ()
        own.kill()


def test_a_time_zone_that_is_no_zone_is_told_with_the_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library then counts in UTC without a word, and so did the owner's hours."""
    (tmp_path / "Europe").mkdir()
    (tmp_path / "Europe" / "Berlin").write_bytes(b"TZif")
    for fine in (
        "",
        "UTC",
        "utc",
        "Etc/UTC",  # of many images, which have no tzdata
        "Zulu",
        "CET-1CEST",
        "<+03>-3",
        "Europe/Berlin",
        ":Europe/Berlin",
        str(tmp_path / "Europe" / "Berlin"),
    ):
        assert owner_machine.zone_fault({"TZ": fine, "TZDIR": str(tmp_path)}) == "", fine
    for wrong in ("Europe/Berln", "Europe", "Berlin"):
        assert f"TZ={wrong} names no time zone" in owner_machine.zone_fault({"TZ": wrong, "TZDIR": str(tmp_path)})
    monkeypatch.setenv("TZ", "Europe/Berln")
    facts = owner_machine.Machine().facts(LiveSettings(hours="0:00-24:00"))
    [state] = states(LiveSettings(hours="mon-sun"), facts)
    assert (state.works, "its time is UTC" in state.fault) == (True, True)
    assert [line.verdict for line in conditions([state])] == [Severity.OK, Severity.WARNING]
    assert owner_machine.Machine().facts(LiveSettings()).zone_fault == "", "no setting asks for it"
