"""A peer of two ranks: gradients, state and refusals against one device; what torchrun says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from node.model.device import DeviceError
from node.ranks import Launch, launched
from node.ranks.channel import rank_device
from tests.system.copied import ranks
from tests.unit.node import ranks_of_a_peer


@pytest.mark.timeout(900)
def test_two_ranks_hold_and_say_what_one_device_does(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks(2, ranks_of_a_peer.rank, store.port, str(tmp_path), "all")
    assert "several ranks cannot train this model" in (tmp_path / "refused").read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_rank_waits_for_a_rank_0_that_is_there_and_for_no_other(tmp_path: Path) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *command, "-m", ranks_of_a_peer.HERE, str(tmp_path), "patience"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert "died or hangs: Timed out" in (tmp_path / "lost").read_text()


def test_one_process_is_an_ordinary_peer() -> None:
    said = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert launched(said) == Launch(1, 2, 1, 2)
    assert launched({**said, "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert launched({name: value for name, value in said.items() if name != "TORCHELASTIC_RUN_ID"}) is None


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(5, 8, 5, 8)
    for name in ("cuda:1", "mps", "nonsense"):
        with pytest.raises(DeviceError, match="a device of its own"):
            rank_device(launch, name)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert str(rank_device(launch, "auto")) == str(rank_device(launch, "cuda")) == "cuda:5"
    assert str(rank_device(launch, "cpu")) == "cpu"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(DeviceError, match="--nproc-per-node 4"):
        rank_device(launch, "auto")
