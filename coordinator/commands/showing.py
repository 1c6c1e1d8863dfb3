"""The command `swarmentum-coordinator run show`: the facts about one run, and the settings that may change, as they are now."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from coordinator.commands.options import Home, Json, RunName, settings
from protos.changes import CHANGEABLE, changed_values, in_force
from protos.identity import short
from protos.json_line import print_json
from protos.log import run_id_of
from protos.run_config import RunConfig, config_from_json
from protos.run_facts import failure_values, failure_words, phase_word
from protos.start import fork_values, fork_words
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb


def show(run: RunName, home: Home = None, as_json: Json = False) -> None:
    """Show one run: its state, and each setting that `run change` may change, with the step since which its value counts."""
    from coordinator.commands.operator import Operator

    values = shown(Operator(settings(home=home).home).find(run))
    if as_json:
        print_json(values)
        return
    for line in lines(values):
        Console(soft_wrap=True).print(line, highlight=False, markup=False)


def shown(facts: pb.GetRunResponse) -> dict[str, Any]:
    """The facts as JSON values."""
    config = config_from_json(facts.genesis.config_json)
    now, since = in_force(config, facts.changed), {it["key"]: it["from_step"] for it in changed_values(facts.changed)}
    return {
        "run": run_id_of(facts.genesis).hex(),
        "name": printable(config.name),
        "phase": phase_word(facts),
        "reason": printable(facts.reason),
        "step": facts.head_step,
        "steps": facts.total_steps,
        "loss": facts.loss if facts.head_step else None,
        "fork": fork_values(facts.genesis),
        "failures": failure_values(facts.failures),
        "settings": [
            {"key": key, "value": value_at(now, key), "from_step": since.get(key, 1)} for key in sorted(CHANGEABLE)
        ],
    }


def line_of(run: pb.GetRunResponse) -> dict[str, Any]:
    """A run in a list of runs, as JSON values."""
    here = [p for p in run.peers if p.phase != pb.PeerPhase.PEER_PHASE_ABSENT]
    return {
        "run": run_id_of(run.genesis).hex(),
        "name": printable(config_from_json(run.genesis.config_json).name),
        "phase": phase_word(run),
        "step": run.head_step,
        "steps": run.total_steps,
        "loss": run.loss,
        "peers": [short(peer.public_key) for peer in here],
        "reason": printable(run.reason),
        "fork": fork_values(run.genesis),
    }


def value_at(config: RunConfig, key: str) -> Any:
    """The value of a setting with a dotted key."""
    section, _, name = key.partition(".")
    return config.model_dump(mode="json")[section][name]


def lines(values: dict[str, Any]) -> list[str]:
    """The facts for people."""
    loss = "" if values["loss"] is None else f", loss {values['loss']:.4f}"
    found = [f"{values['name']} ({values['run'][:16]}): {values['phase']}, {values['reason']}"]
    found.append(f"step {values['step']} of {values['steps']}{loss}")
    found += [fork_words(values["fork"])] if values["fork"] else []
    if values["failures"]:
        found.append(f"peers that could not join, as they say: {failure_words(values['failures'])}")
    found.append("Settings that `run change` may change while the run is paused:")
    for it in values["settings"]:
        since = f"  (changed from step {it['from_step']} on)" if it["from_step"] > 1 else ""
        found.append(f"  {it['key']} = {json.dumps(it['value'])}{since}")
    return found
