"""Words from strangers, for people's eyes: printable, bounded, on one line. Characters that do not print become `?`. Pure.

Escape sequences, line breaks and marks that turn the direction of writing do not print. Markup is not known here: who shows
such words shows them as plain text (`rich.text.Text`), never as markup.
"""

from __future__ import annotations

TEXT_CHARACTERS_MAX = 512


def printable(text: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    """The words, with `?` for what does not print, cut at `characters_max`."""
    cut = text[:characters_max]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)
