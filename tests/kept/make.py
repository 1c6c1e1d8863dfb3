"""Keep what the present version writes: `python -m tests.kept.make`, once for each release, with the release checked out.

It makes `tests/kept/VERSION.tar.gz`: the homes of a coordinator and of a peer with an archive, stopped in the middle of a run.
"""

import tarfile
import tempfile
from pathlib import Path

from protos.version import software_version
from tests.system.local_swarm import LocalSwarm

KEPT = Path(__file__).parent
LEFT_OUT = ("serving.json", "lock", "control.json")
STEPS = 12
RUN = """
name = "kept"
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
intermediate_size = 32
max_position_embeddings = 16
tie_word_embeddings = true
[data]
context = 16
[clock]
steps = 100000
batch_samples = 8
snapshot_every = 4
[overlay]
bootstrap = [BOOTSTRAP]
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with LocalSwarm(Path(folder), RUN) as swarm:
            peer = swarm.join("ada", "--set", "archive=true")
            swarm.wait_step("ada", STEPS)
            peer.interrupt()
            assert peer.finish()[0] == 130
        file = KEPT / f"{software_version()}.tar.gz"
        with tarfile.open(file, "w:gz") as archive:
            for name in ("coordinator", "ada"):
                archive.add(Path(folder) / name, name, filter=_kept)
        print(f"{file}: {file.stat().st_size:,} bytes")


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(member.name)
    return None if name.name in LEFT_OUT or "cache" in name.parts else member


if __name__ == "__main__":
    main()
