"""Your own model and training loop in a swarm: `python own_loop.py LINK HOME`, or without words in a swarm on this machine."""

import sys

from torch import Tensor, nn

import swarmentum


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(256, 64), nn.Linear(64, 64), nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.embedding(tokens)).tanh())
        return logits


def train(link: str, home: str) -> None:
    model = NextByte()
    with swarmentum.join(link, model, home=home, allow_code=True) as peer:
        for share in peer:
            loss = 0.0
            for rows in share.batches(8):
                part = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
                (part * len(rows) / share.samples).backward()
                loss += part.item() * len(rows) / share.samples
            peer.contribute(loss, tokens=share.samples * (rows.shape[1] - 1))
            print(f"step {share.number}: {share.samples} samples, loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        train(*sys.argv[1:])
    else:  # the other peer makes the same model, and trains it with the built-in loop
        run = {"model": {"factory": "own_loop:NextByte"}, "clock": {"steps": 30, "batch_samples": 32, "min_peers": 2}}
        with swarmentum.local(peers=1, run=run) as swarm:
            train(swarm.link, str(swarm.folder / "mine"))
