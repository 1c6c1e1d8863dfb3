"""Attackers as processes against a real coordinator over gRPC, while a run steps: the steps go on."""

import asyncio
import resource
import shutil
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.clock.state import Phase
from coordinator.serving import call_limits, gate, served_coordinator
from coordinator.serving.call_limits import Caller, CallLimits, CallSlot, Lane, Places
from protos.errors import OperatorError
from protos.identity import Identity
from protos.limits import DEVICE_CHARACTERS_MAX
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from tests.attack.one import BEGINS
from tests.unit.coordinator.driver import LAYOUT, config, digest_of
from tests.unit.coordinator.serving import SECONDS_MAX, LivePeer, Served, eventually, identity, peers, served, tick_of

LONG = config(min_peers=2, steps=100_000)
# While an attack goes on: the findings' floods stopped a run at once. How fast it goes is for `make attack` to say.
STEPS_MIN = 3
SLOWER_MAX = 20.0  # of pages there were 2 steps in 15 s, of some 10 a second
OPENS_SECONDS, UNDER_SECONDS, FLOOD_SECONDS_MAX = 2.0, 4.0, 30.0
ATTACK_ENDS_SECONDS = 20.0
TRIED_SECONDS_MAX = 150.0  # of an attacker whose own findings count: it runs commands to the end
PAUSE_SECONDS = 0.05  # slower than what a connection may report, and the cores are left to the attackers


async def step_forever(swarm: list[LivePeer]) -> None:
    """Everyone hears each tick, contributes, holds, hears the entry and tells the state."""
    while True:
        ticks = [tick_of(await peer.until("tick")) for peer in swarm]
        for peer, tick in zip(swarm, ticks, strict=True):
            await peer.contribute(tick, swarm)
        for peer, tick in zip(swarm, ticks, strict=True):
            await peer.until("entry")
            state = pb.AppliedState(step=tick.step, state_digest=digest_of(tick.step))
            await peer.client.report(pb.ReportBody(applied=[state]))
        await asyncio.sleep(PAUSE_SECONDS)


@asynccontextmanager
async def stepping(here: Served) -> AsyncIterator[None]:
    """A run that steps as fast as it can."""
    async with peers(here, 2) as swarm:
        for peer in swarm:
            await peer.join()
        for peer in swarm:
            await peer.ready()
        assert here.runtime.run.phase is Phase.OPEN
        task = asyncio.ensure_future(step_forever(swarm))
        try:
            await eventually(lambda: here.runtime.run.head_step > 5 or task.done())
            yield
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def attacked(
    here: Served, name: str, seconds: float, ends: float = ATTACK_ENDS_SECONDS, begun: asyncio.Event | None = None
) -> str:
    """What an attack, as a process of its own, says that it did; `begun` is set once the process attacks, or has ended."""
    link = here.invite.link()
    arguments = ("-m", "tests.attack.one", name, link, str(here.home), str(seconds))
    child = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(SECONDS_MAX):
            while (line := await child.stderr.readline()) and BEGINS not in line.decode():
                continue
        if begun is not None:
            begun.set()
        out, problems = await asyncio.wait_for(child.communicate(), seconds + ends)
    except TimeoutError:
        return "the attacker was ended"  # thousands of calls that are refused take their time: that is its affair
    finally:
        if child.returncode is None:
            child.kill()
            await child.communicate()
    assert child.returncode == 0, problems.decode()[-3000:]
    return out.decode()


async def steps_during(
    here: Served, name: str, seconds: float = FLOOD_SECONDS_MAX, ends: float = ATTACK_ENDS_SECONDS
) -> tuple[bool, str]:
    """Whether steps go on while an attack does, and what it says.

    A flood is looked at until there are enough steps in UNDER_SECONDS or more of it. A slow machine has few before it, too, so
    few are enough; and a moment in which the whole machine stands still does not end the look.
    """
    begin, began = here.runtime.run.head_step, time.monotonic()
    await asyncio.sleep(3.0)
    before = (here.runtime.run.head_step - begin) / (time.monotonic() - began)
    begun = asyncio.Event()
    attack = asyncio.ensure_future(attacked(here, name, seconds, ends, begun))
    await asyncio.wait({attack, asyncio.ensure_future(begun.wait())}, return_when=asyncio.FIRST_COMPLETED)
    until = time.monotonic() + seconds
    await asyncio.sleep(OPENS_SECONDS)
    begin, began, steps, took = here.runtime.run.head_step, time.monotonic(), 0, 0.0
    while not attack.done() and time.monotonic() < until:
        if took > UNDER_SECONDS and steps >= max(STEPS_MIN, before * took / SLOWER_MAX):
            break
        await asyncio.sleep(0.1)
        steps, took = here.runtime.run.head_step - begin, time.monotonic() - began
    goes_on = steps >= max(STEPS_MIN, before * took / SLOWER_MAX)
    if seconds == FLOOD_SECONDS_MAX:
        attack.cancel()
    told = (await asyncio.gather(attack, return_exceptions=True))[0]
    if isinstance(told, Exception):
        raise told
    return goes_on, f"{before:.1f} steps a second before, {steps} in {took:.1f} s of the attack; {told}"


