"""Which files of a folder are training text: not its other splits, and not the pages about a data set. Pure, of names alone.

A folder has splits if some of its names say train, validation or test, as the hub's data sets do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from node.data.tally import LeftOutReason

ALL: Final = "all"
"""The split that is the whole folder."""
SPLITS: Final = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
PLAIN_SUFFIXES: Final = ("", ".txt", ".text", ".raw", ".tokens")
"""Text files whose name may say a split. Code has tests, too, and is no data set."""
ABOUT_NAMES: Final = frozenset(
    {"readme", "license", "licence", "copying", "notice", "citation", "changelog", "dataset_infos", "dataset_info",
     "dataset_dict", "state", "metadata", "croissant", "checksums", "sha256sums", "md5sums", "index",
     "manifest", "requirements"}
)  # fmt: skip
ABOUT_SUFFIXES: Final = ("", ".md", ".txt", ".rst", ".json", ".cff", ".yaml", ".yml", ".csv", ".html")


def chosen(names: Sequence[PurePath], rows: Sequence[bool], split: str, root: str) -> list[LeftOutReason | None]:
    """For each file, relative to its folder, why it is left out. `rows`: whether the file has rows, not plain text.

    `root`: the folder's own name.
    """
    marks = [split_of(name, has_rows) for name, has_rows in zip(names, rows, strict=True)]
    folders = {folder for name, has_rows in zip(names, rows, strict=True) if has_rows for folder in name.parents}
    return [
        LeftOutReason.ABOUT
        if name.parent in folders and not has_rows and is_about(name, name.parent.name or root)
        else _of_split(mark, has_rows, SPLITS.get(split, split), marks)
        for name, mark, has_rows in zip(names, marks, rows, strict=True)
    ]


def _of_split(mark: str, has_rows: bool, split: str, marks: Sequence[str]) -> LeftOutReason | None:
    """A text file is of another split only if files of the wanted one are there, too."""
    other = mark not in ("", split) and split != ALL
    return LeftOutReason.SPLIT if other and (has_rows or split in marks) else None


def split_of(name: PurePath, has_rows: bool) -> str:
    """The split that a name says, the file's own name before its folders; empty for none."""
    stem = name.name.lower()
    if not has_rows and PurePath(stem).suffix not in PLAIN_SUFFIXES:
        return ""
    for part in (stem, *(folder.lower() for folder in reversed(name.parent.parts))):
        for word in re.split(r"[^a-z]+", part):
            if word in SPLITS:
                return SPLITS[word]
    return ""


def is_about(name: PurePath, folder: str) -> bool:
    """Whether a file without rows, beside some with rows, is about them: a page, a licence, a list, or their script."""
    low = PurePath(name.name.lower())
    script = low.suffix == ".py" and low.stem == folder.lower()
    return script or low.suffix == ".json" or (low.stem in ABOUT_NAMES and low.suffix in ABOUT_SUFFIXES)
