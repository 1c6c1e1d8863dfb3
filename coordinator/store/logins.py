"""The one-time link of `swarmentum-coordinator web login`: the home keeps a hash of its secret until it is used or too old.

A new link replaces the one before. Refuses to keep the secret itself: a reader of the home's files cannot log in with them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path
from typing import Final

from protos.disk import replace_bytes, writing

LOGIN_FILE: Final = "web-login.json"
LINK_SECONDS_MAX: Final = 300.0
SECRET_BYTES: Final = 32
FILE_BYTES_MAX: Final = 1024
OTHER_USERS: Final = 0o644
"""A hash of 32 random bytes helps nobody. So the coordinator can read it if root made the link, as with systemd."""
UNKNOWN: Final = "this link is not the newest, or was used before: `swarmentum-coordinator web login` prints a new one"
TOO_OLD: Final = "this link is too old: `swarmentum-coordinator web login` prints a new one"


def hash_of(secret: str) -> str:
    """Of a random secret of SECRET_BYTES, so one SHA-256 is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def make(home: Path, now: float) -> str:
    """A new secret; the home keeps its hash. `now`: seconds since 1970. Raises DiskError."""
    secret = secrets.token_urlsafe(SECRET_BYTES)
    values = {"sha256": hash_of(secret), "made": now, "expires": now + LINK_SECONDS_MAX}
    path = home / LOGIN_FILE
    with writing(path):
        replace_bytes(path, json.dumps(values).encode())
        path.chmod(OTHER_USERS)
    return secret


def take(home: Path, secret: str, now: float) -> str:
    """Use the link up; empty if it was good, or why not. A wrong secret leaves the link as it is. Raises OSError."""
    path = home / LOGIN_FILE
    try:
        values = json.loads(path.read_bytes()[:FILE_BYTES_MAX])
        kept, made, expires = str(values["sha256"]), float(values["made"]), float(values["expires"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return UNKNOWN
    if not hmac.compare_digest(kept.encode(), hash_of(secret).encode()):
        return UNKNOWN
    try:
        path.unlink()  # of two that come at once, one succeeds
    except FileNotFoundError:
        return UNKNOWN
    return "" if made <= now <= expires else TOO_OLD
