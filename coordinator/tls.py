"""The coordinator's TLS certificate: made once, self-signed, pinned by its sha256 in every invite."""

from __future__ import annotations

import datetime
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

# The name that peers expect, whatever the address: the pin decides, not the name.
TLS_NAME = "swarmentum-coordinator"
VALID_DAYS = 3650


@dataclass(frozen=True)
class Certificate:
    """PEM key and certificate, and the sha256 of the DER certificate."""

    key_pem: bytes
    certificate_pem: bytes

    @property
    def sha256(self) -> bytes:
        """What invites pin; 32 bytes."""
        certificate = x509.load_pem_x509_certificate(self.certificate_pem)
        return hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()


def load_or_create(home: Path) -> Certificate:
    """The certificate in a home folder; made there (key mode 0400) if there is none."""
    key_path, certificate_path = home / "tls.key", home / "tls.crt"
    if not (key_path.exists() and certificate_path.exists()):
        made = _create()
        home.mkdir(parents=True, exist_ok=True)
        key_path.unlink(missing_ok=True)
        certificate_path.unlink(missing_ok=True)
        with os.fdopen(os.open(key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
            file.write(made.key_pem)
        temporary = certificate_path.with_name(f".{certificate_path.name}.{os.getpid()}")
        temporary.write_bytes(made.certificate_pem)
        temporary.rename(certificate_path)  # the pair is made again unless both are there, whole
    return Certificate(key_path.read_bytes(), certificate_path.read_bytes())


def _create() -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, TLS_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Certificate(key_pem, certificate.public_bytes(Encoding.PEM))