# CI runs all attackers against a real swarm, too: `python -m tests.attack`.
BY_NIGHT = pytest.mark.nightly


@pytest.mark.parametrize(
    "name",
    ["watch_flood", *(pytest.param(name, marks=BY_NIGHT) for name in ("long_owner", "page_flood", "held_requests"))],
)
async def test_steps_go_on_under_a_flood(tmp_path: Path, name: str) -> None:
    """The findings' floods stopped a run at once: of Watch streams for good, of pages to 2 steps in 15 s."""
    async with served(tmp_path, LONG) as here, stepping(here):
        goes_on, told = await steps_during(here, name)
        assert goes_on, told
        facts = await asyncio.wait_for(_facts(here), SECONDS_MAX)
        assert facts.head_step > 0, "a newcomer is answered after the attack"


async def _facts(here: Served) -> Any:
    """GetRun as a stranger at an address whose allowance the attack has used up: it waits for its turn."""
    async with here.channel() as channel:
        stub = rpc.CoordinatorServiceStub(channel)
        while True:
            try:
                return await stub.GetRun(pb.GetRunRequest(run_id=here.invite.run_id), timeout=60)
            except grpc.RpcError:
                await asyncio.sleep(0.1)


@BY_NIGHT
async def test_a_peer_joins_and_follows_while_watch_streams_flood(tmp_path: Path) -> None:
    async with served(tmp_path, LONG) as here, stepping(here):
        attack = asyncio.ensure_future(attacked(here, "watch_flood", 6.0))
        await asyncio.sleep(3.0)
        async with peers(here, 3) as swarm:
            assert (await swarm[2].join()).WhichOneof("event") == "entry"
        await attack


async def test_health_answers_check_and_no_watch(tmp_path: Path) -> None:
    async with served(tmp_path, LONG) as here, here.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as error:
            await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest())))
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


async def test_a_call_whose_request_never_comes_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "REQUEST_SECONDS_MAX", 0.2)
    async with served(tmp_path, LONG) as here, here.channel() as channel:

        async def silent() -> AsyncIterator[bytes]:
            await asyncio.sleep(SECONDS_MAX)
            yield b""

        for method in ("Report", "Follow", "GetRun"):
            call = channel.stream_unary(f"/swarmentum.v1.CoordinatorService/{method}")
            with pytest.raises(grpc.RpcError) as error:
                await call(silent(), timeout=SECONDS_MAX)
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "the request did not come in time" in error.value.details()  # type: ignore[attr-defined]
        monkeypatch.setattr(gate, "REQUEST_SECONDS_MAX", SECONDS_MAX)  # this request comes, on a slow machine late
        with pytest.raises(grpc.RpcError, match="malformed"):
            await channel.unary_unary("/swarmentum.v1.CoordinatorService/GetRun")(b"\xff\xff\xff", timeout=SECONDS_MAX)
        assert here.refused("malformed") == 1


async def test_places_are_given_back_and_a_session_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(call_limits.LIMITS, Lane.PEERS, CallLimits(2, 2, 2, 1000, 1))
    async with served(tmp_path, LONG) as here, peers(here, 4) as swarm:
        for peer in swarm:  # each has a stream that stays open
            await peer.join()
        for peer in swarm:
            await peer.client.report(pb.ReportBody())


