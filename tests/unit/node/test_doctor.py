"""Facts become lines: ok, a warning or a problem, with what to do. No machine, no run."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.blobs.testbytes import Upload
from node.commands.doctor import DoctorPrinter, as_values, side_by_side
from node.config import PeerSettings
from node.doctor import lines, machine_probes, run_lines
from node.doctor.doctor_facts import Devices, Download, Fault, Found, Here, InLine, Others, Reach, Seat
from node.doctor.lines import Line, Severity
from node.doctor.run_lines import predict
from node.donor.owner_settings import LiveSettings, MachineFacts, states
from node.model.device import DeviceMemory
from protos.errors import DataError, NetworkError, RefusedError
from protos.limits import PAYLOADS_GB, PERIODS_KEPT
from protos.run_config import RunConfig

GB = 10**9
CPU = Devices("2.13.0+cpu", "cpu", ("cpu",), "cpu", room=DeviceMemory(8 * GB, 16 * GB), threads=8)
GPU = replace(CPU, build="cuda 12.8", present=("cuda:0", "cpu"), chosen="cuda:0", name="RTX 4090", cards=("NVIDIA",))
HERE = Here(
    "/home/x",
    50 * GB,
    clock_kept=True,
    listen="0.0.0.0:0",
    quic=True,
    port_fault="",
    on_battery=None,
    versions={"torch": "2"},
)
OTHERS = Others(3, 30.0, 1, 64, 10, 100, "open", steps_per_second=0.5)
ROUTER = Reach(
    ("/ip4/192.168.1.5/tcp/4001/p2p/12D3KooWGRUbpBkUqRCYhqHTzQvMoUbWeRPHDbYJoCrxRFLwmZwv",), 3, "203.0.114.9"
)
PEER = "12D3KooWGRUbpBkUqRCYhqHTzQvMoUbWeRPHDbYJoCrxRFLwmZwv"
SEAT = Seat(8, "85 M parameters, 1.4 GB of 12 GB", True, "1 GB of 50 GB", 7_000, 10.0, "8 micro-batches")
FOUND = Found(
    "tiny",
    "host:7700",
    20.0,
    OTHERS,
    "nothing",
    PEER,
    SEAT,
    ROUTER,
    Download(4 << 20, 2.0, 84 << 20),
    Upload(1 << 20, 2.0),
)


def verdict(line: Line | None) -> Severity:
    return line.verdict


def at(address: str, seen: str) -> Reach:
    return Reach((f"/ip4/{address}/tcp/4001/p2p/{PEER}",), 3, seen)


def test_a_card_with_a_cpu_build_of_torch_is_a_warning_with_a_way_out() -> None:
    line = lines.device(replace(CPU, cards=("NVIDIA",), driver="570.1"))
    assert line.verdict is Severity.WARNING
    assert "there is an NVIDIA graphics card, but torch 2.13.0+cpu is a CPU build" in line.text
    assert "CUDA build" in line.todo
    assert lines.TORCH_PAGE in line.todo
    assert "ROCm" in lines.device(replace(CPU, cards=("AMD",))).todo


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"build": "cuda 12.8", "cards": ("NVIDIA",)}, "without a driver"),
        ({"build": "cuda 12.8", "cards": ("NVIDIA",), "driver": "470.1"}, "cannot use the NVIDIA graphics card"),
    ],
)
def test_a_card_that_torch_cannot_use_is_told_apart(change: dict[str, Any], words: str) -> None:
    line = lines.device(replace(CPU, **change))
    assert line.verdict is Severity.WARNING
    assert words in line.text
    assert line.todo


def test_a_used_card_a_lone_processor_and_a_choice_are_fine() -> None:
    for found in (GPU, CPU, replace(GPU, chosen="cpu", name="")):
        assert lines.device(found).verdict is Severity.OK
    assert lines.device(GPU).text == "cuda:0, RTX 4090"
    assert (
        lines.device(replace(CPU, chosen="", fault="device = 'cuda:7': this machine has cpu")).verdict
        is Severity.PROBLEM
    )


def test_the_driver_is_a_line_only_beside_an_nvidia_card() -> None:
    assert lines.driver(CPU) is None
    assert verdict(lines.driver(replace(GPU, driver="570.1"))) is Severity.OK
    assert verdict(lines.driver(GPU)) is Severity.WARNING


def test_memory_disk_clock_ports_and_power() -> None:
    assert lines.memory(CPU).text == "8.0 GB free of 16 GB (cpu)"
    assert lines.memory(replace(CPU, room=DeviceMemory(GB, 2 * GB))).verdict is Severity.WARNING
    assert lines.disk(replace(HERE, disk_free=GB)).verdict is Severity.WARNING
    closed = lines.disk(replace(HERE, home_fault="this user cannot write to /home/x"))
    assert (closed.verdict, "--home" in closed.todo) == (Severity.PROBLEM, True)
    assert [lines.clock(replace(HERE, clock_kept=kept)).verdict for kept in (True, False, None)] == [
        Severity.OK, Severity.WARNING, Severity.UNKNOWN,
    ]  # fmt: skip
    busy = lines.ports(replace(HERE, listen="0.0.0.0:4001", port_fault="in use"))
    assert busy.verdict is Severity.PROBLEM
    assert "--listen" in busy.todo
    assert lines.power(HERE) is None
    assert verdict(lines.power(replace(HERE, on_battery=True))) is Severity.WARNING
    assert verdict(lines.power(replace(HERE, on_battery=False))) is Severity.OK


def test_a_home_that_join_could_not_use_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_probes.home_fault(tmp_path / "new" / "home") == ""
    (tmp_path / "file").write_text("")
    assert machine_probes.home_fault(tmp_path / "file" / "home") == f"{tmp_path / 'file'} is no folder"
    home = tmp_path / "home"
    home.mkdir()
    (home / "identity.key").write_bytes(b"")
    (home / "lock").write_bytes(b"")
    assert machine_probes.home_fault(home) == ""
    real, closed = os.access, {home}
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) not in closed and real(path, mode)
    )  # root may do all
    for name, words in (("", "cannot write to"), ("identity.key", "cannot read"), ("lock", "cannot write")):
        closed = {home / name}
        assert machine_probes.home_fault(home) == f"this user {words} {home / name}".rstrip("/")


def test_a_wrong_clock_is_a_warning_with_its_time_alone_and_against_the_coordinators() -> None:
    line = lines.clock(replace(HERE, clock_wrong="this machine's clock says 1972-02-22 00:00 UTC"))
    assert line.verdict is Severity.WARNING
    assert "1972-02-22" in line.text
    assert "timedatectl" in line.todo
    named = run_lines.of_run(replace(FOUND, facts=replace(OTHERS, clock_wrong="they are 3 d 0 h apart")))
    assert [(line.name, line.verdict) for line in named if "3 d" in line.text] == [("clock", Severity.WARNING)]
    assert not [line for line in run_lines.of_run(FOUND) if line.name == "clock"]


def test_a_fact_that_was_not_found_is_said_and_stops_nothing() -> None:
    fault = Fault("no answer within 30 s")
    found = lines.of_devices(fault) + lines.of_here(fault)
    assert {line.verdict for line in found} == {Severity.UNKNOWN}
    assert all(line.text == "no answer within 30 s" for line in found)
    assert lines.worst(found) is Severity.OK


def test_conditions_of_the_owner_are_lines_and_say_whether_the_peer_would_work_now() -> None:
    [none] = lines.conditions([])
    assert (none.name, none.verdict) == ("conditions", Severity.OK)
    monday = MachineFacts(9 * 60, on_mains=True)
    found = lines.conditions(list(states(LiveSettings(hours="mon 18:00-20:00", only_on_mains=True), monday)))
    assert [(line.name, line.verdict) for line in found] == [
        ("hours", Severity.WARNING),
        ("only_on_mains", Severity.OK),
    ]
    assert found[0].text == "outside the hours mon 18:00-20:00; goes on at 18:00"
    assert "swarmentum set" in found[0].todo
    assert lines.conditions(Fault("why"))[0].verdict is Severity.UNKNOWN


@pytest.mark.parametrize(
    ("reach", "words", "kind"),
    [
        (ROUTER, "a router between", Severity.OK),
        (at("100.72.1.2", "8.8.4.4"), "carrier-grade NAT", Severity.OK),
        (at("8.8.4.4", "8.8.4.4"), "none: this machine has the public address 8.8.4.4", Severity.OK),
        (at("127.0.0.1", "127.0.0.1"), "own network", Severity.UNKNOWN),
        (at("192.168.1.5", ""), "does not say", Severity.UNKNOWN),
    ],
)
def test_the_router_is_known_by_the_address_that_others_see(reach: Reach, words: str, kind: Severity) -> None:
    line = run_lines.router(replace(reach, seen_from=reach.seen_from.replace("203.0.114.9", "8.8.4.4")))
    assert words in line.text
    assert line.verdict is kind


def test_a_probe_that_nobody_answered_says_nothing_and_asks_for_nothing() -> None:
    """A home behind a router was told to forward a port; 15 s later it joined without a flag."""
    unanswered = run_lines.reachable(replace(ROUTER, seen_from="8.8.4.4", dialled=None))
    assert (unanswered.verdict, unanswered.todo) == (Severity.UNKNOWN, "")
    assert "takes a relay by itself" in unanswered.text
    relayed = run_lines.reachable(replace(ROUTER, seen_from="8.8.4.4", dialled=False, relays=1))
    assert (relayed.verdict, relayed.todo) == (Severity.OK, "")


def test_reachability_names_the_relay_as_a_way_out() -> None:
    public = at("8.8.4.4", "8.8.4.4")
    relayed = replace(ROUTER, addresses=(f"/ip4/8.8.8.8/tcp/4001/p2p/{PEER}/p2p-circuit/p2p/{PEER}",))
    private = run_lines.reachable(replace(ROUTER, seen_from="8.8.4.4", dialled=False))
    assert private.verdict is Severity.WARNING
    assert "--set reachability=" in private.todo
    assert "public address" in run_lines.reachable(public).text
    assert "through a relay" in run_lines.reachable(relayed).text
    assert run_lines.reachable(at("127.0.0.1", "127.0.0.1")).verdict is Severity.OK


def test_each_no_of_the_run_is_a_problem() -> None:
    no = Fault("not on the list", refused=True)
    for change, name in (
        ({"round_trip_ms": Fault("no coordinator answers")}, "coordinator"),
        ({"facts": Fault("this run needs swarmentum >= 0.9.0", refused=True)}, "run"),
        ({"facts": replace(OTHERS, phase="finished")}, "run"),
        ({"asks": no}, "request"),
        ({"admitted": no}, "admission"),
        ({"seat": replace(SEAT, micro_batch=0)}, "model"),
        ({"seat": replace(SEAT, disk_fits=False)}, "run's disk"),
    ):
        found = run_lines.of_run(replace(FOUND, **change))  # type: ignore[arg-type]
        assert {line.name for line in found if line.verdict is Severity.PROBLEM} == {name}
        assert lines.worst(found) is Severity.PROBLEM
    assert lines.worst(run_lines.of_run(FOUND)) is not Severity.PROBLEM


def test_what_passes_is_not_measured_and_no_problem() -> None:
    line = run_lines.admission(Fault("the coordinator is busy"))
    assert line.verdict is Severity.UNKNOWN
    slow = run_lines.download(replace(FOUND, download=Download(1 << 20, 10.0, 1 << 20)))
    assert slow.verdict is Severity.WARNING
    assert run_lines.coordinator(replace(FOUND, round_trip_ms=900.0)).verdict is Severity.WARNING


def test_a_full_run_is_no_problem_because_join_waits_in_line() -> None:
    found = run_lines.of_run(replace(FOUND, admitted=InLine(3)))
    [line] = [line for line in found if line.name == "admission"]
    assert line.verdict is Severity.WARNING
    assert "3 peers in line before this one; `join` waits in line, too" in line.text
    assert lines.worst(found) is Severity.WARNING


def test_the_upload_is_held_against_what_the_votes_need() -> None:
    enough = run_lines.upload(FOUND)
    text = "524 kB a second (1.0 MB of test bytes in 2.0 s); a step's votes take about 0.053 s"
    assert (enough.verdict, enough.text) == (Severity.OK, text), "7 kB to each of four others"
    assert run_lines.download(FOUND).text.endswith("; to join takes 88 MB, about 42 s")
    slow = run_lines.upload(replace(FOUND, upload=Upload(20_000, 2.0)))  # votes: 7 kB to four others every two seconds
    assert slow.verdict is Severity.WARNING
    assert slow.text.endswith("take about 2.8 s; the votes need more at the run's pace")
    assert "unless vote_size is a number or off" in slow.todo
    assert run_lines.upload(replace(FOUND, upload=Fault("nobody takes any"))).verdict is Severity.UNKNOWN


def test_the_prediction_follows_speed() -> None:
    told = predict(10.0, OTHERS, 7_000)
    assert told.share == 0.25
    assert told.samples_a_step == 16
    assert told.step_seconds == 2
    assert told.up_bytes_an_hour == 1800 * 7_000 * 4
    assert told.down_bytes_an_hour == 1800 * 7_000 * 3
    alone = predict(32.0, replace(OTHERS, ready=0, samples_per_second=0, anchors=0, steps_per_second=None), 7_000)
    assert (alone.share, alone.step_seconds, alone.up_bytes_an_hour) == (1, 2, 0)
    assert "16.0 samples a step of 2 s, 25 % of the swarm" in run_lines.contribution(FOUND).text
    assert run_lines.contribution(FOUND).text.endswith("an hour down"), "votes of one size"
    larger = replace(FOUND, seat=replace(SEAT, most_bytes=35_000))
    assert "up to 5 times as much while all uplinks have room (vote_size)" in run_lines.contribution(larger).text
    unknown = replace(FOUND, seat=replace(SEAT, samples_per_second=None))
    assert run_lines.contribution(unknown).verdict is Severity.UNKNOWN


def test_how_large_votes_may_grow_depends_on_how_many_vote() -> None:
    config = RunConfig.model_validate({"clock": {"snapshot_every": 100_000}})
    (own, few), (same, many) = (machine_probes.payload_bytes(config, PeerSettings(), peers) for peers in (2, 200))
    assert own == same == many < few
    assert few * 2 * PERIODS_KEPT * 100_000 <= PAYLOADS_GB * 10**9


def test_the_json_has_every_line_and_the_prediction() -> None:
    found = lines.of_devices(GPU) + lines.of_here(HERE) + run_lines.of_run(FOUND)
    values = json.loads(json.dumps(as_values(found, FOUND)))
    assert values["name"] == "tiny"
    assert values["prediction"]["samples_a_step"] == 16
    assert {"name", "verdict", "text", "todo"} == values["lines"][0].keys()
    assert values["verdict"] == "warning", "this machine has a router before it, and no relay"


def test_a_probe_that_hangs_or_fails_stops_no_other() -> None:
    hangs = threading.Event()

    def away() -> None:
        raise NetworkError("away")

    def refused() -> None:
        raise RefusedError("no")

    found = side_by_side({"fine": lambda: 3, "hangs": hangs.wait, "away": away, "refused": refused}, 0.5)
    hangs.set()
    assert found["fine"] == 3
    assert found["hangs"].why.startswith("no answer within")
    assert found["away"] == Fault("away")
    assert found["refused"] == Fault("no", refused=True)


STILL_COMPUTES = """
import torch
from node.commands.doctor import side_by_side
from protos.console import exit_with

