"""The nginx example of deploy/proxy before a real coordinator's page: TLS, live events, limits by address."""

import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.system.local_swarm import LocalSwarm, toml_of_run, wait_for
from tests.waiting import free_port

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
EXAMPLE = Path("deploy/proxy/nginx.conf")
OPERATORS_EXAMPLE = Path("deploy/proxy/nginx-operator.conf")
NAME, OPERATORS_NAME = "swarm.example", "operator.example"
RUN = toml_of_run("behind")
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(NGINX is None, reason="no nginx here: apt-get install nginx-light"),
]


class Behind(LocalSwarm):
    """A coordinator whose pages are known under the proxy's names."""

    @cache  # noqa: B019 - one swarm for the module
    def operators_page(self) -> str:
        """Where the operator's page listens. Its log names the proxy."""
        return f"127.0.0.1:{free_port()}"

    def surroundings(self, name: str) -> dict[str, str]:
        page = {
            "SWARMENTUM_COORDINATOR_WEB_LISTEN": "127.0.0.1:0",
            "SWARMENTUM_COORDINATOR_WEB_HOSTS": json.dumps([NAME]),
            "SWARMENTUM_COORDINATOR_OPERATOR_WEB_LISTEN": self.operators_page(),
            "SWARMENTUM_COORDINATOR_OPERATOR_WEB_HOST": OPERATORS_NAME,
        }
        return page if name == "coordinator" else {}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    made = Behind(tmp_path_factory.mktemp("proxy"), RUN)
    try:
        yield made
    finally:
        made.close()


def at_of(swarm: Behind, ready: str) -> str:
    """Where a page listens."""
    said = wait_for(ready, lambda: swarm.events("coordinator", ready))
    return str(said[-1]["url"]).removeprefix("http://").rstrip("/")


def certified(folder: Path, name: str) -> tuple[Path, Path]:
    """The key and the certificate of a name."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    return key, certificate


def answers(port: int) -> bool:
    """Whether somebody takes connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


@contextmanager
def nginx(folder: Path, example: Path, name: str, changes: dict[str, str]) -> Iterator[tuple[int, Path]]:
    """An example on a port and with a certificate of its own; its port, and the certificate."""
    folder.mkdir(exist_ok=True)
    (key, certificate), port = certified(folder, name), free_port()
    text = example.read_text()
    always = {
        r"\[::\]:443": f"[::1]:{port}", r"listen 443": f"listen 127.0.0.1:{port}",
        r"/etc/\S+fullchain\.pem": str(certificate), r"/etc/\S+privkey\.pem": str(key),
    }  # fmt: skip
    for pattern, value in {**always, **changes}.items():
        text, count = re.subn(pattern, value, text)
        assert count == 1, f"{pattern} stands {count} times in {example}"
    config = folder / "nginx.conf"
    paths = "".join(
        f"{name}_temp_path {folder / name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config.write_text(
        f"daemon off; pid {folder / 'nginx.pid'}; error_log {folder / 'error.log'};\n"
        f"events {{}}\nhttp {{ access_log off; {paths}\n{text} }}\n"
    )
    assert NGINX is not None
    tried = subprocess.run([NGINX, "-t", "-c", str(config)], capture_output=True, text=True, check=False, timeout=300)
    assert tried.returncode == 0, tried.stderr
    with subprocess.Popen([NGINX, "-c", str(config)]) as served:
        try:
            wait_for("proxy", lambda: answers(port))
            yield port, certificate
        finally:
            served.terminate()


@contextmanager
def before(swarm: Behind, folder: Path, changes: dict[str, str]) -> Iterator[tuple[int, Path]]:
    """The example for the page of the runs."""
    places = {
        r"127\.0\.0\.1:7780": at_of(swarm, "the web page of the runs is ready"),
        r"\[::\]:80": f"[::1]:{free_port()}", r"listen 80": f"listen 127.0.0.1:{free_port()}",
    }  # fmt: skip
    with nginx(folder, EXAMPLE, NAME, places | changes) as served:
        yield served


