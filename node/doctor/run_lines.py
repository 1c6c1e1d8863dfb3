"""Lines about a run, as it is found from this machine: may it be joined, does it fit, what will this peer give. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from node.doctor.doctor_facts import Fault, Found, InLine, Others, Reach, Seat
from node.doctor.lines import Line, Severity, texts, unknown, wrong_clock
from protos.address import Scope, scope_of, usable
from protos.text import amount, span, things

# What a peer will contribute to a run, and what it costs its line: an estimate from the run's facts. Pure.

SECONDS_AN_HOUR = 3600


@dataclass(frozen=True)
class Prediction:
    """Of one peer, on average."""

    share: float
    """Part of the swarm's samples, 0 to 1."""
    samples_a_step: float
    step_seconds: float
    up_bytes_an_hour: float
    down_bytes_an_hour: float


def predict(own: float, others: Others, payload_bytes: int) -> Prediction:
    """`own`: samples a second of this machine. Shares follow speed; a step takes what it takes now, or what computing takes.

    A peer sends its payload to each other peer and anchor, and gets the payload of each other peer. Large swarms send less:
    peers pass large payloads on.
    """
    assert own > 0, "a peer that computes nothing contributes nothing"
    together = own + others.samples_per_second
    share = own / together
    computing = others.batch_samples / together
    step_seconds = computing if others.steps_per_second is None else max(1 / others.steps_per_second, computing)
    steps_an_hour = SECONDS_AN_HOUR / step_seconds
    return Prediction(
        share,
        share * others.batch_samples,
        step_seconds,
        steps_an_hour * payload_bytes * (others.ready + others.anchors),
        steps_an_hour * payload_bytes * others.ready,
    )


ROUND_TRIP_MS_MAX = 500.0
"""Beyond this, small models wait more for the coordinator than for their own gradients."""
DOWN_BYTES_A_SECOND_MIN = 250_000
"""Two megabits a second: below, a snapshot of a model of 100 M parameters takes half an hour."""
SMALLER_VOTES = "Votes get as small as the run allows, unless vote_size is a number or off. Steps wait for this line."
CARRIER = ipaddress.ip_network("100.64.0.0/10")
RELAY_TODO = (
    "If `join` finds no relay either, forward a port of your router to this machine (--listen 0.0.0.0:PORT), or name a relay "
    "(--set reachability=ADDRESS)."
)


def of_way(found: Found) -> list[Line]:
    """The lines that the coordinator's first answer gives."""
    return _there(coordinator(found), run(found.facts), clock(found.facts))


def of_seat(found: Found) -> list[Line]:
    """All other lines that need the run, in the order in which `join` meets them."""
    return _there(
        asks(found.asks),
        admission(found.admitted),
        *texts(found.texts),
        *seat(found.seat),
        router(found.reach),
        reachable(found.reach),
        download(found),
        upload(found),
        contribution(found),
    )


def of_run(found: Found) -> list[Line]:
    """All lines that need the run."""
    return of_way(found) + of_seat(found)


def _there(*lines: Line | None) -> list[Line]:
    return [line for line in lines if line is not None]


def _fault(name: str, fault: Fault, todo: str = "") -> Line:
    """A fault that the run itself decided is a problem; another one is only not known."""
    return Line(name, Severity.PROBLEM, fault.why, todo) if fault.refused else unknown(name, fault, todo)


def coordinator(found: Found) -> Line:
    """The way to the coordinator."""
    if isinstance(found.round_trip_ms, Fault):
        todo = "Check this machine's internet connection; then ask the run's operator whether the coordinator serves."
        return Line("coordinator", Severity.PROBLEM, found.round_trip_ms.why, todo)
    text = f"{found.address}, round trip {found.round_trip_ms:.0f} ms"
    if found.round_trip_ms > ROUND_TRIP_MS_MAX:
        return Line("coordinator", Severity.WARNING, text, "Use a cable instead of wireless, or another connection.")
    return Line("coordinator", Severity.OK, text)


def run(facts: Others | Fault) -> Line:
    """The run itself. A run of another format, or one that is finished, is a problem."""
    if isinstance(facts, Fault):
        return _fault("run", facts)
    text = f"{facts.phase}, step {facts.head_step} of {facts.steps}, {things(facts.ready, 'peer')} ready"
    if facts.phase == "finished":
        return Line("run", Severity.PROBLEM, text, "Ask the run's operator for the link of another run.")
    return Line("run", Severity.OK, text)


def clock(facts: Others | Fault) -> Line | None:
    """A clock that is not the coordinator's; None if they agree."""
    return None if isinstance(facts, Fault) or not facts.clock_wrong else wrong_clock(facts.clock_wrong)


def asks(asked: str | Fault) -> Line:
    """What the run wants of this machine."""
    if isinstance(asked, Fault):
        return _fault("request", asked)
    return Line("request", Severity.OK, asked)


def admission(admitted: str | InLine | Fault) -> Line:
    """Whether the coordinator lets this peer in."""
    if isinstance(admitted, InLine):
        before = things(admitted.waiting, "peer")
        text = f"the run is full, and {before} in line before this one; `join` waits in line, too, and says its place"
        return Line(
            "admission",
            Severity.WARNING,
            text,
            "Start `swarmentum join`, and leave it running: the line keeps its place.",
        )
    if isinstance(admitted, Fault):
        return _fault("admission", admitted, "Send your peer id to the run's operator." if admitted.refused else "")
    return Line("admission", Severity.OK, f"admitted as peer {admitted}")


