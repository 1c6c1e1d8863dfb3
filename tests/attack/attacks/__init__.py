"""One module for each attack; every module has one `ATTACK`."""

import importlib
import pkgutil

from tests.attack.base import Attack


def all_attacks() -> dict[str, Attack]:
    """Every attack by its name, in the order of the names."""
    found: dict[str, Attack] = {}
    for module in sorted(it.name for it in pkgutil.iter_modules(__path__)):
        attack: Attack = importlib.import_module(f"{__name__}.{module}").ATTACK
        found[attack.name] = attack
    return found
