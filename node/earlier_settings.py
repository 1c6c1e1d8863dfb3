"""Settings of earlier versions, in files, variables and commands that people still have: what each means today. Pure.

Refuses none of them. A setting that has no meaning any more is left out, and a line says what decides today.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from node.donor import owner_settings
from node.donor.live import ARCHIVE_GB, TEXT_GB
from protos.errors import OperatorError
from protos.limits import PAYLOADS_GB
from protos.toml_file import OFF, listed

EARLIER: Final[Mapping[str, str]] = {
    "group_size": "vote_size",
    "top_k": "vote_size",
    "one_in": "vote_size",
    "fit_uplink": "vote_size",
    "uplink_budget": "vote_size",
    "relay_for_others": "relay_mbit",
    "archive_gb": "disk_gb",
    "payloads_gb": "disk_gb",
    "data_gb": "disk_gb",
    "allow_code": "allow",
    "allow_data": "allow",
    "allow_left_out": "allow",
    "yes": "allow",
    "announce": "reachability",
    "relays": "reachability",
    "quic": "listen",
    "trace": "track",
    "evaluate": "decline",
    "tell_failures": "decline",
}
"""Each with the setting that takes its place."""
GONE: Final[Mapping[str, str]] = {
    "licence": "`swarmentum export --licence` names it in the card of an export",
    **owner_settings.GONE,
    "snapshots_gb": "a peer gives snapshots what `snapshots_kept` of them need",
}
"""Each with what decides in its place."""
WORDS: Final[Mapping[str, tuple[bool, str]]] = {
    "allow_code": (True, "code"),
    "allow_data": (True, "data"),
    "allow_left_out": (True, "left_out"),
    "yes": (True, "requests"),
    "trace": (True, "otlp"),
    "evaluate": (False, "evaluation"),
    "tell_failures": (False, "failures"),
}
"""Those that were true or false: the value that counts, and the word that it is in the list of today."""
OPTIONS: Final = ("allow_code", "allow_data", "yes")
"""Options of commands still are these words."""
LISTS: Final = ("allow", "reachability", "track", "decline")
PARTS_GB: Final = {"archive_gb": ARCHIVE_GB, "payloads_gb": PAYLOADS_GB, "data_gb": TEXT_GB}
UPLINK_PART: Final = 0.25
TCP_ALONE: Final = "/tcp"
GIVEN: Final = "given here"
"""The layer of a command line, or of a program that calls `join`."""


def of_today(
    layers: Sequence[tuple[str, Mapping[str, Any]]], usual_listen: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """The settings of all layers (name, values), the first of which counts least. `say` gets a line for each earlier one.

    The parts of a list add up, after a layer that says `off`. Of others, what is set under the name of today counts, unless a
    later layer has an earlier name. OperatorError for a value that none of them takes.
    """
    now, since = dict[str, Any](), dict[str, int]()
    old = dict[str, tuple[int, str, Any]]()
    for number, (where, values) in enumerate(layers):
        for key, value in values.items():
            if key in EARLIER or key in GONE:
                old[key] = (number, where, value)
            else:
                now[key], since[key] = value, number
    for new in sorted({EARLIER[key] for key in old if key in EARLIER}):
        parts = {
            key: it
            for key, it in old.items()
            if EARLIER.get(key) == new and not (_is_off(now, new) and it[0] < since[new])
        }
        if not parts:
            continue
        where = next(iter(parts.values()))[1]
        given = {key: it[2] for key, it in sorted(parts.items(), key=lambda it: it[1][0])}
        latest = max(number for number, _, _ in parts.values())
        tied = new == "relay_mbit" and latest == since.get(new)  # of two words of one layer, to relay nothing counts
        later = tied or latest > since.get(new, -1)
        try:
            now |= _meant(new, given, now, later, usual_listen)
        except (TypeError, ValueError) as error:
            raise OperatorError(f"{where}: {', '.join(given)}: {error}; set {new} instead") from error
    for key, (_, where, value) in old.items():
        if key in GONE:
            say(f"{where}: {key} is no setting any more, and is left out: {GONE[key]}")
        elif not (where == GIVEN and key in OPTIONS):
            new = EARLIER[key]
            means = shown(now[new]) if new in now else f"it is by default, as {key} = {shown(value)} says"
            say(f"{where}: {key} is no setting any more, and counts as {new} = {means}: write that instead")
    return now


def _is_off(now: Mapping[str, Any], new: str) -> bool:
    """Whether a list of today says that nothing is in it. It takes back what earlier layers put there."""
    return new in LISTS and new in now and str(now[new]).strip().lower() in (OFF, "[]")


def shown(value: Any) -> str:
    """A value as `--set` takes it."""
    return ",".join(map(str, value)) if isinstance(value, list) else OFF if value is None else str(value)


def _meant(
    new: str, given: Mapping[str, Any], now: Mapping[str, Any], later: bool, usual_listen: str
) -> dict[str, Any]:
    """What earlier settings, all of which are `new` today, make of it. `later`: than what is set under the name of today."""
    if new in LISTS:
        words = [word for key, value in given.items() for word in _words(key, value)]
        return {new: list(dict.fromkeys([*listed(now.get(new)), *words]))} if words else {}
    if new == "listen":
        text = str(now.get("listen", usual_listen))
        return {} if _true(given["quic"]) else {new: text.removesuffix(TCP_ALONE) + TCP_ALONE}
    if new == "vote_size":
        sizes = [value for key, value in given.items() if key in ("one_in", "top_k", "group_size")]
        part, size = _uplink_part(given, sized=bool(sizes)), sizes[-1] if sizes else OFF
        if given.keys() == {"uplink_budget"} and new in now:
            return {}
        if part is not None and (later or not str(now.get(new)).endswith("%")):
            return {new: f"{100 * part:g}%"}
        return {new: size} if later or new not in now else {}
    if not later and new in now:
        return {}
    if new == "relay_mbit":
        return {} if _true(given["relay_for_others"]) else {new: 0}
    return {new: sum(float(given.get(key, usual)) for key, usual in PARTS_GB.items())}


def _words(key: str, value: Any) -> list[str]:
    """The words of a list that an earlier setting is."""
    if key == "announce":
        return [address.partition("/p2p/")[0] for address in listed(value)]
    if key not in WORDS:
        return listed(value)
    counts, word = WORDS[key]
    return [word] if _true(value) is counts else []


def _uplink_part(given: Mapping[str, Any], *, sized: bool) -> float | None:
    """None: votes of one size. A budget alone is that of the size that follows by default."""
    text = str(given.get("fit_uplink", OFF if sized else "true")).strip().lower()
    if text in ("false", "none", OFF):
        return None
    return float(given.get("uplink_budget", UPLINK_PART) if text == "true" else text)


def _true(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("true", "1", "on", "yes", "t", "y"):
        return True
    if text in ("false", "0", OFF, "no", "f", "n"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")
