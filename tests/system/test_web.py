"""The web page of a run in a real browser, beside a real coordinator with real peers: its numbers are the log's, the browser
checks the log itself, and finds one that somebody changed."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeVar

import pytest

from node.archive.ledger import Ledger, ledger, read
from node.link.client import CoordinatorClient
from protos.accounts import loss_of
from protos.identity import Identity
from protos.invite import Invite
from protos.log import SignedEntry
from protos.v1 import coordinator_pb2 as pb
from tests.system.browser import CHROMIUM, MISSING, chromium, soon, tab, violations_in
from tests.system.local_swarm import LocalSwarm, processes_with, toml_of_run, wait_for
from tests.system.web_folder import Quiet, files_of, serving
from tests.unit.coordinator.driver import LAYOUT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)

T = TypeVar("T")
STEPS = 20
RUN = toml_of_run(
    "page",
    source="DATA",
    clock={"steps": STEPS, "batch_samples": 8, "min_peers": 2, "snapshot_every": 10},
    evaluation={"every": 10, "samples": 4, "sample_tokens": 12, "prompt": "<b>def"},
)
EVIL_NAME = "<script>window.evil=1</script>[/x]"
EVIL = "<script>window.evil=1</script>[/x]\x1b[2J" + "\u202e" * 64
READY = "the web page of the runs is ready"


class PageSwarm(LocalSwarm):
    """Its coordinator shows a page, at a free port."""

    def surroundings(self, name: str) -> dict[str, str]:
        return {"SWARMENTUM_COORDINATOR_WEB_LISTEN": "127.0.0.1:0"} if name == "coordinator" else {}

    def page(self, lives: int = 1) -> str:
        """The URL of the page of the coordinator's newest life."""
        return str(wait_for("page", lambda: self.events("coordinator", READY)[lives - 1 :])[-1]["url"])


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageSwarm]:
    folder = tmp_path_factory.mktemp("page")
    with PageSwarm(folder, RUN) as swarm:
        modes: dict[str, dict[str, str]] = {"ada": {}, "bob": {"SWARMENTUM_MEMORY": "small"}}
        peers = [swarm.join(name, "--owner", OWNER, environment=mode) for name, mode in modes.items()]
        for peer in peers:
            assert peer.finish(500)[0] == 0
        yield swarm
    assert processes_with(str(folder)) == [], "something was left running"


OWNER = "Ada <b>[/x]</b>"
DEVICES = {"cpu", "cpu, memory small (as set)"}


def apart(work: Coroutine[Any, Any, T]) -> T:
    """Run it in a thread: playwright has an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@pytest.fixture(scope="module")
def log(swarm: PageSwarm) -> list[SignedEntry]:
    return apart(read(swarm.invite))[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


def asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return json.loads(answer.read())


def shown(swarm: PageSwarm, url: str) -> str:
    """The address of the run in a browser."""
    return f"{url}#{swarm.invite.run_id.hex()}"


def the_run(swarm: PageSwarm, url: str) -> str:
    """The API's address of the run, once the page has read its whole log."""
    one = f"{url}api/runs/{swarm.invite.run_id.hex()}"

    def whole() -> bool:
        try:
            return bool(asked(one)["step"] == STEPS and asked(one)["phase"] == "finished")
        except urllib.error.HTTPError:
            return False

    wait_for("whole log on the page", whole)
    return one


