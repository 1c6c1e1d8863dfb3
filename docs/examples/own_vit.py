"""A vision transformer in a swarm: `python own_vit.py LINK HOME`, or without words in a swarm on this machine."""

import sys

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import swarmentum

SMALL = {"image_size": 16, "patch_size": 4, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def model() -> nn.Module:
    made = ViTForImageClassification(ViTConfig(**SMALL, intermediate_size=128, num_labels=4))
    made.own_loop = True  # nobody gives it tokens
    return made


def images(count: int) -> tuple[Tensor, Tensor]:
    """Your data set. Here: noise in which one of four quarters is brighter."""
    pixels, labels = torch.randn(count, 3, 16, 16), torch.randint(0, 4, (count,))
    for each, label in zip(pixels, labels.tolist(), strict=True):
        each[:, 8 * (label // 2) :, 8 * (label % 2) :][:, :8, :8] += 3
    return pixels, labels


def train(link: str, home: str) -> None:
    mine = model()
    with swarmentum.join(link, mine, home=home, own_data=True, allow_code=True) as peer:
        for share in peer:
            pixels, labels = images(share.samples)
            loss = mine(pixel_values=pixels, labels=labels).loss
            loss.backward()
            peer.contribute(loss, tokens=share.samples)
            print(f"step {share.number}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        train(*sys.argv[1:])
    else:
        clock = {"steps": 60, "batch_samples": 64, "min_peers": 1}
        run = {"model": {"factory": "own_vit:model"}, "data": {"source": "own"}, "clock": clock}
        with swarmentum.local(peers=0, run=run) as swarm:
            print(f"one more: python own_vit.py {swarm.link} ANOTHER_HOME", flush=True)
            train(swarm.link, str(swarm.folder / "mine"))
