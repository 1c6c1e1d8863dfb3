"""The coordinator's certificate holds for any clock, and a proxy comes between only where it has to: real TLS in processes with
another time or environment."""

import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from grpc_health.v1 import health, health_pb2_grpc

from coordinator.store import home_files
from protos.calls import fetch_certificate, out_of_date
from protos.errors import NetworkError
from tests.unit.connect_proxy import connect_proxy

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
ASK = """
import sys
from grpc_health.v1 import health_pb2, health_pb2_grpc
from protos.errors import SwarmentumError
from protos.calls import fetch_certificate, pinned_channel, way_of
address, sha256 = sys.argv[1], bytes.fromhex(sys.argv[2])
proxy = way_of(address)
try:
    with pinned_channel(address, fetch_certificate(address, sha256, proxy=proxy), proxy=proxy) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=240)
    print("answered")
except SwarmentumError as error:
    print(error)
"""


@dataclass(frozen=True)
class Served:
    """A gRPC server with a coordinator's certificate."""

    address: str
    certificate: home_files.Certificate

    def asked(self, **environment: str) -> str:
        """What a client in a process of its own says, with this environment."""
        done = subprocess.run(
            [sys.executable, "-c", ASK, self.address, self.certificate.sha256.hex()],
            env=os.environ | environment, capture_output=True, text=True, timeout=270, check=False,
        )  # fmt: skip
        return done.stdout.strip() or done.stderr


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    yield from _serve(home_files.load_or_create(tmp_path))


@pytest.fixture
def served_of_before(tmp_path: Path) -> Iterator[Served]:
    yield from _serve(of_before(tmp_path, datetime.now(UTC)))


def _serve(certificate: home_files.Certificate) -> Iterator[Served]:
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    pair = [(certificate.key_pem, certificate.certificate_pem)]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
    server.start()
    yield Served(f"127.0.0.1:{port}", certificate)
    server.stop(None).wait(240)


def of_before(home: Path, now: datetime) -> home_files.Certificate:
    """A certificate for ten years, as older versions made it."""
    made = home_files.load_or_create(home)
    new = x509.load_pem_x509_certificate(made.certificate_pem)
    builder = x509.CertificateBuilder(new.issuer, new.subject, new.public_key(), new.serial_number)
    for extension in new.extensions:
        builder = builder.add_extension(extension.value, critical=extension.critical)
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=3650))
    signed = builder.sign(load_pem_private_key(made.key_pem, None), hashes.SHA256())  # type: ignore[arg-type]
    return home_files.Certificate(made.key_pem, signed.public_bytes(Encoding.PEM))


needs_faketime = pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (apt-get install faketime)")


@needs_faketime
@pytest.mark.parametrize(
    "clock", ["1970-01-02 00:00:00", "1972-02-22 00:00:00", "2036-12-01 00:00:00", "2099-01-01 00:00:00"]
)
def test_a_wrong_clock_ends_no_connection(served: Served, clock: str) -> None:
    assert served.asked(LD_PRELOAD=str(FAKETIME), FAKETIME=f"@{clock}", DONT_FAKE_MONOTONIC="1") == "answered"


@needs_faketime
@pytest.mark.parametrize("clock", ["1972-02-22 00:00:00", "2099-01-01 00:00:00"])
def test_with_a_certificate_of_before_the_error_names_the_clock(served_of_before: Served, clock: str) -> None:
    said = served_of_before.asked(LD_PRELOAD=str(FAKETIME), FAKETIME=f"@{clock}", DONT_FAKE_MONOTONIC="1")
    assert f"this machine's clock says {clock[:10]}" in said
    assert "timedatectl set-ntp true" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "http_proxy", "grpc_proxy", "all_proxy"])
def test_no_proxy_comes_between(served: Served, name: str) -> None:
    assert served.asked(**{name: "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}) == "answered"


def test_a_proxy_leads_to_a_coordinator_that_does_not_answer_directly(served: Served) -> None:
    """With its name, because only the proxy of such a network may know names."""
    with connect_proxy() as proxy:
        proxy.leads["coordinator.invalid:443"] = int(served.address.rpartition(":")[2])
        away = replace(served, address="coordinator.invalid:443")
        assert away.asked(https_proxy=proxy.url, no_proxy="", NO_PROXY="") == "answered"
        assert len(proxy.asked) >= 2, "certificate and channel"
        proxy.leads.clear()
        said = away.asked(https_proxy=proxy.url, no_proxy="", NO_PROXY="")
        assert "coordinator.invalid:443" in said
        assert f"through the proxy 127.0.0.1:{proxy.port}" in said
        assert "403" in said


def test_a_proxy_that_opens_tls_is_named(served: Served, tmp_path: Path) -> None:
    other = replace(
        served, address="coordinator.invalid:443", certificate=home_files.load_or_create(tmp_path / "other")
    )
    with connect_proxy() as proxy:
        proxy.leads["coordinator.invalid:443"] = int(served.address.rpartition(":")[2])
        said = other.asked(https_proxy=proxy.url, no_proxy="", NO_PROXY="")
        assert f"reached through the proxy 127.0.0.1:{proxy.port}" in said
        assert "a proxy that opens TLS" in said
    assert "proxy" not in replace(other, address=served.address).asked()


@pytest.mark.parametrize("value", ["http://cam@127.0.0.1:{port}", "  http://cam:SECRET@127.0.0.1:{port} "])
def test_grpc_asks_the_same_proxy_in_the_same_words(served: Served, value: str) -> None:
    with connect_proxy() as proxy:
        proxy.leads["coordinator.invalid:443"] = int(served.address.rpartition(":")[2])
        away = replace(served, address="coordinator.invalid:443")
        assert away.asked(https_proxy=value.format(port=proxy.port), no_proxy="", NO_PROXY="") == "answered"
        words = {line for head in proxy.asked for line in head.split("\r\n") if line.lower().startswith("proxy-auth")}
        assert len({line.partition(":")[2] for line in words}) == 1


@pytest.mark.parametrize("address", ["a..b:443", f"{'x' * 64}.org:443"])
def test_a_host_that_cannot_be_is_a_sentence_with_a_proxy_too(served: Served, address: str) -> None:
    said = replace(served, address=address).asked(https_proxy="http://127.0.0.1:9", no_proxy="", NO_PROXY="")
    assert said.startswith(f"no coordinator answers at {address}"), said


def test_an_operator_hears_a_year_before_that_a_certificate_of_before_ends(tmp_path: Path) -> None:
    now = datetime(2026, 11, 25, tzinfo=UTC)
    old = of_before(tmp_path, now)
    assert old.ends_soon(now) == ""
    assert "ends on 2036-11-22" in old.ends_soon(now + timedelta(days=3300))
    assert home_files.load_or_create(tmp_path).ends_soon(now + timedelta(days=365_000)) == ""
    assert out_of_date(old.certificate_pem, now) == ""
    assert "holds from 2026-11-24 to 2036-11-22" in out_of_date(old.certificate_pem, now + timedelta(days=4000))


def test_a_server_that_ends_the_connection_first_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wrap_socket` left it to the garbage collector, as a coordinator showed that was stopped at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ours = socket.create_connection(("127.0.0.1", port), timeout=9)
        theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close is a reset
        theirs.close()
        assert select.select([ours], [], [], 9)[0]
        descriptor = ours.fileno()
        monkeypatch.setattr(socket, "create_connection", lambda *_, **__: ours)
        with pytest.raises(NetworkError, match="no coordinator answers at") as caught:
            fetch_certificate(f"127.0.0.1:{port}", bytes(32))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert isinstance(caught.value.__cause__, ConnectionResetError)
