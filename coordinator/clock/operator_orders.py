"""Orders of a run's operators, as the coordinator keeps them: which wait for signatures, which were obeyed, which no entry has.

Pure: the wall clock's time comes with each question. Refuses to verify signatures (`serving/operator_service.py` does) and to
say what an order changes (`memory.py`). ADR 21.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.clock.effects import OrderSigned
from coordinator.clock.value_copy import replace
from protos.identity import short
from protos.limits import ORDER_MS_MAX
from protos.log import Entry, Exclusion
from protos.orders import ID_DIGITS_SHOWN, SignedOrder, order_from_body
from protos.run_sections import OperatorsConfig

WAITING_OF_ONE_MAX = 4
"""Orders that one key signed first. A stolen key cannot take the places of the others."""
OBEYED_MAX = 256
CHANGES_UNLOGGED_MAX = 4
"""With as many exclusions, what an entry has room for (`protos.limits.ORDERS_MAX`)."""
WAITS_MS_MIN = 3_600_000
"""A new order keeps its place for an hour at least, so one key writes at most 4 an hour into the journal."""
CLOCK_MS_MAX = 10 * 60_000
"""The clock of an operator's machine may be so far ahead of the coordinator's."""
HOW = "give it with `--key FILE` of an operator's key, and `swarmentum-coordinator order sign` with the others"


@dataclass(frozen=True)
class UnloggedOrder:
    """An order that was obeyed, and that no entry has. `after_step`: a change counts for the steps after this one."""

    after_step: int
    signed: SignedOrder


@dataclass(frozen=True)
class OperatorOrders:
    """Of one run."""

    waiting: Mapping[bytes, SignedOrder] = field(default_factory=dict)
    """By id, oldest first."""
    obeyed: Mapping[bytes, int] = field(default_factory=dict)
    """By id: until when somebody could repeat it, in Unix milliseconds."""
    unlogged: tuple[UnloggedOrder, ...] = ()

    def waiting_at(self, unix_ms: int) -> dict[bytes, SignedOrder]:
        """The waiting orders that have not expired."""
        return {name: it for name, it in self.waiting.items() if it.order.expires_unix_ms > unix_ms}


def alone(operators: OperatorsConfig, what: str) -> str:
    """Why the coordinator's own key cannot do this alone; empty if it can."""
    if not operators.keys:
        return ""
    return f"{operators.needed} of the {len(operators.keys)} operators of this run have to sign {what}: {HOW}"


def completes(orders: OperatorOrders, operators: OperatorsConfig, name: bytes) -> bool:
    """Whether one more signature is enough."""
    before = orders.waiting.get(name, SignedOrder(b""))
    return len(before.signatures) + 1 >= operators.needed


def refusal(orders: OperatorOrders, name: bytes, body: bytes, key: bytes, unix_ms: int) -> str:
    """Why a signature of an order does not count; empty if it does."""
    order, live = order_from_body(body), orders.waiting_at(unix_ms)
    if name in orders.obeyed:
        return f"order {shown(name)} was obeyed before, and no order is obeyed twice: give a new one"
    if order.expires_unix_ms <= unix_ms:
        return f"order {shown(name)} has expired before enough operators signed it: give a new one"
    if order.expires_unix_ms > unix_ms + ORDER_MS_MAX + CLOCK_MS_MAX:
        return "the order waits for more than 7 days; if it is for 7, the clock of the machine that made it is wrong"
    same = [it.order for other, it in live.items() if it.order.nonce == order.nonce and other != name]
    if same:
        return f"an order cannot change after its first signature, and this one was to {same[0]}: give a new one"
    if name in live:
        if key in live[name].signers:
            return f"{short(key)} has signed order {shown(name)} already: another operator has to sign it"
    elif order.expires_unix_ms < unix_ms + WAITS_MS_MIN:
        return (
            "the order waits for less than an hour; if it is for more, the clock of the machine that made it is wrong"
        )
    elif sum(it.signers[0] == key for it in live.values()) >= WAITING_OF_ONE_MAX:
        return (
            f"{WAITING_OF_ONE_MAX} orders that {short(key)} gave wait for signatures: others have to sign these first"
        )
    return ""


