"""Which files of a folder are training text: not its other splits, and not the pages about a data set. Pure, of names alone.

A folder has splits if some of its names say train, validation or test, as the hub's data sets do. Refuses to look into a file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import PurePath
from typing import Final

from node.data.tally import LeftOutReason
from node.data.text_files import inner_name
from protos.errors import DataError
from protos.text import printable

ALL: Final = "all"
"""The split that is the whole folder."""
SPLITS: Final = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test", "heldout": "test", "holdout": "test",
    "trainset": "train", "validset": "validation", "valset": "validation", "devset": "validation", "testset": "test",
    "traindata": "train", "valdata": "validation", "devdata": "validation", "testdata": "test", "evaldata": "test",
    "newsdev": "validation", "newstest": "test", "devtest": "test", "tst": "test",
    "testa": "validation", "testb": "test",  # CoNLL
}  # fmt: skip
PLAIN_SUFFIXES: Final = ("", ".txt", ".text", ".raw", ".tokens")
"""Text files whose name may say a split."""
NO_SPLIT_SUFFIXES: Final = frozenset(
    (  # noqa: SIM905 - a list would be 47 lines
        ".py .pyi .ipynb .c .h .cc .cpp .hpp .cu .java .js .jsx .mjs .ts .tsx .go .rs .rb .php .sh .bat .ps1 .swift .kt .scala"
        " .lua .jl .r .m .hs .ml .ex .sql .dart .css .cfg .ini .toml .yaml .yml .md .rst .html .htm .tex .adoc"
    ).split()
)
"""Code has tests and pages are about them: `train.py` and `test.py` are no data set. `train.en` and `test.en` are."""
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
    wanted = SPLITS.get(split, split)
    endings = _of_data_sets(names)
    marks = [split_of(name, has_rows or _ending(name) in endings) for name, has_rows in zip(names, rows, strict=True)]
    folders = {folder for name, has_rows in zip(names, rows, strict=True) if has_rows for folder in name.parents}
    return [
        LeftOutReason.ABOUT
        if name.parent in folders and not has_rows and is_about(name, name.parent.name or root)
        else _of_split(mark, has_rows, wanted, marks)
        for name, mark, has_rows in zip(names, marks, rows, strict=True)
    ]


def _of_split(mark: str, has_rows: bool, split: str, marks: Sequence[str]) -> LeftOutReason | None:
    """A text file is of another split only if files of the wanted one are there, too."""
    other = mark not in ("", split) and split != ALL
    return LeftOutReason.SPLIT if other and (has_rows or split in marks) else None


def split_of(name: PurePath, any_ending: bool) -> str:
    """The split that a name says, the file's own name before its folders; empty for none."""
    if not any_ending and _ending(name)[1] not in PLAIN_SUFFIXES:
        return ""
    stem, *folders = _parts(name)
    return _first(word for part in (stem, *reversed(folders)) for word in _words(part))


CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


def _parts(name: PurePath) -> list[str]:
    """The file's name without the ending of a packer, and its folders from the outermost on. `trainData` has two words."""
    spaced = CAMEL.sub("_", name.name)
    stem = inner_name(name if spaced == name.name else PurePath(spaced))
    return [_joined(stem), *map(_folder, name.parent.parts)]


@cache
def _folder(part: str) -> str:
    return _joined(CAMEL.sub("_", part).lower())


def _words(part: str) -> list[str]:
    return re.split(r"[^a-z]+", part)


def _joined(part: str) -> str:
    return re.sub(r"(held|hold)[^a-z]out", r"\1out", part)


def _ending(name: PurePath) -> tuple[PurePath, str]:
    """Of a file in its folder."""
    return name.parent, PurePath(inner_name(name)).suffix


