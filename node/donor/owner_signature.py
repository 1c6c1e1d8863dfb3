"""An owner's key, its signature for a peer, and the owner that a peer names. ADR 35.

The key may lie on another machine: `sign` makes a small file, which goes into the peer's home. Refuses to overwrite a key, and
a file in the home that is damaged or meant for another peer.
"""

from __future__ import annotations

import json
from pathlib import Path

from protos.disk import PRIVATE_MODE, replace_bytes, writing
from protos.errors import OperatorError
from protos.identity import Identity, peer_id
from protos.limits import SIGNATURE_BYTES
from protos.owner import Owner, is_signed_for, name_of, signed_by

KEY_FILE = Path("~/.swarmentum/owner.json")
SIGNED_FILE = "owner.json"
IDENTITY_FILE = "identity.key"
FILE_BYTES_MAX = 4096


def new_key(path: Path, name: str) -> Owner:
    """Make an owner's key file, which only this user can read. OperatorError if there is one."""
    try:
        name = name_of(name)
    except ValueError as error:
        raise OperatorError(f"the name {name!r}: {error}") from error
    if path.exists():
        raise OperatorError(f"{path} exists: an owner's key is never overwritten; choose another path with --file")
    key = Identity.generate()
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        replace_bytes(path, _json(name=name, key=key.to_libp2p().hex()), mode=PRIVATE_MODE)
    return Owner(name, key.public_key)


def sign(key_file: Path, public_key: bytes) -> Owner:
    """The owner of this key file signs for a peer. OperatorError if the file is no owner's key."""
    told = _read(key_file, "no owner's key; `swarmentum owner new NAME` makes one")
    try:
        key = Identity.from_libp2p(bytes.fromhex(told["key"]), where=str(key_file))
        return signed_by(key, name_of(told["name"]), public_key)
    except (ValueError, KeyError) as error:
        raise OperatorError(f"{key_file}: not the key file of an owner: {error}") from error


def keep(path: Path, owner: Owner) -> None:
    """Write the owner's signature for a peer. Raises DiskError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        replace_bytes(path, _json(name=owner.name, key=owner.public_key.hex(), signature=owner.signature.hex()))


def named(home: Path, public_key: bytes, name: str | None) -> tuple[Owner, str]:
    """The owner that this peer names, and what its owner should know. `name`: as it is set. OperatorError for a damaged file.

    Without a set name, the name that a key signed for counts. A set name that is another one is a claim alone.
    """
    path = home / SIGNED_FILE
    if not path.exists():
        return Owner(name or ""), ""
    told = _read(path, "not readable")
    try:
        key, signature = bytes.fromhex(told["key"]), bytes.fromhex(told["signature"])
        owner = Owner(name_of(told["name"]), key, signature)
    except (ValueError, KeyError) as error:
        raise OperatorError(f"{path}: not an owner's signature: {error}; make it again, or remove it") from error
    if len(signature) != SIGNATURE_BYTES or not is_signed_for(owner, public_key):
        raise OperatorError(
            f"{path}: the signature is not for this peer ({peer_id(public_key)}); make it again with `swarmentum owner add`, "
            "or remove it"
        )
    if name is None or name == owner.name:
        return owner, ""
    return Owner(name), f"the owner {name!r} is a claim alone: the signature in {path} is for {owner.name!r}"


def _read(path: Path, otherwise: str) -> dict[str, str]:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} bytes")
        told = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict) or not all(isinstance(value, str) for value in told.values()):
            raise ValueError("not an object of text")
    except FileNotFoundError as error:
        raise OperatorError(f"{path}: {otherwise}") from error
    except (OSError, ValueError) as error:
        raise OperatorError(f"{path}: cannot be read: {error}") from error
    return told


def _json(**values: str) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"
