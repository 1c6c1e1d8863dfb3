"""The checks of a step and their checkers: a pure function of its log entry, which the coordinator and every peer compute
alike.

The draw depends on the entry's hash, and so on every payload of the step. So before a peer's votes are fixed, it cannot know
whether they will be checked, or by which peer. No peer chooses which peer it checks. How often a peer is drawn stands in the
entry. ADR 16.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

from protos.assignment import Range, split_samples
from protos.log import Entry, SignedEntry

CHECK_ALWAYS = 1000
"""The value of `Contribution.check_permille` with which a peer's votes are checked in every step."""
CHECKS_MAX = 4
"""The most checks that one peer makes in a step, so that its work for others is bounded."""
DRAWS_MAX = 64
"""The most draws for one peer's checkers. After that it has fewer, so that the work for a large roster is bounded."""
VERDICTS_NEEDED = 2
"""Verdicts of different checkers that a decision needs: one checker alone excludes no peer."""
VERDICT_STEPS = 2
"""Verdicts on a step are taken for this number of steps, and judged then: a check must not delay a step."""
LOOKED_AT_MIN = 8
"""A checker may look at so many of the subject's samples, however few it has itself."""
LOOKED_AT_TRIED = 8
"""Of a newcomer, whose votes do not count yet, no check looks at more: identities are free, and a check is work for others."""
AUDIT_EVERY = 20
"""The sum of a range is added up again by one peer in one of so many steps: a twentieth of a payload a peer and step moves."""
AUDIT_STEPS = 8
"""The votes of so many steps stay where no anchor has added them up: somebody may want to add them up again."""
_DOMAIN = b"swarmentum/v1/check\0"


def drawn(entry_hash: bytes, entry: Entry, checkers: int) -> Mapping[bytes, tuple[bytes, ...]]:
    """Checked peer -> its checkers, at most `checkers`, never itself. Only authors whose votes count may check."""
    able = [c.public_key for c in entry.contributions]
    busy: Counter[bytes] = Counter()
    found: dict[bytes, tuple[bytes, ...]] = {}
    for subject in (*entry.contributions, *entry.trials):
        if not _lot(entry_hash, subject.public_key) % CHECK_ALWAYS < subject.check_permille:
            continue
        chosen: list[bytes] = []
        for draw in range(DRAWS_MAX if able else 0):
            key = able[_lot(entry_hash, subject.public_key, bytes([draw])) % len(able)]
            if key != subject.public_key and key not in chosen and busy[key] < CHECKS_MAX:
                chosen.append(key)
            if len(chosen) == checkers:
                break
        busy.update(chosen)
        found[subject.public_key] = tuple(chosen)
    return found


def audited(signed: SignedEntry, public_key: bytes) -> tuple[int, ...]:
    """The ranges whose sums this peer adds up again. An aggregator can foresee an entry, but not how the coordinator signs it:
    so the draw follows from the signature, too."""
    aggregate, able = signed.entry.aggregate, [c.public_key for c in signed.entry.contributions]
    if aggregate is None or not able:
        return ()
    seed, found = hashlib.sha256(signed.envelope).digest(), list[int]()
    for number in range(len(aggregate.parts)):
        turn, who = divmod(_lot(seed, b"sum", bytes([number])), len(able))
        if turn % AUDIT_EVERY == 0 and able[who] == public_key:
            found.append(number)
    return tuple(found)


def looked_at(most: int, subject: int, checker: int, *, tried: bool) -> int:
    """How many of a subject's samples a checker looks at. `most`: `trust.check_samples`; the others: samples in their shares.

    No more than twice what the checker has itself, so that a check costs a slow peer two steps of its own, whoever the subject
    is. With less, idle peers that seem fast could have shares of which a check sees too little. `tried`: a newcomer's votes.
    """
    return min(most, subject, max(2 * checker, LOOKED_AT_MIN), LOOKED_AT_TRIED if tried else most)


def checked_samples(entry_hash: bytes, subject: bytes, ranges: tuple[Range, ...], count: int) -> tuple[Range, ...]:
    """Which of a peer's samples its checkers look at: `count` in a row, from a place that the draw decides."""
    spare = sum(map(len, ranges)) - count
    if spare <= 0:
        return ranges
    _, rest = split_samples(list(ranges), _lot(entry_hash, subject, b"samples") % (spare + 1))
    return split_samples(rest, count)[0]


def _lot(entry_hash: bytes, *who: bytes) -> int:
    return int.from_bytes(hashlib.sha256(_DOMAIN + entry_hash + b"".join(who)).digest()[:8], "big")
