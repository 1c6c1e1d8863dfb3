"""Every parser of foreign bytes, as a function of bytes that may raise nothing but what its callers expect.

Where bytes travel in a signed envelope, the fuzzer writes the body and a stranger with a good key signs it: what only a
signature keeps out is no door. `SEEDS` gives each door good bytes to begin with.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer
from pydantic import ValidationError

from coordinator.commands.peers import milliseconds
from coordinator.serving import doors as coordinator_doors
from coordinator.web.actions import ALL as ALL_ACTIONS
from coordinator.web.actions import Changes, Invites, wanted_settings
from coordinator.web.requests import Request
from node.archive import files
from node.blobs.blobs import BlobServer, HolderStreams, Stream, WireBytes
from node.blobs.fetcher import Asking
from node.blobs.turns import Attempt, Audience
from node.control.control_server import answered
from node.data import shards as shard_manifest
from node.optim.base import BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.paper_demo import PaperConfig, PaperDeMo
from node.optim.votes.sums import SUMMED
from node.optim.votes.sums import pack as pack_sums
from node.overlay import reach
from node.overlay.dht import _OwnRecordsOnly, open_record, run_key
from node.snapshot.pieces import describe, load, open_manifest, pack
from node.swarm.inbox import Announced, Inbox
from node.swarm.pushes import PUSHED_BYTES_MAX, PushServer
from node.swarm.runtime import View
from node.wire import UpdateDoor, open_aggregate
from protos import calls
from protos.address import ADDRESSES_SHOWN_MAX, network_of, parse_address, shown, usable
from protos.assignment import Range, SampleShare
from protos.changes import changed_values, settings_body, settings_from_body, settings_of, with_settings
from protos.envelope import Kind, VerifiedEnvelope, open_envelope, parse, seal_bytes
from protos.errors import DataError, NetworkError, OperatorError, Reason, Refusal
from protos.evaluation import figures, open_evaluation, reopen_evaluation
from protos.identity import Identity
from protos.invite import SCHEME, Invite, Ticket, open_ticket, seal_ticket, ticket_body
from protos.log import (
    Contribution,
    Entry,
    Exclusion,
    contributions_body,
    entry_body,
    lr_to_bits,
    open_contributions,
    open_entry,
    run_id_of,
    summed_entry,
)
from protos.orders import open_end
from protos.run_config import RunConfig, config_from_json
from protos.run_facts import list_text, open_runs, sealed_run
from protos.slices import Aggregate, Update, encode_update, joined, list_bytes
from protos.start import StartingState, start_body, start_from_body
from protos.text import TEXT_CHARACTERS_MAX, printable
from protos.tick import Tick, open_tick, tick_body
from protos.toml_file import describe as describe_mistakes
from protos.v1 import archive_pb2, coordinator_pb2, log_pb2, update_pb2

Door = Callable[[bytes], None]
RUN, HASH = b"r" * 32, b"h" * 32
STRANGER = Identity.from_seed(b"s" * 32)
STEP = 3
RANGES = 3
TICKET = Ticket(b"t" * 16, 1_800_000_000_000, 5, "lab machines")
PUSHED_TICK = Tick(1, RUN, 1, (SampleShare(STRANGER.public_key, 2),), (Range(0, 2),), 0)
SHAPES = [("table", (65, 64)), ("bias", (7,))]


def sealed(kind: int, body: bytes) -> bytes:
    return seal_bytes(STRANGER, kind, RUN, body).SerializeToString()


def envelope(data: bytes) -> None:
    open_envelope(data, kind=Kind.KIND_REPORT, run_id=RUN, bytes_max=1 << 16)


def announcement(data: bytes) -> None:
    inbox = Inbox(RUN)
    inbox.move_head(STEP - 1, HASH)
    for raw in (data, sealed(Kind.KIND_ANNOUNCEMENT, data)):
        try:
            inbox.offer(raw, 10_000)
        except Refusal:
            continue


def entry(data: bytes) -> None:
    signed = open_entry(sealed(Kind.KIND_LOG_ENTRY, data), run_id=RUN, coordinator=STRANGER.public_key)
    entry_body(signed.entry)  # what came in can be written again


def tick(data: bytes) -> None:
    opened = open_tick(sealed(Kind.KIND_TICK, data), run_id=RUN, coordinator=STRANGER.public_key)
    tick_body(opened)


def optimizer(config: DeMoConfig | PaperConfig) -> DeMo | PaperDeMo:
    named = [(name, torch.zeros(shape, requires_grad=True)) for name, shape in SHAPES]
    return PaperDeMo(named, config) if isinstance(config, PaperConfig) else DeMo(named, config)


@cache
def payload(config: DeMoConfig | PaperConfig) -> Door:
    """Bytes as a whole payload, and as the votes in a good one: what the door lets through, the optimizer must bear."""
    demo = optimizer(config)
    digest = demo.layout.digest()
    door = UpdateDoor(RUN, digest, demo.layout.chunks, demo.form)

    def run(data: bytes) -> None:
        for raw in (data, encode_update(RUN, digest, Update(STEP, config.size, data))):
            try:
                update = door.open(raw, STEP)
            except Refusal:
                continue
            demo.apply([(update.size, update.votes)], 2.0**-9)

    return run


CONFIGS: dict[str, DeMoConfig | PaperConfig] = {
    "payload-groups": DeMoConfig(group_size=128),
    "payload-topk": DeMoConfig(selection="topk", top_k=32, values="2bit"),
    "payload-paper": PaperConfig(chunk=32, top_k=8),
    "payload-sized": DeMoConfig(values="8bit", magnitudes=True, base=BaseConfig(name="sgd")),
    "payload-random": DeMoConfig(selection="random", one_in=32),
}


def votes(config: DeMoConfig | PaperConfig, data: bytes) -> None:
    payload(config)(data)


def cast_votes(config: DeMoConfig | PaperConfig, *, silent: bool = False) -> bytes:
    """What an honest peer sends; `silent`: one that has no gradient for the table, whose votes say nothing."""
    demo = optimizer(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in demo.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    if silent:
        demo.parameters[0].grad = None
    found = demo.propose(2.0**-9).payload
    UpdateDoor(RUN, demo.layout.digest(), demo.layout.chunks, demo.form).form.check(
        found, config.size, demo.layout.chunks
    )
    return found


@cache
def _summing() -> tuple[DeMo, UpdateDoor]:
    demo = optimizer(DeMoConfig(selection="random"))
    assert isinstance(demo, DeMo)
    return demo, UpdateDoor(RUN, demo.layout.digest(), demo.layout.chunks, SUMMED)


def sum_of_votes(data: bytes) -> None:
    """Bytes as a whole aggregate, and as the sums in a good one: what is let through, the optimizer must bear.

    So for slices.
    """
    demo, door = _summing()
    good = encode_update(RUN, door.layout_digest, Update(STEP, 16, data))
    head = data[: list_bytes(RANGES)]
    for ranges, raw in ((1, data), (1, good), (RANGES, data), (RANGES, joined([good] * RANGES)), (RANGES, head + good)):
        one = replace(door, ranges=ranges)
        with suppress(Refusal):
            updates = [one.open(raw, STEP)]
            demo.apply([(update.size, update.votes) for update in updates], 2.0**-9)
        with suppress(Refusal):
            updates = [*open_aggregate(one, raw, STEP, len(raw), lambda refusal: None)]
            demo.apply([(update.size, update.votes) for update in updates], 2.0**-9)


def sum_request(data: bytes) -> None:
    open_contributions(parse(coordinator_pb2.SumRequest, data).contributions)


def manifest(data: bytes) -> None:
    open_manifest(data)


def shards(data: bytes) -> None:
    """A web server's manifest of token shards."""
    with suppress(DataError):
        made = shard_manifest.parse(data, "it")
        assert shard_manifest.parse(made.encode(), "it") == made, "written again, it is another"


