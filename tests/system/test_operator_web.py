"""The operator's page in a real browser, beside a real coordinator: login by the link, and the actions that a person clicks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.link.client import CoordinatorClient
from protos.identity import Identity, peer_id
from protos.invite import Invite
from protos.v1 import coordinator_pb2 as pb
from tests.system.browser import CHROMIUM, MISSING, chromium, soon, tab, violations_in
from tests.system.local_swarm import Process, processes_with, wait_for
from tests.unit.coordinator.driver import LAYOUT

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)

WRONG = 'name = "made here"\n[clock]\nsteps = "many"\nmin_peers = 2\n'
RIGHT = WRONG.replace('"many"', "20")
REASON = "<img src=x onerror=window.evil=1>"
DEVICE = "<script>window.evil=1</script>"
PEER = Identity.from_seed(bytes([9]) * 32)


class Coordinator:
    """`serve` with the operator's page, and the operator's shell."""

    def __init__(self, folder: Path, page: str = "127.0.0.1:0") -> None:
        self.home, self.folder = folder / "home", folder
        listen = ("--listen", "127.0.0.1:0", "--operator-web-listen", page)
        self.process = self.command("serve", "serve", *listen)
        self.process.first_json()

    def ready(self) -> Coordinator:
        """Once there is a page to log in at."""
        wait_for("operator's page", (self.home / "operator-page.json").exists)
        return self

    def command(self, name: str, *words: str) -> Process:
        return Process(self.folder / f"{name}.log", "coordinator", *words, "--home", str(self.home), "--json")

    def login(self) -> str:
        code, values = self.command("login", "web", "login").finish()
        assert code == 0
        return str(values["link"])


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path)
    try:
        yield made.ready()
    finally:
        made.process.close()
        wait_for("end of the page's processes", lambda: not processes_with(str(made.home)))


def children_of(parent: int) -> list[int]:
    """The processes that a process started."""
    return [it.pid for it in psutil.Process(parent).children() if it.status() != psutil.STATUS_ZOMBIE]


async def joined(invite: Invite) -> None:
    """A peer has joined, under a name that is an attack."""
    client = CoordinatorClient(invite, PEER)
    try:
        await client.connect()
        await client.join(pb.JoinBody(layout_digest=LAYOUT, parameters=10, device=DEVICE))
    finally:
        await client.close()


def confirmed(page: Any) -> None:
    soon(page, "#sure").to_be_visible()
    page.click("#sure-yes")


@in_a_browser
def test_an_operator_logs_in_and_steers_a_run(coordinator: Coordinator) -> None:
    link = coordinator.login()
    with chromium() as browser, tab(browser, link) as page:
        soon(page, "#session").to_contain_text("session")
        assert "login" not in page.url
        create_and_steer(page)
        assert violations_in(page) == []
        with tab(browser, link) as other:
            soon(other, "#away-why").to_contain_text("was used before")
            assert not other.is_visible("#inside")
        page.reload()
        soon(page, "#name").to_have_text("made here")
        page.click("#logout")
        soon(page, "#away-why").to_have_text("You are logged out.")
        page.reload()
        soon(page, "#away").to_be_visible()
        assert not page.is_visible("#inside")
        assert page.evaluate("window.evil") is None


def create_and_steer(page: Any) -> None:
    page.uncheck("#layout")
    page.fill("#toml", WRONG)
    page.click("#check")
    soon(page, "#mistakes").to_contain_text("run.toml:3: clock.steps")
    page.fill("#toml", RIGHT)
    page.click("#create-form button:not([type])")
    confirmed(page)
    soon(page, "#name").to_have_text("made here")
    soon(page, "#answer").to_contain_text("is created")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, joined(Invite.parse(page.inner_text("#link")))).result()
    soon(page, "#peers tbody tr").to_have_count(1)
    assert page.inner_text("#peers tbody td:nth-child(6)") == DEVICE
    page.fill("#reason", REASON)
    page.click("#pause")
    soon(page, "#phase").to_contain_text(REASON)
    soon(page, "#answer").to_contain_text("is paused")
    page.click("#resume")
    soon(page, "#phase").not_to_contain_text(REASON)
    page.click("#peers tbody button")
    page.fill("#peer-reason", "sends noise")
    assert page.input_value("#peer") == peer_id(PEER.public_key)
    page.click("#exclude-form button")
    soon(page, "#sure-text").to_contain_text("for ever")
    page.click("#sure-no")
    page.click("#exclude-form button")
    confirmed(page)
    soon(page, "#peers tbody td:nth-child(3)").to_contain_text("excluded")
    page.click("#finish")
    confirmed(page)
    soon(page, "#phase").to_contain_text("finished")
    page.click("#resume")
    soon(page, "#answer[data-good=false]").to_contain_text("finished")
    done = ["resume", "finish", "exclude", "resume", "pause", "create", "login"]
    soon(page, "#actions tbody td:nth-child(4)").to_have_text(done)


def test_the_page_and_its_processes_end_with_the_coordinator(coordinator: Coordinator, tmp_path: Path) -> None:
    served = coordinator.process.child.pid
    [behind] = wait_for("process behind the page", lambda: children_of(served))
    [page] = children_of(behind)
    coordinator.login()
    os.kill(served, signal.SIGKILL)
    wait_for("end of both", lambda: not any(Path(f"/proc/{pid}/fd").exists() for pid in (behind, page)))
    code, _ = coordinator.command("late", "web", "login").finish()
    assert code == 2
    assert "serves no operator's page" in (tmp_path / "late.log").read_text()


def test_a_port_that_is_in_use_ends_the_page_and_not_the_coordinator(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        made = Coordinator(tmp_path, f"127.0.0.1:{taken.getsockname()[1]}")
        try:
            log = tmp_path / "serve.log"
            wait_for("warning", lambda: "a page is off, and the runs go on without it" in log.read_text())
            assert made.process.child.poll() is None
            made.process.interrupt()
            assert made.process.finish()[0] == 0
        finally:
            made.process.close()
