"""A home or an archive of another user: each command says so, and blames no file in it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from node.archive.files import find
from node.commands.join import homes_of
from protos.errors import OperatorError


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")
@pytest.mark.parametrize("look", [homes_of, find])
def test_what_another_user_owns_is_called_that(look: Callable[[Path], object], tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    os.seteuid(1234)
    try:
        with pytest.raises(OperatorError, match="this user may not read it; run this as the user who owns it"):
            look(tmp_path)
    finally:
        os.seteuid(0)
