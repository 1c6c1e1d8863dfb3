"""A factory's numbers in other processes, where what differs from machine to machine is another one.

The peers of a run begin with equal numbers, and no vote carries a buffer. Code may read what another peer has otherwise: the
order of a set and `hash` (which follow from PYTHONHASHSEED), the process, the time, the threads, a card, variables of the
environment. Such code builds the same twice in one process. Compares sums, because other threads round otherwise. Refuses to
call code faulty that the other processes cannot import: code of a notebook is in no file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from node.model.passes import FAILURES
from node.model.spec import ModelError, ModelSpec, build
from protos.process import python_command, safe_environment

PROCESSES: Final = 2
"""One hash seed in two puts two words into the same order."""
SECONDS_MAX: Final = 240.0
"""Of waiting: for the import of torch, and for two builds of 200 million parameters."""
TOLERANCE: Final = 1e-5
"""Of a tensor's norm: what other threads may round otherwise."""
PART: Final = 1 << 20
_CHILD: Final = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given.pop('path'); "
    "from node.model.other_process import answer; answer(**given)"
)
_KEPT: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|TMPDIR|TEMP|TMP|LANG|TZ|(LC|LD|DYLD|XDG|SSL|PYTHON|VIRTUAL|CONDA|HF|HUGGINGFACE|TRANSFORMERS|TORCH|"
    r"PYTORCH|TRITON|NUMBA|OMP|MKL|KMP|OPENBLAS|NVIDIA|SWARMENTUM)\w*"
)
"""Variables that a Python with torch may need in order to start. A peer does not have the others."""


def sums_of(model: nn.Module) -> dict[str, list[float]]:
    """Of each parameter and buffer by name: a sum that changes with the order of its numbers, and its norm."""
    return {name: _sums(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _sums(tensor: Tensor) -> list[float]:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    flat = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).reshape(-1)
    mixed = square = 0.0
    for first in range(0, len(flat), PART):
        values = flat[first : first + PART].double().nan_to_num(0.0, 1.0, -1.0)
        places = torch.arange(len(values), dtype=torch.float64).add_(first)
        mixed += float(values @ places.cos_())
        square += float(values @ values)
    return [mixed, square**0.5]


def answer(factory: str, kwargs: dict[str, Any], seed: int) -> None:
    """In the other process: print the sums as JSON in the last line, or the error that a build raised."""
    try:
        found: dict[str, Any] = {"sums": sums_of(build(ModelSpec(factory=factory, kwargs=kwargs), seed))}
    except (ModelError, *FAILURES) as error:
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def _environments() -> Iterator[dict[str, str]]:
    """With other hash seeds and other numbers of threads than here, without a card, and without what a peer has not."""
    kept = {name: value for name, value in safe_environment().items() if _KEPT.fullmatch(name)}
    seeds = (seed for seed in "123" if seed != os.environ.get("PYTHONHASHSEED"))
    threads = "2" if torch.get_num_threads() == 1 else "1"
    for seed, _ in zip(seeds, range(PROCESSES), strict=False):
        yield kept | {
            "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""
        }  # fmt: skip


def compare_elsewhere(spec: ModelSpec, seed: int, here: dict[str, list[float]], where: str) -> str:
    """What there is to say if the code could not be built in another process; empty if it was.

    Raises ModelError with the name of a parameter or buffer that is another one there. `here`: the sums of this process.
    """
    given = json.dumps({"path": sys.path, "factory": spec.factory, "kwargs": dict(spec.kwargs), "seed": seed})
    unbuilt = f"{where}: it was not built in another process, to see that peers build the same: "
    try:
        with ExitStack() as started:
            children = [started.enter_context(_started(environment, given)) for environment in _environments()]
            answers = [_answer_of(child) for child in children]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{unbuilt}{error}"
    for found in answers:
        if "sums" not in found:
            return f"{unbuilt}{found.get('error')}"
        if other := _other(here, found["sums"]):
            raise ModelError(
                f"{where}: {other!r} is another one in another process: it follows from PYTHONHASHSEED (the order of a set, "
                "hash()), the number of threads, a card, a clock, or a variable of the environment; make it from torch's "
                "random numbers and model.kwargs alone, so that each peer builds the same"
            )
    return ""


@contextmanager
def _started(environment: dict[str, str], given: str) -> Iterator[subprocess.Popen[str]]:
    """A process that builds; it ends with the block."""
    pipe = subprocess.PIPE
    command = python_command("-c", _CHILD)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as child:
        try:
            assert child.stdin is not None
            child.stdin.write(given)
            child.stdin.close()
            child.stdin = None  # `communicate` would close it again
            yield child
        finally:
            child.kill()


def _answer_of(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = child.communicate(timeout=SECONDS_MAX)
    try:
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        said = next((line for line in reversed(err.splitlines()) if line.strip()), "")
        return {"error": said or f"exit code {child.returncode}"}
    return found


def _other(here: dict[str, list[float]], there: dict[str, list[float]]) -> str:
    """The first name whose sums are others; empty if there is none."""
    for name in here | there:
        one, other = here.get(name), there.get(name)
        if one is None or other is None:
            return name
        if not all(abs(a - b) <= TOLERANCE * max(one[1], other[1]) for a, b in zip(one, other, strict=True)):
            return name
    return ""
