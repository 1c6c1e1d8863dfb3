"""Measurements, one JSON object as the last line: `python -m tests.bench optimizer --json`.

Each subcommand is a module of this package with `arguments(parser)` and `measure(options) -> dict`.
"""

import argparse
import json
import os
from importlib import import_module

OF_THE_STEP = ("optimizer", "codec", "plain", "step_checks")
OF_LEARNING = ("convergence", "adversaries", "shares", "real", "race")
OF_A_SWARM = ("swarm", "restart", "loop", "size", "copies", "coordinator", "traffic", "flat", "reach", "web")
SUBCOMMANDS = (*OF_THE_STEP, *OF_LEARNING, *OF_A_SWARM)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    modules = {name: import_module(f"tests.bench.{name}") for name in SUBCOMMANDS}
    for name, module in modules.items():
        command = commands.add_parser(name, help=str(module.__doc__).splitlines()[0])
        command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        module.arguments(command)
    options = parser.parse_args()
    os.environ.setdefault("SWARMENTUM_TEST_COPIES", "none")  # a copy has the memory of what others import, too
    result = modules[options.command].measure(options)
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{key:24} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