def seat(found: Seat | Fault) -> list[Line]:
    """Memory, disk and speed for the run's own model."""
    if isinstance(found, Fault):
        return [_fault("model", found)]
    lines = [
        Line("model", Severity.OK if found.micro_batch else Severity.PROBLEM, found.why),
        Line("run's disk", Severity.OK if found.disk_fits else Severity.PROBLEM, found.disk),
    ]
    if found.samples_per_second is None:
        return [*lines, unknown("speed", Fault(found.speed))]
    return [*lines, Line("speed", Severity.OK, f"{found.samples_per_second:.3g} samples a second ({found.speed})")]


def router(reach: Reach | Fault) -> Line:
    """The kind of NAT between this machine and the coordinator, by the address that the coordinator sees."""
    if isinstance(reach, Fault):
        return unknown("router", reach)
    if not reach.seen_from:
        return unknown("router", Fault("the coordinator does not say from which address it sees this machine"))
    seen, own = ipaddress.ip_address(reach.seen_from), _own(reach.addresses)
    if scope_of(seen) is not Scope.PUBLIC:
        return unknown("router", Fault(f"the coordinator is in this machine's own network ({seen})"))
    if seen in own:
        return Line("router", Severity.OK, f"none: this machine has the public address {seen}")
    if any(address in CARRIER for address in own if address.version == CARRIER.version):
        text = f"carrier-grade NAT: your provider shares {seen} among customers; `join` takes a relay by itself"
        return Line("router", Severity.OK, text)
    return Line("router", Severity.OK, f"a router between this machine and the internet ({seen} outside)")


def reachable(reach: Reach | Fault) -> Line:
    """Whether other peers can dial this machine, by the addresses that libp2p finds for it."""
    if isinstance(reach, Fault):
        return unknown("reachability", reach)
    found = usable(reach.addresses)
    peers = f"{things(reach.connected, 'peer')} answered"
    if reach.dialled:
        return Line("reachability", Severity.OK, f"peers of the run could dial this machine; {peers}")
    if reach.dialled is False and reach.relays:
        text = f"nobody can dial this machine; `join` takes one of {reach.relays} relays by itself; {peers}"
        return Line("reachability", Severity.OK, text)
    if reach.dialled is False:
        text = f"nobody can dial this machine, and no connected peer is a relay now; `join` goes on looking; {peers}"
        return Line("reachability", Severity.WARNING, text, RELAY_TODO)
    if any(address.scope is Scope.PUBLIC and not address.relay for address in found):
        return Line("reachability", Severity.OK, f"libp2p found a public address for this machine; {peers}")
    if any(address.relay for address in found):
        return Line("reachability", Severity.OK, f"through a relay; {peers}")
    if reach.seen_from and scope_of(ipaddress.ip_address(reach.seen_from)) is not Scope.PUBLIC:
        return Line("reachability", Severity.OK, f"in the coordinator's own network; {peers}")
    text = f"no peer said whether it can dial this machine; `join` asks again, and takes a relay by itself ({peers})"
    return Line("reachability", Severity.UNKNOWN, text)


def _own(addresses: tuple[str, ...]) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """IP addresses in multiaddresses that lead straight to this machine."""
    return {address.ip for address in usable(addresses) if address.ip is not None and not address.relay}


def download(found: Found) -> Line:
    """Bytes a second from peers of the run."""
    if isinstance(found.download, Fault):
        return unknown("download", found.download)
    rate = found.download.size / max(found.download.seconds, 1e-6)
    text = f"{amount(rate)} a second ({amount(found.download.size)} of a snapshot in {found.download.seconds:.1f} s)"
    text += f"; to join takes {amount(found.download.of)}, about {span(found.download.of / rate)}"
    if rate < DOWN_BYTES_A_SECOND_MIN:
        return Line("download", Severity.WARNING, text, "Use a cable instead of wireless, or another connection.")
    return Line("download", Severity.OK, text)


def upload(found: Found) -> Line:
    """Bytes a second to a peer of the run, against what the votes need."""
    if isinstance(found.upload, Fault):
        return unknown("upload", found.upload)
    rate, told = found.upload.size / max(found.upload.seconds, 1e-6), predicted(found)
    text = f"{amount(rate)} a second ({amount(found.upload.size)} of test bytes in {found.upload.seconds:.1f} s)"
    if told is not None:
        votes = told.up_bytes_an_hour / SECONDS_AN_HOUR * told.step_seconds
        text += f"; a step's votes take about {span(votes / rate)}"
    if told is not None and rate < told.up_bytes_an_hour / SECONDS_AN_HOUR:
        return Line("upload", Severity.WARNING, f"{text}; the votes need more at the run's pace", SMALLER_VOTES)
    return Line("upload", Severity.OK, text)


def predicted(found: Found) -> Prediction | None:
    """What this peer will give; None where too little is known."""
    facts, own = found.facts, found.seat
    if isinstance(facts, Fault) or isinstance(own, Fault) or not own.samples_per_second or own.payload_bytes is None:
        return None
    return predict(own.samples_per_second, facts, own.payload_bytes)


def contribution(found: Found) -> Line:
    """The prediction in one line."""
    told, own = predicted(found), found.seat
    if told is None or isinstance(own, Fault):
        return unknown("contribution", Fault("it needs this machine's speed and the run's facts"))
    more = own.most_bytes / (own.payload_bytes or 1)
    return Line(
        "contribution",
        Severity.OK,
        f"about {told.samples_a_step:.1f} samples a step of {told.step_seconds:.2g} s, {100 * told.share:.0f} % of the swarm, "
        f"{amount(told.up_bytes_an_hour)} an hour up, {amount(told.down_bytes_an_hour)} an hour down"
        + (f"; up to {more:.2g} times as much while all uplinks have room (vote_size)" if more > 1 else ""),
    )
