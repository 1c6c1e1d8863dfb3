"""A replay reads and hashes states by pieces: it has no second copy of a large one in memory."""

import tracemalloc
from pathlib import Path

import torch

from node.archive import files
from node.archive.replay import Replay
from node.snapshot.pieces import describe
from node.training.replica import Replica
from tests.unit.archive.test_archive import Life

PIECE_BYTES = 1 << 16


class LargerLife(Life):
    def _replica(self) -> Replica:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = torch.nn.Linear(700, 650)
        return Replica(self.run_id, model, self.config.optimizer, self.config.optimizer.vote_size)


def test_a_state_is_read_and_hashed_by_pieces(tmp_path: Path) -> None:
    life = LargerLife(tmp_path)
    life.step()
    life.recorder.close()
    replay = Replay.of(life.archive)
    state = replay.segments[0].path(files.STATE).read_bytes()
    like = describe(
        state, run_id=life.run_id, step=0, entry_hash=life.run_id, layout_digest=replay.genesis.layout.digest(),
        piece_bytes=PIECE_BYTES,
    )  # fmt: skip
    for _ in range(2):  # the first round imports
        tracemalloc.start()
        replay._begin(replay.segments[0], like)
        assert replay._root(like, life.run_id) == like.root
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < len(state) / 4
