"""The description of the API (OpenAPI 3.1), made from the types of its answers: what is described is what is sent."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from node.web import answers
from protos.version import software_version

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
