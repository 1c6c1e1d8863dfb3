"""All that the operator's page can do: reads, and the listed actions. Each one is the operator's command of the same name.

Refuses everything else: this page deletes, archives and forks no run, and withdraws no snapshot. It runs no code that a run
names, and reads no file that a request names.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from coordinator.commands.checking import PEERS_SHOWN, Findings, cost_of, findings_of, notes_of, rows_of, verdict_of
from coordinator.commands.created import create_run
from coordinator.commands.forks import SETTING, changes_of, flat
from coordinator.commands.operator import Operator
from coordinator.commands.peers import milliseconds, peer_named, row_of
from coordinator.commands.peers import rows_of as rows_of_peers
from coordinator.commands.run_life import line_of, shown
from coordinator.commands.signing import at_home
from protos.changes import Settings, changed_values, settings_of
from protos.errors import OperatorError, Refusal
from protos.identity import peer_id
from protos.limits import (
    EXCLUSION_REASON_BYTES_MAX,
    SETTING_BYTES_MAX,
    SETTING_LIST_BYTES_MAX,
    TICKET_LABEL_BYTES_MAX,
    TICKET_USES_MAX,
)
from protos.log import run_id_of
from protos.run_config import config_from_json
from protos.v1 import coordinator_pb2 as pb

TOML_CHARACTERS_MAX: Final = 1 << 16
ROWS_MAX: Final = 512
"""Peers, and invites, of one answer."""
SETTINGS_MAX: Final = 32
"""Settings of one change."""
_BUILDING: Final = threading.Lock()
"""One model at a time: the clock runs on this machine, too."""
RUN_FILE: Final = "run.toml"
STEP_SECONDS: Final = 10.0
"""The costs on the page are for steps of so many seconds, as those of `run check`."""

Reason = Annotated[str, StringConstraints(max_length=EXCLUSION_REASON_BYTES_MAX)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Answer = dict[str, Any]


class Values(BaseModel):
    """The values of a request. None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def told(self) -> dict[str, Any]:
        """What the log of actions keeps of them."""
        return self.model_dump(mode="json")


class WithReason(Values):
    """Why: peers and all who look at the run see it."""

    reason: Reason = ""


class OfPeer(Values):
    """A peer by its id, or the beginning or the end of it."""

    peer: Name


class OfOrder(Values):
    """An order of the run's operators, by the start of its id."""

    order: Name


class ExcludeRequest(OfPeer):
    """A peer, and why."""

    reason: Annotated[str, StringConstraints(min_length=1, max_length=EXCLUSION_REASON_BYTES_MAX)]


class Changes(Values):
    """Settings, each as KEY=VALUE."""

    settings: list[Annotated[str, StringConstraints(max_length=SETTING_BYTES_MAX + SETTING_LIST_BYTES_MAX + 1)]] = (
        Field(min_length=1, max_length=SETTINGS_MAX)
    )


class Invites(Values):
    """How many peers an invite admits, and for how long (90m, 12h, 7d, 2w or never)."""

    uses: int = Field(default=1, ge=1, le=TICKET_USES_MAX)
    expires: str = Field(default="7d", max_length=16)
    label: str = Field(default="", max_length=TICKET_LABEL_BYTES_MAX)


class Revocation(Values):
    """An invite by the start of its id, or its label."""

    invite: Name
    and_its_peers: bool = False


class RunToml(Values):
    """The text of a run.toml. `layout`: build its model, to know its layout and its costs."""

    text: str = Field(max_length=TOML_CHARACTERS_MAX)
    anchor: bool = False
    layout: bool = True

    def told(self) -> dict[str, Any]:
        """The text itself may be long: the run's definition keeps it."""
        return {"characters": len(self.text), "anchor": self.anchor, "layout": self.layout}


V = TypeVar("V", bound=Values)


@dataclass(frozen=True)
class What:
    """One thing that a request can ask for. `acts`: it changes something, so it goes into the log of actions."""

    values: type[Values]
    answer: Callable[[Operator, str, Any], Answer]
    acts: bool = True


