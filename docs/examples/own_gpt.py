"""GPT-2 with your own text: `python own_gpt.py LINK HOME TEXT`, or without words in a swarm on this machine."""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import swarmentum

CONTEXT = 64
CONFIG = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}


def train(link: str, home: str, text: str) -> None:
    model = GPT2LMHeadModel(GPT2Config(**CONFIG))
    mine = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long()  # nobody else reads it
    with swarmentum.join(link, model, home=home, own_data=True) as peer:
        for share in peer:
            starts = torch.randint(0, len(mine) - CONTEXT, (share.samples,)).tolist()
            rows = torch.stack([mine[start : start + CONTEXT] for start in starts])
            loss = model(rows, labels=rows).loss
            loss.backward()
            peer.contribute(loss, tokens=rows[:, 1:].numel())
            print(f"step {share.number}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        train(*sys.argv[1:])
    else:
        clock = {"steps": 30, "batch_samples": 32, "min_peers": 1}
        run = {"model": {"config": CONFIG}, "data": {"source": "own", "context": CONTEXT - 1}, "clock": clock}
        with swarmentum.local(peers=0, run=run) as swarm:
            print(f"one more: python own_gpt.py {swarm.link} ANOTHER_HOME TEXT", flush=True)
            train(swarm.link, str(swarm.folder / "mine"), torch.__file__)
