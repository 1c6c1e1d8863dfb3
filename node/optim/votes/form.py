"""A run's payload format as a peer asks it: the sizes on offer, the lengths of payloads, and the door for their bytes."""

from __future__ import annotations

from typing import Protocol


class Form(Protocol):
    """`payload.Format`, or `paper.form.PaperForm`. `chunks` is the layout's; a format may have its own and not look at it."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The group sizes, or k, that a peer may choose."""
        ...

    def votes(self, chunks: int, size: int) -> int:
        """Votes in one payload. Raises `VotesError` for a size that is not offered."""
        ...

    def body_bytes(self, chunks: int, size: int) -> int:
        """The longest payload without a silent vote."""
        ...

    def bytes_max(self, chunks: int, size: int) -> int:
        """The longest payload."""
        ...

    def check(self, data: bytes, size: int, chunks: int) -> None:
        """The door: raises `VotesError` for bytes that no peer's `encode` makes."""
        ...
