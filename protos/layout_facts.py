"""What `swarmentum layout` prints of a model, for `swarmentum-coordinator`: a process of its own builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayoutFacts:
    """`votes` and `payload_bytes`: of one payload, at the run's own group size or k; 32 bytes of digest as hex.

    `state_bytes`: memory of a peer whatever its micro-batch; `sample_bytes`: activations of one sample; `disk_bytes`: on its
    disk; `snapshot_bytes`: one snapshot; `copies_bytes`: main memory of the copies that are written to the disk.
    `least_state_bytes`: with memory = small; `least_sample_bytes`: with activation checkpointing. `host_card_bytes` and
    `host_main_bytes`: with memory = host, of one such sample at a time. None if they are not known before the model is built.
    """

    layout_digest: str
    parameters: int
    votes: int
    payload_bytes: int
    state_bytes: int | None = None
    sample_bytes: int | None = None
    disk_bytes: int | None = None
    snapshot_bytes: int | None = None
    copies_bytes: int | None = None
    least_state_bytes: int | None = None
    least_sample_bytes: int | None = None
    host_card_bytes: int | None = None
    host_main_bytes: int | None = None
    untried: str = ""
    """Why the dry run was not made, if it was not."""
    notes: tuple[str, ...] = ()
    reference: dict[str, Any] | None = None
    """What peers compare theirs with: see `ReferenceLoss`."""
