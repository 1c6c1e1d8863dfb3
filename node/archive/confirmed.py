"""What confirms the state that a replay computes: digests in the signed log, or the genesis itself. ADR 26.

A replay derives each state from the one before. This proves nothing about the state that an archive begins with: its author
may have written that. Pure: the replay tells it what it found, and it says what is confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Confirmed:
    """What is confirmed so far. An entry's digest covers one part of a large model (`node/optim/digest.py`)."""

    parts: set[int] = field(default_factory=set)
    """The parts of the state that digests have confirmed since the replay began."""
    of: int = 0
    """How many parts the state has; 0 before the first digest."""
    state: int | None = None
    """The last step after which the whole state is confirmed; None: there is none yet."""
    genesis: bool = False
    """Whether the genesis confirms the state that the replay began with."""
    layout: bool = False
    """Whether the genesis names the parameter layout."""
    votes_fit: int = 0
    votes_misfit: int = 0
    """Counted payloads that name this layout, and the other ones. The log signs the hash of each."""

    def by_genesis(self, step: int) -> None:
        """The genesis names the state with which the replay began, after `step`."""
        self.genesis, self.state = True, step

    def by_entry(self, step: int, part: int, of: int) -> None:
        """An entry names the digest of this part of the state after `step`."""
        self.parts.add(part)
        self.of = of
        if len(self.parts) == of:
            self.state = step

    def lacks(self, began: int, last: int) -> str:
        """Why nothing confirms the replayed states, and what to do; empty if they are confirmed.

        `began`: the step whose state the archive begins with; `last`: the last step that was replayed.
        """
        if self.state is None:
            entries = f"entries {began + 1} to {last}"
            found = (
                f"none of the {entries} has a digest" if not self.of else
                f"the digests in {entries} cover {len(self.parts)} of its {self.of} parts"
            )  # fmt: skip
            return (
                f"nothing in the log confirms the state after step {began}, which this archive begins with: {found}. Take an "
                "archive that goes on to an entry with a digest, or that begins earlier (without --from)"
            )
        if not self.layout and self.votes_fit <= self.votes_misfit:
            return (
                f"nothing in the log confirms the archive's layout.json: {self.votes_fit} of "
                f"{self.votes_fit + self.votes_misfit} counted payloads are of this layout. Take an archive with more steps"
            )
        return ""
