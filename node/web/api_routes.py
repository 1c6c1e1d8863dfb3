"""The routes: the page's files, the read-only JSON API under /api, the log as signed bytes, and the live streams.

Requests change nothing. Other origins may read the API (CORS for GET), except the invite link.

The description of the API (OpenAPI 3.1) is made from the types of its answers: what is described is what is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from node.web import answers, views
from node.web.server import TRANSPORT, Channels, HttpGuard, Reader, stream
from protos.version import software_version

if TYPE_CHECKING:
    from node.web.serve import Site

REF: Final = "#/components/schemas/{model}"
_RUN = {"name": "run", "in": "path", "required": True, "description": "The run id, 64 hex digits.",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"}}  # fmt: skip
_OFFSET = ("offset", "Lines to leave out.")
_LIMIT = ("limit", "Lines wanted, at most 200.")
_BINARY = "application/octet-stream"
_EVENTS = "text/event-stream"
_ONE = "/api/runs/{run}"
# path -> (what it is, its answer, its numbers)
_PATHS: Final[dict[str, tuple[str, type[answers.Answer] | str, tuple[tuple[str, str], ...]]]] = {
    "/api/runs": ("The runs of this page.", answers.RunList, (_OFFSET, _LIMIT)),
    _ONE: ("One run: phase, figures, peers, newest events.", answers.Run, ()),
    f"{_ONE}/steps": (
        "Figures by step, reduced to some points. With `from`, `to` and `points` of at least `to - from + 1`: each step.",
        answers.Steps,
        (("from", "The first step."), ("to", "The last step."), ("points", "Points wanted, at most 2,000.")),
    ),
    f"{_ONE}/ledger": ("The leaderboard, from the log alone.", answers.Ledger, (_OFFSET, _LIMIT)),
    f"{_ONE}/samples": ("What the model wrote after the evaluated states, as peers say.", answers.Samples, ()),
    f"{_ONE}/feed": ("Events.", answers.Feed, (("after", "Only events with a larger number."),)),
    f"{_ONE}/genesis": ("The serialised Genesis. The run id is its hash (docs/protocol.md).", _BINARY, ()),
    f"{_ONE}/log": (
        "Signed entries in order: records of a u32 length (big endian) and a SignedEnvelope, as they travelled. At most 512 "
        "entries or 1 MiB a page. The header x-last-step names the last one.",
        _BINARY,
        (("from", "The first step."),),
    ),
    f"{_ONE}/invite": ("The invite link, for the page itself: other origins do not get it.", answers.InviteLink, ()),
    f"{_ONE}/events": (
        "Live: event `run` has what /api/runs/{run} has, event `steps` has the new steps as /steps has them.",
        _EVENTS,
        (),
    ),
    "/api/events": ("Live: event `runs` has what /api/runs has.", _EVENTS, ()),
}


def description() -> bytes:
    """The description as JSON."""
    models: list[type[answers.Answer]] = [answers.Problem]
    models += [it for _, it, _ in _PATHS.values() if not isinstance(it, str)]
    _, schemas = models_json_schema([(model, "serialization") for model in models], ref_template=REF)
    return json.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "A Swarmentum run",
                "version": software_version(),
                "description": "Read only. Answers have an ETag. Other origins may read everything but the invite link.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": {path: {"get": _operation(path, *it)} for path, it in _PATHS.items()},
            "components": {"schemas": schemas["$defs"]},
        },
        indent=1,
    ).encode()


def _operation(
    path: str, what: str, answer: type[answers.Answer] | str, numbers: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [_RUN] if "{run}" in path else []
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": {"type": "integer", "minimum": 0}}
        for name, text in numbers
    ]
    kind, schema = (answer, {}) if isinstance(answer, str) else ("application/json", _ref(answer))
    problem = {"description": "Why not.", "content": {"application/json": {"schema": _ref(answers.Problem)}}}
    return {
        "operationId": (path.removeprefix("/api/").replace("/{run}", "/one").replace("/", "_")),
        "summary": what,
        "parameters": parameters,
        "responses": {
            "200": {"description": what, "content": {kind: {"schema": schema}}},
            "304": {"description": "As the asker has it already (If-None-Match)."},
            "default": problem,
        },
    }


def _ref(model: type[answers.Answer]) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}


STATIC: Final = Path(__file__).with_name("static")
PAGE_LINES_MAX: Final = 200
POINTS_MAX: Final = 2000
POINTS: Final = 600
NUMBER_DIGITS_MAX: Final = 15
_OPEN_TO_ALL = {"access-control-allow-origin": "*", "access-control-expose-headers": "etag, x-last-step"}
_LOG = "application/octet-stream"


def app_of(site: Site, hosts: Iterable[str] = ()) -> Any:
    """The whole app. `hosts`: names under which browsers may ask for the invite link, besides addresses and localhost."""
    api = Api(site, frozenset(host.lower() for host in hosts))
    one = "/api/runs/{run}"
    routes = [
        Route("/api/openapi.json", api.openapi),
        Route("/api/runs", api.runs),
        Route("/api/events", api.list_events),
        Route(one, api.run),
        Route(f"{one}/steps", api.steps),
        Route(f"{one}/ledger", api.ledger),
        Route(f"{one}/feed", api.feed),
        Route(f"{one}/samples", api.samples),
        Route(f"{one}/genesis", api.genesis),
        Route(f"{one}/log", api.log),
        Route(f"{one}/invite", api.invite),
        Route(f"{one}/events", api.run_events),
        Mount("/", Files(directory=STATIC, html=True)),
    ]
    return HttpGuard(Starlette(routes=routes, exception_handlers={HTTPException: refused}), bodies=False)


class Files(StaticFiles):
    """The page's own files. A browser asks each time whether they changed, so it never mixes two versions."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """As the library makes it, but checked by ETag each time."""
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


