"""A look at a tensor while another thread imports torch's distributed tensors."""

import sys
from types import ModuleType

import pytest
import torch

from node.optim.dtensor import MODULE, is_dtensor


def test_a_module_that_another_thread_imports_now_has_made_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    assert not is_dtensor(torch.zeros(1))
