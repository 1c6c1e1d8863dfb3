"""Measurements, one JSON object as the last line: `python -m tests.bench optimizer --json`.

Each subcommand is a module of this package with `arguments(parser)` and `measure(options) -> dict`.
"""

import argparse
import json

from tests.bench import (
    adversaries,
    codec,
    convergence,
    coordinator,
    flat,
    loop,
    optimizer,
    plain,
    race,
    reach,
    real,
    restart,
    shares,
    size,
    step_checks,
    swarm,
    traffic,
    web,
)

SUBCOMMANDS = {
    "optimizer": optimizer,
    "codec": codec,
    "plain": plain,
    "swarm": swarm,
    "convergence": convergence,
    "adversaries": adversaries,
    "restart": restart,
    "shares": shares,
    "step_checks": step_checks,
    "loop": loop,
    "size": size,
    "coordinator": coordinator,
    "traffic": traffic,
    "flat": flat,
    "race": race,
    "real": real,
    "reach": reach,
    "web": web,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=module.__doc__.splitlines()[0])
        command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        module.arguments(command)
    options = parser.parse_args()
    result = SUBCOMMANDS[options.command].measure(options)
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{key:24} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
