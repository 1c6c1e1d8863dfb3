"""Every limit of the contract, by name, with its unit last, and a limiter of rates. Both sides refuse what is beyond them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

HASH_BYTES = 32
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
NONCE_BYTES = 16
SESSION_ID_BYTES = 16
PROCESS_BYTES = 16
CHALLENGE_BYTES = 32

# Gossip carries small signed messages only: flooding big ones costs some ten times the ideal bytes (docs/overlay.md).
GOSSIP_MESSAGE_BYTES_MAX = 384 * 1024  # an entry of 2,000 contributions is about 170 KB; announcements are 300 bytes
ENVELOPE_OVERHEAD_BYTES_MAX = 256
ANNOUNCEMENT_BYTES_MAX = 512
LOSS_NATS_MAX = 1e30  # that a peer may claim; the coordinator has a tighter range of its own
# Run id, step, layout digest and group size with their tags: 80 bytes at most; see protos/slices.py.
UPDATE_HEADER_BYTES_MAX = 96
# 2**31 parameters at g=8, the largest votes that this version carries.
PAYLOAD_BYTES_MAX = 1 << 28

ENTRY_CONTRIBUTIONS_MAX = 2048
ROSTER_PEERS_MAX = 2048
AGGREGATORS_MAX = 4  # of one range of one step
FALSE_SUMS_MAX = 64  # in one report
RANGES_MAX = 64  # a tick names each of their aggregators by a byte
POOL_RANGES_MAX = 4096
ENTRY_BYTES_MAX = 352 * 1024  # of each part as many as may be, and 4 exclusions with all their evidence: 338 KB
TICK_BYTES_MAX = 192 * 1024
DECIDED_BYTES_MAX = ENTRY_BYTES_MAX + TICK_BYTES_MAX + 1024  # an entry and a tick in their envelopes
CONFIG_JSON_BYTES_MAX = 256 * 1024
ADDRESSES_MAX = 16
ADDRESS_BYTES_MAX = 256
DEVICE_CHARACTERS_MAX = 80
OWNER_CHARACTERS_MAX = 64
OWNER_STEPS_MIN = 100  # the journal keeps at most one change of a peer's owner in so many steps
INVITE_BYTES_MAX = 8 * 1024

# Tickets
TICKET_ID_BYTES = 16
TICKET_LABEL_BYTES_MAX = 128
TICKET_BYTES_MAX = 512  # an envelope of 210 bytes, a label, and some 30 more
TICKET_MS_MAX = 10 * 365 * 24 * 3600 * 1000  # ten years
TICKET_USES_MAX = 1 << 14
UNIX_MS_MAX = 1 << 48  # the year 10889

# Checks and exclusions
EXCLUSIONS_MAX = 4  # in one entry; further ones are in the next
EVIDENCE_MAX = 16  # verdicts with an exclusion
READMITTED_MAX = 64  # in one entry, and decisions that wait for one
EXCLUSION_REASON_BYTES_MAX = 256  # of the operator's words
EVALUATIONS_MAX = 8  # of one state, and in one entry
SAMPLE_TEXT_BYTES_MAX = 1024  # of what a model wrote
EVALUATION_BYTES_MAX = 384 + SAMPLE_TEXT_BYTES_MAX  # an envelope of some 160 bytes, a hash, and some 40 more
SETTING_BYTES_MAX = 64  # of the key, and of the value, of a setting that the operator changed
SETTING_LIST_BYTES_MAX = 512  # of a value that is a list: each later entry of the log repeats it
OPERATORS_MAX = 8  # keys of one run
ORDER_BYTES_MAX = 2048  # of what operators sign: settings, or a key and the operator's words
ORDERS_MAX = 8  # in one entry
ORDER_MS_MAX = 7 * 24 * 3600 * 1000  # an order waits at most so long for its signatures
SIGNED_ORDER_BYTES_MAX = ORDER_BYTES_MAX + OPERATORS_MAX * 104 + 8
END_BYTES_MAX = 512 + SIGNED_ORDER_BYTES_MAX  # a hash, the operator's words, some 20 more, and its order
EQUIVOCATIONS_MAX = 4  # in one report, and what a peer keeps to be reported

# gRPC
REQUEST_BYTES_MAX = 1 << 20
ENTRIES_PAGE_MAX = 64
HOLDINGS_MAX = ROSTER_PEERS_MAX
APPLIED_MAX = 256
VERDICTS_MAX = 64
ABSTENTION_REASON_BYTES_MAX = 128

# Snapshots
SNAPSHOT_PIECE_BYTES = 1 << 20
SNAPSHOT_PIECES_MAX = 1 << 17
MANIFEST_BYTES_MAX = 8 << 20

STATES_MAX = 256  # of a run, in one list
STEP_MAX = 1 << 40
SAMPLE_INDEX_MAX = 1 << 60
# Room that a peer gives others' votes, unless it is told otherwise (`run create` says where a run may need more), and the least
# for snapshots.
PAYLOADS_GB = 20.0
SNAPSHOTS_GB = 20.0
# Joiners need the votes of so many snapshot periods: they load the agreed snapshot or the one before, and replay the log, while
# the next snapshot is agreed.
PERIODS_KEPT = 3

FULL = "the run is full"
"""The first words of a refusal that a peer which waits in line does not get."""


# A rate limiter: a leaky bucket a key, bounded in the keys that it remembers. Pure: the time is given.


class RateLimiter:
    """`burst` at once, and then one more each `each_ms`, by key; the `kept` keys that were asked for last are remembered."""

    def __init__(self, burst: int, each_ms: float, kept: int) -> None:
        self._burst_ms, self._each_ms, self._kept = burst * each_ms, each_ms, kept
        self._paid_until: OrderedDict[Hashable, float] = OrderedDict()

    def allow(self, key: Hashable, now_ms: float) -> bool:
        """Whether this key may act once more; each time moves the time that it is paid for."""
        paid = max(self._paid_until.pop(key, now_ms), now_ms) + self._each_ms
        good = paid <= now_ms + self._burst_ms
        self._paid_until[key] = paid if good else paid - self._each_ms
        while len(self._paid_until) > self._kept:
            self._paid_until.popitem(last=False)
        return good
