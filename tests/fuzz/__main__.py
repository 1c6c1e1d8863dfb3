"""Fuzz one door, or each for `--seconds` one after the other. Exit code 1: something got through that should not have.

A crash is written to `--artifacts` as a file; `python -m tests.fuzz DOOR --replay FILE` shows its traceback.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RSS_MB_MAX = 2048  # torch and hivemind take half a gigabyte to begin with
INPUT_SECONDS_MAX = 30
INPUT_BYTES_MAX = 8192
START_SECONDS_MAX = 300
NAMES = (  # here too, so that nothing heavy is imported before the fuzzer instruments it
    "envelope", "announcement", "entry", "tick", "payload-groups", "payload-topk", "payload-paper", "payload-sized",
    "payload-random", "sum-of-votes", "sum-request", "manifest", "shards", "snapshot", "config", "invite", "ticket",
    "peer-record", "dht-record", "address",
    "foreign-text", "requests", "blob-stream", "archive", "packed", "starting-state", "end", "evaluation", "settings",
    "pushed-votes", "control", "operator-page", "reach", "public-runs",
)  # fmt: skip


def fuzz(name: str, seconds: int, artifacts: Path) -> None:
    """In this process; does not return."""
    import atheris

    os.environ["SWARMENTUM_OPTIM_BACKEND"] = "torch"  # numba compiles no instrumented functions
    with atheris.instrument_imports(include=["protos", "coordinator", "node"], exclude=["node.optim.backends.numba"]):
        from tests.fuzz import doors
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(doors.corpus(name)):
            (Path(corpus) / str(number)).write_bytes(seed)
        flags = [
            f"-max_total_time={seconds}",
            f"-rss_limit_mb={RSS_MB_MAX}",
            f"-timeout={INPUT_SECONDS_MAX}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-artifact_prefix={artifacts}/{name}-",
            "-seed=1",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], *flags, corpus], doors.knock(name))
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("door", nargs="?", choices=[*NAMES, "all"], help="one door, or `all` in one process")
    parser.add_argument("--seconds", type=int, default=10, help="for each door (default 10)")
    parser.add_argument("--artifacts", type=Path, default=Path("swarmentum-out/fuzz"))
    parser.add_argument("--replay", type=Path, help="one input")
    options = parser.parse_args()
    options.artifacts.mkdir(parents=True, exist_ok=True)
    if options.replay is not None:
        from tests.fuzz import doors

        doors.knock(options.door)(options.replay.read_bytes())
        return 0
    if options.door is not None:
        fuzz(options.door, options.seconds, options.artifacts)
    failed = [name for name in NAMES if not _quietly(name, options)]
    print(f"{len(NAMES) - len(failed)} of {len(NAMES)} doors hold{'; broken: ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


def _quietly(name: str, options: argparse.Namespace) -> bool:
    flags = ("--seconds", str(options.seconds), "--artifacts", str(options.artifacts))
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", name, *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=options.seconds + START_SECONDS_MAX,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    told = done.stdout + done.stderr
    runs = next((line.split()[-1] for line in told.splitlines() if "number_of_executed_units" in line), "?")
    print(f"{name}: {runs} inputs, {'ok' if done.returncode == 0 else 'BROKEN'}", flush=True)
    if done.returncode:
        print(told[-3000:], flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
