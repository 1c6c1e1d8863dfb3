"""The API over a real socket: answers, ETags, pages, other origins, and refusals. The runs are logs that were signed here."""

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.client import HTTPMessage
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from coordinator.serving.page import gone_line_of
from node.web import answers, server
from node.web.api_routes import app_of, description
from node.web.followed import DoesNotHoldError, Followed
from node.web.serve import RUNS_MAX, Shown, Site, gone_in
from node.web.server import Timed, listening, url_of
from protos.accounts import Accounts
from protos.changes import settings_of
from protos.errors import OperatorError
from protos.evaluation import Evaluation, seal_evaluation
from protos.identity import Identity
from protos.invite import Invite
from protos.log import seal_entry
from protos.run_config import config_from_json
from protos.v1 import coordinator_pb2 as pb
from tests.interop.world import FakeCoordinator, Log
from tests.unit.web.logs import COORDINATOR, GENESIS, INVITE, PEERS, RUN, entry, signed_log

STEPS = 40
LONG = 600
ONE = f"api/runs/{RUN.hex()}"
EVIL = "<script>alert(1)</script>[/x]\x1b[2J" + "\u202e" * 64


@dataclass
class Got:
    status: int
    headers: HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def fed(run: Followed, steps: int) -> None:
    """As if the coordinator had given the log and the facts."""
    for signed in signed_log(steps):
        run._take(signed.envelope, None)
    run.config = config_from_json(GENESIS.config_json)
    run.facts = pb.GetRunResponse(genesis=GENESIS, phase=pb.Phase.PHASE_OPEN, head_step=steps, reason=EVIL)
    run.facts.peers.add(public_key=PEERS[0].public_key, phase=pb.PeerPhase.PEER_PHASE_READY, device=EVIL, standing=EVIL)
    run.facts.peers.add(public_key=b"short", device="damaged")
    run.problem = ""


@asynccontextmanager
async def page(steps: int = STEPS, hosts: tuple[str, ...] = ()) -> AsyncIterator[tuple[Site, str]]:
    site, made = Site(), listening("127.0.0.1:0")
    config = uvicorn.Config(
        app_of(site, hosts), http=Timed, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server._serve([made]))
    try:
        site.add(INVITE)
        site._tasks[RUN.hex()].cancel()  # there is no coordinator behind this link
        fed(site.runs[RUN.hex()], steps)
        yield site, url_of(made)
    finally:
        await site.close()
        server.should_exit = True
        await serving
        made.close()


