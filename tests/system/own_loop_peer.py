"""A program that trains with a model class and a loop of its own: `python -m tests.system.own_loop_peer LINK HOME HOW`.

Names and shapes are those of tests/system/tiny.py, and the code is not: the model takes the tokens in another way, and the loop
has its own loss. HOW: `on` goes on for ever; `checks` does, and gives its loss to the peer; `optimizer` does, behind a torch
optimizer; `leaves` takes three rounds and leaves; `ends` has data of its own, so it allows none of the run's, and ends the
program after three rounds without a word.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import swarmentum


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.hidden = nn.Linear(128, 64)
        self.head = nn.Linear(64, 256)

    def nats(self, rows: Tensor) -> Tensor:
        now, before = self.embedding(rows[:, 1:-1]), self.embedding(rows[:, :-2])
        logits = self.head(torch.tanh(self.hidden(torch.cat((now, before), dim=-1))))
        return nn.functional.nll_loss(torch.log_softmax(logits.flatten(0, 1), -1), rows[:, 2:].flatten())

    def forward(self, rows: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.nats(rows))


def main(link: str, home: str, how: str) -> None:
    torch.manual_seed(999)  # no state of the run
    torch.set_num_threads(1)
    model = Own()
    own_data = how in {"ends", "optimizer"}
    peer = swarmentum.join(
        link, model, loss=Own.nats if how == "checks" else None,
        home=home, own_data=own_data, allow_data=not own_data, allow_code=how == "checks", listen="127.0.0.1:0", threads=1,
    )  # fmt: skip
    if how == "optimizer":
        behind_optimizer(peer, model, Path(home) / "losses")
    for rounds, share in enumerate(peer, 1):
        loss = 0.0
        batches = [torch.randint(0, 256, (share.samples, 33))] if own_data else share.batches(4)
        for rows in batches:
            part = model.nats(rows) * len(rows) / share.samples
            part.backward()
            loss += part.item()
        peer.contribute(loss, tokens=share.samples * 30)
        print(share.number, flush=True)
        if how not in {"on", "checks"} and rounds == 3:
            break
    if how == "leaves":
        peer.close()
        print(peer.summary.votes_accepted, flush=True)


def behind_optimizer(peer: swarmentum.Joined, model: Own, file: Path) -> None:
    """A loop that knows nothing of shares, as a trainer has it; two micro-batches a step. `file`: their mean losses."""
    optimizer = peer.optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(swarmentum.OperatorError, match="no parameter has a gradient"):
        optimizer.step()
    while not optimizer.finished:
        step = optimizer.share.number
        losses = []
        for _ in range(2):
            losses.append(model(torch.randint(0, 256, (4, 33))).loss)
            (losses[-1] / 2).backward()
        with file.open("a") as lines:
            lines.write(f"{step} {sum(map(float, losses)) / 2!r}\n")
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