async def refused(request: Request, error: Exception) -> Response:
    """Why a request has no answer, as JSON."""
    assert isinstance(error, HTTPException)
    body = answers.Problem(error=str(error.detail)).model_dump_json()
    headers = {**(error.headers or {}), **_OPEN_TO_ALL}
    return Response(body, error.status_code, headers, "application/json")


class Api:
    """The answers of one site."""

    def __init__(self, site: Site, hosts: frozenset[str]) -> None:
        self._site, self._hosts = site, hosts
        self._openapi = description()

    async def openapi(self, request: Request) -> Response:
        """What this API is."""
        return tagged(request, self._openapi, "application/json")

    async def runs(self, request: Request) -> Response:
        """The list of runs."""
        offset, limit = number(request, "offset", 0), number(request, "limit", PAGE_LINES_MAX, PAGE_LINES_MAX)
        found = list(self._site.runs.values())
        lines = [views.line_of(run) for run in found[offset : offset + limit]]
        return value(request, answers.RunList(runs=lines, total=len(found), offset=offset))

    async def run(self, request: Request) -> Response:
        """One run."""
        return value(request, views.run_of(self._found(request)))

    async def steps(self, request: Request) -> Response:
        """Columns of a chart."""
        run = self._found(request)
        first = number(request, "from", 1)
        last = number(request, "to", run.book.head)
        points = max(number(request, "points", POINTS, POINTS_MAX), 1)
        return value(request, run.book.points(first, last, points))

    async def ledger(self, request: Request) -> Response:
        """A page of the leaderboard."""
        offset, limit = number(request, "offset", 0), number(request, "limit", PAGE_LINES_MAX, PAGE_LINES_MAX)
        return value(request, views.ledger_of(self._found(request), offset, limit))

    async def feed(self, request: Request) -> Response:
        """Events after a number."""
        events = views.events_of(self._found(request), number(request, "after", 0))
        return value(request, answers.Feed(events=events))

    async def samples(self, request: Request) -> Response:
        """What the model wrote."""
        return value(request, views.samples_of(self._found(request)))

    async def genesis(self, request: Request) -> Response:
        """The bytes whose hash is the run id."""
        run = self._found(request)
        if run.facts is None:
            raise HTTPException(503, f"run {run.run_hex[:16]}: {run.problem}; ask again in a few seconds")
        return tagged(request, run.facts.genesis.SerializeToString(deterministic=True), _LOG)

    async def log(self, request: Request) -> Response:
        """Signed entries, as they travelled."""
        data, last, full = self._found(request).spool.page(max(number(request, "from", 1), 1))
        kept = "public, max-age=86400, immutable" if full else "no-cache"
        return tagged(request, data, _LOG, {"x-last-step": str(last), "cache-control": kept})

    async def invite(self, request: Request) -> Response:
        """The link, for the page itself: no other origin may read it."""
        run = self._found(request)
        host = (request.headers.get("host") or "").rpartition("@")[2].lower()
        if not self._own(host):
            text = f"the page does not know the host {host[:64]!r}; start it with --host {host[:64]}"
            raise HTTPException(403, text)
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise HTTPException(403, "another site asked for the invite link: only the page itself may have it")
        return value(request, views.invite_of(run), shared=False)

    def _own(self, host: str) -> bool:
        """Whether no stranger's DNS can have led a browser here under this name."""
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if name == "localhost" or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    async def list_events(self, request: Request) -> Response:
        """The live stream of the list."""
        return self._live("")

    async def run_events(self, request: Request) -> Response:
        """The live stream of a run."""
        return self._live(self._found(request).run_hex)

    def _live(self, name: str) -> Response:
        reader = self._site.channels.enter(name)
        if reader is None:
            raise HTTPException(
                503, "too many browsers watch at the moment; try again in a minute", {"retry-after": "60"}
            )
        return EventStream(self._site.channels, name, reader)

    def _found(self, request: Request) -> Any:
        name = request.path_params["run"]
        run = self._site.runs.get(name)
        if run is None:
            raise HTTPException(404, f"no run {name[:64]!r} here; /api/runs lists the runs by their whole ids")
        return run


