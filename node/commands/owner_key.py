"""`swarmentum owner`: an owner's key, and its signature for a peer. ADR 35."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node.commands.options import EXIT_CODES, Home, Json
from protos.json_line import print_json

app = typer.Typer(help="Prove that several machines are yours: a key signs for each of them.", no_args_is_help=True)
KeyFile = Annotated[
    Path | None, typer.Option("--file", help="The owner's key file (default: ~/.swarmentum/owner.json).")
]


@app.command(epilog=EXIT_CODES)
def new(
    name: Annotated[str, typer.Argument(help="Your name, as everybody will see it: at most 64 printable characters.")],
    file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Make an owner's key. Keep the file: without it nobody can sign for your next machine."""
    from node.donor.owner_signature import KEY_FILE, new_key
    from protos.identity import peer_id

    path = file or KEY_FILE.expanduser()
    owner = new_key(path, name)
    if as_json:
        print_json({"file": str(path), "name": owner.name, "key": peer_id(owner.public_key)})
        return
    print(f"The key of {owner.name} is in {path}: {peer_id(owner.public_key)}")
    print("`swarmentum owner add` signs for the peer of this machine; keep a copy of the file in a safe place.")


@app.command(epilog=EXIT_CODES)
def add(
    peer: Annotated[
        str | None,
        typer.Argument(metavar="[PEER_ID]", help="A peer on another machine (default: the peer of this machine)."),
    ] = None,
    home: Home = None,
    file: KeyFile = None,
    out: Annotated[
        Path | None, typer.Option(help="For another machine: the file to write, which goes into that peer's home.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Sign that a peer is yours. The peer shows it from its next start on, or after `swarmentum set owner NAME`."""
    from node.config import load_settings
    from node.donor.owner_signature import IDENTITY_FILE, KEY_FILE, SIGNED_FILE, keep, sign
    from protos.errors import OperatorError
    from protos.identity import Identity, peer_id, public_key_of

    if (peer is None) != (out is None):
        raise OperatorError(
            "another machine's peer needs both its PEER_ID and --out FILE; this machine's needs neither"
        )
    folder = load_settings(home=home).home
    public_key = Identity.load_or_create(folder / IDENTITY_FILE).public_key if peer is None else public_key_of(peer)
    owner = sign(file or KEY_FILE.expanduser(), public_key)
    path = out or folder / SIGNED_FILE
    keep(path, owner)
    if as_json:
        print_json({"file": str(path), "name": owner.name, "peer": peer_id(public_key)})
        return
    print(f"{owner.name} signed for the peer {peer_id(public_key)}: {path}")
    if peer is not None:
        print(f"Copy it to {SIGNED_FILE} in that peer's home (default: ~/.swarmentum/peer), and start the peer again.")