def list_of_runs(operator: Operator, run: str, values: Values) -> Answer:
    """Every run, as `run list`."""
    return {"runs": [line_of(found) for found in operator.list_runs()]}


def one_run(operator: Operator, run: str, values: Values) -> Answer:
    """One run: `run show`, `peer list`, `invite list`, and its link."""
    found = _found(operator, run)
    mode = config_from_json(found.genesis.config_json).admission.mode
    tickets = [
        row_of(status.ticket, status.state, [peer_id(key) for key in status.users])
        for status in operator.tickets(found.genesis)[-ROWS_MAX:]
    ]
    rows = rows_of_peers(found)
    operators = at_home(operator, found, operator.identity)
    return {
        **shown(found),
        "orders": [it.values() for it in (operators.waiting() if operators.config.keys else ())],
        "operators": len(operators.config.keys),
        "needed": operators.config.needed,
        "signs": operators.signs,
        "peers": rows[:ROWS_MAX],
        "peers_known": len(rows),
        "invites": tickets,
        "admission": mode,
        "link": operator.invite(found.genesis).link(),
    }


def pause(operator: Operator, run: str, values: WithReason) -> Answer:
    """`run pause`."""
    operator.steer(_found(operator, run).genesis, pb.RunChange.RUN_CHANGE_PAUSE, values.reason)
    return {"said": "The run is paused: no further step opens, and its peers are told why."}


def resume(operator: Operator, run: str, values: Values) -> Answer:
    """`run resume`."""
    operator.steer(_found(operator, run).genesis, pb.RunChange.RUN_CHANGE_RESUME)
    return {"said": "The run goes on."}


def finish(operator: Operator, run: str, values: WithReason) -> Answer:
    """`run finish`."""
    found = _found(operator, run)
    genesis, operators = found.genesis, at_home(operator, found, operator.identity)
    if operators.config.keys:
        return {"said": str(operators.give(finishes=True, reason=values.reason))}
    operator.steer(genesis, pb.RunChange.RUN_CHANGE_FINISH, values.reason)
    step = _found(operator, run).head_step
    return {"said": f"The run is finished at step {step}: its peers store the last state, and end."}


def exclude(operator: Operator, run: str, values: ExcludeRequest) -> Answer:
    """`peer exclude`."""
    found = _found(operator, run)
    public_key, operators = peer_named(found, values.peer), at_home(operator, found, operator.identity)
    if operators.config.keys:
        return {"said": str(operators.give(excludes=public_key, reason=values.reason))}
    operator.exclude_peer(found.genesis, public_key, values.reason)
    return {"said": f"Peer {peer_id(public_key)} is excluded; the next entry of the log says so."}


def readmit(operator: Operator, run: str, values: OfPeer) -> Answer:
    """`peer readmit`."""
    found = _found(operator, run)
    public_key = peer_named(found, values.peer)
    operator.readmit_peer(found.genesis, public_key)
    return {"said": f"Peer {peer_id(public_key)} may join again."}


def change(operator: Operator, run: str, values: Changes) -> Answer:
    """`run change`."""
    wanted, found = wanted_settings(values), _found(operator, run)
    operators = at_home(operator, found, operator.identity)
    if operators.config.keys:
        return {"said": str(operators.give(settings=wanted))}
    operator.change(found.genesis, wanted)
    keys = {key for key, _ in wanted}
    rows = [row for row in changed_values(_found(operator, run).changed) if row["key"] in keys]
    said = [f"{row['key']} = {json.dumps(row['value'])} from step {row['from_step']} on." for row in rows]
    return {"said": "\n".join([*said, "The run is still paused: resume it to go on with these values."])}


def sign(operator: Operator, run: str, values: OfOrder) -> Answer:
    """`order sign`, with the coordinator's own key."""
    operators = at_home(operator, _found(operator, run), operator.identity)
    return {"said": str(operators.sign(operators.find(values.order).signed))}


