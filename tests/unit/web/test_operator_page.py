"""The operator's page over HTTP, with the process behind it in this one: who gets in, who does not, what is kept of it."""

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from coordinator.store import home_files
from coordinator.store.home_files import LINK_SECONDS_MAX, LOGIN_FILE, TOO_OLD, UNKNOWN
from coordinator.web import requests
from coordinator.web.__main__ import Child, line_of
from coordinator.web.requests import (
    BEGUN,
    FILE_BYTES_MAX,
    NO_SESSION,
    OLDER_FILE,
    RECORD_FILE,
    SESSION_SECONDS_MAX,
    SESSIONS_MAX,
    WRONG_TOKEN,
    OperatorReply,
    Record,
    Requests,
)
from node.operator_page import page_routes
from node.operator_page.page_routes import BODY_BYTES_MAX, LOGINS_AT_ONCE, TOKEN, app_of
from node.web.server import listening, server_of
from protos.errors import OperatorError

PROXY = "operator.example"
BEGAN = 1_800_000_000.0


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = BEGAN

    def __call__(self) -> float:
        return self.now


@dataclass
class Got:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"])


class Behind:
    """The process behind the page, without the pipes between."""

    def __init__(self, requests: Requests) -> None:
        self.requests, self.asked = requests, 0

    async def ask(self, values: dict[str, Any]) -> page_routes.PipeReply:
        self.asked += 1
        answer = await self.requests.answer(json.dumps(values).encode())
        told = json.loads(line_of(1, answer))
        return page_routes.PipeReply(told["status"], told["body"], told["cookie"])