def test_the_api_says_what_the_log_says(swarm: PageSwarm, log: list[SignedEntry]) -> None:
    one = the_run(swarm, swarm.page())
    facts, found = asked(one), ledger(swarm.invite.run_id, *apart(read(swarm.invite)))
    counted = [c for signed in log for c in signed.entry.contributions]
    assert (facts["step"], facts["votes"], facts["head"]) == (STEPS, len(counted), log[-1].hash.hex())
    assert facts["tokens"] == sum(c.tokens for c in counted)
    assert facts["payload_bytes"] == sum(c.payload_bytes for c in counted)
    assert facts["loss"] == pytest.approx(loss_of(log[-1].entry.contributions), rel=1e-6)
    assert {it["device"] for it in facts["peers"]} == DEVICES
    told = asked(f"{one}/ledger")
    assert told["identities"] == found.values()["identities"]
    assert told["owners"] == found.values()["owners"]
    assert [(it["name"], it["identities"], it["votes_accepted"]) for it in told["owners"]] == [(OWNER, 2, len(counted))]
    steps = asked(f"{one}/steps?points={STEPS}")
    assert steps["steps"] == [signed.entry.step for signed in log]
    assert steps["loss"] == pytest.approx([loss_of(signed.entry.contributions) for signed in log], rel=1e-6)


@in_a_browser
def test_the_browser_verifies_the_log_and_shows_its_numbers(
    swarm: PageSwarm, log: list[SignedEntry], browser: Any
) -> None:
    url = swarm.page()
    one = the_run(swarm, url)
    with tab(browser, shown(swarm, url)) as page:
        page.wait_for_selector(f"#proof[data-state=good][data-step='{STEPS}'][data-equal=true]")
        assert page.inner_text("#proof-text") == f"{STEPS} entries verified by your browser"
        assert "WebCrypto" in page.inner_text("#proof-sums")
        assert page.inner_text("#step").startswith(f"step {STEPS} of {STEPS}")
        assert page.inner_text("#phase").startswith("finished")
        assert same_ledger(page, ledger(swarm.invite.run_id, log))
        assert page.locator("#ledger tbody td:nth-child(2)").all_inner_texts() == [OWNER] * 2
        assert page.locator("#owners tbody td:nth-child(1)").all_inner_texts() == [OWNER]
        assert set(page.locator("#peers tbody td:nth-child(6)").all_inner_texts()) == DEVICES
        facts = asked(one)
        held = {it["step"]: f"{it['loss']:.4f}" for it in facts["held_out"]}
        last = facts["held_out"][-1]
        assert held.keys() <= {10, STEPS}
        # a run may end before its last state is agreed
        assert page.inner_text("#figures").count(f"{last['loss']:.4f} at step {last['step']}") == 1
        assert facts["written"]["step"] == last["step"]
        assert facts["written"]["text"].startswith("<b>def")
        assert page.text_content("#written-text") == facts["written"]["text"]
        page.click("#samples summary")
        soon(page, "#samples-list").to_contain_text("This is the first one" if last["step"] == 10 else "After step 10")
        assert "tests.system.tiny:model" in page.inner_text("#about")
        assert str(swarm.folder / "text.txt") in page.inner_text("#about")
        page.click("#chart-loss summary")
        rows = page.locator("#chart-loss details tbody tr")
        soon(page, "#chart-loss details tbody tr").to_have_count(STEPS)  # the browser fills the table after the click
        assert [row.split() for row in rows.all_inner_texts()] == [
            [str(signed.entry.step), f"{loss_of(signed.entry.contributions):.4f}", held.get(signed.entry.step, "-")]
            for signed in log
        ]
        page.click("#proof details summary")
        page.fill("#link", f'"{swarm.link[:40]}\n{swarm.link[40:]}".')
        soon(page, "#compared").to_have_text("Your link means this run.")
        page.fill("#link", swarm.link[:-9])
        soon(page, "#compared").to_contain_text("damaged")
        assert Invite.parse(page.inner_text("#command").split()[-1]) == swarm.invite


def same_ledger(page: Any, found: Ledger) -> bool:
    """Whether the leaderboard on the page, which the browser added up, has the log's identities and votes."""
    soon(page, "#ledger-note").to_contain_text("added up by your browser")
    ids = page.locator("#ledger tbody th").all_inner_texts()
    votes = page.locator("#ledger tbody td:nth-child(3)").all_inner_texts()
    return [(line.id, str(line.votes_accepted)) for line in found.accounts] == list(zip(ids, votes, strict=True))


