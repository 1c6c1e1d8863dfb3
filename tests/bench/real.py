"""A whole run of a language model: coordinator, anchor and two peers as processes, then AdamW alone on the same samples.

Llama with 23 M parameters, a tokenizer of 8,192 words that is trained here, and Python's standard library as text. The run has
the default settings, but for batch, steps and warm-up. AdamW has the same first parameters, samples, batch, schedule and bf16
in this process. Its rate is the best of `--lrs` after `--tries` steps.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import swarmentum
from coordinator.clock.rules import learning_rate
from node.data.corpus import open_corpus
from node.data.samples import Samples
from node.model.gradients import accumulate_gradients
from node.model.spec import ModelSpec, build
from node.training.held_out import held_out_loss
from protos.run_config import RunConfig
from tests.system.billion import WORDS, command, train_tokenizer
from tests.system.local_swarm import wait_for

PEERS, CONTEXT, EVALUATED = 2, 256, 64
WAIT_SECONDS_MAX = 6 * 3600.0
PROMPT = "def read_file(path):\n    "


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2000, help="steps (default 2000)")
    parser.add_argument("--batch", type=int, default=4, help="samples of 256 tokens a step (default 4)")
    parser.add_argument("--every", type=int, default=200, help="steps from one evaluation to the next (default 200)")
    parser.add_argument("--width", type=int, default=512, help="width of the model (default 512)")
    parser.add_argument("--layers", type=int, default=6, help="layers (default 6)")
    parser.add_argument(
        "--lrs", type=float, nargs="*", default=[5e-4, 1e-3, 2e-3], help="rates of AdamW; none: no AdamW"
    )
    parser.add_argument("--tries", type=int, default=200, help="steps of each rate (default 200)")
    parser.add_argument("--folder", type=Path, help="an empty folder, which stays (default: a temporary one)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        train_tokenizer(folder)
        values = settings(options, folder / "tokenizer.json")
        config = RunConfig.model_validate(values)
        found: dict[str, Any] = {"tokens": options.steps * options.batch * CONTEXT, "cores": os.cpu_count()}
        with _short_and_alone():
            found["swarm"] = swarm(values, folder)
        print(json.dumps(found), flush=True)
        if options.lrs:
            found["adamw"] = adamw(config, options, folder)
        return found


def settings(options: argparse.Namespace, tokenizer: Path) -> dict[str, Any]:
    """The run's settings, as in run.toml."""
    width = options.width
    model = {
        "model_type": "llama", "vocab_size": WORDS, "hidden_size": width, "intermediate_size": 3 * width,
        "num_hidden_layers": options.layers, "num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128),
        "tie_word_embeddings": True, "max_position_embeddings": 1024,
    }  # fmt: skip
    return {
        "name": "real", "model": {"config": model},
        "data": {"source": "stdlib", "tokenizer": str(tokenizer), "context": CONTEXT, "dtype": "uint16"},
        "optimizer": {"warmup_steps": max(1, options.steps // 20)},
        "clock": {
            "steps": options.steps, "batch_samples": options.batch, "min_peers": PEERS, "snapshot_every": options.every,
        },
        "evaluation": {"every": options.every, "samples": EVALUATED},
    }  # fmt: skip


@contextmanager
def _short_and_alone() -> Iterator[None]:
    """Children compute in bf16, and with one thread each."""
    wanted = {"SWARMENTUM_PRECISION": "bf16", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def swarm(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The run from its start to its end: curve, seconds, bytes, and what the archive says."""
    began = time.monotonic()
    with swarmentum.local(peers=PEERS, anchor=True, run=values, folder=folder / "swarm") as here:
        here.wait(timeout=WAIT_SECONDS_MAX)
        seconds = time.monotonic() - began
        log, last = folder / "swarm" / "logs" / "anchor.log", values["clock"]["steps"]
        held_out = wait_for("the last held-out loss", lambda: _evaluated(log, last), WAIT_SECONDS_MAX)
        steps = {name: here.steps(name) for name in ("anchor", *(f"peer-{n}" for n in range(PEERS)))}
        verdict = here.verify()
        command(
            folder,
            "export",
            here.link,
            str(folder / "model"),
            "--set",
            "allow=data",
            "--yes",
            "--home",
            str(folder / "export"),
        )
    digests = {name: {it["step"]: it["digest"] for it in rows} for name, rows in steps.items()}
    common = set.intersection(*(set(it) for it in digests.values()))
    return {
        "seconds": round(seconds), "steps": max(common), "verified": verdict.ok,
        "equal": all(len({it[step] for it in digests.values()}) == 1 for step in common),
        "held_out": held_out,
        "wrote": written(folder / "model"), "last": steps["peer-0"][-1],
    }  # fmt: skip


def _evaluated(log: Path, last: int) -> list[list[float]]:
    """The held-out losses that the anchor has told, once there is one of the last step; until then nothing."""
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    found = [[it["step"], it["loss"]] for it in events if it["event"] == "held-out loss"]
    return found if found and found[-1][0] == last else []


def written(model: Path) -> str:
    """What an export writes after the prompt, as transformers reads it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(0)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    made = loaded.generate(ids, max_new_tokens=80, do_sample=True, top_p=0.9, temperature=0.7)
    return str(tokenizer.decode(made[0], skip_special_tokens=True))


def adamw(config: RunConfig, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same in one process: the curve of the best rate, and what each rate had after the tries."""
    tries = {lr: _trained(config, lr, options.tries, options.tries, folder)[-1][1] for lr in options.lrs}
    best = min(tries, key=lambda lr: tries[lr])
    began = time.monotonic()
    curve = _trained(config, best, options.steps, options.every, folder)
    return {"lr": best, "tries": tries, "seconds": round(time.monotonic() - began), "held_out": curve}


def _trained(config: RunConfig, lr: float, last: int, every: int, folder: Path) -> list[list[float]]:
    """Held-out losses [step, nats a token] of the first `last` steps of a run with this rate."""
    corpus = open_corpus(None, folder / "cache", tokenizer=config.data.tokenizer, allow_left_out=True)
    samples = Samples(corpus.tokens, CONTEXT, config.seed)
    model = build(ModelSpec(config.model.config, None, {}), config.seed, vocabulary=WORDS, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rates, held_out, device = (
        config.optimizer.model_copy(update={"lr": lr}),
        samples.validation(EVALUATED),
        torch.device("cpu"),
    )
    autocast, batch, curve = torch.autocast("cpu", torch.bfloat16), config.clock.batch_samples, list[list[float]]()
    for step in range(1, last + 1):
        accumulate_gradients(model, [samples.batch((step - 1) * batch, step * batch)], device, autocast)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(rates, config.clock.steps, step)
        optimizer.step()
        if step % every == 0:
            model.eval()
            value = held_out_loss(model, held_out, device, 8, lambda: False, 0.0)
            model.train()
            assert value is not None
            curve.append([step, round(value, 4)])
    return curve