def no_room(orders: OperatorOrders, body: bytes, unix_ms: int) -> str:
    """Why an order with enough signatures has to wait; empty if it need not."""
    if sum(until > unix_ms for until in orders.obeyed.values()) >= OBEYED_MAX:
        return f"{OBEYED_MAX} orders were obeyed in 7 days, as many as the coordinator remembers: sign it again later"
    changes = sum(bool(it.signed.order.settings) for it in orders.unlogged)
    if order_from_body(body).settings and changes >= CHANGES_UNLOGGED_MAX:
        return f"{changes} changes wait for the next step, as many as an entry of the log has room for: resume the run first"
    return ""


def with_signature(orders: OperatorOrders, name: bytes, record: OrderSigned) -> OperatorOrders:
    """With one more signature, and without what has expired."""
    live = orders.waiting_at(record.unix_ms)
    before = live.get(name, SignedOrder(record.body))
    live[name] = replace(before, signatures=(*before.signatures, (record.public_key, record.signature)))
    obeyed = {it: until for it, until in orders.obeyed.items() if until > record.unix_ms}
    return replace(orders, waiting=live, obeyed=obeyed)


def as_obeyed(orders: OperatorOrders, name: bytes, after_step: int) -> OperatorOrders:
    """A waiting order is obeyed now. The log has yet to say so; the end of a run says so itself."""
    signed = orders.waiting[name]
    found = _remembered(orders, {name: signed})
    if signed.order.finishes:
        return found
    return replace(found, unlogged=(*found.unlogged, UnloggedOrder(after_step, signed)))


def _remembered(orders: OperatorOrders, done: Mapping[bytes, SignedOrder]) -> OperatorOrders:
    obeyed = {**orders.obeyed, **{name: signed.order.expires_unix_ms for name, signed in done.items()}}
    kept = sorted(obeyed.items(), key=lambda it: it[1])[-OBEYED_MAX:]
    waiting = {name: it for name, it in orders.waiting.items() if name not in done}
    return replace(orders, waiting=waiting, obeyed=dict(kept))


def for_entry(orders: OperatorOrders, exclusions: Iterable[Exclusion], step: int) -> tuple[SignedOrder, ...]:
    """The orders behind what the entry of a step does."""
    out = {it.public_key for it in exclusions if it.by_operator}
    return tuple(
        it.signed
        for it in orders.unlogged
        if (it.signed.order.excludes in out if it.signed.order.excludes else it.after_step < step)
    )


def logged(orders: OperatorOrders, done: Mapping[bytes, SignedOrder], entry: Entry) -> OperatorOrders:
    """An entry has these orders. It may come back to a journal that lost its end, so its orders are remembered here, too, and a
    change that it lacks is void: no later entry can have it."""
    out, bodies = {it.public_key for it in entry.exclusions}, {signed.body for signed in done.values()}
    rest = tuple(
        it
        for it in orders.unlogged
        if it.signed.body not in bodies
        and (it.signed.order.excludes not in out if it.signed.order.excludes else it.after_step >= entry.step)
    )
    return replace(_remembered(orders, done) if done else orders, unlogged=rest)


def readmitted(orders: OperatorOrders, key: bytes) -> OperatorOrders:
    """No entry will have the exclusion of this peer, if none has it yet."""
    rest = tuple(it for it in orders.unlogged if it.signed.order.excludes != key)
    return orders if len(rest) == len(orders.unlogged) else replace(orders, unlogged=rest)


def shown(name: bytes) -> str:
    """The beginning of an order's id."""
    return name.hex()[:ID_DIGITS_SHOWN]
