"""The nginx example of deploy/proxy before a real coordinator's page: TLS, live events, limits by address."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.local_swarm import PLAIN_MODEL, LocalSwarm, wait_for

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
EXAMPLE = Path("deploy/proxy/nginx.conf")
NAME = "swarm.example"
RUN = f"""
name = "behind"
{PLAIN_MODEL}
[data]
context = 32
[clock]
steps = 100000
[overlay]
bootstrap = [BOOTSTRAP]
"""
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(200),
    pytest.mark.skipif(NGINX is None, reason="no nginx here: apt-get install nginx-light"),
]


class Behind(LocalSwarm):
    """A coordinator whose page is known under the proxy's name."""

    def surroundings(self, name: str) -> dict[str, str]:
        page = {
            "SWARMENTUM_COORDINATOR_WEB_LISTEN": "127.0.0.1:0",
            "SWARMENTUM_COORDINATOR_WEB_HOSTS": json.dumps([NAME]),
        }
        return page if name == "coordinator" else {}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The example on ports and with a certificate of its own; its port, and the certificate."""
    folder = tmp_path_factory.mktemp("proxy")
    swarm = Behind(folder, RUN)
    try:
        ready = wait_for("page", lambda: swarm.events("coordinator", "the web page of the runs is ready"))
        at = str(ready[-1]["url"]).removeprefix("http://").rstrip("/")
        key, certificate, port = folder / "key.pem", folder / "cert.pem", free_port()
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}", "-keyout", str(key), "-out", str(certificate)],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        text = EXAMPLE.read_text()
        changes = {
            r"127\.0\.0\.1:7780": at, r"\[::\]:443": f"[::1]:{port}", r"listen 443": f"listen 127.0.0.1:{port}",
            r"\[::\]:80": f"[::1]:{free_port()}", r"listen 80": f"listen 127.0.0.1:{free_port()}",
            r"/etc/\S+fullchain\.pem": str(certificate), r"/etc/\S+privkey\.pem": str(key),
        }  # fmt: skip
        for pattern, value in changes.items():
            text, count = re.subn(pattern, value, text)
            assert count == 1, f"{pattern} stands {count} times in {EXAMPLE}"
        config = folder / "nginx.conf"
        paths = "".join(
            f"{name}_temp_path {folder / name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config.write_text(
            f"daemon off; pid {folder / 'nginx.pid'}; error_log {folder / 'error.log'};\n"
            f"events {{}}\nhttp {{ access_log off; {paths}\n{text} }}\n"
        )
        assert NGINX is not None
        tried = subprocess.run(
            [NGINX, "-t", "-c", str(config)], capture_output=True, text=True, check=False, timeout=60
        )
        assert tried.returncode == 0, tried.stderr
        with subprocess.Popen([NGINX, "-c", str(config)]) as served:
            try:
                wait_for("proxy", (folder / "nginx.pid").exists)
                yield port, certificate
            finally:
                served.terminate()
    finally:
        swarm.close()


@contextmanager
def ask(proxy: tuple[int, Path], path: str) -> Iterator[httpx.Response]:
    port, certificate = proxy
    context = ssl.create_default_context(cafile=str(certificate))
    with (
        httpx.Client(verify=context, timeout=20) as client,
        client.stream(
            "GET", f"https://127.0.0.1:{port}{path}", headers={"Host": NAME}, extensions={"sni_hostname": NAME}
        ) as answer,
    ):
        yield answer


def runs_of(proxy: tuple[int, Path]) -> list[dict[str, Any]]:
    with ask(proxy, "/api/runs") as runs:
        return list(json.loads(runs.read())["runs"])


def test_the_page_is_behind_tls_and_live(proxy: tuple[int, Path]) -> None:
    with ask(proxy, "/") as page:
        assert page.status_code == 200
        assert page.headers["Strict-Transport-Security"] == "max-age=31536000"
        assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    [run] = wait_for("run on the page", lambda: runs_of(proxy))
    assert run["name"] == "behind"
    with ask(proxy, "/api/events") as events:
        assert events.headers["Content-Type"].startswith("text/event-stream")
        assert next(events.iter_lines()), "the first event waits in the proxy"


def test_one_address_cannot_ask_without_end(proxy: tuple[int, Path]) -> None:
    statuses = []
    for _ in range(300):
        with ask(proxy, "/icon.svg") as answer:
            statuses.append(answer.status_code)
        if statuses[-1] == 429:
            break
    assert statuses[0] == 200
    assert statuses[-1] == 429, f"{len(statuses)} requests, none refused"
