"""The held-out loss of agreed states, behind the training: a thread with a copy of the model loads a stored snapshot. ADR 53.

The samples are the held-out end of the run's text, which no peer trains on. Refuses to evaluate a state that is not agreed, or
not on this peer's disk, and to delay the training: while one evaluation goes on, only the newest further state waits.
"""

from __future__ import annotations

import copy
import hashlib
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from node.data.samples import Batch
from node.model.device import autocast
from node.model.gradients import Loss, no_room, to_device
from node.model.gradients import loss as next_token_loss
from node.snapshot.pieces import parameters_of
from node.snapshot.store import SnapshotStore
from node.training.host_maker import HostMaker
from node.training.replica import Replica
from protos.errors import NetworkError, OperatorError
from protos.evaluation import DEVICES, Evaluation, is_due
from protos.process import join_or_leave
from protos.run_config import RunConfig

STORE_SECONDS_MAX: Final = 60.0
"""How long an agreed state may take to get to the disk: this peer's own copy may be late."""
FINISH_SECONDS_MAX: Final = 120.0
"""How long a peer that leaves waits for the evaluation that goes on: it may be that of the last state."""
LOOK_SECONDS: Final = 0.2
RESTS: Final = 1.0
"""After each micro-batch the thread rests for so many times as long as that took."""


@dataclass(frozen=True)
class _Job:
    step: int
    root: bytes


def set_sha256(samples: Batch) -> bytes:
    """The hash that names these samples, int64 [n, context + 1]: 32 bytes."""
    shape = np.asarray(samples.shape, dtype="<i8").tobytes()
    return hashlib.sha256(shape + np.ascontiguousarray(samples, dtype="<i8").tobytes()).digest()


def held_out_loss(
    model: nn.Module,
    samples: Batch,
    device: torch.device,
    micro_batch: int,
    stopping: Callable[[], bool],
    rests: float,
    loss: Loss = next_token_loss,
    autocast: AbstractContextManager[Any] | None = None,
) -> float | None:
    """Mean loss in nats a token without dropout, in fp32 or under `autocast`; summed in fp64. None if it was stopped."""
    forward = nullcontext() if autocast is None else autocast
    total = 0.0
    for first in range(0, len(samples), micro_batch):
        if stopping():
            return None
        began = time.monotonic()
        rows = to_device(samples[first : first + micro_batch], device)
        with torch.no_grad(), forward:  # what a program's loss keeps for later has to be good for a backward pass
            total += float(loss(model, rows)) * len(rows)
        time.sleep(rests * (time.monotonic() - began))
    return total / len(samples)


class Evaluator:
    """One peer's. `samples` reads the held-out samples, and raises OperatorError while they are not here. `tell` reports.

    `write`: what a model writes, for people. None: nothing. `model`: one on the CPU to evaluate with. None: a copy of the
    replica's, on its device. `loss`: the program's own, for a model of its own.

    Where the device has no room for fp32 weights (`HostMaker`), each evaluation makes a bf16 model there. Such losses count as
    those of another kind of device.
    """

    def __init__(
        self,
        config: RunConfig,
        replica: Replica,
        store: SnapshotStore,
        samples: Callable[[], Batch],
        tell: Callable[[Evaluation], None],
        micro_batch: int,
        log: Any,
        write: Callable[[nn.Module], str] | None = None,
        model: nn.Module | None = None,
        loss: Loss | None = None,
    ) -> None:
        self._config, self._replica, self._store = config, replica, store
        self._samples, self._tell, self._micro_batch, self._log = samples, tell, micro_batch, log
        self._write, self._loss = write, loss or next_token_loss
        self._device = replica.device if model is None else torch.device("cpu")
        maker = replica.maker
        self._short = maker if isinstance(maker, HostMaker) and maker.evaluates_short else None
        if self._short is not None:
            self._device = self._short.device
        self._forward = None if self._short is None else autocast(self._device, "bf16")
        self._given = self._model = None if model is None else model.eval().requires_grad_(requires_grad=False)
        self._set: tuple[Batch, bytes] | None = None
        self._changed = threading.Condition()
        self._waiting: _Job | None = None
        self._busy = self._stopping = False
        self._thread: threading.Thread | None = None

    def agreed(self, step: int, root: bytes, last_step: int) -> None:
        """The state after a step is agreed: evaluate it if it is due. Returns at once."""
        if not is_due(self._config, step, last_step):
            return
        with self._changed:
            self._waiting = _Job(step, root)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="evaluator", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until nothing is to be evaluated, for FINISH_SECONDS_MAX at most; then end the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._busy, FINISH_SECONDS_MAX)
        self.close()

    def close(self) -> None:
        """End the thread after its present micro-batch."""
        with self._changed:
            self._stopping, thread = True, self._thread
            self._changed.notify_all()
        if thread is not None:
            join_or_leave(thread, FINISH_SECONDS_MAX)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._waiting is not None)
                job, self._waiting, self._busy = self._waiting, None, True
            if self._stopping or job is None:
                return
            try:
                self._evaluate(job)
            except RuntimeError as error:
                if not no_room(error):
                    self._not_evaluated(job, error)
                    continue
                self._log.warning("no memory to evaluate states: set decline=evaluation", step=job.step, why=str(error))
                self._model = self._given
            except Exception as error:  # noqa: BLE001 - the model, and with a program's loss the code, are anybody's
                self._not_evaluated(job, error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _not_evaluated(self, job: _Job, error: Exception) -> None:
        known = isinstance(error, (OperatorError, NetworkError, OSError))
        why = str(error) if known else f"{type(error).__name__}: {error}"
        self._log.info("this state is not evaluated", step=job.step, why=why)

    def _evaluate(self, job: _Job) -> None:
        path = self._stored(job.root)
        if path is None:
            return
        began = time.monotonic()
        if self._set is None:
            held_out = self._samples()
            self._set = held_out, set_sha256(held_out)
        samples, name = self._set
        device = self._device
        model = self._load(path)
        value = held_out_loss(model, samples, device, self._micro_batch, self._ends, RESTS, self._loss, self._forward)
        if value is None:
            return
        if not math.isfinite(value):
            raise OperatorError(f"its held-out loss is {value}")
        seconds = round(time.monotonic() - began, 1)
        self._log.info("held-out loss", step=job.step, loss=round(value, 4), samples=len(samples), seconds=seconds)
        kind = device.type if device.type in DEVICES and self._short is None else "other"
        with self._forward or nullcontext():
            text = "" if self._write is None else self._write(model)
        self._tell(Evaluation(b"", job.step, value, samples[:, 1:].size, name, kind, text))

    def _ends(self) -> bool:
        return self._stopping

    def _stored(self, root: bytes) -> Path | None:
        """The snapshot's file, once this peer has it; None if this peer stores another state."""
        until = time.monotonic() + STORE_SECONDS_MAX
        while not self._store.has(root):
            if self._stopping or self._waiting is not None or time.monotonic() > until:
                return None
            time.sleep(LOOK_SECONDS)
        return self._store.file(root)

    def _load(self, path: Path) -> nn.Module:
        """The copy of the model, with the parameters of a snapshot. OSError if the snapshot was deleted meanwhile."""
        from safetensors import safe_open

        file: Any = safe_open(path, "pt")
        if self._short is not None:
            return self._short.to_evaluate(file.get_tensor)
        if self._model is None:
            self._model = copy.deepcopy(self._replica.whole_model()).eval().requires_grad_(requires_grad=False)
        with torch.no_grad():
            for name, parameter in parameters_of(self._model).items():
                parameter.copy_(file.get_tensor(name))
        return self._model