def test_lanes_do_not_take_each_others_places_and_peers_find_room() -> None:
    made = Places({lane: CallLimits(2, 3, 4, 1000, 1) for lane in Lane})

    def acquire(lane: Lane, site: str, connection: str = "", *, known: bool = False) -> CallSlot | str:
        return made.acquire(lane, Caller(site, connection or site, known), 0)

    held = [acquire(Lane.READING, "a") for _ in range(2)]
    assert "of your network address" in str(acquire(Lane.READING, "a", known=True))
    assert isinstance(acquire(Lane.PEERS, "a"), CallSlot)
    assert all(isinstance(acquire(Lane.READING, "loopback"), CallSlot) for _ in range(2))
    assert "calls are under way" in str(acquire(Lane.READING, "b")), "of all addresses"
    assert isinstance(acquire(Lane.READING, "b", known=True), CallSlot), "a peer with a session is there"
    for place in held:
        assert isinstance(place, CallSlot)
        place.leave()
        place.leave()
    assert made._all[Lane.READING] == 3
    made.met(b"session", "a:1")
    assert all(isinstance(acquire(Lane.READING, "a", "a:1"), CallSlot) for _ in range(call_limits.SESSION_CALLS_MAX))
    assert made._all[Lane.READING] == 3, "a session's connection has places of its own"
    assert "of your connection" in str(acquire(Lane.READING, "a", "a:1"))
    made.met(b"session", "a:2")
    assert isinstance(acquire(Lane.READING, "a", "a:1"), CallSlot)
    assert made._all[Lane.READING] == 4, "a session has one connection"


def test_calls_of_one_address_have_a_rate() -> None:
    slow = Places({lane: CallLimits(9, 9, 9, 2, 100) for lane in Lane})
    taken = [slow.acquire(Lane.JOINING, Caller("a", "a:1"), now) for now in (0, 0, 0, 150)]
    assert [isinstance(place, CallSlot) for place in taken] == [True, True, False, True]


async def test_256_peers_on_one_machine_ask_at_once(tmp_path: Path) -> None:
    """The limits of loopback let a whole swarm on one machine start together."""
    async with served(tmp_path, LONG) as here, peers(here, 8) as swarm:
        for peer in swarm:
            await peer.client.connect()

        async def start(number: int) -> None:
            client = swarm[number % len(swarm)].client
            await client._call("GetRun", pb.GetRunRequest(run_id=here.invite.run_id))
            for _ in range(2):
                await client._call("GetChallenge", pb.GetChallengeRequest(run_id=here.invite.run_id))

        await asyncio.gather(*(start(number) for number in range(256)))


@pytest.mark.long
async def test_idle_connections_end_soon_and_leave_descriptors(tmp_path: Path) -> None:
    async with served(tmp_path, LONG) as here, stepping(here):
        attack = asyncio.ensure_future(attacked(here, "idle_connections", 20.0))
        await asyncio.sleep(4.0)
        before = here.runtime.run.head_step
        facts = await asyncio.wait_for(_facts(here), SECONDS_MAX)
        assert facts.head_step > 0, "a newcomer is answered meanwhile"
        told = await attack
        assert here.runtime.run.head_step - before > STEPS_MIN, told
        longest = float(told.partition("after ")[2].split()[0])
        assert longest < 18, f"gRPC's own limit is 120 s; {told}"


