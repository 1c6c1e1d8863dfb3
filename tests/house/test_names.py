"""A name is one thing: a class stands in one file, and a file's name in one folder, or it is in a list here."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.house.test_tree import name, ours, syntax

CLASSES = {
    "Ledger": "the web API's schema has the name of what it shows",
    "Peer": "the web API's schema has the name of what it shows",
    "Run": "the web API's schema has the name of what it shows",
    "Samples": "of the web API's schema, texts that the model wrote; everywhere else, windows of tokens",
}
"""Class names that stand in two files or more, each with the reason."""
FILES = {
    "config": "the settings of a peer, and those of a coordinator: what each program is told",
    "text": "a run's training text, and words from strangers",
}
"""File names that stand in two folders or more, each with the reason."""
ENTRANCES = ("__init__", "__main__")


def twice(places: dict[str, set[Path]]) -> dict[str, list[str]]:
    return {word: sorted(map(name, paths)) for word, paths in places.items() if len(paths) > 1}


def classes() -> dict[str, set[Path]]:
    found: dict[str, set[Path]] = defaultdict(set)
    for path in ours():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(path)
    return found


def files() -> dict[str, set[Path]]:
    found: dict[str, set[Path]] = defaultdict(set)
    for path in ours():
        if path.stem not in ENTRANCES:
            found[path.stem].add(path)
    return found


def check(found: dict[str, list[str]], known: dict[str, str], kind: str) -> None:
    new = {word: paths for word, paths in found.items() if word not in known}
    assert not new, (
        f"a {kind} name that stands for two things: give the less central one a name that says its object: {new}"
    )
    gone = known.keys() - found.keys()
    assert not gone, (
        f"a {kind} name that stands for one thing now: take it out of the list, which only gets shorter: {gone}"
    )


def test_a_class_name_is_one_class() -> None:
    check(twice(classes()), CLASSES, "class")


def test_a_file_name_is_one_file() -> None:
    check(twice(files()), FILES, "file")
