"""Identity: libp2p's spelling, files that only the owner reads, damage that is told."""

import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.errors import OperatorError
from protos.identity import Identity, peer_id, public_key_of, short, verify

# Test vector of the libp2p peer-ids specification (github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md).
SPEC_PRIVATE = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SPEC_PUBLIC = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
deterministic = settings(derandomize=True, deadline=None)


def test_libp2p_spec_vector() -> None:
    identity = Identity.from_libp2p(SPEC_PRIVATE, where="spec")
    assert identity.public_key == SPEC_PUBLIC
    assert identity.to_libp2p() == SPEC_PRIVATE


def test_peer_id_is_the_one_that_libp2p_shows() -> None:
    """All zero seed: the public key of RFC 8032's arithmetic, and its peer id as go-libp2p prints it."""
    identity = Identity.from_seed(bytes(32))
    assert identity.public_key.hex() == "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29"
    assert identity.peer_id == "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    assert short(identity.public_key) == identity.peer_id[-8:]


@given(public_key=st.binary(min_size=32, max_size=32))
@deterministic
def test_peer_id_round_trip(public_key: bytes) -> None:
    text = peer_id(public_key)
    assert text.startswith("12D3KooW")
    assert public_key_of(text) == public_key


@pytest.mark.parametrize(
    "text", ["", "12D3KooW", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "0OIl", "é", peer_id(bytes(32)) + "1"]
)
def test_not_a_peer_id(text: str) -> None:
    with pytest.raises(OperatorError, match="not a"):
        public_key_of(text)


@given(message=st.binary(max_size=60), bit=st.integers(0, 511))
@deterministic
def test_signatures(message: bytes, bit: int) -> None:
    identity = Identity.from_seed(bytes([5]) * 32)
    signature = identity.sign(message)
    assert identity.sign(message) == signature
    assert verify(identity.public_key, signature, message)
    changed = bytearray(signature)
    changed[bit // 8] ^= 1 << bit % 8
    assert not verify(identity.public_key, bytes(changed), message)
    assert not verify(identity.public_key, signature, message + b"x")
    assert not verify(Identity.from_seed(bytes([6]) * 32).public_key, signature, message)
    assert not verify(identity.public_key[:-1], signature, message)
    assert not verify(identity.public_key, signature[:-1], message)
    assert not verify(bytes([255]) * 32, signature, message), "no point of the curve"


def test_file_is_made_once_and_only_the_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.key"
    made = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert Identity.load_or_create(path).public_key == made.public_key
    assert list(path.parent.iterdir()) == [path], "nothing is left over"
    assert Identity.generate().public_key != Identity.generate().public_key


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:-1], lambda data: data + b"x", lambda data: b"\x09" + data[1:],
    lambda data: data[:10] + bytes([data[10] ^ 1]) + data[11:], lambda data: data[:-1] + bytes([data[-1] ^ 1]),
])  # fmt: skip
def test_damaged_file_is_told_and_kept(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "identity.key"
    data = damage(Identity.generate().to_libp2p())  # type: ignore[operator]
    path.write_bytes(data)
    with pytest.raises(OperatorError, match=str(path)):
        Identity.load_or_create(path)
    assert path.read_bytes() == data


def test_file_that_cannot_be_read_or_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="is a folder"):
        Identity.load_or_create(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OperatorError, match="cannot be read or made"):
        Identity.load_or_create(tmp_path / "file" / "identity.key")


def test_a_new_key_is_on_the_disk_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename alone may be lost with the power: the journal would be there, and the key that signed it gone."""
    synced: list[Path] = []
    monkeypatch.setattr("protos.disk.sync_folder", synced.append)
    Identity.load_or_create(tmp_path / "identity.key")
    assert synced == [tmp_path]


def test_an_empty_key_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "identity.key").touch()
    with pytest.raises(OperatorError, match=r"identity.key is empty.*Restore.*or delete it"):
        Identity.load_or_create(tmp_path / "identity.key")


@pytest.mark.parametrize("y", [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18])
@pytest.mark.parametrize("sign", [0, 1 << 255])
def test_a_key_without_a_secret_has_no_signatures(y: int, sign: int) -> None:
    """Anybody signs for the neutral element: 0*B = R + h*A for R = A and every h. It passed as an owner's `signed` name."""
    key = (y | sign).to_bytes(32, "little")
    forged = (1).to_bytes(32, "little") + bytes(32)
    assert not any(verify(key, forged, bytes([number])) for number in range(32))


def test_points_of_order_eight_are_no_keys_and_a_real_key_is_one() -> None:
    for text in (
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    ):
        forged = (1).to_bytes(32, "little") + bytes(32)
        for high in (0, 0x80):
            key = bytes.fromhex(text)[:-1] + bytes([bytes.fromhex(text)[-1] | high])
            assert not any(verify(key, forged, bytes([number])) for number in range(64))
    made = Identity.from_seed(bytes(32))
    assert verify(made.public_key, made.sign(b"x"), b"x")
