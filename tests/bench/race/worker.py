"""One peer of a rival, as a process of its own: `python -m tests.bench.race.worker RIVAL TASK.json RANK OWN_IP FIRST_IP`.

Ends with its parent (protos/guard.py starts it). Exit code 0: it ran to its end and rank 0 left the weights.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from tests.bench.race import gloo_rivals, hivemind_rivals
from tests.bench.race.task import Peer, Task

LOOPS: Final[Mapping[str, Callable[[Peer, str], None]]] = {
    "ddp": gloo_rivals.ddp,
    "diloco": gloo_rivals.diloco,
    "hivemind": hivemind_rivals.averaging,
    "hivemind-local": hivemind_rivals.local,
}


def main(arguments: list[str]) -> None:
    name, task, rank, own_address, first_address = arguments
    torch.set_num_threads(1)
    peer = Peer(Task.read(Path(task)), int(rank))
    LOOPS[name](peer, own_address if name.startswith("hivemind") else first_address)
    peer.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
