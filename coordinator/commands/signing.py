"""Orders of a run's operators: the commands `swarmentum-coordinator order ...`, and what waits, from the side of one operator.

Needs no home of a coordinator: an operator has a key of its own, and the run's link. Refuses to sign bytes that it does not
show: an order is named by the hash of its bytes.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from coordinator.commands import operator as operator_module
from coordinator.commands.operator import call, facts_of, operator_at
from coordinator.config import EXIT_CODES, Home, Json, Key
from protos.changes import Settings
from protos.envelope import NO_RUN, Kind, seal, seal_bytes
from protos.errors import OperatorError, RefusedError
from protos.identity import Identity, peer_id, short
from protos.invite import Invite, is_link
from protos.limits import NONCE_BYTES, ORDER_MS_MAX
from protos.log import run_id_of
from protos.orders import (
    ID_DIGITS_SHOWN,
    OperatorOrder,
    SignedOrder,
    check_signed,
    operators_of,
    order_body,
    order_id,
    signed_order_from_body,
)
from protos.text import print_json
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from protos.version import Program


@dataclass(frozen=True)
class OrderState:
    """An order with its signers. `obeyed`: it has enough of them, and counts."""

    name: bytes
    signed: SignedOrder
    needed: int
    obeyed: bool = False

    def values(self) -> dict[str, Any]:
        """For programs."""
        order = self.signed.order
        until = datetime.fromtimestamp(order.expires_unix_ms / 1000, UTC)
        return {
            "order": self.name.hex(),
            "what": order.what,
            "says": str(order),
            "signed_by": [peer_id(key) for key in self.signed.signers],
            "needed": self.needed,
            "obeyed": self.obeyed,
            "expires": until.isoformat(timespec="seconds"),
        }

    def __str__(self) -> str:
        who = ", ".join(map(short, self.signed.signers))
        if self.obeyed:
            return f"The order to {self.signed.order} has its {self.needed} signatures ({who}), and is obeyed."
        values, name = self.values(), self.name.hex()[:ID_DIGITS_SHOWN]
        return (
            f"{name}: {values['says']}\n  signed by {who}; it needs {self.needed} operators until {values['expires']}: "
            f"`swarmentum-coordinator order sign RUN {name} --key FILE`"
        )


class Operators:
    """The orders of one run, for one key."""

    def __init__(self, invite: Invite, facts: pb.GetRunResponse, identity: Identity) -> None:
        self.facts, self.config = facts, operators_of(facts.genesis)
        self._invite, self._identity, self._run_id = invite, identity, run_id_of(facts.genesis)

    @property
    def signs(self) -> bool:
        """Whether this key is one of the run's operators."""
        return self._identity.public_key in self.config.public_keys

    def waiting(self) -> list[OrderState]:
        """The orders that wait, oldest first. RefusedError for signatures that do not hold."""
        body = pb.ListOrdersBody(run_id=self._run_id, nonce=secrets.token_bytes(NONCE_BYTES))
        request = pb.ListOrdersRequest(envelope=seal(self._identity, Kind.KIND_ADMIN, NO_RUN, body))
        answer = call(self._invite, "ListOrders", request, rpc.OperatorServiceStub)
        found = [signed_order_from_body(it) for it in answer.orders]
        for signed in found:  # each signature holds, though there are not enough of them
            check_signed(self.config.model_copy(update={"needed": len(signed.signatures)}), self._run_id, signed)
        return [OrderState(order_id(self._run_id, it.body), it, self.config.needed) for it in found]

    def find(self, name: str) -> OrderState:
        """The one waiting order whose id begins so. OperatorError."""
        waiting = self.waiting()
        found = [it for it in waiting if name and it.name.hex().startswith(name.lower())]
        if len(found) != 1:
            known = ", ".join(it.name.hex()[:ID_DIGITS_SHOWN] for it in waiting) or "none"
            raise OperatorError(f"{len(found)} waiting orders have an id that begins with {name!r}; there are: {known}")
        return found[0]

    def give(
        self, *, excludes: bytes = b"", reason: str = "", settings: Settings = (), finishes: bool = False
    ) -> OrderState:
        """A new order, with the first signature."""
        expires = int(time.time() * 1000) + ORDER_MS_MAX
        order = OperatorOrder(secrets.token_bytes(NONCE_BYTES), expires, reason, excludes, settings, finishes)
        return self.sign(SignedOrder(order_body(order)))

    def sign(self, before: SignedOrder) -> OrderState:
        """One more signature. RefusedError, NetworkError; OperatorError if this key is no operator's."""
        if not self.signs:
            raise OperatorError(
                f"the key {peer_id(self._identity.public_key)} is none of this run's operators "
                f"({', '.join(self.config.keys)}): name the file of one with --key"
            )
        before.order  # noqa: B018 - raises Refusal before anything is signed
        envelope = seal_bytes(self._identity, Kind.KIND_ORDER, self._run_id, before.body)
        request = pb.SignOrderRequest(envelope=envelope)
        answer: pb.SignOrderResponse = call(self._invite, "SignOrder", request, rpc.OperatorServiceStub)
        mine = (envelope.public_key, envelope.signature)
        after = replace(before, signatures=(*before.signatures, mine))
        if answer.HasField("order"):
            after = signed_order_from_body(answer.order)
        if after.body != before.body:
            raise RefusedError("the coordinator answers with another order than the one that was signed")
        return OrderState(order_id(self._run_id, before.body), after, self.config.needed, answer.obeyed)


