"""Probes of a run: the way to its coordinator, admission, the overlay, and a bounded download from its peers.

Joins nothing: the coordinator opens no session, and the overlay sees an identity that lives as long as the probe. Pulls at most
DOWNLOAD_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from node.blobs.blobs import WireBytes
from node.blobs.fetcher import BlobFetcher
from node.blobs.testbytes import Upload, measure
from node.doctor.doctor_facts import Download, Fault, InLine, Others, Reach, fault_of
from node.link.client import CoordinatorClient
from node.link.run_reader import read_facts
from node.overlay.host import Host
from node.overlay.reach import ReachState
from node.overlay.settings import OverlaySettings
from node.snapshot.pieces import SnapshotManifest, open_manifest
from node.swarm.facts import Snapshot, snapshot_of
from node.training.sync import manifest_bytes
from protos import clocks
from protos.calls import way_of
from protos.changes import in_force
from protos.errors import NetworkError, OperatorError, SwarmentumError, in_words
from protos.http_proxy import HttpProxy
from protos.identity import Identity, peer_id, public_key_of
from protos.invite import Invite
from protos.limits import FULL
from protos.run_config import RunConfig
from protos.run_facts import phase_word
from protos.v1 import coordinator_pb2 as pb

DOWNLOAD_BYTES_MAX = 4 << 20
DOWNLOAD_SECONDS_MAX = 15.0
"""A piece that is not here by then is not waited for."""
DOWNLOAD_SECONDS_WANTED = 5.0
OVERLAY_SECONDS_MAX = 60.0
UPLOADS_TRIED_MAX = 4
CONNECT_SECONDS_MAX = 5.0
ROUND_TRIPS = 3


@dataclass(frozen=True)
class ProbedRun:
    """A run, as its coordinator tells it."""

    facts: pb.GetRunResponse
    config: RunConfig
    at: float
    """When that was, on this machine's monotonic clock."""
    clock_wrong: str = ""
    """How this machine's wall clock differs from the coordinator's; empty: it does not."""


@dataclass(frozen=True)
class Way:
    """The way to the coordinator, and the run behind it."""

    address: str
    round_trip_ms: float | Fault
    run: ProbedRun | Fault


async def way_to(invite: Invite) -> Way:
    """The first coordinator of the invite that answers, and what the acting one says about the run."""
    address, round_trip = await _round_trip(invite.coordinators)
    if isinstance(round_trip, Fault):
        return Way(address, round_trip, Fault("no coordinator answers"))
    try:
        return Way(address, round_trip, await look(invite))
    except NetworkError as error:  # something took the connection: a network's login page, another program
        return Way(address, fault_of(error), Fault("no coordinator answers"))
    except SwarmentumError as error:
        return Way(address, round_trip, fault_of(error))


async def look(invite: Invite) -> ProbedRun:
    """One look at a run, with its settings as they are now. Raises NetworkError, RefusedError, Refusal, or OperatorError for a
    run of another format."""
    facts, config = await read_facts(invite)
    config = in_force(config, facts.changed)
    return ProbedRun(facts, config, time.monotonic(), clocks.apart(datetime.now(UTC), facts.unix_ms))


async def _round_trip(addresses: Sequence[str]) -> tuple[str, float | Fault]:
    """The address, with the proxy that leads there if one does, and the shortest of some TCP handshakes, in ms."""
    fault = Fault("the invite names no coordinator")
    for address in addresses:
        host, _, port = address.rpartition(":")
        took = []
        proxy = await asyncio.to_thread(way_of, address)
        by = "" if proxy is None else f" through the HTTP proxy {proxy.at}"
        try:
            for _ in range(ROUND_TRIPS):
                began = time.monotonic()
                await _shake_hands(host.strip("[]"), int(port), proxy)
                took.append(time.monotonic() - began)
        except (OSError, ValueError) as error:
            fault = Fault(f"no coordinator answers at {address}{by}: {in_words(error)}")
            continue
        return address + by, 1000 * min(took)
    return ", ".join(addresses), fault


async def _shake_hands(host: str, port: int, proxy: HttpProxy | None) -> None:
    if proxy is not None:
        (await asyncio.to_thread(proxy.connect, host, port, CONNECT_SECONDS_MAX)).close()
        return
    async with asyncio.timeout(CONNECT_SECONDS_MAX):
        _, writer = await asyncio.open_connection(host, port)
    writer.close()


def others_of(run: ProbedRun, later: ProbedRun | Fault) -> Others:
    """The run's peers, and its pace between two looks."""
    newest = run if isinstance(later, Fault) else later
    facts, config = newest.facts, newest.config
    ready = [peer for peer in facts.peers if peer.phase == pb.PeerPhase.PEER_PHASE_READY]
    moved = facts.head_step - run.facts.head_step
    return Others(
        ready=sum(not peer.anchor for peer in ready),
        samples_per_second=sum(peer.samples_per_second for peer in ready if not peer.anchor),
        anchors=sum(peer.anchor for peer in ready),
        batch_samples=config.clock.batch_samples,
        head_step=facts.head_step,
        steps=facts.total_steps,
        phase=phase_word(facts),
        steps_per_second=moved / (newest.at - run.at) if moved > 0 else None,
        clock_wrong=run.clock_wrong,
    )


@dataclass(frozen=True)
class Inside:
    """What can be found once the run is known."""

    admitted: str | InLine | Fault
    reach: Reach | Fault
    download: Download | Fault
    upload: Upload | Fault
    later: ProbedRun | Fault