def snapshot(data: bytes) -> None:
    load(data, {name: torch.zeros(shape) for name, shape in SHAPES})


def starting_state(data: bytes) -> None:
    start = start_from_body(parse(log_pb2.StartingState, data))
    assert start_from_body(start_body(start)) == start, "written again, it is another"


def end(data: bytes) -> None:
    opened = open_end(sealed(Kind.KIND_RUN_END, data), run_id=RUN, coordinator=STRANGER.public_key)
    assert str(opened).isprintable()


def config(data: bytes) -> None:
    config_from_json(data.decode(errors="replace"))


def invite(data: bytes) -> None:
    whole = data + hashlib.sha256(data).digest()[:4]
    for text in (data.decode(errors="replace"), SCHEME + base64.urlsafe_b64encode(whole).decode().rstrip("=")):
        try:
            Invite.parse(text)
        except OperatorError:
            continue


def ticket(data: bytes) -> None:
    """As it is, and as a body that the coordinator signed."""
    for raw in (data, sealed(Kind.KIND_TICKET, data)):
        try:
            opened = open_ticket(raw, run_id=RUN, coordinator=STRANGER.public_key)
        except Refusal:
            continue
        again = seal_ticket(STRANGER, RUN, opened)
        assert open_ticket(again, run_id=RUN, coordinator=STRANGER.public_key) == opened, "written again, it is another"


