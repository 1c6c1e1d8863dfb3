"""One attack, by name: `python -m tests.attack.one NAME LINK FOLDER SECONDS [COORDINATOR_PID]`; prints what came of it."""

import faulthandler
import logging
import sys
from pathlib import Path

import structlog

from tests.attack.attacks import all_attacks
from tests.attack.base import Target

HANGS_SECONDS = 290.0
BEGINS = "the attack begins"
"""On stderr: until then the process only starts."""


def main() -> None:
    """As an attacker's own process, so that it shares nothing with what it attacks."""
    name, link, folder, seconds, *pid = sys.argv[1:]
    faulthandler.dump_traceback_later(
        10 * float(seconds) + HANGS_SECONDS, exit=True
    )  # says where it hangs, before it is ended
    # what its p2pd has to say is no result
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    target = Target(link, Path(folder), int(pid[0]) if pid else None)
    attack = all_attacks()[name]
    print(BEGINS, file=sys.stderr, flush=True)
    print(attack.run(target, float(seconds)))


if __name__ == "__main__":
    main()