@in_a_browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_and_a_keyboard_are_enough(swarm: PageSwarm, browser: Any, dark: bool) -> None:
    url = swarm.page()
    the_run(swarm, url)
    with tab(browser, shown(swarm, url), width=360, height=740, dark=dark) as page:
        page.wait_for_selector("#proof[data-state=good]")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert not page.evaluate(LOW_CONTRAST)
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.tagName + '#' + document.activeElement.id"))
        assert {"BUTTON#copy", "INPUT#", "SUMMARY#", "A#api"} <= reached
        page.keyboard.press("Home")
        named = "(it) => document.getElementById(it.getAttribute('aria-labelledby')) !== null"
        assert page.evaluate(f"[...document.querySelectorAll('section')].every({named})"), "a section without a name"


LOW_CONTRAST = """() => {
  const parts = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const words = [...node.childNodes].some((it) => it.nodeType === 3 && it.textContent.trim() !== "");
    if (!words || node.closest(".uplot, noscript") || !node.checkVisibility()) continue;
    const [a, b] = [light(parts(getComputedStyle(node).color)), light(ground(node))];
    if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) found.push(node.outerHTML.slice(0, 80));
  }
  return found.join("\\n");
}"""
"""Text whose contrast with its ground is below 4.5 to 1 (WCAG AA)."""


@contextmanager
def between(url: str, change: Callable[[str, bytes], bytes]) -> Iterator[str]:
    """A server that passes the page on and changes some answers: somebody between the page and the browser."""

    class Passing(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("/events"):
                self.send_error(503)
                return
            try:
                with urllib.request.urlopen(url.rstrip("/") + self.path, timeout=300) as answer:
                    body, kind = change(self.path, answer.read()), answer.headers["content-type"]
            except urllib.error.HTTPError as error:
                self.send_error(error.code)
                return
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Passing) as own:
        yield own


def with_record(page: bytes, number: int, change: Callable[[bytes], list[bytes]]) -> bytes:
    """A page of the log with one record (from 1) changed into others."""
    out, at, count = b"", 0, 0
    while at < len(page):
        size = int.from_bytes(page[at : at + 4], "big")
        count += 1
        record = page[at + 4 : at + 4 + size]
        for data in change(record) if count == number else [record]:
            out += len(data).to_bytes(4, "big") + data
        at += 4 + size
    return out


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