def peer_record(data: bytes) -> None:
    open_record(sealed(Kind.KIND_PEER_RECORD, data), RUN)


def dht_record(data: bytes) -> None:
    """As a value and a subkey; and the value in a record that fits otherwise, as far as the signature."""
    cut, key = len(data) // 2, DHTID.generate(source=run_key(RUN)).to_bytes()
    subkey = MSGPackSerializer.dumps(STRANGER.peer_id)
    signed = MSGPackSerializer.dumps(sealed(Kind.KIND_PEER_RECORD, data))
    for serves in (None, RUN):
        _OwnRecordsOnly(serves).validate(DHTRecord(key, data[:cut], data[cut:], 1e9))
        _OwnRecordsOnly(serves).validate(DHTRecord(key, subkey, signed, 1e9))


def address(data: bytes) -> None:
    """A list of addresses, one a line, as a joiner says them; each is parsed again from what was kept."""
    lines = data.decode(errors="replace").split("\n")
    for kept in (usable(lines), usable(lines, STRANGER.peer_id)):
        assert [parse_address(it.text).text for it in kept] == [it.text for it in kept]
        for of, to in ((None, None), (network_of(lines[0]), network_of(lines[-1]))):
            assert len(shown(kept, of, to)) <= ADDRESSES_SHOWN_MAX
    for line in lines:
        parse_address(line)


def foreign_text(data: bytes) -> None:
    text = printable(data.decode(errors="replace"))
    assert text.isprintable()
    assert len(text) <= TEXT_CHARACTERS_MAX


def requests(data: bytes) -> None:
    opened = VerifiedEnvelope(Kind.KIND_REPORT, RUN, STRANGER.public_key, data, b"")
    for attempt in (
        lambda: coordinator_doors.joined(opened, parse(coordinator_pb2.JoinBody, data), STRANGER.public_key, 0, ""),
        lambda: coordinator_doors.reported(opened, parse(coordinator_pb2.ReportBody, data)),
        lambda: parse(coordinator_pb2.FollowBody, data),
        lambda: parse(coordinator_pb2.CreateRunBody, data),
        lambda: parse(coordinator_pb2.CreateTicketBody, data),
    ):
        try:
            attempt()
        except Refusal:
            continue


