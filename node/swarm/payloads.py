"""The payloads that this peer holds, in memory, by hash; forgotten by step. Bounded in bytes: the oldest step goes first."""

from __future__ import annotations

PAYLOADS_BYTES_MAX = 1 << 31


class Payloads:
    """Not thread-safe: belongs to the network thread."""

    def __init__(self, bytes_max: int = PAYLOADS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._by_hash: dict[bytes, bytes] = {}
        self._by_step: dict[int, set[bytes]] = {}
        self._total = 0

    def get(self, sha256: bytes) -> bytes | None:
        """The payload, or None."""
        return self._by_hash.get(sha256)

    def put(self, step: int, sha256: bytes, data: bytes) -> bool:
        """Keep a payload (its hash is checked already); False if it was here."""
        if sha256 in self._by_hash:
            return False
        self._by_hash[sha256] = data
        self._by_step.setdefault(step, set()).add(sha256)
        self._total += len(data)
        while self._total > self._bytes_max and len(self._by_step) > 1:
            self._forget(min(self._by_step))
        return True

    def forget_until(self, step: int) -> None:
        """Drop the payloads of this step and of all before."""
        for old in [at for at in self._by_step if at <= step]:
            self._forget(old)

    def _forget(self, step: int) -> None:
        for sha256 in self._by_step.pop(step):
            self._total -= len(self._by_hash.pop(sha256))
