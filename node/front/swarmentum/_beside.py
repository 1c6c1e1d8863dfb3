"""Whether `node`, `coordinator` and `protos` are this project's. Their names are common, and another package may come first."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("node", "coordinator", "protos")


def check_beside() -> None:
    """Raises ImportError with the path of a package that stands where one of ours should be."""
    here = Path(__file__).resolve().parent.parent
    # In a checkout this package lies in node/front, in a wheel beside the three.
    root = here.parents[1] if here.name == "front" and (here.parent / "__main__.py").is_file() else here
    for name in PACKAGES:
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
