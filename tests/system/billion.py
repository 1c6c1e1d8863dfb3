"""A model of 1.24 billion parameters in a swarm on one machine: `python -m tests.system.billion --folder DIR`.

Llama-3.2-1B's configuration, a tokenizer of 8,192 words that is trained here, and Python's standard library as text. An anchor
and one peer; the peer is killed and comes back; it goes, and a late joiner takes the state from a mirror. Then the model is
exported, and the anchor's archive verified. Prints a line for each part: seconds, and the most memory of each process.
`--layers 1 --width 256` is the same with a small model.
"""

import argparse
import json
import os
import resource
import shutil
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from tokenizers import ByteLevelBPETokenizer

import swarmentum
from tests.bench.copies import peak_of
from tests.system.local_swarm import wait_for

VOCABULARY, LAYERS, WIDTH = 128_256, 16, 2048
WORDS = 8192
WAIT_SECONDS = 3000.0
LOOK_SECONDS = 0.5
STEPS, KILLED_AT, LATE_AFTER = 8, 2, 5


def config(folder: Path, layers: int, width: int) -> dict[str, Any]:
    model = {
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": layers, "num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 256),
        "tie_word_embeddings": True, "max_position_embeddings": 2048,
    }  # fmt: skip
    return {
        "name": "billion",
        "model": {"config": model},
        "data": {"source": "stdlib", "tokenizer": str(folder / "tokenizer.json"), "context": 64, "dtype": "uint16"},
        "optimizer": {"lr": 1e-3},
        "clock": {
            "steps": STEPS, "batch_samples": 4, "min_peers": 1, "snapshot_every": 1,
            "deadline_ms_min": 60_000, "deadline_ms_max": 900_000,
        },
        "snapshots": {"mirrors": [str(folder / "mirror")]},
    }  # fmt: skip


def train_tokenizer(folder: Path) -> None:
    made = ByteLevelBPETokenizer()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    made.train([str(file) for file in files], vocab_size=WORDS, show_progress=False)
    made.save(str(folder / "tokenizer.json"))


class Story:
    """Says each part with its seconds, and the most memory that each process had in it."""

    def __init__(self, swarm: swarmentum.Local) -> None:
        self._swarm, self._peaks = swarm, dict[str, float]()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            for name, child in list(self._swarm._children.items()):
                with suppress(OSError, StopIteration):
                    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
                    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
                    self._peaks[name] = round(peak / 1e6, 2)
            time.sleep(LOOK_SECONDS)

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        self._peaks.clear()
        began = time.monotonic()
        yield
        facts = {"part": what, "seconds": round(time.monotonic() - began, 1), "peak_gb": dict(self._peaks)}
        print(json.dumps(facts), flush=True)


def command(folder: Path, *words: str) -> None:
    peak = peak_of(words, log := folder / f"{words[0]}.log", WAIT_SECONDS)
    facts = {"command": words[0], "peak_gb": round(peak / 1e9, 2), "said": log.read_text().strip()[-500:]}
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True)
    (folder / "mirror").mkdir()
    train_tokenizer(folder)
    os.environ |= {"SWARMENTUM_ARCHIVE": "true", "SWARMENTUM_ALLOW": "data"}
    os.environ["SWARMENTUM_MIRROR"] = str(folder / "mirror")  # the anchor writes it
    run = config(folder, options.layers, options.width)
    print(json.dumps({"memory_gb": round(psutil.virtual_memory().total / 1e9, 1)}), flush=True)
    with swarmentum.local(peers=1, anchor=True, run=run, folder=folder / "swarm") as swarm:
        story = Story(swarm)
        with story.part(f"to step {KILLED_AT}, from nothing"):
            swarm.wait(KILLED_AT, timeout=WAIT_SECONDS)
        swarm.kill("peer-0")
        swarm.add_peer("peer-0")
        with story.part(f"killed; back, and to step {LATE_AFTER}"):
            swarm.wait(LATE_AFTER, timeout=WAIT_SECONDS)
        digests = {name: {it["step"]: it["digest"] for it in swarm.steps(name)} for name in ("peer-0", "anchor")}
        both = digests["peer-0"].keys() & digests["anchor"].keys()
        assert both
        assert all(digests["peer-0"][step] == digests["anchor"][step] for step in both), digests
        swarm.kill("peer-0")
        shutil.rmtree(folder / "swarm" / "peer-0" / "runs")
        wait_for("the mirror", lambda: list((folder / "mirror").rglob("*.manifest")), WAIT_SECONDS)
        swarm.add_peer("late")
        with story.part("a late joiner, to the end"):
            swarm.wait(timeout=WAIT_SECONDS)
        log = (folder / "swarm" / "logs" / "late.log").read_text()
        assert "mirror: bytes came from there" in log, log[-3000:]
        assert "Traceback" not in log
        with story.part("export"):
            command(folder, "export", swarm.link, str(folder / "model"), "--yes", "--home", str(folder / "export"))
    began = time.monotonic()
    verdict = swarmentum.verify(folder / "swarm" / "anchor")  # it was there from the first step on
    assert verdict.ok, verdict
    facts = {
        "part": "the anchor's archive is verified",
        "steps": verdict.steps,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(
        json.dumps(facts | {"peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)}), flush=True
    )


if __name__ == "__main__":
    main()
