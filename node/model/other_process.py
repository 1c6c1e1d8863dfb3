"""A factory's numbers in other processes, where what differs from machine to machine is another one.

The peers of a run begin with equal numbers, and no vote carries a buffer. Code may read what another peer has otherwise: the
order of a set and `hash` (which follow from PYTHONHASHSEED), the process, the time, the threads, a card, variables of the
environment. Such code builds the same twice in one process. Compares sums, because other threads round otherwise. Builds in one
other process at a time, for the memory. Refuses to call code faulty that the other processes cannot import: code of a notebook
is in no file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn

from node.model.passes import FAILURES
from node.model.spec import ModelError, ModelSpec, build
from protos.process import guarded, python_command, safe_environment

PROCESSES: Final = 2
"""One hash seed in two puts two words into the same order."""
SECONDS_MAX: Final = 120.0
"""Of waiting for all of them: whoever waits for a dry run waits 300 s (`coordinator/commands/planning.py`)."""
END_SECONDS_MAX: Final = 5.0
TOLERANCE: Final = 1e-5
"""Of a tensor's norm."""
TOLERANCE_OF_THREADS: Final = 1e-2
"""Other threads round otherwise. A QR of 1,024 rows (`orthogonal_`) makes 1e-5 of that, an inverse 1e-3."""
PART: Final = 1 << 20
_MARK: Final = b"swarmentum built: "
"""Begins the line of the answer: code may print lines of its own."""
_CHILD: Final = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given.pop('path'); "
    "from node.model.other_process import answer; answer(**given)"
)
_KEPT: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|TMPDIR|TEMP|TMP|LANG|TZ|(LC|LD|DYLD|XDG|SSL|PYTHON|VIRTUAL|CONDA|HF|HUGGINGFACE|TRANSFORMERS|TORCH|"
    r"PYTORCH|TRITON|NUMBA|OMP|MKL|KMP|OPENBLAS|NVIDIA|SWARMENTUM)\w*|(HTTPS?|ALL|NO)_PROXY|(https?|all|no)_proxy"
)
"""Variables that a Python with torch may need in order to start, and a download. A peer does not have the others."""


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


def answer(factory: str, kwargs: dict[str, Any], seed: int, threads: int) -> None:
    """In the other process: print the sums as JSON in a line, or the error that a build raised."""
    torch.set_num_threads(threads)
    try:
        found: dict[str, Any] = {"sums": sums_of(build(ModelSpec(factory=factory, kwargs=kwargs), seed))}
    except (ModelError, *FAILURES) as error:
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    sys.stdout.write(f"\n{_MARK.decode()}{json.dumps(found)}\n")


def _environment(hash_seed: str, threads: int) -> dict[str, str]:
    """Without a card, and without what a peer has not."""
    kept = {name: value for name, value in safe_environment().items() if _KEPT.fullmatch(name)}
    named = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return {**kept, **named, "PYTHONHASHSEED": hash_seed, "CUDA_VISIBLE_DEVICES": ""}


def compare_elsewhere(spec: ModelSpec, seed: int, here: dict[str, list[float]], where: str) -> str:
    """What there is to say if the code could not be built in another process; empty if it was.

    Raises ModelError with the name of a parameter or buffer that is another one there. `here`: the sums of this process.
    """
    given = {"path": sys.path, "factory": spec.factory, "kwargs": dict(spec.kwargs), "seed": seed}
    own, until = torch.get_num_threads(), time.monotonic() + SECONDS_MAX
    seeds = [it for it in "123" if it != os.environ.get("PYTHONHASHSEED")]
    for hash_seed, threads in list(zip(seeds, (2 if own == 1 else 1, own), strict=False))[:PROCESSES]:
        found = _answer(given, hash_seed, threads, until)
        other = _other(here, found.get("sums", here), TOLERANCE)
        if other and threads != own:  # rounding, unless the threads of this process make another one, too
            other = _other(here, found["sums"], TOLERANCE_OF_THREADS)
            if not other:
                found = _answer(given, hash_seed, own, until)
                other = _other(here, found.get("sums", here), TOLERANCE)
        if other:
            raise ModelError(
                f"{where}: {other!r} has other numbers in another process: they follow from PYTHONHASHSEED (the order of a "
                "set, hash()), the number of threads, a card, a clock, or a variable of the environment; make them from "
                "torch's random numbers and model.kwargs alone, so that each peer builds the same"
            )
        if "sums" not in found:
            return f"{where}: it was not built in another process, to see that peers build the same: {found['error']}"
    return ""


def _answer(given: dict[str, Any], hash_seed: str, threads: int, until: float) -> dict[str, Any]:
    """`sums`, or `error`, of a process that builds. It ends with this call."""
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(
            guarded(*python_command("-c", _CHILD)),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=_environment(hash_seed, threads),
        ) as child:
            try:
                words = json.dumps({**given, "threads": threads}).encode()
                out, err = child.communicate(words, timeout=max(until - time.monotonic(), 0.0))
            finally:
                child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(END_SECONDS_MAX)
                child.kill()  # it ignores the signal, as its parents may do; nothing to do with one that has ended
    except subprocess.TimeoutExpired:
        return {"error": f"that took more than {SECONDS_MAX:g} s"}
    except OSError as error:
        return {"error": str(error)}
    if mine := [line for line in out.splitlines() if line.startswith(_MARK)]:
        answered: dict[str, Any] = json.loads(mine[-1].removeprefix(_MARK))
        return answered
    said = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    return {"error": said[-1] if said else f"exit code {child.returncode}"}


def _other(here: dict[str, list[float]], there: dict[str, list[float]], tolerance: float) -> str:
    """The first name whose sums are others; empty if there is none."""
    for name in here | there:
        one, other = here.get(name), there.get(name)
        if one is None or other is None:
            return name
        if not all(abs(a - b) <= tolerance * max(one[1], other[1]) for a, b in zip(one, other, strict=True)):
            return name
    return ""
