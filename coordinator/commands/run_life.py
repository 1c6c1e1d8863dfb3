"""The commands `swarmentum-coordinator run show|pause|resume|finish|change` and `snapshot ...`: a run, its life, its agreed
snapshots, and the withdrawal of wrong ones.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coordinator.commands.operator import operator_at
from coordinator.commands.signing import show_order
from coordinator.config import EXIT_CODES, Home, Json, Key, RunName
from protos.changes import CHANGEABLE, changed_values, in_force, settings_of
from protos.errors import OperatorError, Refusal
from protos.identity import short
from protos.log import run_id_of
from protos.run_config import RunConfig, config_from_json
from protos.run_facts import failure_values, failure_words, run_values
from protos.start import RUN_DIGITS_SHOWN, fork_values, fork_words
from protos.text import print_json, printable
from protos.v1 import coordinator_pb2 as pb
from protos.version import Program

Reason = Annotated[str, typer.Option(help="Why: peers and all who look at the run see it.")]


def pause(run: RunName, reason: Reason = "", home: Home = None, as_json: Json = False) -> None:
    """Open no further step of a run, until `run resume`. Peers stay connected, and are told why.

    An open step is decided first. The pause outlives a restart of the coordinator.
    """
    operator = operator_at(home)
    found = operator.find(run)
    operator.steer(found.genesis, pb.RunChange.RUN_CHANGE_PAUSE, reason)
    if as_json:
        print_json({**_named(found), "paused": True, "reason": reason})
        return
    _say(f"{_shown(found)} is paused: no further step opens, and its peers are told why. `run resume` ends this.")


def resume(run: RunName, home: Home = None, as_json: Json = False) -> None:
    """Open the steps of a paused run again."""
    operator = operator_at(home)
    found = operator.find(run)
    operator.steer(found.genesis, pb.RunChange.RUN_CHANGE_RESUME)
    if as_json:
        print_json({**_named(found), "paused": False})
        return
    _say(f"{_shown(found)} goes on.")


def finish(run: RunName, reason: Reason = "", key: Key = None, home: Home = None, as_json: Json = False) -> None:
    """End a run at its newest step, for good. Peers store the last state, and end as after the last planned step.

    The coordinator signs the end, and no entry after it. A step that is open is given up. `run fork` can go on from there.
    In a run with operators' keys this is an order, which others of them have to sign, too: `order sign`.
    """
    from coordinator.commands.signing import operators

    if (ordering := operators(run, home, key)) is not None:
        show_order(ordering.give(finishes=True, reason=reason), as_json=as_json)
        return
    operator = operator_at(home)
    genesis = operator.find(run).genesis
    operator.steer(genesis, pb.RunChange.RUN_CHANGE_FINISH, reason)
    found = operator.find(run_id_of(genesis).hex())
    if as_json:
        print_json({**_named(found), "finished": True, "step": found.head_step, "reason": reason})
        return
    _say(f"{_shown(found)} is finished at step {found.head_step}: its peers store the last state, and end.")


def decay(
    run: RunName,
    steps: Annotated[int, typer.Option(min=1, help="How many steps the decay takes.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Let the learning rate of a `wsd` or `constant` run decay from the next step on. The run ends with the decay.

    To go on training afterwards, fork the run from a snapshot before the decay.
    """
    operator = operator_at(home)
    genesis = operator.find(run).genesis
    operator.steer(genesis, pb.RunChange.RUN_CHANGE_DECAY, steps=steps)
    found = operator.find(run_id_of(genesis).hex())
    if as_json:
        print_json({**_named(found), "steps": steps, "last_step": found.total_steps})
        return
    _say(f"{_shown(found)}: the learning rate decays over {steps} steps, and the run ends at step {found.total_steps}.")


def change(
    run: RunName,
    changes: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE...", help="Settings with their new values, for example clock.steps=2000."),
    ],
    key: Key = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Change settings of a paused run, from its next step on: its length, its learning rate, its batch, its limits.

    Each later entry of the signed log names the values. Only a paused run changes. A setting that the state depends on needs
    `run fork`. In a run with operators' keys this is an order, which others of them have to sign, too: `order sign`.
    """
    from coordinator.commands.forks import changes_of, flat
    from coordinator.commands.signing import operators

    try:
        wanted = settings_of(flat(changes_of(changes)))
    except Refusal as refusal:
        raise OperatorError(refusal.detail) from refusal
    if (ordering := operators(run, home, key)) is not None:
        show_order(ordering.give(settings=wanted), as_json=as_json)
        return
    operator = operator_at(home)
    genesis = operator.find(run).genesis
    operator.change(genesis, wanted)
    found = operator.find(run_id_of(genesis).hex())
    keys = {key for key, _ in wanted}
    now = [row for row in changed_values(found.changed) if row["key"] in keys]
    if as_json:
        print_json({**_named(found), "changed": now, "steps": found.total_steps})
        return
    for row in now:
        _say(f"{row['key']} = {json.dumps(row['value'])} from step {row['from_step']} on")
    _say(f"{_shown(found)} is changed, and still paused: `run resume` goes on with these values.")


def archive(
    run: RunName,
    undo: Annotated[bool, typer.Option("--undo", help="Serve and list an archived run again.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Serve and list a finished run no more. Its journal stays, and `run list --all` shows it."""
    operator = operator_at(home)
    found = operator.find(run)
    changes = pb.RunChange.RUN_CHANGE_ARCHIVE, pb.RunChange.RUN_CHANGE_UNARCHIVE
    operator.steer(found.genesis, changes[undo])
    if as_json:
        print_json({**_named(found), "archived": not undo})
        return
    _say(f"{_shown(found)} is {'served again' if undo else 'archived: nobody is served any more'}.")


