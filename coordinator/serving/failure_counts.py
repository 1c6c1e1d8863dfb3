"""Peers that failed before or at the door of a run, as counts by reason and version, since this coordinator started. ADR 21.

Anybody may tell one without a key, so nothing depends on these counts. Refuses to grow: reasons are of an enum, each run counts
few versions, and each network address and all together may tell only so often.
"""

from __future__ import annotations

import re
from collections import Counter

import structlog

from coordinator.serving.metrics import Metrics
from coordinator.serving.throttled_log import ThrottledLog
from protos.rate_limiter import RateLimiter
from protos.run_facts import REASONS
from protos.v1 import coordinator_pb2 as pb
from protos.version import software_version

VERSIONS_KEPT = 8
"""Versions that a run counts apart; others are "other". This coordinator's own version always has a place."""
OTHER = "other"
VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}((a|b|rc|\.dev|\.post)\d{1,4})?", re.ASCII)
ADDRESS_TOLD_MAX, ADDRESS_TOLD_MS = 3, 60_000
TOLD_MAX, TOLD_MS = 60, 1_000
ADDRESSES_KEPT = 4096


class Failures:
    """Of all runs of a coordinator."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counts: dict[bytes, Counter[tuple[int, str]]] = {}
        self._by_address = RateLimiter(ADDRESS_TOLD_MAX, ADDRESS_TOLD_MS, ADDRESSES_KEPT)
        self._all = RateLimiter(TOLD_MAX, TOLD_MS, 1)
        self._caused = ThrottledLog(structlog.get_logger("coordinator"))

    def may_tell(self, address: str, now_ms: int) -> bool:
        """Whether a stranger at this network address may tell one more."""
        return self._by_address.allow(address, now_ms) and self._all.allow("", now_ms)

    def count(self, run_id: bytes, reason: int, version: str) -> None:
        """One more. The caller has the run. A reason that this version does not know is OTHER."""
        reason = reason if reason in REASONS else pb.JoinFailure.JOIN_FAILURE_OTHER
        found = self._counts.setdefault(run_id, Counter())
        name = self._known(found, version)
        found[reason, name] += 1
        run = run_id.hex()[:16]
        self._metrics.join_failures.labels(run, REASONS[reason], name).inc()
        self._caused.info("a peer could not join", run, run=run, step="-", peer="-", why=REASONS[reason], version=name)

    def _known(self, found: Counter[tuple[int, str]], version: str) -> str:
        if version == software_version() or version in {name for _, name in found}:
            return version
        versions = {name for _, name in found} - {OTHER, software_version()}
        return version if VERSION.fullmatch(version) and len(versions) < VERSIONS_KEPT else OTHER

    def of(self, run_id: bytes) -> list[pb.JoinFailures]:
        """The counts of a run, the largest first."""
        return [
            pb.JoinFailures(reason=reason, software_version=version, count=count)  # type: ignore[arg-type]
            for (reason, version), count in self._counts.get(run_id, Counter()).most_common()
        ]

    def forget(self, run_id: bytes) -> None:
        """The run is deleted."""
        self._counts.pop(run_id, None)