@pytest.fixture(scope="module")
def proxy(swarm: Behind) -> Iterator[tuple[int, Path]]:
    with before(swarm, swarm.folder / "nginx", {}) as served:
        yield served


@contextmanager
def ask(proxy: tuple[int, Path], path: str) -> Iterator[httpx2.Response]:
    port, certificate = proxy
    context = ssl.create_default_context(cafile=str(certificate))
    with (
        httpx2.Client(verify=context, timeout=300) as client,
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


def test_one_address_cannot_ask_without_end(swarm: Behind, tmp_path: Path) -> None:
    """At a rate that this test beats on the slowest machine, too; the burst is the example's."""
    statuses = []
    with before(swarm, tmp_path, {"rate=20r/s": "rate=1r/m"}) as slow:
        for _ in range(100):
            with ask(slow, "/icon.svg") as answer:
                statuses.append(answer.status_code)
            if statuses[-1] == 429:
                break
    assert statuses[0] == 200
    assert statuses[-1] == 429, f"{len(statuses)} requests, none refused"


def test_an_operator_logs_in_behind_tls_from_an_own_address_alone(swarm: Behind) -> None:
    at = {r"http://127\.0\.0\.1:7781": f"http://{swarm.operators_page()}"}
    at_of(swarm, "the operator's page is ready")
    folder = swarm.folder
    closed, opened = (partial(nginx, folder / name, OPERATORS_EXAMPLE, OPERATORS_NAME) for name in ("closed", "open"))
    with closed(at) as served, operators(*served) as client:
        assert client.get("/").status_code == 403, "the address of this test is none of the example's"
    own = {r"192\.0\.2\.0/24": "127.0.0.1", "rate=5r/s": "rate=1r/m"}
    with opened(at | own) as served, operators(*served) as client:
        page = client.get("/")
        assert page.status_code == 200
        assert page.headers["Strict-Transport-Security"] == "max-age=31536000"
        link = str(swarm.operate("web", "login")["link"])
        assert link.startswith(f"https://{OPERATORS_NAME}/#login=")
        secret = link.partition("=")[2]
        foreign = client.post("/api/login", json={"secret": secret}, headers={"Origin": f"https://{NAME}"})
        assert foreign.status_code == 403
        login = client.post("/api/login", json={"secret": secret})
        assert login.status_code == 200, "another site used the link up"
        said = login.headers["Set-Cookie"].lower()
        assert all(word in said for word in ("; secure", "; httponly", "; samesite=strict"))
        cookie = {"Cookie": login.headers["Set-Cookie"].partition(";")[0]}
        token = {"x-swarmentum-token": login.json()["token"]}
        asked = {"what": "runs", "run": "", "values": {}}
        assert client.post("/api/ask", json=asked, headers=cookie).status_code == 403, "the cookie alone"
        found = client.post("/api/ask", json=asked, headers={**cookie, **token})
        assert [run["name"] for run in found.json()["runs"]] == ["behind"]
        statuses = [client.get("/icon.svg").status_code for _ in range(100)]
        assert statuses[-1] == 429, "one address may ask without end"


@contextmanager
def operators(port: int, certificate: Path) -> Iterator[httpx2.Client]:
    """A browser that knows the operator's page by its name."""
    headers = {"Host": OPERATORS_NAME, "Origin": f"https://{OPERATORS_NAME}", "Sec-Fetch-Site": "same-origin"}
    context = ssl.create_default_context(cafile=str(certificate))
    named = {"sni_hostname": OPERATORS_NAME}

    def about(request: httpx2.Request) -> None:
        request.extensions = {**request.extensions, **named}

    hooks = {"request": [about]}
    at = f"https://127.0.0.1:{port}"
    with httpx2.Client(verify=context, timeout=300, base_url=at, headers=headers, event_hooks=hooks) as client:
        yield client
