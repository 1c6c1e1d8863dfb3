"""A hub for tests: the part of the Hugging Face hub's HTTP API that uploads and downloads of a model use, on loopback.

The client is the real huggingface_hub, by HF_ENDPOINT. No test has reached the real hub. Large files go by git LFS here
(HF_HUB_DISABLE_XET=1), because the protocol of hf_xet is another server's.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

TOKEN = "hf_a_token_that_writes"
READS = "hf_a_token_that_reads"


@dataclass
class Repo:
    """A repository: the files of each commit, the newest last."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], message: str = "") -> str:
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode(), usedforsecurity=False).hexdigest()
        self.commits.append((sha, files))
        self.messages.append(message)
        return sha

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((it for it in self.commits if it[0] == revision), None)


class Hub:
    """`refuse` may break a request: (method, path) -> a status, 0 for a connection that ends without a word, None: go on."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.refuse: Callable[[str, str], int | None] = lambda method, path: None
        hub = self

        class Handler(_Handler):
            def __init__(self, *args: Any) -> None:
                self.hub = hub
                super().__init__(*args)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, folder: Path, token: str | None = TOKEN) -> dict[str, str]:
        """For a program that uses this hub. Its cache and token are below `folder`."""
        values = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        return (
            values | {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"} | ({"HF_TOKEN": token} if token else {})
        )

    def count(self, method: str, part: str) -> int:
        """How many requests had this part in their path."""
        return sum(one == method and part in path for one, path in self.asked)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._take("GET")

    def do_HEAD(self) -> None:
        self._take("HEAD")

    def do_POST(self) -> None:
        self._take("POST")

    def do_PUT(self) -> None:
        self._take("PUT")

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def _take(self, method: str) -> None:
        path, _, _ = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append((method, path))
        refused = self.hub.refuse(method, path)
        if refused == 0:
            self.close_connection = True
            return
        if refused is not None:
            self._answer(refused, {"error": "the test says no"})
            return
        for pattern, answer in _ROUTES:
            if (match := re.fullmatch(pattern, f"{method} {path}")) is not None:
                answer(self, *match.groups(), body)
                return
        self._answer(404, {"error": f"not here: {method} {path}"})

    @property
    def token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _answer(self, status: int, value: Any = None, data: bytes | None = None, **headers: str) -> None:
        data = json.dumps(value).encode() if data is None else data
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self.token not in (TOKEN, READS)):
            self._answer(404 if self.token in (TOKEN, READS) else 401, {"error": "Repository not found"},
                         X_Error_Code="RepoNotFound")  # fmt: skip
            return None
        return repo

    def whoami(self, body: bytes) -> None:
        if self.token not in (TOKEN, READS):
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
            return
        self._answer(200, {"type": "user", "name": "ada", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or 'ada'}/{wanted['name']}"
        if self.token != TOKEN or not name.startswith("ada/"):
            self._answer(403, {"error": "you have no rights to create a model under this namespace"})
            return
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            self._answer(409, {"error": "You already created this model repo", "url": url})
            return
        private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.hub.repos[name] = Repo(private)
        self.hub.repos[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._answer(200, {"url": url, "name": name, "id": name})

    def validate(self, body: bytes) -> None:
        head = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
        assert head["tags"] == ["swarmentum"]
        assert head["license"] == "unknown"
        self._answer(200, {"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str, body: bytes) -> None:
        if self._repo(name) is None:
            return
        asked = json.loads(body)["files"]
        modes = [
            {"path": it["path"], "uploadMode": "lfs" if it["path"].endswith(".safetensors") else "regular",
             "shouldIgnore": False, "oid": None}
            for it in asked
        ]  # fmt: skip
        self._answer(200, {"files": modes})

    def batch(self, name: str, body: bytes) -> None:
        objects = []
        for it in json.loads(body)["objects"]:
            sha = it["oid"]
            made = {"oid": sha, "size": it["size"]}
            if sha not in self.hub.blobs:
                made["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{sha}"}}
            objects.append(made)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def store(self, sha: str, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == sha
        self.hub.blobs[sha] = body
        self._answer(200, {})

    def commit(self, name: str, revision: str, body: bytes) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        files, message = dict(repo.commits[-1][1]), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        sha = repo.commit(files, message)
        self._answer(200, {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"})

    def info(self, name: str, revision: str | None, body: bytes) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        found = repo.at(revision or "main")
        if found is None:
            self._answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
            return
        sha, files = found
        siblings = [{"rfilename": path} for path in files]
        self._answer(200, {"id": name, "modelId": name, "sha": sha, "private": repo.private, "siblings": siblings,
                           "tags": [], "downloads": 0, "likes": 0})  # fmt: skip

    def tree(self, name: str, revision: str, body: bytes) -> None:
        repo = self._repo(name)
        found = None if repo is None else repo.at(revision)
        if found is None:
            return
        self._answer(200, [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data, usedforsecurity=False).hexdigest()}
            for path, data in found[1].items()
        ])  # fmt: skip

    def resolve(self, name: str, revision: str, path: str, body: bytes) -> None:
        repo = self._repo(name)
        found = None if repo is None else repo.at(revision)
        if repo is None or found is None:
            return
        sha, files = found
        if path not in files:
            self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
            return
        etag = hashlib.sha256(files[path]).hexdigest()
        self._answer(
            200, data=files[path], ETag=f'"{etag}"', X_Repo_Commit=sha, Content_Type="application/octet-stream"
        )


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, Any]] = [
    (r"GET /api/whoami-v2", _Handler.whoami),
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate),
    (rf"POST /api/models/{_NAME}/preupload/(\w+)", _Handler.preupload),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /lfs/(\w+)", _Handler.store),
    (rf"POST /api/models/{_NAME}/commit/(\w+)", _Handler.commit),
    (rf"GET /api/models/{_NAME}(?:/revision/(\w+))?", _Handler.info),
    (rf"GET /api/models/{_NAME}/tree/(\w+)", _Handler.tree),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/(\w+)/(.+)", _Handler.resolve),
]