async def get(url: str, **headers: str) -> Got:
    def ask() -> Got:
        request = urllib.request.Request(url, headers={name.replace("_", "-"): it for name, it in headers.items()})
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return Got(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Got(error.code, error.headers, error.read())

    return await asyncio.to_thread(ask)


async def test_the_answers_are_the_logs() -> None:
    sums = Accounts(RUN)
    for signed in signed_log(STEPS):
        sums.add(signed.entry)
    async with page() as (_, url):
        run = answers.Run.model_validate_json((await get(url + ONE)).body)
        assert (run.step, run.votes) == (STEPS, 3 * STEPS)
        assert run.tokens == sum(account.tokens for account in sums.ordered())
        assert run.payload_bytes_each == pytest.approx(101)
        assert run.allreduce_bytes_each == 8000
        ledger = answers.Ledger.model_validate_json((await get(f"{url}{ONE}/ledger")).body)
        assert [line.id for line in ledger.identities] == [account.id for account in sums.ordered()]
        steps = answers.Steps.model_validate_json((await get(f"{url}{ONE}/steps?from=30&to=40&points=11")).body)
        assert steps.steps == list(range(30, 41))
        runs = answers.RunList.model_validate_json((await get(url + "api/runs")).body)
        assert [line.run for line in runs.runs] == [RUN.hex()]


async def test_strangers_words_are_printable_everywhere() -> None:
    async with page(3) as (site, url):
        site.runs[RUN.hex()].book.tell("joined", EVIL, None)
        for path in ("api/runs", ONE, f"{ONE}/feed", f"{ONE}/ledger"):
            got = await get(url + path)
            text = json.dumps(got.json, ensure_ascii=False)
            assert "\x1b" not in text
            assert "\u202e" not in text
            assert got.headers["content-type"] == "application/json"
        peers = (await get(url + ONE)).json["peers"]
        assert len(peers) == 1, "a peer without a whole key is left out"
        assert peers[0]["device"].startswith("<script>")


async def test_what_is_trained_is_told_as_it_is_now() -> None:
    async with page(3) as (site, url):
        run = site.runs[RUN.hex()]
        about = answers.Run.model_validate_json((await get(url + ONE)).body).about
        assert (about.model, about.data, about.tokenizer, about.schedule) == ("llama", ["stdlib"], "bytes", "cosine")
        run.book.settings = (("clock.batch_samples", "32"), ("optimizer.schedule", '"wsd"'))
        about = answers.Run.model_validate_json((await get(url + ONE)).body).about
        assert (about.batch_samples, about.schedule) == (32, "wsd")
        run.book.settings = (
            ("clock.batch_samples", '"lies"'),
        )  # an entry cannot hold it; a page is no place to stop at it
        assert (await get(url + ONE)).status == 200
        hostile = {"config": {"model_type": EVIL}, "factory": None}
        run.config = run.config and run.config.model_copy(update={"model": run.config.model.model_copy(update=hostile)})
        text = (await get(url + ONE)).json["about"]["model"]
        assert "\x1b" not in text
        assert "\u202e" not in text


async def test_samples_of_the_model_are_printable_and_thinned() -> None:
    async with page(3) as (site, url):
        for step in range(1, 101):
            made = Evaluation(b"", step, 2.0, 64, bytes(32), "cpu", f"{EVIL}\n{step}")
            site.runs[RUN.hex()].book.take([seal_evaluation(PEERS[0], RUN, made)])
        got = answers.Samples.model_validate_json((await get(f"{url}{ONE}/samples")).body).samples
        assert [it.step for it in got] == list(range(5, 101, 5))
        assert got[-1].text.endswith("\n100")
        assert "\x1b" not in got[-1].text
        assert answers.Run.model_validate_json((await get(url + ONE)).body).written == got[-1]


async def test_who_was_here_and_which_coordinator_acts_is_kept() -> None:
    async with page(3) as (site, url):
        run = site.runs[RUN.hex()]
        for at, when in (("one:7700", 100.0), ("one:7700", 101.0), ("two:7700", 102.0)):
            run.looked = when
            run._note(run.facts, at)
        run.facts.peers[0].phase = pb.PeerPhase.PEER_PHASE_ABSENT
        run.looked = 110.0
        run._note(run.facts, "two:7700")
        got = (await get(url + ONE)).json
        assert [(it["phase"], it["seen"]) for it in got["peers"]] == [("absent", 102.0)]
        assert [it["text"] for it in got["events"] if it["kind"] == "take-over"] == [
            "the coordinator at two:7700 acts now; before it was the one at one:7700"
        ]


async def test_a_run_that_its_operator_archived_leaves_the_page_and_may_come_back() -> None:
    async with page(3) as (site, url):
        ask = f"GET /{ONE}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        with connected(url, ask) as made:
            async with asyncio.timeout(240):
                while not site.channels.watched(RUN.hex()):
                    await asyncio.sleep(0.01)
            assert gone_in(gone_line_of(RUN)) == RUN.hex()
            await site.remove(gone_in(gone_line_of(RUN)))
            await site.remove("of another page")
            made.settimeout(240)

            def rest() -> bytes:
                try:
                    return b"".join(iter(lambda: made.recv(65536), b""))
                except ConnectionResetError:
                    return b""

            await asyncio.to_thread(rest)  # returns: the stream has ended
        assert (await get(url + ONE)).status == 404
        assert (await get(url + "api/runs")).json["total"] == 0
        assert site.add(INVITE)
        assert (await get(url + ONE)).status == 200
    for line in (Shown(INVITE, ()).line(), "", "[1]", "{", "[" * 9999):
        assert gone_in(line) == ""


async def test_the_log_goes_out_as_it_was_signed() -> None:
    async with page(LONG) as (_, url):
        found, first = [], 1
        while data := (got := await get(f"{url}{ONE}/log?from={first}")).body:
            while data:
                size = int.from_bytes(data[:4], "big")
                found.append(data[4 : 4 + size])
                data = data[4 + size :]
            assert int(got.headers["x-last-step"]) == len(found)
            first = len(found) + 1
        assert found == [signed.envelope for signed in signed_log(LONG)]
        genesis = await get(f"{url}{ONE}/genesis")
        assert genesis.body == GENESIS.SerializeToString(deterministic=True)


async def test_an_answer_that_the_asker_has_is_not_sent_again() -> None:
    async with page(5) as (site, url):
        for path in ("api/runs", ONE, f"{ONE}/steps", f"{ONE}/log?from=1", "api/openapi.json", "page.js"):
            tag = (await get(url + path)).headers["etag"]
            again = await get(url + path, If_None_Match=f'"other", {tag}')
            assert (again.status, again.body) == (304, b""), path
        before = (await get(url + ONE)).headers["etag"]
        site.runs[RUN.hex()]._take(seal_entry(COORDINATOR, RUN, entry(6, signed_log(5)[-1].hash)).envelope, None)
        assert (await get(url + ONE, If_None_Match=before)).status == 200


async def test_pages_of_the_ledger() -> None:
    async with page(2) as (_, url):
        whole = (await get(f"{url}{ONE}/ledger")).json["identities"]
        parts = [(await get(f"{url}{ONE}/ledger?offset={at}&limit=2")).json for at in (0, 2)]
        assert [line for part in parts for line in part["identities"]] == whole
        assert {part["total"] for part in parts} == {3}


@pytest.mark.parametrize("number", ["-1", "x", "1e3", "", "9" * 16, "\u0663", "1%00"])
async def test_a_number_that_is_none_is_refused_with_its_value(number: str) -> None:
    async with page(2) as (_, url):
        got = await get(f"{url}{ONE}/steps?from={urllib.request.quote(number, safe='%')}")
        assert got.status == 400
        assert "from=" in got.json["error"]


async def test_what_is_not_there_says_what_to_do() -> None:
    async with page(2) as (_, url):
        for path in ("api/runs/" + "0" * 64, "api/runs/x/log", f"api/runs/{RUN.hex()}0"):
            got = await get(url + path)
            assert got.status == 404
            assert "/api/runs lists" in got.json["error"]
        assert (await get(url + "..%2f..%2fapp.py")).status == 404
        assert (await get(url + "nothing.js")).status == 404


async def test_other_origins_read_everything_but_the_invite() -> None:
    async with page(2) as (_, url):
        for path in ("api/runs", ONE, f"{ONE}/log?from=1", "api/openapi.json"):
            assert (await get(url + path, Origin="https://x.example")).headers["access-control-allow-origin"] == "*"
        own = await get(f"{url}{ONE}/invite")
        assert own.json == {"invite": INVITE.link(), "admits": True}
        assert own.headers["access-control-allow-origin"] is None
        assert (await get(f"{url}{ONE}/invite", Sec_Fetch_Site="cross-site")).status == 403
        rebound = await get(f"{url}{ONE}/invite", Host="x.example:7780")
        assert rebound.status == 403
        assert "--host x.example" in rebound.json["error"]
    async with page(2, hosts=("Swarm.example",)) as (_, url):
        assert (await get(f"{url}{ONE}/invite", Host="swarm.example")).status == 200


async def test_every_answer_has_the_policy_of_the_page() -> None:
    async with page(2) as (_, url):
        for path in ("", "page.js", ONE, "nothing", f"{ONE}/steps?from=x"):
            headers = (await get(url + path)).headers
            assert headers["content-security-policy"].startswith("default-src 'self';")
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "more", ["Content-Length: 5\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /page.js HTTP/1.1\r\n",
             "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
)  # fmt: skip
async def test_a_request_with_a_body_is_refused_and_its_connection_ends(more: str) -> None:
    """A proxy and this server could differ about where it ends, and the rest would be another person's request."""
    async with page(2) as (_, url):
        with connected(url, f"GET /{ONE} HTTP/1.1\r\nHost: localhost\r\n{more}".encode()) as made:

            def rest() -> bytes:
                return b"".join(iter(lambda: made.recv(65536), b""))

            got = await asyncio.to_thread(rest)
        assert got.startswith(b"HTTP/1.1 400 ")
        assert got.count(b"HTTP/1.1") == 1
        assert got.endswith(b"requests have no body here")
        with connected(url, f"GET /{ONE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()) as made:
            assert (await asyncio.to_thread(made.recv, 65536)).startswith(b"HTTP/1.1 200 ")


async def test_only_reading_is_possible() -> None:
    async with page(2) as (_, url):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            request = urllib.request.Request(url + ONE, method=method)
            with pytest.raises(urllib.error.HTTPError) as refused:
                await asyncio.to_thread(urllib.request.urlopen, request, timeout=240)
            assert refused.value.code == 405
            refused.value.close()


@contextmanager
def connected(url: str, request: bytes, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    with socket.socket() as made:
        if receive_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(240)
        made.connect((host, int(port)))
        made.sendall(request)
        yield made


async def test_a_connection_that_sends_no_whole_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS_MAX", 0.2)
    async with page(2) as (_, url):
        whole = f"GET /{ONE} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        for begun in (b"", b"GET / HT", whole[:-2], whole + whole[:9]):
            with connected(url, begun) as made:

                def rest(made: socket.socket = made) -> bytes:
                    try:
                        return b"".join(iter(lambda: made.recv(65536), b""))
                    except ConnectionResetError:
                        return b""

                await asyncio.to_thread(rest)  # returns: the other side ended it


async def test_a_slow_reader_is_dropped_while_a_quick_one_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_SECONDS_MAX", 0.5)
    async with page(2) as (site, url):
        ask = f"GET /{ONE}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        with connected(url, ask, 4096) as _slow:
            reader, writer = await asyncio.open_connection(*_slow.getpeername())
            writer.write(ask)
            async with asyncio.timeout(240):
                while site.channels.count < 2:
                    await asyncio.sleep(0.01)
                read, sent = 0, 0
                while site.channels.count == 2:  # until the slow one is dropped
                    site.channels.publish(RUN.hex(), server.message("run", "x" * 200_000))
                    sent += 200_000
                    while read < sent:
                        read += len(await reader.read(1 << 20))
                    await asyncio.sleep(0)
            site.channels.publish(RUN.hex(), server.message("run", "the last one"))
            seen = b""
            async with asyncio.timeout(240):
                while b"the last one" not in seen:
                    seen = seen[-64:] + await reader.read(1 << 20)
            writer.close()
            await writer.wait_closed()


async def test_too_many_readers_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page(2) as (site, url):
        site.channels._readers_max = 0
        got = await get(f"{url}{ONE}/events")
        assert got.status == 503
        assert got.headers["retry-after"] == "60"


def test_the_description_names_every_route_and_no_other() -> None:
    described = json.loads(description())
    site_routes = {route.path for route in _routes() if route.path.startswith("/api") and "openapi" not in route.path}
    assert set(described["paths"]) == site_routes
    references = set(json.dumps(described).split('"#/components/schemas/')[1:])
    named = {reference.partition('"')[0] for reference in references}
    assert named <= set(described["components"]["schemas"])


def _routes() -> list[Any]:
    async def made() -> list[Any]:
        site = Site()
        try:
            return list(app_of(site)._app.routes)
        finally:
            await site.close()

    return asyncio.run(made())


async def test_an_entry_that_does_not_hold_ends_the_following_and_is_named() -> None:
    run = Followed(INVITE)
    good = signed_log(3)
    run._take(good[0].envelope, None)
    damaged = bytearray(good[1].envelope)
    damaged[100] ^= 1
    for bad, why in ((bytes(damaged), "entry 2"), (good[2].envelope, "entry 2"), (good[0].envelope, "entry 2")):
        with pytest.raises(DoesNotHoldError, match=why):
            run._take(bad, None)
    assert (run.book.head, run.spool.head) == (1, 1)
    run.close()


async def test_what_the_operators_did_not_order_ends_the_following_and_is_named(tmp_path: Path) -> None:
    """The coordinator's key is stolen: it signs a change that no operator ordered, and serves it as a real one would."""
    operators = [Identity.from_seed(bytes([90 + n]) * 32) for n in range(2)]
    coordinator = FakeCoordinator(STEPS, operators)
    log = Log(coordinator.run_id, coordinator.identity)
    coordinator.entries = [log.commit(), log.entry(settings=settings_of({"clock.steps": 7}))]
    async with coordinator.serve(tmp_path) as invite:
        run = Followed(invite)
        await asyncio.wait_for(run.run(), 240)
    assert "entry 2 of the log does not hold" in run.problem
    assert "settings that the operators did not order" in run.problem
    assert run.book.head == 1
    run.close()


def test_lines_of_a_coordinator() -> None:
    one = Shown(INVITE, ("127.0.0.1:7700",))
    assert Shown.from_line(one.line()) == one
    for line in ("", "{", "[]", "7", '{"invite": 3, "at": []}', '{"invite": "swarmentum://x", "at": []}', "[" * 9999):
        with pytest.raises(OperatorError):
            Shown.from_line(line)


async def test_a_page_shows_a_bounded_number_of_runs_each_once() -> None:
    site = Site()
    try:
        for number in range(RUNS_MAX):
            invite = Invite(bytes([number]) * 32, ("127.0.0.1:1",), bytes(32), bytes(32), (), "x")
            assert site.add(invite)
            assert not site.add(invite)
        with pytest.raises(OperatorError, match=str(RUNS_MAX)):
            site.add(INVITE)
    finally:
        await site.close()


@pytest.mark.parametrize("listen", ["7780", ":7780", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x"])
def test_an_address_that_is_none_is_named(listen: str) -> None:
    with pytest.raises(OperatorError, match="--listen"):
        listening(listen)


def test_a_busy_port_is_named() -> None:
    made = listening("127.0.0.1:0")
    port = made.getsockname()[1]
    with pytest.raises(OperatorError, match=f"127.0.0.1:{port}: cannot listen"):
        listening(f"127.0.0.1:{port}")
    made.close()