def _of_data_sets(names: Sequence[PurePath]) -> set[tuple[PurePath, str]]:
    """Endings under which a folder has a split's file with a twin in another split: train.en and test.en, train/a.en and
    test/b.en, or train.en and test/b.en. So test2016.en is no text to train on, either."""
    twins, firm = defaultdict[tuple[str, ...], dict[str, set[tuple[PurePath, str]]]](dict), set[tuple[str, ...]]()
    for name in names:
        if (ending := _ending(name))[1] not in NO_SPLIT_SUFFIXES:
            for mark, place, is_firm in _places(name):
                common = tuple(re.sub("[a-z]+", lambda it: "" if it[0] in SPLITS else it[0], part) for part in place)
                twins[common].setdefault(mark, set()).add(ending)
                if is_firm:
                    firm.add(common)
    found = (marks.values() for common, marks in twins.items() if len(marks) > 1 and common in firm)
    return {ending for endings in found for of_mark in endings for ending in of_mark}


def _places(name: PurePath) -> Iterator[tuple[str, list[str], bool]]:
    """A split, and what is equal of a file and its twins in others: its name, or its ending and the folder of the split.

    A file whose name begins or ends with the split may stand beside another split's folder, or a file named by it alone. So not
    each of them is firm: two books, Night Train and Acid Test, are no twins. A title, which has spaces, is none of a folder."""
    stem, *folders = _parts(name)
    ending, words = PurePath(stem).suffix, _words(PurePath(stem).stem)
    if mark := _first(_words(stem)):
        yield mark, [stem, *folders], True
        if " " not in stem and (words[0] in SPLITS or words[-1] in SPLITS):
            yield mark, [ending, *folders, ""], SPLITS.keys() >= set(words) - {""}
    while folders and not _first(_words(folders[-1])):
        folders.pop()
    if folders:
        yield _first(_words(folders[-1])), [ending, *folders], True


def _first(words: Iterable[str]) -> str:
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def named_otherwise(names: Sequence[PurePath], split: str) -> tuple[str, int]:
    """Words about files that are read though their names say another split, as code and text without such twins do, and a
    count."""
    marks = {SPLITS.get(split, split), ""}
    named = [name for name in names if split != ALL and split_of(name, True) not in marks]
    example = printable(named[0].as_posix().replace("{", "{{").replace("}", "}}")) if named else ""
    told = f"files that are read though their names say another split, such as {example}: {{}}; move test sets away"
    return told, len(named)


PART: Final = re.compile(r"(.*?)(\d{3,})-of-(\d{3,})(?:-[0-9a-f]{16})?(.*)", re.DOTALL)
"""A file that is one of several, as `datasets` and the hub name them; some have a digest in the name."""


def parts_told(files: Sequence[PurePath]) -> list[str]:
    """Words about sets of numbered files that are not there whole. Raises DataError for files of two sets of one name."""
    sets = dict[tuple[PurePath, str, str], dict[str, set[int]]]()
    for file in files:
        if (part := PART.fullmatch(file.name)) is not None:
            before, number, of, after = part.groups()
            sets.setdefault((file.parent, before, after), {}).setdefault(of, set()).add(int(number))
    told = list[str]()
    for (folder, before, after), found in sorted(sets.items()):
        names = [f"{before}*-of-{of}{after}" for of in sorted(found)]
        if len(names) > 1:
            raise DataError(
                f"data: {folder} has {' and '.join(names)}, so files of an earlier set are still there, and their text would "
                "count twice: delete the old ones, or move them away"
            )
        (of, numbers), name = next(iter(found.items())), str(folder / names[0]).replace("{", "{{").replace("}", "}}")
        if len(numbers) < int(of):
            told.append(f"of {name} {len(numbers):,} of {int(of):,} files are there")
    return told


def is_about(name: PurePath, folder: str) -> bool:
    """Whether a file without rows, beside some with rows, is about them: a page, a licence, a list, or their script."""
    low = PurePath(inner_name(name))
    script = low.suffix == ".py" and low.stem == folder.lower()
    return script or low.suffix == ".json" or (low.stem in ABOUT_NAMES and low.suffix in ABOUT_SUFFIXES)