class EventStream(Response):
    """One open stream of server-sent events."""

    def __init__(self, channels: Channels, name: str, reader: Reader) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store", **_OPEN_TO_ALL})
        del self.headers["content-length"]
        self._channels, self._name, self._reader = channels, name, reader

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send until the browser leaves, is dropped, or the process stops."""

        async def body(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        watching = asyncio.ensure_future(gone())
        watching.add_done_callback(lambda _: self._reader.end())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            kept = await stream(self._reader, body)
            transport = scope.get("state", {}).get(TRANSPORT)
            if not kept and transport is not None:
                transport.abort()
            elif not watching.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watching.cancel()
            self._channels.leave(self._name, self._reader)


def number(request: Request, name: str, default: int, most: int | None = None) -> int:
    """A whole number of the query, at least 0; more than `most` counts as `most`. 400 for anything else."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS_MAX):
        raise HTTPException(400, f"{name}={text[:32]!r}: expected a whole number of at most {NUMBER_DIGITS_MAX} digits")
    return int(text) if most is None else min(int(text), most)


def value(request: Request, answer: answers.Answer, *, shared: bool = True) -> Response:
    """An answer as JSON."""
    return tagged(request, answer.model_dump_json().encode(), "application/json", shared=shared)


def tagged(
    request: Request, body: bytes, kind: str, headers: dict[str, str] | None = None, *, shared: bool = True
) -> Response:
    """The body with its ETag; 304 without it if the asker has it. `shared`: other origins may read it."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    own = {"cache-control": "no-cache", "etag": tag, **(_OPEN_TO_ALL if shared else {}), **(headers or {})}
    asked = {part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")}
    if tag in asked or "*" in asked:
        return Response(status_code=304, headers=own)
    return Response(body, headers=own, media_type=kind)