@dataclass
class Site:
    """A page at a port of this machine, and one browser's secrets."""

    home: Path
    port: int
    behind: Behind
    wall: Clock
    clock: Clock
    cookie: str = ""
    token: str = ""

    def link(self) -> str:
        return home_files.make(self.home, self.wall.now)

    async def get(self, path: str, **headers: str) -> Got:
        return await asyncio.to_thread(self._sent, "GET", path, None, headers)

    async def post(self, path: str, values: Any, **headers: str) -> Got:
        own = {"content-type": "application/json", "origin": f"http://127.0.0.1:{self.port}", TOKEN: self.token}
        own |= {"cookie": f"swarmentum-operator={self.cookie}"} if self.cookie else {}
        chosen = {**own, **{name.replace("_", "-"): value for name, value in headers.items()}}
        data = values if isinstance(values, bytes) else json.dumps(values).encode()
        return await asyncio.to_thread(self._sent, "POST", f"/api/{path}", data, chosen)

    def _sent(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Got:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=240)
        try:
            kept = {name: value for name, value in headers.items() if value}
            connection.request(method, path, body, kept)
            answer = connection.getresponse()
            return Got(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    async def ask(self, what: str, run: str = "", **values: Any) -> Got:
        return await self.post("ask", {"what": what, "run": run, "values": values})

    async def login(self) -> Got:
        got = await self.post("login", {"secret": self.link()})
        assert got.status == 200, got.body
        self.cookie = got.headers["set-cookie"].partition("=")[2].partition(";")[0]
        self.token = got.json["token"]
        return got


def nobody() -> Any:
    raise OperatorError("no coordinator here")


@asynccontextmanager
async def site(home: Path, operator: Any = nobody) -> AsyncIterator[Site]:
    wall, clock = Clock(), Clock()
    requests = Requests(home, operator, wall, clock)
    behind, made = Behind(requests), listening("127.0.0.1:0")
    server = server_of(app_of(behind, (PROXY,), clock))
    serving = asyncio.ensure_future(server._serve([made]))
    try:
        yield Site(home, made.getsockname()[1], behind, wall, clock)
    finally:
        server.should_exit = True
        await serving
        made.close()
        requests.close()


async def test_a_link_opens_one_session_once_and_the_cookie_is_for_this_page_alone(tmp_path: Path) -> None:
    async with site(tmp_path) as page:
        secret = page.link()
        assert secret not in (tmp_path / LOGIN_FILE).read_text()
        wrong = await page.post("login", {"secret": "x" * 43})
        assert (wrong.status, wrong.error) == (401, UNKNOWN)
        got = await page.post("login", {"secret": secret})
        assert got.status == 200
        cookie = [part.strip().lower() for part in got.headers["set-cookie"].split(";")][1:]
        assert sorted(cookie) == ["httponly", "path=/", "samesite=strict"]
        assert "set-cookie" not in wrong.headers
        assert got.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in got.headers
        assert "script-src 'self'" in got.headers["content-security-policy"]
        again = await page.post("login", {"secret": secret})
        assert (again.status, again.error) == (401, UNKNOWN)
        assert not (tmp_path / LOGIN_FILE).exists()


async def test_a_link_that_is_too_old_or_not_the_newest_opens_nothing(tmp_path: Path) -> None:
    async with site(tmp_path) as page:
        first, second = page.link(), page.link()
        assert (await page.post("login", {"secret": first})).error == UNKNOWN
        page.wall.now += LINK_SECONDS_MAX + 1
        late = await page.post("login", {"secret": second})
        assert (late.status, late.error) == (401, TOO_OLD)
        page.wall.now -= LINK_SECONDS_MAX
        assert (await page.post("login", {"secret": second})).error == UNKNOWN, "it is used up"
        third = page.link()
        page.wall.now -= 3600
        assert (await page.post("login", {"secret": third})).error == TOO_OLD, "a link of the future"
        for damaged in (b"", b"{}", b"[1]", b'{"sha256": 1, "made": "x", "expires": 0}'):
            (tmp_path / LOGIN_FILE).write_bytes(damaged)
            assert (await page.post("login", {"secret": third})).status == 401


async def test_behind_https_the_cookie_is_secure(tmp_path: Path) -> None:
    async with site(tmp_path) as page:
        got = await page.post("login", {"secret": page.link()}, host=PROXY, origin=f"https://{PROXY}")
        assert got.status == 200
        assert "; Secure" in got.headers["set-cookie"]


async def test_both_secrets_of_a_session_are_needed(tmp_path: Path) -> None:
    async with site(tmp_path) as page:
        assert ((await page.ask("log")).status, (await page.ask("log")).error) == (401, NO_SESSION)
        await page.login()
        assert (await page.ask("log")).status == 200
        first = page.cookie, page.token
        for token in ("", "x", first[1][:-1]):
            page.token = token
            got = await page.ask("log")
            assert (got.status, got.error) == (403, WRONG_TOKEN)
        page.token = first[1]
        page.cookie = "x" * 43
        assert (await page.ask("log")).status == 401
        await page.login()
        page.token = first[1]
        assert (await page.ask("log")).status == 403, "the token of another session"
        page.cookie, page.token = "x" * 200, ""
        assert (await page.ask("log")).status == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "http://[bad"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example", "origin": "http://127.0.0.1.evil.example"}, 421),
        ({"host": "192.0.2.7:7781", "origin": "http://192.0.2.7:7781"}, 403),
        ({"host": PROXY, "origin": f"http://{PROXY}"}, 403),
    ],
)
async def test_requests_of_other_sites_reach_nothing(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    async with site(tmp_path) as page:
        await page.login()
        asked, secret = page.behind.asked, page.link()
        for path, values in (("ask", {"what": "log"}), ("login", {"secret": secret}), ("logout", {})):
            got = await page.post(path, values, **headers)
            assert got.status == status
            assert "set-cookie" not in got.headers
        assert page.behind.asked == asked
        assert (await page.post("login", {"secret": secret})).status == 200, "the link is as good as before"


async def test_the_files_are_for_the_pages_own_names(tmp_path: Path) -> None:
    async with site(tmp_path) as page:
        for host in (f"127.0.0.1:{page.port}", "localhost", "[::1]:7781", PROXY, f"{PROXY}:443"):
            assert (await page.get("/", host=host)).status == 200
        for path in ("/", "/operator.js", "/page.css"):
            assert (await page.get(path, host="evil.example")).status == 421
        assert (await page.get("/operator.js")).headers["content-type"].startswith("text/javascript")
        assert (await page.get("/api/ask")).status == 405
        assert (await page.get("/../__main__.py")).status == 404
        html = (await page.get("/")).body.decode()
        assert "<script>" not in html
        assert " onclick" not in html
        assert "style=" not in html


async def test_logins_and_actions_have_a_rate(tmp_path: Path) -> None:
    async with site(tmp_path) as page:
        tries = [(await page.post("login", {"secret": "x" * 43})).status for _ in range(LOGINS_AT_ONCE + 2)]
        assert tries == [401] * LOGINS_AT_ONCE + [429] * 2
        late = await page.post("login", {"secret": page.link()})
        assert (late.status, late.headers["retry-after"]) == (429, "60")
        page.clock.now += 60
        await page.login()
        acts = [(await page.ask("pause", "0" * 64)).status for _ in range(requests.ACTIONS_AT_ONCE + 1)]
        assert acts == [400] * requests.ACTIONS_AT_ONCE + [429]
        assert (await page.ask("log")).status == 200, "reads go on"
        reads = [(await page.ask("log")).status for _ in range(requests.REQUESTS_AT_ONCE)]
        assert reads[-1] == 429


async def test_sessions_end(tmp_path: Path) -> None:
    async with site(tmp_path) as page:
        await page.login()
        assert (await page.post("logout", {})).headers["set-cookie"].startswith('swarmentum-operator=""')
        assert (await page.ask("log")).status == 401
        await page.login()
        page.clock.now += SESSION_SECONDS_MAX + 1
        assert (await page.ask("log")).status == 401
        await page.login()
        oldest = page.cookie, page.token
        for _ in range(SESSIONS_MAX):
            page.clock.now += 60
            await page.login()
        assert (await page.ask("log")).status == 200
        page.cookie, page.token = oldest
        assert (await page.ask("log")).status == 401, "a new login ended the oldest session"


async def test_bodies_that_are_no_requests(tmp_path: Path) -> None:
    async with site(tmp_path) as page:
        await page.login()
        assert (await page.post("ask", b"x" * (BODY_BYTES_MAX + 1))).status == 413
        for body in (b"", b"{", b"[]", b"[" * 100_000, b'{"what": 1}', b'{"what": "log", "values": []}', b"\xff"):
            assert (await page.post("ask", body)).status == 400, body[:20]
        assert (await page.post("ask", b'{"what": "log", "run": "\\ud800"}')).status == 400
        assert (await page.post("ask", {"what": "log", "run": "../../etc"})).status == 400
        for what in ("delete", "archive", "__class__", ""):
            assert (await page.ask(what)).status == 404
    for line in (b"", b"7", b'{"do": "steal"}', b'{"do": "ask", "key": 1}', b"[" * 100_000):
        assert (await Requests(tmp_path, nobody).answer(line)).status == 400


async def test_wrong_values_are_no_actions_and_an_action_without_its_line_is_not_done(tmp_path: Path) -> None:
    called: list[str] = []

    def operator() -> Any:
        called.append("operator")
        raise OperatorError("what the coordinator says")

    async with site(tmp_path, operator) as page:
        await page.login()
        assert (await page.ask("exclude", "0" * 64, peer="12D", reason="")).status == 400
        assert (await page.ask("pause", "0" * 64, reason="x" * 257)).status == 400
        assert (await page.ask("pause", "0" * 64, why="x")).status == 400
        assert called == []
        got = await page.ask("pause", "0" * 64, reason="why")
        assert (got.status, got.error, called) == (400, "what the coordinator says", ["operator"])
        newest = (await page.ask("log")).json["actions"]
        assert [(it["action"], it["outcome"]) for it in newest] == [("pause", got.error), ("login", "done")]
        assert newest[0]["values"] == {"reason": "why"}
        (tmp_path / RECORD_FILE).unlink()
        (tmp_path / RECORD_FILE).mkdir()
        lost = await page.ask("pause", "0" * 64)
        assert lost.status == 503
        assert "nothing was done" in lost.error
        assert called == ["operator"]


def test_the_log_of_actions_is_bounded_and_outlives_the_process_and_a_full_disk(tmp_path: Path) -> None:
    record = Record(tmp_path)
    assert record.begin("s", "pause", "ab", {"reason": "\x1b[2J"}, BEGAN) == 1
    record.end(1, "refused:\nbecause\u202e")
    assert record.begin("s", "finish", "ab", {}, BEGAN) == 2
    with (tmp_path / RECORD_FILE).open("ab") as file:
        file.write(b'{"number": 3, "ti')  # a full disk
    again = Record(tmp_path)
    assert [(it["number"], it["outcome"]) for it in again.newest()] == [(2, BEGUN), (1, "refused:?because?")]
    assert again.begin("t", "resume", "ab", {}, BEGAN) == 3
    assert [it["action"] for it in Record(tmp_path).newest()] == ["resume", "finish", "pause"]
    assert ((tmp_path / RECORD_FILE).stat().st_mode & 0o777) == 0o600
    for _ in range(FILE_BYTES_MAX // 20_000):
        again.begin("t", "change", "ab", {"settings": ["x" * 30_000]}, BEGAN)
    sizes = [(tmp_path / name).stat().st_size for name in (RECORD_FILE, OLDER_FILE)]
    assert all(size < FILE_BYTES_MAX + 40_000 for size in sizes)


def test_an_answer_is_json_whatever_a_loss_is() -> None:
    line = line_of(7, OperatorReply(200, {"runs": [{"loss": math.nan}], "x": (math.inf, 1.5)}))
    assert json.loads(line)["body"] == {"runs": [{"loss": None}], "x": [None, 1.5]}


MISBEHAVES = """
import json, sys
print(json.dumps({"url": "http://127.0.0.1:1/"}), flush=True)
guess = '8 {"do": "ask", "what": "pause", "cookie": "guess", "token": "guess"}'
for line in ("garbage", "-1 {}", "x" * 70 + " {}", "7 {}", guess):
    print(line, flush=True)
answers = sorted(json.loads(sys.stdin.readline())["id"] for _ in range(2))
print("9 " + "x" * (2 << 20 if sys.argv[1] == "flood" else 9), flush=True)
answers.append(json.loads(sys.stdin.readline() or '{"id": "none"}')["id"])
sys.exit({"[7, 8, 9]": 3, "[7, 8, 'none']": 4}.get(str(answers), 5))
"""


@pytest.mark.parametrize(("how", "code"), [("calm", 3), ("flood", 4)])
async def test_a_page_process_that_misbehaves_gets_refusals_or_an_end(tmp_path: Path, how: str, code: int) -> None:
    requests = Requests(tmp_path, nobody)
    child = Child("127.0.0.1:0", (), requests)
    child._command = (sys.executable, "-c", MISBEHAVES, how)
    told: list[str] = []
    try:
        assert await child.run(told.append) == code
    finally:
        requests.close()
    assert told == ["http://127.0.0.1:1/"]
    assert not (tmp_path / RECORD_FILE).exists()


async def test_a_page_that_was_taken_over_fills_no_log_with_logins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs no session for a wrong login, and each one was a line of the coordinator's log."""
    requests = Requests(tmp_path)
    for number in range(2_000):
        asked = {"do": "login", "secret": "x", "address": f"{number}\n\x1b[2Jforged"}
        assert (await requests.answer(json.dumps(asked).encode())).status == 401
    requests.close()
    assert capsys.readouterr().out.count("a login at the operator's page was refused") <= 100
