"""What happens to a run, in words: one line an event, its effects below it."""

from collections.abc import Sequence

from coordinator.clock import effects, events
from protos.identity import short
from protos.log import Entry
from protos.slices import places_of
from protos.tick import Tick
from tests.unit.coordinator.driver import Swarm, key, sha

NAMES = ("ada", "bob", "cid", "dan")


def name(public_key: bytes) -> str:
    """Of a peer of the scenarios; their keys count from 0."""
    return next((NAMES[n] for n in range(len(NAMES)) if key(n) == public_key), "the operator")


class Transcript(Swarm):
    """A swarm that writes down what the machine is told and what it wants done."""

    lines: list[str]

    def note(self, text: str) -> None:
        """A line that explains what follows."""
        self._lines().append(f"\n# {text}")

    def begin(self, text: str) -> None:
        """What happened until now is not shown."""
        self._lines().clear()
        self.note(text)

    def text(self) -> str:
        text = "\n".join(self._lines()).strip("\n") + "\n"
        for number, who in enumerate(NAMES):
            text = text.replace(short(key(number)), who)
        return text

    def _lines(self) -> list[str]:
        if not hasattr(self, "lines"):
            self.lines = []  # `Swarm` feeds events while it is made
        return self.lines

    def feed(self, event: events.Event) -> list[effects.Effect]:
        before = self.run.phase, self.run.reason
        wants = super().feed(event)
        self._lines().append(f"{self.now / 1000:7.3f} s  {told(event)}")
        self._lines().extend(f"{'':11}-> {wanted(effect)}" for effect in wants)
        if (self.run.phase, self.run.reason) != before:
            self._lines().append(f"{'':11}   the run is {self.run.phase.name.lower()}: {self.run.reason}")
        return wants

    def crash(self, down_ms: int = 1_000) -> None:
        self.note("The coordinator is killed. All streams break.")
        super().crash(down_ms)

    def restart(self) -> None:
        super().restart()
        self.note(f"A coordinator reads the journal: {len(self.journal)} records. Its timer is set to {self.timer} ms.")


def told(event: events.Event) -> str:
    """An event, as what its peer does."""
    match event:
        case events.JoinAsked():
            return f"{name(event.public_key)} asks to take part"
        case events.Connected():
            return f"{name(event.public_key)} follows the log"
        case events.Disconnected():
            return f"{name(event.public_key)} {'says goodbye' if event.leaving else 'is disconnected'}"
        case events.Reported():
            return f"{name(event.public_key)} reports: {'; '.join(_reported(event))}"
        case events.TimerFired():
            return "the timer fires"
        case _:
            return type(event).__name__


def _reported(event: events.Reported) -> list[str]:
    found = []
    if event.claim is not None:
        claim = event.claim
        found.append(
            f"announces payload {payload(claim.payload_sha256)} of step {claim.step} "
            f"({claim.samples} samples, {claim.compute_ms} ms)"
        )
    if event.held is not None:
        found.append(f"holds the payloads of places {', '.join(map(str, places_of(event.held.mask)))}")
    if event.holdings:
        found.append(f"holds {', '.join(payload(held) for _, _, held in event.holdings)}")
    found += [f"has applied step {step}" for step, _ in event.applied]
    found += [f"stored the snapshot of step {fact.step}" for fact in event.snapshots]
    found += [f"proves two payloads of {name(offence.author)}" for offence in event.offences]
    return found


def payload(sha256: bytes) -> str:
    """As its author and step, where it is one that an honest peer of the scenarios makes."""
    for number, who in enumerate(NAMES):
        for step in range(1, 9):
            if sha256 == sha("payload", step, number, 0):
                return f"{who}/{step}"
    return sha256.hex()[:8]


def wanted(effect: effects.Effect) -> str:
    """An effect, as what is done."""
    match effect:
        case effects.Append():
            return f"write to the journal: {_record(effect.record)}"
        case effects.SendTick():
            return f"send the tick of step {effect.tick.step}: {effect.deadline_ms} ms are left"
        case effects.SendEntry():
            return f"send entry {effect.step}"
        case effects.SendNotice():
            to = "everybody" if effect.to is None else name(effect.to)
            return f"tell {to}: {effect.reason}"
        case effects.SendAnnouncement():
            return f"pass {name(effect.public_key)}'s announcement on"
        case effects.Arm():
            return f"set the timer to {effect.at_ms / 1000:.3f} s"
        case effects.Refuse():
            return f"refuse {name(effect.public_key)}: {effect.reason}"
        case effects.EndStream():
            return f"end the stream of {name(effect.public_key)}"


def _record(record: effects.Record) -> str:
    match record:
        case effects.TickOpened():
            return _tick(record.tick)
        case effects.EntryCommitted():
            return _entry(record.entry)
        case effects.SnapshotAgreed():
            return f"the snapshot of step {record.snapshot.step} is agreed"
        case effects.LayoutFixed():
            return f"the layout is fixed, {record.parameters} parameters"
        case effects.PeerLeft():
            return f"{name(record.public_key)} has left step {record.step}"
        case effects.Equivocated():
            return f"{name(record.offence.author)} announced two payloads of step {record.offence.step}"
        case _:
            return type(record).__name__


def _tick(tick: Tick) -> str:
    shares = ", ".join(
        f"{name(share.public_key)} {share.samples} (place {place})" for place, share in enumerate(tick.roster)
    )
    again = f", opened again ({tick.attempt})" if tick.attempt > 1 else ""
    return f"tick {tick.step}{again}: samples {_ranges([(r.start, r.stop) for r in tick.pool])}; shares {shares}"


def _ranges(found: Sequence[tuple[int, int]]) -> str:
    return " and ".join(f"{start} to {stop - 1}" for start, stop in found) or "none"


def _entry(entry: Entry) -> str:
    count = ", ".join(name(c.public_key) for c in entry.contributions)
    text = f"entry {entry.step}: the votes of {count} count"
    if entry.returned_samples:
        text += f"; samples {_ranges([(r.start, r.stop) for r in entry.returned_samples])} go back"
    if entry.exclusions:
        text += f"; excluded: {', '.join(name(it.public_key) for it in entry.exclusions)}"
    return text + ("; with the digest of the state before" if entry.parent_state_digest else "")