async def test_a_connection_without_calls_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has shaken hands, and then asks nothing."""
    short = [
        (name, 500 if name == "grpc.max_connection_idle_ms" else value)
        for name, value in served_coordinator._GRPC_OPTIONS
    ]
    monkeypatch.setattr(served_coordinator, "_GRPC_OPTIONS", short)
    async with served(tmp_path, LONG) as here:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port, ssl=context)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))  # an empty SETTINGS frame
        async with asyncio.timeout(SECONDS_MAX):
            while await reader.read(1024):
                continue
        writer.close()


def test_descriptors_are_raised_to_the_hard_limit_and_not_beyond() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        assert served_coordinator.raise_descriptors(400) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 400
        assert served_coordinator.raise_descriptors(350) == 400, "never lowered"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_coordinator_that_could_take_no_connection_says_so_and_does_not_serve() -> None:
    """With `ulimit -Hn 128` it was serving, and closed each connection: clients heard that it does not answer."""
    with pytest.raises(OperatorError, match="128 open files, and a coordinator needs 144"):
        served_coordinator.connections_of(128)
    assert served_coordinator.connections_of(144) == 16


# ---- what peers say of themselves ------------------------------------------------------------------------------------


async def _join(here: Served, peer: LivePeer, addresses: list[str], device: str = "cpu") -> pb.JoinResponse:
    await peer.client.connect()
    body = pb.JoinBody(layout_digest=LAYOUT, parameters=10, device=device, addresses=addresses)
    response = await peer.client.join(body)
    peer.stream = peer.client.follow(0)  # type: ignore[assignment]
    await peer.event()
    return response


async def test_bad_addresses_are_left_out_and_their_peer_is_welcome(tmp_path: Path) -> None:
    async with served(tmp_path, LONG) as here, peers(here, 2) as (ada, bob):
        own = f"/ip4/127.0.0.1/tcp/4001/p2p/{identity(0).peer_id}"
        other = f"/ip4/127.0.0.1/tcp/4001/p2p/{Identity.generate().peer_id}"
        await _join(here, ada, [*["junk"] * 20, other, own, "/ip4/999.1.1.1/tcp/1/p2p/x"])
        assert here.runtime.run.peers[ada.key].addresses == (own,)
        assert here.refused("out_of_range") == 22
        assert list((await _join(here, bob, [])).bootstrap) == [own]
        moved = own.replace("4001", "4002")
        await ada.client.report(pb.ReportBody(addresses=[other, moved]))
        assert here.runtime.run.peers[ada.key].addresses == (moved,)
        assert list((await bob.client.get_run())[0].bootstrap) == [moved]


async def test_nobody_fills_the_list_that_joiners_get(tmp_path: Path) -> None:
    """Two that came first with 16 addresses each had all 32 places."""
    async with served(tmp_path, config(min_peers=30, batch_samples=64, steps=9)) as here, peers(here, 24) as swarm:
        for peer in swarm[:-1]:
            name = identity(peer.number).peer_id
            await _join(here, peer, [f"/ip4/127.0.0.1/tcp/{4001 + n}/p2p/{name}" for n in range(16)])
        told = (await _join(here, swarm[-1], [])).bootstrap
        by_peer = [address.rpartition("/")[2] for address in told]
        assert len(set(by_peer)) == 16
        assert max(by_peer.count(name) for name in by_peer) == 2


async def test_devices_are_printable_and_bounded(tmp_path: Path) -> None:
    async with served(tmp_path, LONG) as here, peers(here, 1) as (peer,):
        await _join(here, peer, [], "\x1b]0;owned\x07[/x]" + "x" * 100)
        device = here.runtime.run.peers[peer.key].device
        assert device.isprintable()
        assert len(device) == DEVICE_CHARACTERS_MAX
        assert device.startswith("?]0;owned?[/x]")


@BY_NIGHT
@pytest.mark.parametrize("name", ["garbage_addresses", "markup_device"])
async def test_what_joiners_say_of_themselves_harms_nobody(tmp_path: Path, name: str) -> None:
    async with served(tmp_path, LONG) as here, stepping(here):
        goes_on, told = await steps_during(here, name, 7.0, TRIED_SECONDS_MAX)
        assert goes_on, told
        good = {
            "garbage_addresses": "0 garbage",
            "markup_device": "failed for none; codes reached the terminal for none",
        }
        assert good[name] in told


async def test_pages_are_read_beside_the_clocks_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that takes for ever holds up no step; what was read is read once."""
    async with served(tmp_path, LONG) as here, stepping(here), here.channel() as channel:
        stub = rpc.CoordinatorServiceStub(channel)
        reading, times, loop = here.hub._reading, [0], asyncio.get_running_loop()
        may, entries = asyncio.Event(), reading._journal.entries

        def slow(*key: Any) -> list[bytes]:
            times[0] += 1
            asyncio.run_coroutine_threadsafe(may.wait(), loop).result(SECONDS_MAX)
            return entries(*key)

        monkeypatch.setattr(reading._journal, "entries", slow)
        request = pb.ListEntriesRequest(run_id=here.invite.run_id, from_step=1)
        asked = asyncio.ensure_future(_page(stub, request))
        await eventually(lambda: times[0])
        head = here.runtime.run.head_step
        await eventually(lambda: here.runtime.run.head_step > head + 70)
        may.set()
        assert len((await asked).entries) > 0
        await _page(stub, request)
        before = times[0]
        pages = await asyncio.gather(*(_page(stub, request) for _ in range(20)))
        assert {len(page.entries) for page in pages} == {64}
        assert times[0] == before, "a whole page never changes"


async def _page(stub: Any, request: Any) -> Any:
    return await stub.ListEntries(request, timeout=SECONDS_MAX)


@BY_NIGHT
async def test_a_client_of_another_language_gets_nothing_in(tmp_path: Path) -> None:
    """Node's own gRPC client, with the .proto files alone: every request is refused with its reason."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: apt-get install npm")
    async with served(tmp_path, LONG) as here, stepping(here):
        before = here.runtime.run.head_step
        told = await attacked(here, "other_language", 2.0, TRIED_SECONDS_MAX)
        if "could not install" in told:
            pytest.skip(told)
        assert "INVALID_ARGUMENT" in told
        assert here.runtime.run.head_step > before
