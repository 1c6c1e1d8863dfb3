"""Swarmentum for programs: an optimizer for any training loop, a swarm in one cell, and the record of a run.

    DeMoOptimizer   a `torch.optim.Optimizer`; DeMoConfig and LocalConfig are its settings
    local           a swarm on this machine: a coordinator and peers, each in its own process
    join            a model and a loop of your own, as a peer of a run
    verify          replay a run's archive, and say whether each step holds
    read_run        the verified log of a run, from its coordinator, an archive or a file of `swarmentum export-log`

What `__all__` names is the public interface; all other modules are this project's own and may change. A name is loaded when it
is first used, so the import itself takes milliseconds and no torch. Errors that are meant are `SwarmentumError`s.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

_PACKAGES: Final = ("node", "coordinator", "protos")


def _check_beside() -> None:
    """Raises ImportError with the path of a package that stands where one of ours should be: their names are common."""
    here = Path(__file__).resolve().parent.parent
    # In a checkout this package lies in node/front, in a wheel beside the three.
    root = here.parents[1] if here.name == "front" and (here.parent / "__main__.py").is_file() else here
    for name in _PACKAGES:
        wanted, found = root / name, _found(name)
        if found is None:
            raise ImportError(f"swarmentum needs its package {name!r} at {wanted}: install swarmentum again", name=name)
        if found.resolve() != wanted:
            raise ImportError(
                f"the package {name!r} at {found} hides swarmentum's own at {wanted}: rename it, or take its folder out of the "
                "module path (sys.path, PYTHONPATH)",
                name=name,
                path=str(found),
            )


def _found(name: str) -> Path | None:
    """The folder of a package, or the file of a module, that `import` finds by this name."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        places = list(getattr(loaded, "__path__", ())) or [getattr(loaded, "__file__", None) or f"<{name}>"]
        return Path(places[0])
    spec = find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ()) or [spec.origin or f"<{name}>"]
    return Path(places[0])


_check_beside()

# A worker of a DataLoader is a fork: gRPC's own handlers end it by SIGABRT, if a thread of the peer is in gRPC just then. Read
# when gRPC starts, so it is set before.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def _peer_program() -> None:
    """The command `swarmentum`."""
    _program("node.__main__")


def _coordinator_program() -> None:
    """The command `swarmentum-coordinator`."""
    _program("coordinator.__main__")


def _program(module: str) -> None:
    try:
        import_module(module).main()
    except KeyboardInterrupt:  # while it is imported; later the program itself sees to it
        raise SystemExit(130) from None


if TYPE_CHECKING:
    from node.archive.verify import Verification
    from node.optim.demo import DeMoConfig
    from node.optim.local import LocalConfig
    from node.optim.torch_optimizer import DeMoOptimizer
    from node.training.maker import Share
    from protos.errors import (
        DivergedError,
        NetworkError,
        OperatorError,
        RefusedError,
        StoppedError,
        SwarmentumError,
    )
    from swarmentum._join import Joined, join
    from swarmentum._local import Local, local
    from swarmentum._optimizer import SwarmOptimizer
    from swarmentum._reading import Peer, Run, Step, Vote, read_run, verify

    __version__: str

_HOME = {
    "DeMoConfig": "node.optim.demo",
    "DeMoOptimizer": "node.optim.torch_optimizer",
    "DivergedError": "protos.errors",
    "Joined": "swarmentum._join",
    "Local": "swarmentum._local",
    "LocalConfig": "node.optim.local",
    "NetworkError": "protos.errors",
    "OperatorError": "protos.errors",
    "Peer": "swarmentum._reading",
    "RefusedError": "protos.errors",
    "Run": "swarmentum._reading",
    "Share": "node.training.maker",
    "Step": "swarmentum._reading",
    "StoppedError": "protos.errors",
    "SwarmOptimizer": "swarmentum._optimizer",
    "SwarmentumError": "protos.errors",
    "Verification": "node.archive.verify",
    "Vote": "swarmentum._reading",
    "join": "swarmentum._join",
    "local": "swarmentum._local",
    "read_run": "swarmentum._reading",
    "verify": "swarmentum._reading",
}
"""The module that a public name comes from."""

__all__ = [
    "DeMoConfig",
    "DeMoOptimizer",
    "DivergedError",
    "Joined",
    "Local",
    "LocalConfig",
    "NetworkError",
    "OperatorError",
    "Peer",
    "RefusedError",
    "Run",
    "Share",
    "Step",
    "StoppedError",
    "SwarmOptimizer",
    "SwarmentumError",
    "Verification",
    "Vote",
    "__version__",
    "join",
    "local",
    "read_run",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from protos.version import software_version

        value: Any = software_version()
    elif name in _HOME:
        value = _loaded(name)
    else:
        raise AttributeError(f"module 'swarmentum' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def _loaded(name: str) -> Any:
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("torch", "numpy", "numba", "safetensors", "transformers"):
            raise ImportError(
                f"swarmentum.{name} needs {error.name}, which the base install leaves out: "
                "pip install '.[node]' in the folder of the repository",
                name=error.name,
            ) from error
        raise


def __dir__() -> list[str]:
    return __all__