class _Sink:
    """The writing end that nobody reads."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...

    @property
    def transport(self) -> _Sink:
        return self

    def abort(self) -> None: ...


def blob_stream(data: bytes) -> None:
    """As a server's client, and as a client's server."""

    async def both() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        audience = Audience(frozenset())  # a stranger's stream
        server = BlobServer(lambda sha256: b"blob" * 10, WireBytes(), lambda refusal: None, audience)
        with suppress(asyncio.IncompleteReadError):
            await server.handle("stranger", reader, _Sink())  # type: ignore[arg-type]
        answer = asyncio.StreamReader()
        answer.feed_data(data)
        answer.feed_eof()
        streams = HolderStreams(None)  # type: ignore[arg-type]
        stream = Stream(HASH, answer, _Sink())  # type: ignore[arg-type]
        for total_max, most in ((None, 64), (256, 256)):
            for begun in (bytearray(), bytearray(8)):
                attempt, asking = Attempt(HASH, 64, 0.0, begun), Asking(HASH, total_max, streams, WireBytes())
                with suppress(NetworkError, Refusal, asyncio.IncompleteReadError):
                    async with asyncio.timeout(None) as deadline:
                        await asking.transfer(stream, attempt, deadline)
                assert len(attempt.buffer) <= most, "more bytes were kept than were asked for"

    asyncio.run(both())


class _Announcements:
    """The announcements of a peer with one open step, without the pulls that follow."""

    def __init__(self) -> None:
        self._inbox = Inbox(RUN)
        self._inbox.open_step(PUSHED_TICK.step, PUSHED_TICK.places)

    @contextmanager
    def pushed(self, data: bytes, author: bytes) -> Iterator[Announced | None]:
        announced = self._inbox.offer(data, PUSHED_BYTES_MAX)
        if announced.author != author:
            raise Refusal(Reason.UNKNOWN_SIGNER, "a push by another than its author")
        yield announced if self._inbox.may_pull(announced) else None

    def takes(self, step: int) -> tuple[int, ...]:
        return (0,)


def pushed_votes(data: bytes) -> None:
    """A stream of pushes: as it comes, and as an announcement's body with a good signature, then the payload."""
    kept: list[tuple[int, bytes, bytes]] = []
    view = View(RUN, STRANGER.public_key)
    view.tick = PUSHED_TICK
    server = PushServer(
        _Announcements(),  # type: ignore[arg-type]
        view,
        lambda *kept_one: kept.append(kept_one),
        WireBytes(),
        lambda refusal: None,
    )
    body, payload = data[1 : 1 + data[0]] if data else b"", data[1 + data[0] :] if data else b""
    parts = (sealed(Kind.KIND_ANNOUNCEMENT, body), payload)
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    async def both() -> None:
        for stream in (data, framed, framed + framed):
            reader = asyncio.StreamReader()
            reader.feed_data(stream)
            reader.feed_eof()
            await server.handle(STRANGER.peer_id, reader, _Sink())  # type: ignore[arg-type]

    asyncio.run(both())
    assert len(kept) <= 1, "more than one payload of an author and a step was kept"
    assert all(hashlib.sha256(votes).digest() == sha256 for _, sha256, votes in kept)


