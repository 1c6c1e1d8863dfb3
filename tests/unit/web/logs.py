"""Signed logs of a small run, made here with real keys, and what a page needs to follow them."""

from functools import lru_cache

from protos.identity import Identity
from protos.invite import Invite
from protos.log import Contribution, Entry, Exclusion, SignedEntry, lr_to_bits, run_id_of, seal_entry
from protos.run_config import RunConfig
from protos.v1 import log_pb2

COORDINATOR = Identity.from_seed(bytes([3]) * 32)
PEERS = tuple(
    sorted((Identity.from_seed(bytes([number]) * 32) for number in (21, 22, 23)), key=lambda it: it.public_key)
)
GENESIS = log_pb2.Genesis(
    format_version=1,
    config_json=RunConfig(name="paper").canonical_json(),
    coordinator_public_key=COORDINATOR.public_key,
    nonce=bytes(16),
    layout_digest=bytes([7]) * 32,
    parameters=1000,
)
RUN = run_id_of(GENESIS)
INVITE = Invite(RUN, ("127.0.0.1:1",), COORDINATOR.public_key, bytes(32), (), "paper")


def contribution(number: int, step: int, loss: float = 2.0) -> Contribution:
    """Of a peer by its number; each has other samples."""
    return Contribution(PEERS[number].public_key, bytes([step % 256, number]) * 16, 100 + number, 4 + number, 512, loss)


def entry(step: int, parent: bytes, loss: float | None = None, exclusions: tuple[Exclusion, ...] = ()) -> Entry:
    """All peers count in it; the loss falls with the steps."""
    falls = 4.0 / step if loss is None else loss
    counted = tuple(contribution(number, step, falls) for number in range(len(PEERS)))
    return Entry(step, parent, counted, lr_to_bits(0.5), b"", (), 100 * step, exclusions=exclusions)


@lru_cache
def signed_log(steps: int) -> list[SignedEntry]:
    """Entries 1 to `steps`, signed and chained."""
    made: list[SignedEntry] = []
    for step in range(1, steps + 1):
        made.append(seal_entry(COORDINATOR, RUN, entry(step, made[-1].hash if made else RUN)))
    return made
