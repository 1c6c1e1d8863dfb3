"""steps.jsonl after a crash or a full disk."""

import json
import os
import resource
import signal
from pathlib import Path

import pytest

from node.training.telemetry import LINE_BYTES_MAX, StepLog
from protos.disk import DiskError


@pytest.mark.parametrize("torn", ['{"step": 3, "dig', "", "x" * (LINE_BYTES_MAX // 2)])
def test_a_line_that_was_left_unfinished_does_not_spoil_the_next(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "runs" / "steps.jsonl"
    for steps in ([1, 2], [3]):
        log = StepLog(path)
        for step in steps:
            log.write(step=step)
        log.close()
        with path.open("a") as file:
            file.write(torn)
    log = StepLog(path)
    log.write(step=4)
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_first_line_that_was_left_unfinished_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"st')
    log = StepLog(path)
    log.write(step=1)
    log.close()
    assert path.read_text() == '{"step": 1}\n'


def test_it_does_not_grow_without_end(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for _ in range(2):
        log = StepLog(path, bytes_max=1000)
        for step in range(1, 401):
            log.write(step=step)
        log.close()
    kept = [path.with_name("steps.jsonl.1"), path]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert all(file.stat().st_size < 1100 for file in kept)
    steps = [json.loads(line)["step"] for file in kept for line in file.read_text().splitlines()]
    assert steps == list(range(steps[0], 401)), "no line is lost between the two files"


@pytest.mark.parametrize("limit", ["file", "disk"])
def test_a_log_that_takes_no_more_is_told_once(tmp_path: Path, limit: str) -> None:
    """`ulimit -f`, or 4 GB on a FAT disk: the peer's end tried to write the line again, and ended with a traceback."""
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if limit == "file":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        else:
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, next(it for it in range(3, 256) if _leads_to(it, path)))
            os.close(full)
        with pytest.raises(DiskError, match=r"steps\.jsonl cannot be written"):
            log.write(step=1)
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def _leads_to(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
