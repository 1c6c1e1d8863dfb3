"""Identity: an Ed25519 key pair. A peer is its public key; its libp2p peer id is the same key in another spelling.

Refuses to make or overwrite key files that others may read. Crypto is `cryptography`'s, never ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from protos.disk import PRIVATE_MODE, check_no_folder, replace_bytes
from protos.errors import OperatorError
from protos.limits import PUBLIC_KEY_BYTES, SIGNATURE_BYTES

# libp2p peer-ids spec: protobuf PrivateKey{Type: Ed25519 = 1, Data: seed[32] + public[32]}.
_LIBP2P_PRIVATE_PREFIX = bytes.fromhex("08011240")
# The same spec: identity multihash (0x00, 36 bytes) of protobuf PublicKey{Type: Ed25519 = 1, Data: public[32]}.
_LIBP2P_PEER_ID_PREFIX = bytes.fromhex("0024" + "08011220")
_FIELD = (1 << 255) - 19
_ORDER_8 = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")
_SMALL_ORDER = frozenset({0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8})
"""The y of the eight points of small order of edwards25519 (libsodium's `ge25519_has_small_order` has the same list)."""


@dataclass(frozen=True)
class Identity:
    """A key pair. `public_key` is 32 bytes."""

    private_key: Ed25519PrivateKey
    public_key: bytes

    @property
    def peer_id(self) -> str:
        """The libp2p spelling, 12D3Koo..."""
        return peer_id(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """64 bytes; Ed25519 is deterministic: the same message always gets the same signature."""
        return self.private_key.sign(message)

    @staticmethod
    def generate() -> Identity:
        """A new random key pair."""
        return _of(Ed25519PrivateKey.generate())

    @staticmethod
    def from_seed(seed: bytes) -> Identity:
        """The key pair of a 32-byte seed."""
        return _of(Ed25519PrivateKey.from_private_bytes(seed))

    @staticmethod
    def load_or_create(path: Path) -> Identity:
        """Read a key file, or make one (mode 0400, in the libp2p PrivateKey form that go-libp2p reads).

        Raises OperatorError if the file is no such key.
        """
        check_no_folder(path)
        try:
            if not path.exists():
                identity = Identity.generate()
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_bytes(path, identity.to_libp2p(), mode=PRIVATE_MODE)
                return identity
            data = path.read_bytes()
        except OSError as error:
            raise OperatorError(f"{path}: the identity file cannot be read or made: {error.strerror}") from error
        return Identity.from_libp2p(data, where=str(path))

    def to_libp2p(self) -> bytes:
        """68 bytes: the libp2p PrivateKey protobuf."""
        seed = self.private_key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        return _LIBP2P_PRIVATE_PREFIX + seed + self.public_key

    @staticmethod
    def from_libp2p(data: bytes, where: str) -> Identity:
        """Inverse of `to_libp2p`; `where` names the source in the error."""
        if not data:
            raise OperatorError(
                f"{where} is empty: the identity that was in it is lost here. Restore the file from a backup, or delete it to "
                "have a new identity made: for others this is somebody new then"
            )
        if len(data) != 68 or not data.startswith(_LIBP2P_PRIVATE_PREFIX):
            raise OperatorError(
                f"{where}: not an Ed25519 identity file (68 bytes, libp2p PrivateKey); "
                "move it away to have a new identity made, or restore it from a backup"
            )
        identity = Identity.from_seed(data[4:36])
        if identity.public_key != data[36:]:
            raise OperatorError(f"{where}: the identity file is damaged: its two halves do not belong together")
        return identity


def _of(private_key: Ed25519PrivateKey) -> Identity:
    return Identity(private_key, private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))


@lru_cache(maxsize=4096)  # spelled for every log line and reason; base58 is slow
def peer_id(public_key: bytes) -> str:
    """The libp2p peer id of an Ed25519 public key (libp2p peer-ids spec)."""
    assert len(public_key) == PUBLIC_KEY_BYTES, len(public_key)
    return base58.b58encode(peer_id_bytes(public_key)).decode("ascii")


def peer_id_bytes(public_key: bytes) -> bytes:
    """A peer id as libp2p's messages carry it."""
    return _LIBP2P_PEER_ID_PREFIX + public_key


def public_key_of(peer_id_text: str) -> bytes:
    """The public key inside a peer id; OperatorError if it is no Ed25519 peer id."""
    try:
        raw = base58.b58decode(peer_id_text)
    except ValueError as error:
        raise OperatorError(f"{peer_id_text!r} is not a peer id: {error}") from error
    if len(raw) != 38 or not raw.startswith(_LIBP2P_PEER_ID_PREFIX):
        raise OperatorError(f"{peer_id_text!r} is not an Ed25519 peer id (12D3Koo...)")
    return raw[6:]


@lru_cache(maxsize=8192)
def _key_of(public_key: bytes) -> Ed25519PublicKey:
    """ValueError for bytes that are no key."""
    return Ed25519PublicKey.from_public_bytes(public_key)


def verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` is the key's signature of `message`; False for bytes of the wrong length, and for a key that has no
    secret."""
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES or _anybody_signs(public_key):
        return False
    try:
        _key_of(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _anybody_signs(public_key: bytes) -> bool:
    """Whether the key is a point of small order, which OpenSSL takes: a signature that anybody can write fits one message in
    eight, or every message."""
    y = int.from_bytes(public_key, "little") & ((1 << 255) - 1)
    return y % _FIELD in _SMALL_ORDER


def short(public_key: bytes) -> str:
    """The last eight characters of the peer id: enough to tell peers apart in a table."""
    return peer_id(public_key)[-8:]