def operators(run: str, home: Path | None, key: Path | None) -> Operators | None:
    """The operators of a run, by its link, or by its name or id at the coordinator of `home`. None if the run names none: the
    coordinator's own key decides alone. OperatorError."""
    if is_link(run):
        if key is None:
            raise OperatorError("--key: name the file of your operator's key; a link says nothing about who you are")
        invite = Invite.parse(run)
        facts = facts_of(invite)
        if operators_of(facts.genesis).keys:
            return Operators(invite, facts, key_in(key))
    else:
        operator = operator_at(home)
        facts = operator.find(run)
        if operators_of(facts.genesis).keys:
            return at_home(operator, facts, operator.identity if key is None else key_in(key))
    if key is not None:
        raise OperatorError(
            "--key: this run has no operators' keys; give the command without it, beside the coordinator"
        )
    return None


def at_home(operator: operator_module.Operator, facts: pb.GetRunResponse, identity: Identity) -> Operators:
    """The operators of a run of this home's coordinator."""
    return Operators(replace(operator.invite(facts.genesis), coordinators=operator.addresses), facts, identity)


def key_in(path: Path) -> Identity:
    """The key in a file. OperatorError if there is none."""
    if not path.exists():
        raise OperatorError(f"{path}: no such key; `swarmentum-coordinator order key {path}` makes one")
    return Identity.load_or_create(path)


app = typer.Typer(cls=Program, help="Decide with other operators: list their orders, sign one.", no_args_is_help=True)
RunOrLink = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's link; beside its coordinator, its name or id.")
]


@app.command("key", epilog=EXIT_CODES)
def show_key(
    file: Annotated[Path, typer.Argument(help="The file of your key. Keep it secret: it signs for you.")],
    as_json: Json = False,
) -> None:
    """Make an operator's key, or print the id of the one that is there: for `operators.keys` of run.toml."""
    made = not file.exists()
    key = Identity.load_or_create(file)
    if as_json:
        print_json({"key": key.peer_id, "file": str(file), "made": made})
        return
    _say(
        f"{key.peer_id}\n{'Made' if made else 'Read'} {file}. Give the operator of the run the id, and nobody the file."
    )


@app.command("list", epilog=EXIT_CODES)
def list_orders(run: RunOrLink, key: Key = None, home: Home = None, as_json: Json = False) -> None:
    """List the orders that wait for signatures: what each says, who signed it, and until when it waits."""
    waiting = _of(run, home, key).waiting()
    for order in waiting:
        show_order(order, as_json=as_json)
    if not (waiting or as_json):
        _say("No order waits.")


@app.command("sign", epilog=EXIT_CODES)
def sign(
    run: RunOrLink,
    order: Annotated[str, typer.Argument(help="The order's id, or its beginning; see `order list`.")],
    key: Key = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Sign an order of another operator. With the last signature that it needs it counts, at once."""
    if as_json and not yes:
        raise OperatorError("order sign --json asks nothing: give --yes, too")
    found = _of(run, home, key)
    waiting = found.find(order)
    if not yes:
        typer.confirm(f"{waiting}\nSign it?", abort=True)
    show_order(found.sign(waiting.signed), as_json=as_json)


def _of(run: str, home: Path | None, key: Path | None) -> Operators:

    found = operators(run, home, key)
    if found is None:
        raise OperatorError(
            "this run has no operators' keys: its coordinator's own key decides alone, and no order waits"
        )
    return found


def show_order(order: OrderState, *, as_json: bool) -> None:
    """An order, for people or programs."""
    if as_json:
        print_json(order.values())
    else:
        _say(str(order))


def _say(text: str) -> None:
    Console(soft_wrap=True).print(text, highlight=False, markup=False)
