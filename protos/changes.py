"""Settings of a run that its operator may change while it is paused, and what they make of the genesis' settings. ADR 44.

Each entry of the log names the settings in force in its step that are not the genesis' own, so a reader needs no other entry.
`settings_from_body` is the door. Refuses settings that the state, the votes or a peer's start depend on: a fork changes these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import ValidationError

from protos.errors import Reason, Refusal
from protos.limits import SETTING_BYTES_MAX, SETTING_LIST_BYTES_MAX
from protos.run_config import RunConfig
from protos.text import printable
from protos.toml_file import wrongs
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2

Settings = tuple[tuple[str, str], ...]
"""(key, value as canonical JSON), sorted by key."""

RATE_KEYS: Final = frozenset(
    f"optimizer.{name}" for name in ("lr", "schedule", "warmup_steps", "lr_final_ratio", "decay_steps")
)
"""The learning rate. Ticks and entries carry the rate of each step (ADR 1), so only the coordinator computes it."""
STEPS: Final = "clock.steps"
SNAPSHOT_EVERY: Final = "clock.snapshot_every"
ADMISSION_MODE: Final = "admission.mode"
MIRRORS: Final = "snapshots.mirrors"
CHANGEABLE: Final = RATE_KEYS | {
    STEPS,
    SNAPSHOT_EVERY,
    ADMISSION_MODE,
    MIRRORS,
    "clock.batch_samples",
    "clock.min_peers",
    "clock.max_peers",
    "clock.quorum",
    "clock.deadline_ms_min",
    "clock.deadline_ms_max",
    "clock.deadline_mad_factor",
    "trust.probation_steps",
    "trust.agreement_min",
    "trust.overlap_max",
    "trust.exclude_at",
}
_WHY_NOT: Final = (
    ("operators", "the run's definition names whose orders it obeys, so that nobody takes over"),
    ("admission.allowed", "the list is a part of the run's definition; set admission.mode=invite, and make tickets"),
    ("trust.", "peers check each other by it since they started"),
    ("clock.strict", "votes of a strict run follow from its seed"),
    ("clock.ranges", "all peers cut their votes by it since they started"),
    ("clock.digest_steps", "all peers compare digests by it since they started"),
    ("optimizer.", "the state and the votes of all peers depend on it"),
    ("model", "the state holds the parameters of this model"),
    ("data", "peers have this data since they started"),
    ("name", "the run's definition names it"),
    ("seed", "the initial state and the order of samples follow from it"),
    ("evaluation", "figures before and after the change could not be compared"),
    ("overlay", "it only counts when a peer starts, and peers that joined before are added to it"),
)


def why_not(key: str) -> str:
    """Why a setting may not change, and what to do instead; empty if it may."""
    if key in CHANGEABLE:
        return ""
    why = next(
        (words for start, words in _WHY_NOT if key.startswith(start)), "no run has such a setting that may change"
    )
    return f"{key} cannot change in a run that exists: {why}. `swarmentum-coordinator run fork RUN {key}=...` makes a new run"


def merged(before: Iterable[tuple[str, str]], after: Iterable[tuple[str, str]]) -> Settings:
    """The settings in force after a change."""
    return tuple(sorted({**dict(before), **dict(after)}.items()))


def with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """The settings `config` of a genesis, but for these. Raises Refusal for one that may not change, or does not fit."""
    if not settings:
        return config
    values: dict[str, Any] = config.model_dump(mode="json")
    for key, text in settings:
        if why := why_not(key):
            raise Refusal(Reason.OUT_OF_RANGE, why)
        section, _, name = key.partition(".")
        values[section][name] = _value(key, text)
    if values["admission"]["mode"] not in ("invite", config.admission.mode):
        raise Refusal(
            Reason.OUT_OF_RANGE,
            f"{ADMISSION_MODE} can become invite, and then {config.admission.mode} again: an open run is protected against "
            "copied votes from its first step on. `swarmentum-coordinator run fork RUN admission.mode=...` makes a new run",
        )
    try:
        changed = RunConfig.model_validate(values)
    except ValidationError as error:
        raise Refusal(Reason.OUT_OF_RANGE, described(error)) from error
    changed.check_new()
    return changed


def described(error: ValidationError) -> str:
    """The first mistake, with its key."""
    return wrongs(error)[0].text


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Values by dotted key, as settings. Raises Refusal for a value that is no plain one."""
    return settings_from_body(
        [
            log_pb2.Setting(key=key, value_json=json.dumps(value, separators=(",", ":"), sort_keys=True))
            for key, value in sorted(values.items())
        ]
    )