def computes():
    matrix = torch.ones(700, 700)
    while True:
        matrix @ matrix

def command():
    print(side_by_side({"seat": computes}, 0.5)["seat"].why)
    raise SystemExit(3)

exit_with(command)
"""


def test_a_probe_that_still_computes_does_not_abort_the_program() -> None:
    """On a busy machine the doctor printed all, and then ended by SIGABRT: "terminate called without an active exception"."""
    command = [sys.executable, "-c", STILL_COMPUTES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "no answer within 0 s\n", "")


def test_a_fact_is_told_when_it_comes_and_not_when_the_last_one_does() -> None:
    """The doctor was silent for 21 s, and then printed all of its lines."""
    came, goes_on = list[str](), threading.Event()

    def told(name: str, _: Any) -> None:
        came.append(name)
        goes_on.set()

    found = side_by_side({"slow": lambda: goes_on.wait(20), "quick": lambda: 3}, 30, told)
    assert found == {"slow": True, "quick": 3}, "the slow probe ended because the quick one's fact was told before"
    assert came == ["quick", "slow"]


def test_rows_stand_under_each_other_and_what_takes_time_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with DoctorPrinter() as screen:
        screen.say("looking")
        screen.tell([lines.disk(HERE)])
        screen.tell([lines.ports(HERE), lines.clock(HERE)])
        screen.end([])
    out, err = capsys.readouterr()
    assert err == "looking ...\n"
    starts = {line.index(" ok ") for line in out.splitlines() if " ok " in line}
    assert len(starts) == 1
    assert out.splitlines()[-1] == "This machine can take part."


def test_cards_and_batteries_are_read_from_the_system(tmp_path: Path) -> None:
    def device(name: str, kind: str, maker: str) -> None:
        folder = tmp_path / "bus" / "pci" / "devices" / name
        folder.mkdir(parents=True)
        (folder / "class").write_text(f"{kind}\n")
        (folder / "vendor").write_text(f"{maker}\n")

    assert machine_probes.cards_of(tmp_path) == ()
    device("0000:01:00.0", "0x030000", "0x10de")
    device("0000:01:00.1", "0x040300", "0x1002")  # sound
    device("0000:02:00.0", "0x030000", "0x8086")
    assert machine_probes.cards_of(tmp_path) == ("NVIDIA",)
    assert machine_probes.on_battery(tmp_path) is None
    for name, kind, status in (("AC", "Mains", ""), ("BAT0", "Battery", "Discharging")):
        folder = tmp_path / "class" / "power_supply" / name
        folder.mkdir(parents=True)
        (folder / "type").write_text(kind)
        (folder / "status").write_text(status)
    assert machine_probes.on_battery(tmp_path) is True
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed\nGCC version: 12.2.0\n")
    assert machine_probes.driver_of(driver) == "570.124.06"
    assert machine_probes.driver_of(tmp_path / "none") == ""


def test_training_text_says_what_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    assert machine_probes.of_person(PeerSettings()) == ()
    good = machine_probes.of_person(PeerSettings(data=str(tmp_path)))
    [line] = lines.texts(good)
    assert (line.verdict, line.todo) == (Severity.OK, "")
    assert line.text.endswith("1 document of 1 file, 9 B")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    [line] = lines.texts(machine_probes.of_person(PeerSettings(data=str(tmp_path))))
    assert line.verdict is Severity.PROBLEM
    assert "left out: 1 not UTF-8" in line.text
    assert "--set allow=left_out" in line.todo
    [line] = lines.texts(machine_probes.of_person(PeerSettings(data=str(tmp_path), allow=["left_out"])))
    assert line.verdict is Severity.OK
    (tmp_path / "a.txt").unlink()
    facts = side_by_side({"texts": lambda: machine_probes.of_person(PeerSettings(data=str(tmp_path)))}, 30.0)
    [line] = lines.texts(facts["texts"])
    assert line.verdict is Severity.PROBLEM
    assert "no UTF-8 text file below" in line.text
    assert lines.texts(Fault("slow"))[0].verdict is Severity.UNKNOWN
    run = RunConfig.model_validate({"data": {"source": str(tmp_path / "b.txt")}})
    assert machine_probes.of_run(run, PeerSettings()) == (), "the run may not read it"
    with pytest.raises(DataError, match="is not UTF-8"):
        machine_probes.of_run(run, PeerSettings(allow=["data"]))
    assert "training text" in [line.name for line in run_lines.of_run(replace(FOUND, texts=good))]
