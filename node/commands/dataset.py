"""`swarmentum data build`: token shards that a run names by an address and a hash. Joins nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from node.commands.options import EXIT_CODES, Json, need_node_extra

app = typer.Typer(help="Prepare training text.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    """Prepare training text."""


@app.command("build", epilog=EXIT_CODES)
def build(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A text file, a folder, a .jsonl or .parquet file, or hf://OWNER/NAME for a dataset of the Hugging Face hub.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="A new folder for the shards.")],
    tokenizer: Annotated[
        str, typer.Option(help="The run's tokenizer: bytes, or a folder or name for Hugging Face's AutoTokenizer.")
    ] = "bytes",
    column: Annotated[str, typer.Option(help="The column of text in .jsonl, .parquet and datasets.")] = "text",
    subset: Annotated[str | None, typer.Option(help="The subset (configuration) of a dataset.")] = None,
    split: Annotated[str, typer.Option(help="The split of a dataset.")] = "train",
    shard_tokens: Annotated[int, typer.Option(min=1024, max=1 << 30, help="Tokens a shard.")] = 1 << 24,
    seed: Annotated[int, typer.Option(help="Decides the order of the documents.")] = 0,
    as_json: Json = False,
) -> None:
    """Turn text into token shards that can lie on any web server, and print what a run needs to name them."""
    need_node_extra()
    from node.data.build import Source, build
    from node.data.tokenizer import load_tokenizer

    def told(documents: int, tokens: int, shards: int) -> None:
        print(f"{documents:,} documents, {tokens:,} tokens, {shards:,} shards written", file=sys.stderr)

    text = Source(source, column, subset, split)
    built = build(text, load_tokenizer(tokenizer), tokenizer, out, shard_tokens=shard_tokens, seed=seed, told=told)
    if as_json:
        print(json.dumps({**asdict(built), "folder": str(built.folder)}))
        return
    print(f"{built.folder}: {built.tokens:,} tokens of {built.documents:,} documents in {built.shards:,} shards.")
    print("Put the folder on a web server, and write this into run.toml:")
    print("[data]")
    print('source = "https://YOUR.SERVER/FOLDER"')
    print(f'sha256 = "{built.sha256}"')
    print(f'tokenizer = "{tokenizer}"')
