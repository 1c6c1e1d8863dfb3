"""`swarmentum data build`: token shards that a run names by an address and a hash. Joins nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from node.commands.options import EXIT_CODES, AllowLeftOut, Json, need_node_extra
from protos.errors import StoppedError
from protos.text import print_json, things
from protos.version import Program

app = typer.Typer(cls=Program, help="Prepare training text.", no_args_is_help=True)
Column = Annotated[str, typer.Option(help="The column of text in .jsonl, .csv, .parquet and datasets.")]
Split = Annotated[
    str, typer.Option(help="The split of a dataset, or of a folder that has splits; all takes every file of a folder.")
]


@app.callback()
def _data() -> None:
    """Prepare training text."""


@app.command("build", epilog=EXIT_CODES)
def build(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A text file, a folder, a .jsonl, .parquet or .arrow file, or hf://OWNER/NAME for a dataset of the hub.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FOLDER", help="A new folder for the shards, or that of a build that broke off."),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(help="The run's tokenizer: bytes, a tokenizer.json, or a folder or name of Hugging Face."),
    ] = "bytes",
    column: Column = "text",
    subset: Annotated[str | None, typer.Option(help="The subset (configuration) of a dataset.")] = None,
    split: Split = "train",
    shard_tokens: Annotated[int, typer.Option(min=1024, max=1 << 30, help="Tokens a shard.")] = 1 << 24,
    seed: Annotated[int, typer.Option(help="Decides the order of the documents.")] = 0,
    allow_left_out: AllowLeftOut = False,
    as_json: Json = False,
) -> None:
    """Turn text into token shards that can lie on any web server, and print what a run needs to name them."""
    need_node_extra()
    from node.data.build import Source, build
    from node.data.tokenizer import load_tokenizer

    def told(documents: int, tokens: int, shards: int) -> None:
        print(
            f"{things(documents, 'document')}, {things(tokens, 'token')}, {things(shards, 'shard')} written",
            file=sys.stderr,
        )

    text = Source(source, column, subset, split)
    options: dict[str, Any] = {"shard_tokens": shard_tokens, "seed": seed, "allow_left_out": allow_left_out}
    try:
        built = build(text, load_tokenizer(tokenizer), tokenizer, out, told=told, **options)
    except KeyboardInterrupt:
        raise StoppedError(f"stopped; the same command goes on from the last shard in {out}") from None
    for line in built.reading.lines():
        print(line, file=sys.stderr)
    if as_json:
        made = {"folder": str(built.folder), "sha256": built.sha256, "documents": built.documents}
        print_json({**made, "tokens": built.tokens, "shards": built.shards, **built.reading.values()})
        return
    size = f"{things(built.tokens, 'token')} of {things(built.documents, 'document')}"
    print(f"{built.folder}: {size} in {things(built.shards, 'shard')}.")
    print("Put the folder on a web server, and write this into run.toml:")
    print("[data]")
    print('source = "https://YOUR.SERVER/FOLDER"')
    print(f'sha256 = "{built.sha256}"')
    print(f'tokenizer = "{tokenizer}"')


@app.command("survey", epilog=EXIT_CODES)
def survey(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="As SOURCE of `swarmentum data build`.")],
    column: Column = "text",
    subset: Annotated[str | None, typer.Option(help="The subset (configuration) of a dataset.")] = None,
    split: Split = "train",
    as_json: Json = False,
) -> None:
    """Count what a source of text has, and what would be left out and why. Reads the first 64 MiB, and writes nothing."""
    need_node_extra()
    from node.data.corpus import look_at
    from node.data.sources import Source

    found = look_at(Source(source, column, subset, split))
    if as_json:
        print_json({**found.values(), "lines": found.lines()})
        return
    for line in found.lines():
        print(line)


@app.command("tokenizer", epilog=EXIT_CODES)
def tokenizer(
    name: Annotated[str, typer.Argument(metavar="TOKENIZER", help="As --tokenizer of `swarmentum data build`.")],
    as_json: Json = False,
) -> None:
    """Print a tokenizer's hash, which a run can name, so that no peer joins with another one."""
    need_node_extra()
    from node.data.tokenizer import load_tokenizer, sha256_of_tokenizer

    found = load_tokenizer(name)
    sha256, ends = sha256_of_tokenizer(found), found.end
    if as_json:
        print_json({"tokenizer": name, "sha256": sha256, "vocabulary": found.vocabulary, "end": ends})
        return
    end = "none: a newline ends a text" if ends is None else str(ends)
    print(f"{found.vocabulary:,} tokens; id that ends a text: {end}. For run.toml:")
    print(f'tokenizer = "{name}"')
    print(f'tokenizer_sha256 = "{sha256}"')
