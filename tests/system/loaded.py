"""What the process of tests/system/copied.py loads before it is copied: what the two commands import, and kernels."""

import gc
from importlib import import_module
from pathlib import Path

import torch

from node.optim.demo import DeMo, DeMoConfig
from tests.system.tiny import model

COMMANDS = ("join", "relay", "status", "control", "copies", "doctor")
MODULES = (
    "coordinator.serving.served_coordinator",
    "coordinator.commands.created",
    *(f"node.commands.{name}" for name in COMMANDS),
    "node.app",
    "transformers.models.llama.modeling_llama",
)

gc.disable()
for module in MODULES:
    import_module(module)
with torch.random.fork_rng(devices=[]):
    DeMo(model(), DeMoConfig())
gc.freeze()
gc.enable()
if Path("/proc/self/task").is_dir():  # a copy has one thread of its original: what another held would stay locked
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "something that is loaded has started a thread"