CHANGES: dict[str, tuple[Callable[[bytes], list[bytes]], str]] = {
    "a byte of the body": (lambda data: [flipped(data, len(data) // 2)], "entry 17 does not hold"),
    "a byte of the signature": (
        lambda data: [flipped(data, len(data) - 1)],
        "entry 17 does not hold: its signature is wrong",
    ),
    "left out": (lambda data: [], "entry 17 does not hold: it is the entry of step 18"),
    "twice": (lambda data: [data, data], "entry 18 does not hold: it is the entry of step 17"),
    "cut off": (lambda data: [data[:-1]], "entry 17 does not hold"),
}


@in_a_browser
@pytest.mark.parametrize("name", CHANGES)
def test_a_log_that_somebody_changed_is_found(swarm: PageSwarm, browser: Any, name: str) -> None:
    url, (change, why) = swarm.page(), CHANGES[name]
    the_run(swarm, url)

    def changed(path: str, body: bytes) -> bytes:
        return with_record(body, 17, change) if "/log?from=1" in path else body

    with between(url, changed) as somebody, tab(browser, shown(swarm, somebody)) as page:
        page.wait_for_selector("#proof[data-state=bad]")
        assert why in page.inner_text("#proof-text")
        assert "added up by your browser" not in page.inner_text("#ledger-note")


@in_a_browser
def test_a_definition_that_is_not_the_runs_and_figures_that_are_not_the_logs_are_found(
    swarm: PageSwarm, browser: Any
) -> None:
    url = swarm.page()
    the_run(swarm, url)
    other = lambda path, body: flipped(body, 40) if path.endswith("/genesis") else body  # noqa: E731
    with between(url, other) as somebody, tab(browser, shown(swarm, somebody)) as page:
        page.wait_for_selector("#proof[data-state=bad]")
        assert "its hash is not the run id" in page.inner_text("#proof-text")

    def more(path: str, body: bytes) -> bytes:
        if not path.endswith(swarm.invite.run_id.hex()):
            return body
        return json.dumps(json.loads(body) | {"tokens": 999}).encode()

    with between(url, more) as somebody, tab(browser, shown(swarm, somebody)) as page:
        page.wait_for_selector("#proof[data-equal=false]")
        assert "DIFFER" in page.inner_text("#proof-sums")


@in_a_browser
def test_a_browser_without_webcrypto_verifies_with_the_library(swarm: PageSwarm, browser: Any) -> None:
    url = swarm.page()
    one = the_run(swarm, url)
    with tab(browser, shown(swarm, url)) as page:
        script = """async ([one, run, damage]) => {
          const { LogVerifier, crypts } = await import("/verifier.js");
          const get = async (what, from) => {
            const data = new Uint8Array(await (await fetch(`${one}/${what}${from ? `?from=${from}` : ""}`)).arrayBuffer());
            if (what === "log" && damage && data.length > 0) data[data.length - 1] ^= 1;
            return data;
          };
          const verifier = new LogVerifier(run, get, await crypts(null));
          try { await verifier.advance(); } catch (error) { return [verifier.crypt.name, error.step, error.message]; }
          return [verifier.crypt.name, verifier.step, verifier.sums().head];
        }"""
        run = swarm.invite.run_id.hex()
        assert page.evaluate(script, [one, run, False]) == ["@noble/ed25519", STEPS, asked(one)["head"]]
        name, step, why = page.evaluate(script, [one, run, True])
        assert (name, step, why) == ("@noble/ed25519", STEPS, f"entry {STEPS} does not hold: its signature is wrong")


@in_a_browser
def test_what_a_peer_calls_itself_is_text_and_the_page_is_live(
    swarm: PageSwarm, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run on the same coordinator: a peer that joins it by hand names its device like an attacker."""
    file = swarm.folder / "evil.toml"
    file.write_text('name = "evil"\n[clock]\nmin_peers = 2\n')
    link = swarm.operate("run", "create", str(file), "--no-layout")["invite"]
    invite, url = Invite.parse(link), swarm.page()
    wait_for("the second run on the page", lambda: asked(url + "api/runs")["total"] == 2)
    with tab(browser, url) as page:
        soon(page, "#runs tbody tr").to_have_count(2)
        page.click("#runs tbody a:has-text('evil')")
        soon(page, "#connection").to_have_text("live")
        soon(page, "#name").to_have_text("evil")
        monkeypatch.setattr("node.link.client.software_version", lambda: EVIL)
        apart(joined(invite))
        soon(page, "#peers tbody tr").to_have_count(1)  # without a reload
        device, version = (page.inner_text(f"#peers tbody td:nth-child({place})") for place in (6, 7))
        assert device.startswith("<script>window.evil=1</script>[/x]?[2J")
        assert version == "<script>window.evil=1</script>[/"
        assert page.inner_text("#peers tbody td:nth-child(2)") == EVIL_NAME
        assert "\u202e" not in page.content()
        assert "\x1b" not in page.content()
        assert page.evaluate("window.evil") is None
        assert page.locator("#peers script").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") == 1200, (
            "long names widen their table, not the page"
        )


@in_a_browser
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_that_keeps_people_from_reading_the_page(swarm: PageSwarm, browser: Any, dark: bool) -> None:
    """The rules of WCAG 2.1 A and AA that a program can judge; contrast among them."""
    url = swarm.page()
    the_run(swarm, url)
    for width in (360, 1200):
        for at in (shown(swarm, url), f"{url}#runs"):
            with tab(browser, at, width=width, dark=dark) as page:
                page.wait_for_selector("#proof[data-state=good], #runs tbody tr")
                for summary in page.locator("#run:not([hidden]) summary").all():
                    summary.click()
                assert violations_in(page) == []


async def joined(invite: Invite) -> None:
    """A peer has joined, under a name that is an attack."""
    client = CoordinatorClient(invite, Identity.from_seed(bytes([9]) * 32))
    try:
        await client.connect()
        owner = pb.Owner(name=EVIL_NAME)
        await client.join(pb.JoinBody(layout_digest=LAYOUT, parameters=10, device=EVIL[:64], owner=owner))
    finally:
        await client.close()


def test_a_page_of_ones_own_says_the_same_and_ends_cleanly(swarm: PageSwarm) -> None:
    web = swarm.start("web", "node", "web", swarm.link, "--listen", "127.0.0.1:0", "--json")
    one = the_run(swarm, web.first_json()["url"])
    other = the_run(swarm, swarm.page())
    for path in ("/ledger", "/invite"):
        assert asked(one + path) == asked(other + path)
    mine, theirs = asked(one), asked(other)
    assert [mine[key] for key in ("head", "votes", "tokens")] == [theirs[key] for key in ("head", "votes", "tokens")]
    web.interrupt()
    assert web.finish()[0] == 0


@in_a_browser
def test_a_page_as_files_is_checked_by_the_browser_too(swarm: PageSwarm, browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    export = swarm.start("export", "node", "export-page", swarm.link, str(folder), "--json")
    code, said = export.finish()
    assert (code, said["steps"]) == (0, STEPS)
    again, _ = swarm.start("export-2", "node", "export-page", swarm.link, str(folder), "--json").finish()
    assert again == 2, "a folder with files is left alone"
    with files_of(folder) as url:
        with tab(browser, url) as page:
            page.wait_for_selector(f"#proof[data-state=good][data-step='{STEPS}'][data-equal=true]")
            assert page.inner_text("#name") == "page"
            assert page.locator("#peers tbody tr").count() >= 2
        log = folder / "data" / "log" / "1.bin"
        log.write_bytes(with_record(log.read_bytes(), 17, lambda data: [flipped(data, len(data) // 2)]))
        with tab(browser, url) as page:
            page.wait_for_selector("#proof[data-state=bad]")
            assert "entry 17 does not hold" in page.inner_text("#proof-text")


def test_the_page_ends_with_its_coordinator_and_a_busy_port_does_not_end_the_coordinator(
    tmp_path: Path, swarm: PageSwarm
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        serve = ("coordinator", "serve", "--home", str(tmp_path), "--listen", "127.0.0.1:0", "--json", "--web-listen")
        process = swarm.start("busy", *serve, busy)
        process.first_json()
        wait_for("warning", lambda: swarm.events("busy", "a page is off, and the runs go on without it"))
        assert process.child.poll() is None
        process.interrupt()
        assert process.finish()[0] == 0
    process = swarm.start("killed", *serve, "127.0.0.1:0")
    process.first_json()
    wait_for("page", lambda: swarm.events("killed", READY))
    children = subprocess.run(
        ["pgrep", "-f", "-x", ".* -m node.web.serve .*"], capture_output=True, text=True, check=False
    )
    of_killed = [pid for pid in map(int, children.stdout.split()) if parent_of(pid) == process.child.pid]
    assert len(of_killed) == 1
    assert os.getpgid(of_killed[0]) == of_killed[0], "a terminal's Ctrl-C printed its traceback"
    os.kill(process.child.pid, signal.SIGKILL)
    wait_for("end of the page", lambda: parent_of(of_killed[0]) is None)
    process.close()


def parent_of(pid: int) -> int | None:
    """The parent of a live process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[1])
