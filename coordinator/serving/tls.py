"""The coordinator's TLS certificate: made once, self-signed, pinned by its sha256 in every invite."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from protos.disk import PRIVATE_MODE, check_no_folder, replace_bytes
from protos.errors import OperatorError
from protos.pinned import TLS_NAME

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
    """The certificate in a home folder; made there (key mode 0400) if there is none."""
    key_path, certificate_path = home / "tls.key", home / "tls.crt"
    for path in (key_path, certificate_path):
        check_no_folder(path)
    if not (key_path.exists() and certificate_path.exists()):
        made = _create()
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