def settings_body(settings: Settings) -> list[log_pb2.Setting]:
    """As protobuf."""
    return [log_pb2.Setting(key=key, value_json=text) for key, text in settings]


def settings_from_body(body: Iterable[log_pb2.Setting]) -> Settings:
    """The door: how many, sizes, order, plain values in their one spelling. Raises Refusal."""
    found = [(setting.key, setting.value_json) for setting in body]
    if len(found) > len(CHANGEABLE):
        raise Refusal(Reason.TOO_LARGE, f"{len(found)} settings, at most {len(CHANGEABLE)}")
    for key, text in found:
        if len(key.encode()) > SETTING_BYTES_MAX or len(text.encode()) > bytes_max(key):
            raise Refusal(Reason.TOO_LARGE, f"a setting of more than {bytes_max(key)} bytes")
        if why := why_not(key):
            raise Refusal(Reason.OUT_OF_RANGE, f"{why} (or a newer version of swarmentum knows more: install it)")
        _value(key, text)
    if [key for key, _ in found] != sorted({key for key, _ in found}):
        raise Refusal(Reason.OUT_OF_RANGE, "settings are not sorted by key, each once")
    return tuple(found)


def values_of(settings: Settings) -> dict[str, Any]:
    """The settings as plain values, for people and for JSON."""
    return {key: json.loads(text) for key, text in settings}


def changed_values(changed: Iterable[pb.ChangedSetting]) -> list[dict[str, Any]]:
    """The present values of a run's changed settings, as JSON values: key, value, and the first step that the value counts for.

    At most as many as may change; a value that is not plain is shown as text.
    """
    rows: dict[str, dict[str, Any]] = {}
    for it in changed:
        key = printable(it.setting.key, SETTING_BYTES_MAX)
        try:
            value: object = _value(key, it.setting.value_json)
            value = [printable(one) for one in value] if isinstance(value, list) else value
            value = printable(value) if isinstance(value, str) else value
        except Refusal:
            value = printable(it.setting.value_json, SETTING_BYTES_MAX)
        if key in rows or len(rows) < len(CHANGEABLE):
            rows[key] = {"key": key, "value": value, "from_step": it.from_step}
    return [rows[key] for key in sorted(rows)]


def in_force(config: RunConfig, changed: Iterable[pb.ChangedSetting], step: int | None = None) -> RunConfig:
    """The genesis' settings with a run's changes: all of them, or those that count in `step`. Raises Refusal."""
    found: Settings = ()
    for it in changed:
        if step is None or it.from_step <= step:
            found = merged(found, settings_from_body([it.setting]))
    return with_settings(config, found)


def words(settings: Settings) -> str:
    """The settings for people, on one line."""
    return ", ".join(f"{key} = {text}" for key, text in settings)


def bytes_max(key: str) -> int:
    """The most bytes of a changed setting's value."""
    return SETTING_LIST_BYTES_MAX if key == MIRRORS else SETTING_BYTES_MAX


def _value(key: str, text: str) -> float | str | list[str]:
    if len(text) > bytes_max(key):  # before it is parsed: [[[[ without end would end the reader
        raise Refusal(Reason.TOO_LARGE, f"{key}: a value of more than {bytes_max(key)} characters")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Refusal(Reason.MALFORMED, f"{key}: its value is not JSON") from error
    if key == MIRRORS:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise Refusal(
                Reason.OUT_OF_RANGE, f'{key}: expected a list such as ["https://example.org/states"], got {text}'
            )
    elif isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Refusal(Reason.OUT_OF_RANGE, f"{key}: expected a number or a word, got {text}")
    if json.dumps(value, separators=(",", ":")) != text or text in ("NaN", "Infinity", "-Infinity"):
        raise Refusal(Reason.MALFORMED, f"{key}: {text} is not the one spelling of its value")
    found: float | str | list[str] = value
    return found
