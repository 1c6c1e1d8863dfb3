"""The door for gossiped announcements, pure: bytes in; a verified announcement or a refusal with its reason out.

The inbox takes each announcement once, and only for the next two steps: an author may be a step ahead of this peer's stream.
Only members of the step's roster are taken, so a peer never pulls a stranger's payload. ADR 8.

The inbox keeps a second announcement of one author and step as evidence, and its payload is not pulled. No honest peer signs
two (last_announcement.py). The inbox also keeps an announcement of the step that was decided last, if its author announced
another payload of that step here (ADR 8).

An announcement that comes before its step's tick waits for the tick. The roster limit bounds all that the inbox remembers, and
the inbox forgets it with the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protos import limits
from protos.equivocation import check_hashes, open_announcement
from protos.errors import Reason, Refusal
from protos.log import Entry
from protos.v1 import update_pb2

STEPS_AHEAD_MAX = 2
# Two announcements are evidence; more add nothing.
PAYLOADS_AN_AUTHOR_MAX = 2
# Announcements of one step that a peer gossips because the entry names other payloads.
DISPUTED_MAX = 4


@dataclass(frozen=True)
class Announced:
    """The content of a verified announcement: its author holds this payload of its own."""

    author: bytes
    step: int
    payload_sha256: bytes
    payload_bytes: int
    parent_hash: bytes
    envelope: bytes


class Inbox:
    """Announcements of the steps after the head."""

    def __init__(self, run_id: bytes) -> None:
        self._run_id = run_id
        self._head = (0, run_id)
        self._open: tuple[int, frozenset[bytes]] = (0, frozenset())
        self._seen: dict[tuple[int, bytes, bytes], Announced] = {}

    def move_head(self, step: int, entry_hash: bytes) -> None:
        """The log has grown, or starts again from a snapshot."""
        self._head = (step, entry_hash)
        self._seen = {
            key: value
            for key, value in self._seen.items()
            if step <= key[0] <= step + STEPS_AHEAD_MAX and (key[0] != step + 1 or value.parent_hash == entry_hash)
        }

    def open_step(self, step: int, members: Iterable[bytes]) -> list[Announced]:
        """The step's roster is known. Returns its members' announcements so far, in order; the inbox forgets all others."""
        self._open = (step, frozenset(members))
        self._seen = {key: value for key, value in self._seen.items() if key[0] != step or key[1] in self._open[1]}
        return [announced for key, announced in self._seen.items() if key[0] == step]

    def envelope_of(self, step: int, author: bytes, payload_sha256: bytes) -> bytes | None:
        """The author's signed announcement of this payload, if the inbox has it."""
        announced = self._seen.get((step, author, payload_sha256))
        return None if announced is None else announced.envelope

    def disputed(self, entry: Entry) -> list[bytes]:
        """Announcements of payloads that an entry does not name, by authors of whom it names another. DISPUTED_MAX at most.

        The author may have announced one payload to the coordinator and another to this peer. A peer with both announcements
        has the proof.
        """
        found = []
        for c in entry.contributions if entry.aggregate is None else ():
            said = [value for key, value in self._seen.items() if key[:2] == (entry.step, c.public_key)]
            if said and all(it.payload_sha256 != c.payload_sha256 for it in said):
                found += [it.envelope for it in said if it.parent_hash == entry.parent_hash]
        return found[:DISPUTED_MAX]

    def is_decided(self, step: int) -> bool:
        """Whether the log has this step's entry: an announcement that is taken for this step is evidence."""
        return step <= self._head[0]

    def may_pull(self, announced: Announced) -> bool:
        """Whether the author is known to be in the roster of that step."""
        return self._open[0] == announced.step and announced.author in self._open[1]

    def is_early(self, announced: Announced) -> bool:
        """Whether the tick of that step has yet to come."""
        return announced.step > max(self._open[0], self._head[0])

    def contradicted(self, announced: Announced) -> Announced | None:
        """The author's earlier announcement for the same step and log, if it names another payload."""
        step, author = announced.step, announced.author
        first = next(value for key, value in self._seen.items() if key[:2] == (step, author))
        return None if first is announced or first.parent_hash != announced.parent_hash else first

    def offer(self, data: bytes, payload_bytes_max: int) -> Announced:
        """Take a gossiped announcement, or raise `Refusal`: size, parse, kind, run, signature, range, step, replay.

        `payload_bytes_max` is the longest payload that can be valid.
        """
        opened, body = open_announcement(data, run_id=self._run_id)
        check_hashes(body)
        if not 0 < body.payload_bytes <= payload_bytes_max:
            raise Refusal(Reason.OUT_OF_RANGE, f"payload of {body.payload_bytes} bytes, at most {payload_bytes_max}")
        head_step, head_hash = self._head
        if body.step == head_step and self._is_evidence(opened.public_key, body):
            return self._kept(
                Announced(opened.public_key, body.step, body.payload_sha256, body.payload_bytes, body.parent_hash, data)
            )
        if not head_step < body.step <= head_step + STEPS_AHEAD_MAX:
            raise Refusal(Reason.WRONG_STEP, f"announcement of step {body.step}, the head is {head_step}")
        if body.step == self._open[0] and opened.public_key not in self._open[1]:
            raise Refusal(Reason.UNKNOWN_SIGNER, f"the author is not in the roster of step {body.step}")
        if body.step == head_step + 1 and body.parent_hash != head_hash:
            raise Refusal(Reason.WRONG_PARENT, f"announcement of step {body.step} on another log")
        announced = Announced(
            opened.public_key, body.step, body.payload_sha256, body.payload_bytes, body.parent_hash, data
        )
        return self._kept(announced)

    def _made_room_for(self, announced: Announced) -> bool:
        """Forget an announcement of a later step, whose author nobody knows yet, for one of a member of the open step."""
        if not self.may_pull(announced):
            return False
        later = next((key for key in self._seen if key[0] > self._open[0]), None)
        return later is not None and self._seen.pop(later) is not None

    def _is_evidence(self, author: bytes, body: update_pb2.Announcement) -> bool:
        """Whether an announcement of the last decided step contradicts an announcement of its author that is here."""
        said = [value for key, value in self._seen.items() if key[:2] == (body.step, author)]
        return any(it.parent_hash == body.parent_hash and it.payload_sha256 != body.payload_sha256 for it in said)

    def _kept(self, announced: Announced) -> Announced:
        step, author = announced.step, announced.author
        if (step, author, announced.payload_sha256) in self._seen:
            raise Refusal(Reason.REPLAYED, f"step {step} announced again")
        others = sum(key[:2] == (step, author) for key in self._seen)
        if others >= PAYLOADS_AN_AUTHOR_MAX:
            raise Refusal(Reason.REPLAYED, f"step {step} announced with {others + 1} payloads")
        if len(self._seen) >= limits.ROSTER_PEERS_MAX * (STEPS_AHEAD_MAX + 1) and not self._made_room_for(announced):
            raise Refusal(Reason.OUT_OF_RANGE, "more announcements than a roster can send")
        self._seen[step, author, announced.payload_sha256] = announced
        return announced