def delete(
    run: RunName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Delete a finished run from the journal, for ever. What peers have of it stays with them."""
    operator = operator_at(home)
    found = operator.find(run)
    if as_json and not yes:
        raise OperatorError("run delete --json asks nothing: give --yes, too")
    if not yes:
        question = f"{_shown(found)} and its log of {found.head_step} steps will be gone for ever. Delete it?"
        typer.confirm(question, abort=True)
    operator.steer(found.genesis, pb.RunChange.RUN_CHANGE_DELETE)
    if as_json:
        print_json({**_named(found), "deleted": True})
        return
    _say(f"{_shown(found)} is deleted. The journal gives its room to other runs, and to the disk at the next start.")


def _named(found: pb.GetRunResponse) -> dict[str, object]:
    name = printable(config_from_json(found.genesis.config_json).name)
    return {"run": run_id_of(found.genesis).hex(), "name": name}


def _shown(found: pb.GetRunResponse) -> str:
    values = _named(found)
    return f"Run {values['name']} ({str(values['run'])[:RUN_DIGITS_SHOWN]})"


def _say(text: str) -> None:
    Console(soft_wrap=True).print(text, highlight=False, markup=False)


snapshot_app = typer.Typer(
    cls=Program, help="List a run's agreed snapshots, withdraw wrong ones.", no_args_is_help=True
)


@snapshot_app.command("list", epilog=EXIT_CODES)
def list_snapshots(run: RunName, home: Home = None, as_json: Json = False) -> None:
    """List the agreed snapshots that joiners are offered, newest first, and what was withdrawn."""
    found = operator_at(home).find(run)
    rows = [_row(ref) for ref in ([found.snapshot] if found.HasField("snapshot") else []) + list(found.earlier)]
    gone = [(withdrawn.from_step, withdrawn.to_step) for withdrawn in found.withdrawn]
    if as_json:
        print_json({"snapshots": rows, "withdrawn": gone})
        return
    table = Table("step", "root", "bytes", "held by", title="Agreed snapshots")
    for row in rows:
        table.add_row(str(row["step"]), row["root"][:16], str(row["bytes"]), ", ".join(row["holders"]))
    console = Console()
    console.print(table if rows else "No snapshot is agreed.")
    for first, last in gone:
        console.print(f"Withdrawn: the agreed snapshots and digests of steps {first} to {last}.", highlight=False)


@snapshot_app.command(epilog=EXIT_CODES)
def withdraw(
    run: RunName,
    step: Annotated[int, typer.Option(min=1, help="The step of the first snapshot that is wrong; see `list`.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Withdraw the agreed snapshots of a step and of all later steps, and the state digests since.

    Joiners start from the snapshot before. A peer that stopped because its own state differed can
    continue: start it again.
    """
    operator = operator_at(home)
    found = operator.find(run)
    operator.withdraw_snapshot(found.genesis, step)
    if as_json:
        print_json({"withdrawn_from_step": step, "head_step": found.head_step})
        return
    text = f"The agreed snapshots and digests of steps {step} to {max(found.head_step, step)} are withdrawn."
    Console(soft_wrap=True).print(text, highlight=False)


def _row(ref: pb.SnapshotRef) -> dict[str, Any]:
    holders = [short(key) for key in ref.holders]
    return {"step": ref.step, "root": ref.root.hex(), "bytes": ref.total_bytes, "holders": holders}


def show(run: RunName, home: Home = None, as_json: Json = False) -> None:
    """Show one run: its state, and each setting that `run change` may change, with the step since which its value counts."""
    values = shown(operator_at(home).find(run))
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
        **run_values(facts, config, run_id_of(facts.genesis)),
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
        **run_values(run, config_from_json(run.genesis.config_json), run_id_of(run.genesis)),
        "peers": [short(peer.public_key) for peer in here],
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
