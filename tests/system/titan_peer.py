"""The torchtitan of docs/examples without a GPU: `torchrun --nproc-per-node 1 tests/system/titan_peer.py LINK HOME`.

torchtitan asks CUDA for its device's name and memory, takes flex attention, which has no backward pass on a CPU, and calls a
function of torch's nightly builds. Here each has a stand-in; torchtitan itself, its model, data and loop are the real ones. The
folder of SWARMENTUM_TEST_TITAN has its text and tokenizer. Prints how many votes counted.
"""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

FOLDER = Path(os.environ["SWARMENTUM_TEST_TITAN"])
MEMORY_BYTES = 1 << 34


class Processor(ModuleType):
    """`torch.cpu` with what torchtitan asks of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=MEMORY_BYTES)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def current_device(self) -> int:
        return 0

    def reset_peak_memory_stats(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...


def prepare() -> None:
    """The text, and a tokenizer of it, in FOLDER."""
    from tokenizers import ByteLevelBPETokenizer

    text = Path(os.__file__).read_text()
    (FOLDER / "text").mkdir(parents=True)
    (FOLDER / "text" / "c4.json").write_text(json.dumps({"text": text}) + "\n")
    made = ByteLevelBPETokenizer()
    made.train_from_iterator([text], vocab_size=2000, special_tokens=["<s>", "</s>"])
    made.save(str(FOLDER / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(words))


if __name__ == "__main__" and sys.argv[1:] == ["prepare"]:
    prepare()
    sys.exit()

from torchtitan.tools import utils  # noqa: E402

utils.device_type, utils.device_module = "cpu", Processor("cpu")  # before others take them from there
torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]

from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402

_whole = config_registry.llama3_debugmodel


def small() -> Any:
    made = _whole()
    made.training.seq_len, made.training.local_batch_size = 32, 4
    made.hf_assets_path, made.dataloader.dataset_path = str(FOLDER), str(FOLDER / "text")
    made.optimizer.implementation = "foreach"
    made.dump_folder = str(FOLDER / "outputs")
    model = made.model_spec.model
    model.layers = model.layers[:1]
    model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    return made


config_registry.llama3_debugmodel = small

from docs.examples import train_with_torchtitan as example  # noqa: E402

model = example.model


def main(link: str, home: str) -> None:
    trainer = example.Peer(small(), link=link, home=home, allow_code=True, listen="127.0.0.1:0")
    trainer.train()
    trainer.peer.close()
    trainer.close()
    print("votes", trainer.peer.summary.votes_accepted)


if __name__ == "__main__":
    main(*sys.argv[1:])
