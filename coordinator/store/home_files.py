"""Small files in a coordinator's home: the runs that its key has made, its TLS certificate, and the one-time link of
`swarmentum-coordinator web login`.

With the runs the coordinator notices a new or older journal: with an empty one it would serve nothing, and tell its peers
that their run is unknown. Refuses to guess which journal is the right one. A coordinator with a shared database, which is
backed up as a whole, does not use that file.

The certificate is made once, self-signed, and pinned by its sha256 in every invite.

Of the link the home keeps a hash of its secret until it is used or too old. A new link replaces the one before. Refuses to
keep the secret itself: a reader of the home's files cannot log in with them.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from protos.calls import TLS_NAME
from protos.disk import PRIVATE_MODE, check_no_folder, remove_at_end, replace_bytes, write_bytes, writing
from protos.errors import OperatorError

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


# Where the operator's page of a home is: a file that the page writes, and that `swarmentum-coordinator web login` reads.

PLACE_FILE: Final = "operator-page.json"


class PageAddress:
    """The address of the page, in the home, while the page is served."""

    def __init__(self, home: Path) -> None:
        self._home, self._path = home, home / PLACE_FILE

    def write(self, url: str) -> None:
        """The page is at this address. Raises DiskError."""
        with writing(self._path):
            replace_bytes(self._path, json.dumps({"url": url, "pid": os.getpid()}).encode(), synced=False)

    def remove(self) -> None:
        """The page is served no more."""
        remove_at_end(self._path)

    def read(self) -> str:
        """The address. OperatorError if there is no page."""
        try:
            values = json.loads(self._path.read_bytes())
            url, pid = str(values["url"]), int(values["pid"])
        except (OSError, ValueError, TypeError, KeyError):
            url, pid = "", 0
        if not url or not _lives(pid):
            raise OperatorError(
                f"the coordinator of {self._home} serves no operator's page: start it with "
                "`swarmentum-coordinator serve --operator-web-listen 127.0.0.1:7781`"
            )
        return url


def _lives(pid: int) -> bool:
    """Whether a process has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True


NAME = "runs.json"
NAMED_MAX = 5


class KnownRuns:
    """One home's. Raises OperatorError for a damaged file."""

    def __init__(self, home: Path) -> None:
        self._path = home / NAME
        self._names: dict[str, str] = {}
        check_no_folder(self._path)
        if not self._path.exists():
            return
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise OperatorError(f"{self._path} cannot be read: {error}; delete it, it is written again") from error
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values.values()):
            raise OperatorError(f"{self._path} is not a list of runs; delete it, it is written again")
        self._names = values

    def check(self, journal: str, there: Collection[bytes]) -> None:
        """Raises OperatorError if the journal lacks runs that were made here."""
        found = {run_id.hex() for run_id in there}
        missing = [f"{name} ({run_id[:16]})" for run_id, name in self._names.items() if run_id not in found]
        if missing:
            named = ", ".join(missing[:NAMED_MAX]) + (" ..." if len(missing) > NAMED_MAX else "")
            raise OperatorError(
                f"the journal {journal} does not have {len(missing)} of the runs that were made here: {named}. Restore it, "
                f"with its -wal file if there is one. To give these runs up for ever, delete {self._path}"
            )

    def add(self, run_id: bytes, name: str) -> None:
        """Add a run; the disk has it on return."""
        if self._names.get(run_id.hex()) == name:
            return
        self._names[run_id.hex()] = name
        write_bytes(self._path, json.dumps(self._names, indent=1).encode())


# The pin decides, not the dates: a machine whose clock is wrong can check the pin, too.
VALID_FROM = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
VALID_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""RFC 5280 gives this date to certificates without an end."""
ENDS_SOON = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Certificate:
    """PEM key and certificate, and the sha256 of the DER certificate."""

    key_pem: bytes
    certificate_pem: bytes

    @property
    def sha256(self) -> bytes:
        """The hash that invites pin; 32 bytes."""
        certificate = x509.load_pem_x509_certificate(self.certificate_pem)
        return hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()

    def ends_soon(self, now: datetime.datetime) -> str:
        """A warning if an older version made this certificate, and TLS refuses it within a year; else empty."""
        last = x509.load_pem_x509_certificate(self.certificate_pem).not_valid_after_utc
        if last - now > ENDS_SOON:
            return ""
        return (
            f"the certificate ends on {last:%Y-%m-%d}: no peer can connect after that. Stop the coordinator, delete tls.key "
            "and tls.crt in its home, and start it: the new certificate has no end. Then send every peer a new invite "
            "(`swarmentum-coordinator run invite NAME`)"
        )


def load_or_create(home: Path) -> Certificate:
    """The certificate in a home folder; made there (key mode 0400) if there is none. DiskError."""
    key_path, certificate_path = home / "tls.key", home / "tls.crt"
    for path in (key_path, certificate_path):
        check_no_folder(path)
    if not (key_path.exists() and certificate_path.exists()):
        made = _create()
        with writing(certificate_path):
            home.mkdir(parents=True, exist_ok=True)
            certificate_path.unlink(missing_ok=True)  # the pair is made again unless both are there, whole
            replace_bytes(key_path, made.key_pem, mode=PRIVATE_MODE)
            replace_bytes(certificate_path, made.certificate_pem)
    certificate = Certificate(key_path.read_bytes(), certificate_path.read_bytes())
    _check(certificate, key_path, certificate_path)
    return certificate


def _check(certificate: Certificate, key_path: Path, certificate_path: Path) -> None:
    """Raises OperatorError unless both parse and belong together: gRPC would only say that it cannot listen."""
    mend = (
        f"Restore {key_path.name} and {certificate_path.name} from a backup. If there is none, delete both: new ones are made, "
        "and every peer needs a new invite (`swarmentum-coordinator run invite NAME`)"
    )
    try:
        key = load_pem_private_key(certificate.key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise OperatorError(f"{key_path} holds no private key ({len(certificate.key_pem)} bytes). {mend}") from error
    try:
        found = x509.load_pem_x509_certificate(certificate.certificate_pem)
    except ValueError as error:
        size = len(certificate.certificate_pem)
        raise OperatorError(f"{certificate_path} holds no certificate ({size} bytes). {mend}") from error
    if key.public_key() != found.public_key():
        raise OperatorError(f"{key_path} is not the key of {certificate_path}. {mend}")


def _create() -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, TLS_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_UNTIL)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Certificate(key_pem, certificate.public_bytes(Encoding.PEM))