def reach_stream(data: bytes) -> None:
    """A request to dial back, and the answer to such a request. Nothing here dials: no port of a good request is above 1023."""
    remote = reach.Remote(STRANGER.peer_id, "/ip4/11.0.0.1/tcp/4001", "11.0.0.1")

    def fed(more: bytes) -> asyncio.StreamReader:
        reader = asyncio.StreamReader()
        reader.feed_data(more)
        reader.feed_eof()
        return reader

    async def both() -> None:
        async def seen_at(_remote: str) -> str:
            return "11.0.0.2"

        async def opened(_key: bytes, _protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return fed(data), _Sink()  # type: ignore[return-value]

        answerer = reach.Answerer(seen_at, lambda: True)
        low = bytes(byte & 3 if at % 2 else byte for at, byte in enumerate(data))
        with suppress(asyncio.IncompleteReadError):
            await answerer.answer("stranger", fed(low), _Sink())  # type: ignore[arg-type]
        told = await reach.ask_all(opened, [remote], [4001, 4002])
        found = reach.conclude(told, STRANGER.peer_id)
        usable(found.addresses, STRANGER.peer_id)
        assert all(parse_address(address).peer for address in (*found.addresses, *found.relays))

    asyncio.run(both())


def control(data: bytes) -> None:
    """The owner's door: a line with the secret, and what a stranger may send."""
    secret = "s" * 64
    for line in (data, b'{"secret": "' + secret.encode() + b'", ' + data):
        answer = answered(line, secret, {"me": lambda request: {"steps": request.get("steps")}})
        assert answer.keys() in ({"ok"}, {"error"})
        json.dumps(answer)


def operator_page(data: bytes) -> None:
    """What a page's process that was taken over sends to the process behind it: a request, and the values of its action."""
    try:
        request = Request.model_validate_json(data)
        what = ALL_ACTIONS.get(request.what)
        values = None if what is None else what.values.model_validate(request.values)
    except ValidationError as error:
        describe_mistakes(error)
        return
    if isinstance(values, Changes):
        with suppress(OperatorError):
            wanted_settings(values)
    if isinstance(values, Invites):
        with suppress(OperatorError):
            milliseconds(values.expires)
    json.dumps({} if values is None else values.told())


def archive(data: bytes) -> None:
    for read in (_archived_records, lambda d: files.layout_shapes(d.decode(errors="replace")), _frame):
        try:
            read(data)
        except Refusal:
            continue


def packed(data: bytes) -> None:
    """A message that is packed against the one before, as a coordinator may send it."""
    for before in (b"", HASH * 100):
        with suppress(Refusal):
            parse(coordinator_pb2.Decided, calls.unpack(data, before, 1 << 16))


def _archived_records(data: bytes) -> None:
    raw = io.BytesIO(data)
    raw.name = "payloads"
    for record in files._records(io.BufferedReader(raw), 1 << 16):
        files.payload_of(parse(archive_pb2.ArchivedPayload, record))


def _frame(data: bytes) -> None:
    files.payload_of(archive_pb2.ArchivedPayload(payload_zstd=data))


def evaluation(data: bytes) -> None:
    """A held-out loss: its body with a good signature, and as a coordinator that signs entries may give it."""
    signed = seal_bytes(STRANGER, Kind.KIND_EVALUATION, RUN, data).SerializeToString()
    with suppress(Refusal):
        reopen_evaluation(data)
    figures([signed, data], RUN)
    found = open_evaluation(signed, run_id=RUN)
    assert 0 <= found.loss < math.inf


def settings(data: bytes) -> None:
    """The changed settings of an entry, and what they make of a run; and those of the facts, for people."""
    body = parse(log_pb2.LogEntry, data)
    shown_ = changed_values(coordinator_pb2.ChangedSetting(setting=it, from_step=1) for it in body.settings)
    assert all(row["key"].isprintable() for row in shown_)
    config_ = with_settings(RunConfig(), settings_from_body(body.settings))
    assert config_.model_dump_json()


def public_runs(data: bytes) -> None:
    """A list from a web server: as it comes, as an entry, and as the body of an entry that the run's own coordinator signed."""
    with suppress(Refusal):
        open_runs(data, 1e9)
    with suppress(Refusal):
        body = parse(coordinator_pb2.ListedRun, data)
        run_id = run_id_of(body.facts.genesis)
        body.invite = Invite(run_id, ("host:1",), STRANGER.public_key, HASH, (), "run").link()
        signed = seal_bytes(STRANGER, Kind.KIND_LISTED_RUN, run_id, body.SerializeToString())
        runs, left_out = open_runs(list_text([signed.SerializeToString(), data]).encode(), 1e9)
        assert left_out, "bytes without a signature got through"
        for run in runs:
            json.dumps(run.values(), allow_nan=False)


DOORS: dict[str, Door] = {
    "envelope": envelope,
    "announcement": announcement,
    "entry": entry,
    "tick": tick,
    **{name: partial(votes, config) for name, config in CONFIGS.items()},
    "sum-of-votes": sum_of_votes,
    "sum-request": sum_request,
    "manifest": manifest,
    "shards": shards,
    "snapshot": snapshot,
    "config": config,
    "invite": invite,
    "ticket": ticket,
    "peer-record": peer_record,
    "dht-record": dht_record,
    "address": address,
    "foreign-text": foreign_text,
    "requests": requests,
    "blob-stream": blob_stream,
    "archive": archive,
    "packed": packed,
    "starting-state": starting_state,
    "end": end,
    "evaluation": evaluation,
    "settings": settings,
    "pushed-votes": pushed_votes,
    "control": control,
    "operator-page": operator_page,
    "reach": reach_stream,
    "public-runs": public_runs,
}
"""By name. Each may raise `Refusal`."""


def seeds() -> dict[str, list[bytes]]:
    """Good bytes for each door, so that the fuzzer begins behind the first check."""
    contribution = Contribution(HASH, HASH, 100, 4, 400, 1.5)
    made = Entry(STEP, HASH, (contribution,), lr_to_bits(1e-3), HASH, (Range(3, 9),), 99,
                 exclusions=(Exclusion(HASH, "why", by_operator=True),), readmitted=(HASH,),
                 aggregate=Aggregate(HASH, 9))  # fmt: skip
    summed = summed_entry(made, Aggregate(HASH, 9), HASH)
    ticked = Tick(STEP, HASH, 1, (SampleShare(HASH, 4),), (Range(0, 4),), lr_to_bits(1e-3), (HASH,))
    said = update_pb2.Announcement(step=STEP, parent_hash=HASH, payload_sha256=HASH, payload_bytes=9)
    state = pack({name: torch.zeros(shape) for name, shape in SHAPES})
    listed = describe(state, run_id=RUN, step=STEP, entry_hash=HASH, layout_digest=HASH).encoded
    report = coordinator_pb2.ReportBody(session_id=b"s" * 16, sequence=1)
    report.holdings.add(step=STEP, public_key=HASH, payload_sha256=HASH)
    report.held.step, report.held.attempt, report.held.places, report.held.payloads_sha256 = STEP, 1, b"\x05", HASH
    report.applied.add(step=STEP, state_digest=HASH)
    report.summed.step, report.summed.attempt, report.summed.payloads_sha256 = STEP, 1, HASH
    report.summed.aggregate.sha256, report.summed.aggregate.total_bytes = HASH, 9
    chunks = _summing()[1].chunks
    added = (np.arange(chunks * 256).reshape(chunks, 256) % 5 - 2).astype(np.int16)
    joining = coordinator_pb2.JoinBody(challenge=HASH, layout_digest=HASH, owner=coordinator_pb2.Owner(name="Ada"))
    asked = update_pb2.BlobRequest(sha256=HASH).SerializeToString()
    answered = update_pb2.BlobResponse(found=True, total_bytes=64, remaining_bytes=64).SerializeToString()
    framed = [len(frame).to_bytes(4, "big") + frame for frame in (asked, answered)]
    pushed = update_pb2.Announcement(
        step=1, parent_hash=RUN, payload_sha256=hashlib.sha256(b"votes").digest(), payload_bytes=5
    ).SerializeToString()
    archived = files.payload_record(b"votes" * 9, HASH, b"")
    genesis = log_pb2.Genesis(
        config_json=RunConfig().canonical_json(), coordinator_public_key=STRANGER.public_key, nonce=b"n" * 16
    )
    public = coordinator_pb2.ListedRun(facts=coordinator_pb2.GetRunResponse(genesis=genesis, head_step=3), peers=2)
    link = Invite(run_id_of(genesis), ("h:1",), STRANGER.public_key, HASH, (), "run")
    listed_run = sealed_run(STRANGER, link, public.facts, 1_800_000_000_000)
    return {
        "envelope": [sealed(Kind.KIND_REPORT, b"body")],
        "announcement": [said.SerializeToString(), sealed(Kind.KIND_ANNOUNCEMENT, said.SerializeToString())],
        "entry": [entry_body(made), entry_body(summed)],
        "tick": [tick_body(ticked).SerializeToString()],
        "end": [log_pb2.RunEnd(step=STEP, entry_hash=HASH, reason="enough").SerializeToString()],
        **{name: [cast_votes(config), cast_votes(config, silent=True)] for name, config in CONFIGS.items()},
        "sum-of-votes": [pack_sums(added, 2)],
        "sum-request": [
            coordinator_pb2.SumRequest(
                step=STEP, attempt=1, contributions=contributions_body([contribution])
            ).SerializeToString()
        ],
        "manifest": [listed],
        "shards": [
            shard_manifest.ShardManifest(
                "bytes", "0" * 64, 256, "uint8", (shard_manifest.Shard("000000.bin", 9, "0" * 64),), "a book"
            ).encode()
        ],
        "snapshot": [state[:400]],
        "config": [RunConfig().canonical_json().encode()],
        "invite": [
            Invite(RUN, ("host:1",), HASH, HASH, (), "run").link().encode(),
            Invite(RUN, ("h:1",), STRANGER.public_key, HASH, (), "run", seal_ticket(STRANGER, RUN, TICKET))
            .link()
            .encode(),
        ],
        "ticket": [ticket_body(TICKET).SerializeToString(), seal_ticket(STRANGER, RUN, TICKET)],
        "peer-record": [
            update_pb2.PeerRecord(
                addresses=[f"/ip4/1.2.3.4/tcp/1/p2p/{STRANGER.peer_id}"], sequence=1
            ).SerializeToString()
        ],
        "dht-record": [b"\xa4peer\xc4\x04data"],
        "address": [
            f"/ip4/1.2.3.4/tcp/1/p2p/{STRANGER.peer_id}\n/ip6/::1/udp/1/quic-v1/p2p/{STRANGER.peer_id}".encode(),
            f"/dns4/x.org/tcp/1/wss/p2p/{STRANGER.peer_id}/p2p-circuit/p2p/{STRANGER.peer_id}".encode(),
            b"ipv4:192.0.2.1:4711\nipv6:%5B2001:db8::1%5D:4711",
        ],
        "foreign-text": [b"cuda: NVIDIA H200", b"\x1b]0;owned\x07[/x]"],
        "requests": [report.SerializeToString(), joining.SerializeToString()],
        "blob-stream": [framed[0] + framed[0], framed[1] + b"x" * 64],
        "archive": [
            len(archived).to_bytes(4, "big") + archived,
            files.layout_text(SHAPES, {"table": "table"}).encode(),
        ],
        "packed": [calls.pack(sealed(Kind.KIND_TICK, HASH), before) for before in (b"", HASH * 100)],
        "pushed-votes": [bytes([len(pushed)]) + pushed + b"votes"],
        "reach": [b"\x02\x00\x50\x01\xbb", b"\x01\x0811.0.0.2\x01\x00", b"\x00\x0484.1"],
        "control": [b'"command": "me", "steps": 3}', b'{"command": "me"}'],
        "operator-page": [
            b'{"do": "ask", "what": "change", "values": {"settings": ["clock.steps=9", "optimizer.lr=[1, 2]"]}}',
            b'{"do": "ask", "what": "invite", "run": "", "values": {"uses": 2, "expires": "7d", "label": "x"}}',
            b'{"do": "login", "secret": "x", "address": "192.0.2.1"}',
        ],
        "evaluation": [
            log_pb2.Evaluation(
                step=5, loss=2.5, tokens=64, set_sha256=HASH, device="cpu", sample="a"
            ).SerializeToString()
        ],
        "settings": [
            log_pb2.LogEntry(
                settings=settings_body(settings_of({"clock.steps": 9, "optimizer.lr": 0.5, "admission.mode": "invite"}))
            ).SerializeToString()
        ],
        "public-runs": [list_text([listed_run]).encode(), public.SerializeToString()],
        "starting-state": [start_body(StartingState(RUN, HASH, STEP, HASH, HASH, 64, HASH, 9)).SerializeToString()],
    }


ALL = "all"
"""Every door in one process: the first byte says which."""


def any_door(data: bytes) -> None:
    if data:
        list(DOORS.values())[data[0] % len(DOORS)](data[1:])


def corpus(name: str) -> list[bytes]:
    """Good bytes to begin with."""
    if name != ALL:
        return seeds()[name]
    return [bytes([number]) + seed for number, door in enumerate(DOORS) for seed in seeds()[door]]


def knock(name: str) -> Callable[[bytes], Any]:
    """The door as the fuzzer calls it: a refusal is what a door is for."""
    door = any_door if name == ALL else DOORS[name]

    def run(data: bytes) -> None:
        try:
            door(data)
        except Refusal:
            return

    return run
