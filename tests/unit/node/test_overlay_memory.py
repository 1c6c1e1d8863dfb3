"""A p2pd that takes more memory than it may: it is ended, and started again for ever, later and later."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from node.overlay import daemon, p2pd
from node.overlay.settings import OverlaySettings
from tests.unit.node.test_overlay import hosts, until


def test_go_is_told_a_part_of_the_limit() -> None:
    assert p2pd.environment(2 * 10**9) == ["env", "GOMEMLIMIT=1525MiB"]


def test_a_public_machine_may_listen_on_tcp_alone() -> None:
    assert OverlaySettings("127.0.0.1", 4001, quic=False).listen(["127.0.0.1"]) == ["/ip4/127.0.0.1/tcp/4001"]


# hivemind leaves a connection open if p2pd ends within a call
@pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
async def test_a_real_daemon_passes_its_limit_and_comes_back_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2pd, "LOOK_SECONDS", 0.05)
    with capture_logs() as logs:
        async with hosts(tmp_path, 2) as (ada, bob):
            size = p2pd.taken(ada.p2p._child.pid)
            assert size is not None
            assert 10**7 < size < 10**9
            real, one = p2pd.memory_bytes_max(), p2pd.taken
            more = [real]
            monkeypatch.setattr(p2pd, "taken", lambda pid: (one(pid) or 0) + sum(more) * (pid == ada.p2p._child.pid))
            await until("three starts", lambda: ada.restarts >= 3)
            more.clear()
            await until("a daemon", lambda: ada.p2p._child.returncode is None)
            async with asyncio.timeout(240):
                while not await bob.connect(await ada.addresses() or ["/p2p/x"]):
                    await asyncio.sleep(0.05)
            assert bob.restarts == 0
    waits = [line["seconds"] for line in logs if line["event"].startswith("the libp2p daemon died")]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, [0.2, 0.4, 0.8], strict=False)), waits
    ended = [line for line in logs if "too much memory" in line["event"]]
    assert len(ended) >= 3
    assert all(line["mb"] > line["mb_max"] >= 100 for line in ended)


@pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
async def test_a_daemon_that_ran_for_long_is_back_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "STEADY_SECONDS", 0.0)
    with capture_logs() as logs:
        async with hosts(tmp_path, 2) as (ada, bob):
            ada.p2p._child.kill()
            await until("the next", lambda: ada.restarts == 1 and ada.p2p._child.returncode is None)
            async with asyncio.timeout(240):
                while not await bob.connect(await ada.addresses() or ["/p2p/x"]):
                    await asyncio.sleep(0.05)
    assert [line["seconds"] for line in logs if "died" in line["event"]] == [0.0]