async def inside(invite: Invite, identity: Identity, overlay: OverlaySettings, run: ProbedRun) -> Inside:
    """Admission, the overlay, a download, and a second look at the run."""
    admitted, seen_from = await _admission(invite, identity, run)
    if isinstance(admitted, Fault):
        not_now = Fault("the run does not admit this peer")
        return Inside(admitted, not_now, not_now, not_now, run)
    reach_found, download_found, upload_found = await _overlay(invite, overlay, run, seen_from)
    try:
        later: ProbedRun | Fault = await look(invite)
    except SwarmentumError as error:
        later = fault_of(error)
    return Inside(admitted, reach_found, download_found, upload_found, later)


async def _admission(invite: Invite, identity: Identity, run: ProbedRun) -> tuple[str | InLine | Fault, str]:
    """This peer's id if it is admitted, or the line before a full run; and the address from which the coordinator sees it."""
    client = CoordinatorClient(invite, identity)
    try:
        await client.connect()
        return identity.peer_id, await client.may_join()
    except SwarmentumError as error:
        fault = fault_of(error)
        if fault.refused and FULL in fault.why:
            return InLine(run.facts.in_line), ""
        return replace(fault, why=f"{fault.why} (this peer is {identity.peer_id})"), ""
    finally:
        await client.close()


async def _overlay(
    invite: Invite, overlay: OverlaySettings, run: ProbedRun, seen_from: str
) -> tuple[Reach | Fault, Download | Fault, Upload | Fault]:
    """Get on the overlay for a moment, pull from the run's peers, and send test bytes to one."""
    with tempfile.TemporaryDirectory(prefix="swarmentum-doctor-") as folder:
        path = Path(folder) / "identity.key"
        host = Host(Identity.load_or_create(path), path, replace(overlay, listen_port=0, announce=()))
        known = tuple(dict.fromkeys([*invite.bootstrap, *run.facts.bootstrap]))
        try:
            async with asyncio.timeout(OVERLAY_SECONDS_MAX):
                await host.start(known)
                await host.finder.somebody()
                connected, finding = await host.connected(), await host.finder.ask()
                dialled = None if finding.verdict is ReachState.UNKNOWN else finding.verdict is ReachState.PUBLIC
                reach = Reach(tuple(await host.addresses()), len(connected), seen_from, dialled, len(finding.relays))
                newest = await look(invite)  # a small run makes a snapshot every few seconds, and peers drop older ones
                return reach, await _download(host, newest, set(connected)), await _upload(host)
        except TimeoutError:
            late = Fault(f"the overlay did not answer within {OVERLAY_SECONDS_MAX:.0f} s")
            return late, late, late
        except SwarmentumError as error:
            away = Fault("this machine is not on the overlay")
            return fault_of(error), away, away
        finally:
            await host.stop()


async def _upload(host: Host) -> Upload | Fault:
    """Test bytes to the first peer that takes them: connected directly, because a relay has a pace of its own."""
    direct = [remote for remote, is_direct in (await host.connected()).items() if is_direct]
    for remote in direct[:UPLOADS_TRIED_MAX]:
        with suppress(OperatorError):  # of other software
            found = await measure(host.open, public_key_of(remote))
            if found is not None:
                return found
    return Fault("no connected peer takes test bytes now" if direct else "no peer is connected directly")


async def _download(host: Host, run: ProbedRun, connected: set[str]) -> Download | Fault:
    """Pieces of the newest snapshot, one after the other."""
    if not run.facts.HasField("snapshot"):
        return Fault("the run has no snapshot yet")
    snapshot = snapshot_of(run.facts.snapshot)
    holders = sorted(snapshot.holders, key=lambda key: peer_id(key) not in connected)
    if not holders:
        return Fault("no peer of the run serves the snapshot now")
    fetcher = BlobFetcher(host, WireBytes(), lambda refusal: None)
    try:
        return await _pieces(fetcher, snapshot, holders)
    except TimeoutError:
        return Fault(f"no piece of the snapshot came within {DOWNLOAD_SECONDS_MAX:.0f} s")
    except (NetworkError, SwarmentumError) as error:
        return fault_of(error)
    finally:
        fetcher.close()


async def _pieces(fetcher: BlobFetcher, snapshot: Snapshot, holders: Sequence[bytes]) -> Download | Fault:
    size = manifest_bytes(snapshot)
    if size > DOWNLOAD_BYTES_MAX // 2:
        return Fault("the snapshot's manifest is too large to measure with")
    async with asyncio.timeout(DOWNLOAD_SECONDS_MAX):
        manifest = open_manifest(await fetcher.fetch(snapshot.root, size, holders))
        first = await _piece(fetcher, manifest, 0, holders)
    pulled, seconds, spent = *first, size + first[0]
    for index in range(1, len(manifest.piece_hashes)):
        if spent + manifest.piece_length(index) > DOWNLOAD_BYTES_MAX or seconds > DOWNLOAD_SECONDS_WANTED:
            break
        async with asyncio.timeout(DOWNLOAD_SECONDS_MAX):
            more, took = await _piece(fetcher, manifest, index, holders)
        pulled, seconds, spent = pulled + more, seconds + took, spent + more
    return Download(pulled, seconds, manifest.total_bytes)


async def _piece(
    fetcher: BlobFetcher, manifest: SnapshotManifest, index: int, holders: Sequence[bytes]
) -> tuple[int, float]:
    """Pull one piece: its bytes, and the seconds that it took."""
    began = time.monotonic()
    data = await fetcher.fetch(manifest.piece_hashes[index], manifest.piece_length(index), holders)
    return len(data), time.monotonic() - began
