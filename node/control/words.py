"""What a peer tells its owner, in words: pure functions of the values of `swarmentum me --json`.

The terminal view, `swarmentum me` and the last line of `join` use the same words. Text that comes from others is made printable
here; it is never markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protos.text import MINUTE, amount, count, duration, printable, things

WHY_CHARACTERS_MAX = 120
NAME_CHARACTERS_MAX = 40
DEVICE_CHARACTERS_MAX = 40
LATELY_STEPS = 10
BYTES_A_GB = 10**9
"""A peer is "counted" if the log counts its votes in each of so many last steps that it was asked in."""
REACHED = {
    "public": "others can dial this peer",
    "private": "others cannot dial this peer",
    "unknown": "no peer outside its own network has said whether it can dial this peer",
}

Told = Mapping[str, Any]


def state(told: Told) -> tuple[str, str]:
    """(the peer's standing in words, one of "good", "wait" and "bad")."""
    if told["ending"] == "finish":
        return "ending after the open step", "wait"
    if told["ending"]:
        return "leaving: saving what is needed to come back", "wait"
    if told["loading"]:
        return told["loading"], "wait"
    if told["waits_for"]:
        return cut(told["waits_for"], WHY_CHARACTERS_MAX), "wait"
    if not told["entered"]:
        return "joining the run", "wait"
    if told["step"] >= told["steps"]:
        return "the run is finished: saving", "good"
    if told["paused"]:
        return paused(told), "wait"
    behind = told["committed_step"] - told["step"]
    if behind > 1:
        return f"catching up: {behind} steps behind", "wait"
    if told["waiting"]:
        return f"waiting: {cut(told['waiting'], WHY_CHARACTERS_MAX)}", "wait"
    if told["anchor"]:
        return "an anchor: applies every step", "good"
    if told["checks"]:
        return cut(told["checks"], WHY_CHARACTERS_MAX), "wait"
    return _counted(told["last"])


def paused(told: Told) -> str:
    """That a peer is paused, and by what. The owner's own pause comes first, because only the owner ends it."""
    held = cut(told["held"], WHY_CHARACTERS_MAX)
    if not told["paused_by_owner"]:
        return f"paused: {held}"
    left = told.get("pause_seconds_left")  # a peer that was started before there was one has no end
    more = "" if left is None else f" for {duration(left)} more"
    return f"paused by its owner{more}, and {held}" if held else f"paused{more}"


def resumed(told: Told) -> str:
    """What became of the owner's wish to let the peer train again."""
    if told["held"]:
        return f"your pause is over, and a condition goes on to pause the peer: {cut(told['held'], WHY_CHARACTERS_MAX)}"
    return f"training again from step {told['step']}"


def _counted(last: Sequence[Told]) -> tuple[str, str]:
    """`last`: the last steps, the newest first."""
    asked = [fate for fate in last if fate["outcome"] not in {"not asked", "replayed", "paused"}][:LATELY_STEPS]
    if not asked:
        return "in the run: its votes begin with the next step that asks it", "wait"
    accepted = sum(fate["outcome"] == "accepted" for fate in asked)
    if accepted == len(asked):
        return "counted", "good"
    words = f"counted in {accepted} of the last {len(asked)} steps"
    return words, "wait" if accepted else "bad"


def vote(fate: Told) -> tuple[str, str]:
    """(what became of this peer's vote in a step, and why; one of "good", "wait" and "bad")."""
    if fate["outcome"] == "accepted":
        return f"step {fate['step']}: accepted, {fate['samples']} of {fate['all_samples']} samples", "good"
    kind = "wait" if fate["outcome"] in {"paused", "not asked", "replayed", "probation"} else "bad"
    return f"step {fate['step']}: {fate['outcome']}: {cut(fate['why'], WHY_CHARACTERS_MAX)}", kind


def progress(told: Told) -> str:
    """The step, of all."""
    return f"step {told['step']:,} of {told['steps']:,}"


def clock(told: Told) -> str:
    """How long the peer runs, and how long the run goes on at the pace of its last steps."""
    here = f"here for {duration(told['seconds'])}"
    if told["step"] >= told["steps"]:
        return here
    left, pace = told["seconds_left"], told["step_seconds"]
    if left is None or pace is None:
        return f"{here}; the time left is not known yet"
    return (
        f"{here}; about {duration(left)} left, {pace:.2g} s a step"
        if pace < MINUTE
        else f"{here}; {duration(left)} left"
    )


def given(told: Told) -> str:
    """What the log counts of this peer, since it started."""
    tokens, samples = count(told["tokens_accepted"]), count(told["samples_accepted"])
    return f"{tokens} tokens, {samples} samples; {percent(told['share'])} of the swarm in the last steps"


def traffic(rate: float | None, total: int, month: int, gb: float | None) -> str:
    """Bytes a second now, bytes since the start, and those of the month, of the GB that the owner gives."""
    return f"{'-' if rate is None else amount(rate)}/s, {amount(total)} in total, {monthly(month, gb)}"


def monthly(used: int, gb: float | None) -> str:
    """`1.2 GB this month`, `1.2 GB of 50 GB this month`."""
    return f"{amount(used)}{'' if gb is None else f' of {amount(gb * BYTES_A_GB)}'} this month"


def device(told: Told) -> str:
    """The device, how busy it is, and its memory."""
    load, name = told["load"], cut(told["device"], DEVICE_CHARACTERS_MAX)
    said = [name] if load["busy"] is None else [name, f"{percent(load['busy'])} busy"]
    memory, why = told.get("memory", "full"), told.get("memory_why", "")
    if why or memory != "full":
        said.append(f"memory {memory} ({why})" if why else f"memory {memory}")
    if load["own"] is not None:
        said.append(f"{amount(load['own'])} for this peer")
    if load["used"] is not None and load["total"]:
        said.append(f"{amount(load['used'])} of {amount(load['total'])} in use")
    return ", ".join(said)


def link(access: Told | None) -> str:
    """Whether others can dial this peer, and through what they reach it."""
    if access is None:
        return "connecting"
    words = REACHED[access["reachable"]]
    if access["relays"]:
        return f"{words}; they come through {things(access['relays'], 'relay')}"
    return f"{words}; no relay takes it yet" if access["reachable"] == "private" else words


def peers(access: Told | None, last: Sequence[Told]) -> str:
    """The connections, and how many voted in the last step."""
    voted = f"; {last[0]['peers']} voted in the last step" if last else ""
    if access is None:
        return f"connecting{voted}"
    connected = access["direct"] + access["relayed"]
    how = f": {access['direct']} directly, {access['relayed']} through a relay" if access["relayed"] else ""
    return f"{connected} connected{how or (' directly' if connected else '')}{voted}"


def farewell(summary: Told, *, anchor: bool = False) -> str:
    """The last line of `join`: thanks, and what was given, of the values of a summary."""
    traffic = f"{amount(summary['wire_bytes_sent'])} up and {amount(summary['wire_bytes_received'])} down"
    time = duration(summary["seconds"])
    steps = things(summary["votes_accepted"], "step")
    if anchor:
        return f"Thank you. This anchor applied {things(summary['steps_applied'], 'step')}, with {traffic} in {time}."
    if not summary["votes_accepted"]:
        what = "The run is finished. It" if summary["finished"] else "The log"
        return (
            f"{what} counts no votes of this peer since this start, {time} ago ({traffic}). Votes of earlier starts count as "
            "before: `swarmentum ledger LINK` shows them."
        )
    return (
        f"Thank you for {count(summary['tokens_accepted'])} tokens in {steps}, {percent(summary['share'])} of the swarm's "
        f"work, with {traffic} in {time}."
    )


def cut(text: str, characters_max: int) -> str:
    """Printable text, cut between two words; the cut shows."""
    clean = printable(text, 4 * characters_max)
    if len(clean) <= characters_max:
        return clean
    head = clean[: characters_max - 1]
    return (head.rpartition(" ")[0] or head) + "…"


def percent(part: float) -> str:
    """`4.7 %`, `47 %`, `under 0.1 %`."""
    value = 100 * part
    if value == 0 or value >= 9.95:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value >= 0.1 else "under 0.1 %"