def wanted_settings(values: Changes) -> Settings:
    """The settings with their values. Refuses names of files, which the command takes. OperatorError."""
    wrong = [text for text in values.settings if SETTING.fullmatch(text) is None]
    if wrong:
        raise OperatorError(f"{wrong[0]!r}: expected KEY=VALUE, for example clock.steps=2000")
    try:
        return settings_of(flat(changes_of(values.settings)))
    except Refusal as refusal:
        raise OperatorError(refusal.detail) from refusal


def invite(operator: Operator, run: str, values: Invites) -> Answer:
    """`invite create`."""
    length = milliseconds(values.expires)
    genesis = _found(operator, run).genesis
    ticket = operator.create_ticket(genesis, length, values.uses, values.label)
    peers = "1 peer" if values.uses == 1 else f"{values.uses} peers"
    link = operator.invite(genesis, ticket).link()
    return {"said": f"The invite admits {peers}. On each:", "copy": f"swarmentum join {link}"}


def revoke(operator: Operator, run: str, values: Revocation) -> Answer:
    """`invite revoke`."""
    genesis = _found(operator, run).genesis
    found = operator.find_ticket(genesis, values.invite)
    operator.revoke_ticket(genesis, found.ticket, with_peers=values.and_its_peers)
    rest = f"; {len(found.users)} peers that joined with it have to leave" if values.and_its_peers else ""
    return {"said": f"The invite is revoked: it admits nobody else{rest}."}


def check(operator: Operator, run: str, values: RunToml) -> Answer:
    """`run check`."""
    with _checked(values) as findings:
        config, facts = findings.config, findings.facts
        cost = None if facts is None else cost_of(config, facts, PEERS_SHOWN, STEP_SECONDS)
        rows = [list(row) for row in rows_of(config, facts, cost)]
        return {"said": f"Run {config.name}: {verdict_of(findings)}.", "rows": rows, "notes": notes_of(findings)}


def create(operator: Operator, run: str, values: RunToml) -> Answer:
    """`run create`."""
    with _checked(values) as findings:
        findings.refuse_unchecked()
        made = create_run(operator, findings)
    answer: Answer = {"said": f"Run {findings.config.name} is created.", "run": run_id_of(made.genesis).hex()}
    open_layout = "The layout of its model is not fixed yet: the first anchor fixes it, or the first peers do."
    answer |= {"notes": [*([] if made.layout else [open_layout]), *findings.said]}
    if made.anchor_link is not None:
        answer |= {"secret": f"swarmentum anchor {made.anchor_link}"}
    return answer


ALL: Final[Mapping[str, What]] = {
    "runs": What(Values, list_of_runs, acts=False),
    "run": What(Values, one_run, acts=False),
    "check": What(RunToml, check, acts=False),
    "create": What(RunToml, create),
    "pause": What(WithReason, pause),
    "resume": What(Values, resume),
    "finish": What(WithReason, finish),
    "exclude": What(ExcludeRequest, exclude),
    "readmit": What(OfPeer, readmit),
    "change": What(Changes, change),
    "sign": What(OfOrder, sign),
    "invite": What(Invites, invite),
    "revoke": What(Revocation, revoke),
}


def _found(operator: Operator, run: str) -> pb.GetRunResponse:
    """The run with this whole id. OperatorError."""
    if not run:
        raise OperatorError("run: the request names no run")
    return operator.find(run)


@contextmanager
def _checked(values: RunToml) -> Iterator[Findings]:
    """The findings about a text. OperatorError names each mistake with its line of `run.toml`."""
    with tempfile.TemporaryDirectory(prefix="swarmentum-run-") as folder:
        file = Path(folder) / RUN_FILE
        file.write_text(values.text, encoding="utf-8")
        if values.layout and not _BUILDING.acquire(blocking=False):
            raise OperatorError("another model is being built here: wait until its check or its creation has ended")
        try:
            findings = findings_of(file, anchor=values.anchor, layout=values.layout, local=False)
        except OperatorError as error:
            raise OperatorError(str(error).replace(str(file), RUN_FILE)) from error
        finally:
            if values.layout:
                _BUILDING.release()
        yield findings
