"""An exported folder loads with Hugging Face, and replaces nothing that is not ours.

Also a dry run of a model and of its export, before a run begins.
"""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models, pre_tokenizers

from coordinator.commands.checking import findings_of
from node.app import join
from node.commands.model_layout import layout_of
from node.config import PeerSettings
from node.data.tokenizer import ByteTokenizer, load_tokenizer
from node.export.card import card_text, facts_of, files_of
from node.export.first_look import first_look, other_loss, tried, versions
from node.export.model_folder import ExportError, check_folder, export, sample_text, writer
from node.model.spec import ModelError, ModelSpec, build
from node.training.exports import check_series
from protos.errors import OperatorError
from protos.identity import Identity
from protos.invite import Invite
from protos.run_config import RunConfig, config_from_json
from protos.run_sections import ModelConfig, ReferenceLoss
from tests.unit.model.test_dry_run import SMALL
from tests.unit.model.test_spec import TINY

SMALL_BART: dict[str, Any] = {
    "model_type": "bart", "vocab_size": 256, "d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 32,
    "decoder_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TEXT = "def café():\n    return '日本 🐍'\t\0"
CARD = {"run id": "abc", "steps": 100, "odd": "a|b"}


def test_hugging_face_loads_the_same_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    model, path = build(ModelSpec(TINY), 3), tmp_path / "out" / "model"
    assert logging.is_progress_bar_enabled()
    export(model, ByteTokenizer(), path, CARD)
    assert logging.is_progress_bar_enabled()
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert ids[0].tolist() == list(TEXT.encode())
    assert tokenizer.decode(ids[0]) == TEXT
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert "| odd | a\\|b |" in (path / "README.md").read_text()
    assert json.loads((path / "swarmentum.json").read_text())["steps"] == 100
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}


@pytest.mark.parametrize("change", ["adapter", "tie"])
def test_a_model_that_transformers_would_make_otherwise_is_no_model_of_transformers(
    tmp_path: Path, change: str
) -> None:
    """Its configuration names the plain one: AutoModelForCausalLM drew the layers of LoRA, or a tied head, anew."""
    model: Any = build(ModelSpec({**TINY, "tie_word_embeddings": False}), 3)
    if change == "tie":
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    path = export(model, ByteTokenizer(), tmp_path / "model", CARD)
    assert not (path / "config.json").exists()
    assert "your own module" in (path / "README.md").read_text()
    assert load_file(path / "model.safetensors").keys() >= {name for name, _ in model.named_parameters()}


def test_special_ids_are_the_tokenizer_s_and_the_live_model_keeps_its_own(tmp_path: Path) -> None:
    """A Llama's own are 1 and 2, which are plain bytes here."""
    from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

    class Own(ByteTokenizer):
        def huggingface(self) -> object:
            ids = {f"t{number}": number for number in range(253)} | {"<end>": 253, "<pad>": 254, "<begin>": 255}
            backend = Tokenizer(models.WordLevel(ids, unk_token="t0"))
            named = {"eos_token": "<end>", "pad_token": "<pad>", "bos_token": "<begin>"}
            return PreTrainedTokenizerFast(tokenizer_object=backend, **named)

    model = build(ModelSpec({**TINY, "bos_token_id": 1, "eos_token_id": 2}), 3)
    for tokenizer, expected in ((ByteTokenizer(), (None, None, None)), (Own(), (255, 253, 254))):
        path = export(model, tokenizer, tmp_path / type(tokenizer).__name__, CARD)
        for config in (AutoConfig.from_pretrained(path), GenerationConfig.from_pretrained(path)):
            assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == expected
        assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("kind", "other"), [("roberta", True), ("bert", False), ("llama", False), ("xlm", True), ("jamba", False)]
)
def test_a_type_whose_generate_goes_on_otherwise_than_its_logits_say_is_told(kind: str, other: bool) -> None:
    config: dict[str, Any] = {"model_type": kind, **({"pad_token_id": 0} if kind == "jamba" else {})}
    if kind == "xlm":
        config |= {"vocab_size": 256, "emb_dim": 32, "n_layers": 1, "n_heads": 2, "causal": True}
    else:
        config |= {**SMALL, **({"is_decoder": True} if "bert" in kind else {})}
    if kind == "jamba":
        config |= {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2, "num_key_value_heads": 2}
    told = [note for note in tried(ModelSpec(config), ByteTokenizer(), 32)["notes"] if "`generate` of" in note]
    assert bool(told) is other, told


def test_a_prompt_gets_no_end_of_a_text_from_the_tokenizer_of_an_export(tmp_path: Path) -> None:
    """BERT's kind puts [SEP] after each text, which no text of the training had, and RoBERTa's the end of a document."""
    from transformers import AutoTokenizer, BertTokenizer

    ids = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5, "b": 6, "##c": 7}
    BertTokenizer(vocab=ids).save_pretrained(tmp_path / "bert")
    tokenizer = load_tokenizer(str(tmp_path / "bert"))
    back = AutoTokenizer.from_pretrained(export(build(PLAIN, 1), tokenizer, tmp_path / "m", CARD))
    assert (back("bc a").input_ids, back("bc", "a").input_ids) == ([2, 6, 7, 5], [2, 6, 7, 5])
    assert back.encode("bc a", add_special_tokens=False) == tokenizer.encode("bc a").tolist() == [6, 7, 5]
    assert (back.sep_token_id, back.pad_token_id, back.decode([6, 7, 5])) == (3, 0, tokenizer.decode([6, 7, 5]))
    assert tokenizer.huggingface()("a").input_ids == [2, 5, 3]
    assert load_tokenizer(str(tmp_path / "m")).encode("bc a").tolist() == [6, 7, 5]


def test_generate_writes_no_token_of_another_tokenizer_at_its_end(tmp_path: Path) -> None:
    """BART forces its 2, the end of a text, as the last token. Here 2 is a plain byte, which no text had."""
    from transformers import AutoModelForCausalLM

    model = build(ModelSpec({**SMALL_BART, "forced_eos_token_id": 2}), 3).eval()
    back: Any = AutoModelForCausalLM.from_pretrained(export(model, ByteTokenizer(), tmp_path / "m", CARD))
    ids = torch.arange(65, 70)[None]
    drawn = back.generate(ids, max_new_tokens=4, do_sample=False)
    assert drawn[0, -1] == back(drawn[:, :-1]).logits[0, -1].argmax() != 2
    assert model.generation_config.forced_eos_token_id == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "config",
    [
        {**SMALL, "model_type": "roberta", "is_decoder": True},
        {**SMALL, "model_type": "cwm", "num_key_value_heads": 2},
        {"model_type": "xlm", "vocab_size": 256, "emb_dim": 32, "n_layers": 1, "n_heads": 2, "causal": True},
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_a_type_whose_special_ids_are_not_the_tokenizer_s_is_the_same_model_again(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """RoBERTa and XLM compute with the id of padding: without one no pass worked. A CWM has to have a beginning."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = build(ModelSpec(config), 3)
    path = export(model, ByteTokenizer(), tmp_path / "m", CARD)
    ids = torch.arange(1, 30)[None]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(path)(ids).logits, model.eval()(ids).logits)
    left = GenerationConfig.from_pretrained(path)
    assert (left.bos_token_id, left.eos_token_id, left.pad_token_id) == (None, None, None)
    assert tried(ModelSpec(config), ByteTokenizer(), 32)["untried"] == ""


def test_a_card_names_no_folder_of_a_machine_and_the_licence() -> None:
    sources = ("stdlib", "/home/ada/secret project/text.txt", "https://example.org/shards")
    mix = [
        {"name": f"s{number}", "source": source, "sha256": "ab" * 32 if "example" in source else None, "weight": 1}
        for number, source in enumerate(sources)
    ]
    config = RunConfig.model_validate({"name": "x", "data": {"mix": mix}})
    card = card_text(facts_of(config, bytes(32), steps=3), licence="apache-2.0")
    assert "| data | the Python standard library, text.txt (each peer had a copy), https://example.org/shards |" in card
    assert "/home" not in card
    assert card.startswith("---\nlicense: apache-2.0\ntags:")
    assert card_text({}).startswith("---\nlicense: unknown\n")


def test_plain_module_is_saved_with_a_note(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    spec = ModelSpec(factory="tests.unit.model.test_spec:Plain")
    model, other = build(spec, 1), build(spec, 2)
    path = export(model, ByteTokenizer(), tmp_path / "m", {})
    load_model(other, str(path / "model.safetensors"))
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids), other(ids))
    assert "your own module" in (path / "README.md").read_text()


def test_only_an_export_is_replaced(tmp_path: Path) -> None:
    spec, path = ModelSpec(factory="tests.unit.model.test_spec:Plain"), tmp_path / "m"
    for steps in (1, 2):
        export(build(spec, 1), ByteTokenizer(), path, {"steps": steps})
    facts = json.loads((path / "swarmentum.json").read_text())
    assert facts.pop("files") == sorted(file.name for file in path.iterdir())
    assert facts == {"steps": 2}
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match="is not an export of this program"):
        export(build(spec, 1), ByteTokenizer(), tmp_path / "work", {})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m", "work"]


PLAIN = ModelSpec(factory="tests.unit.model.test_spec:Plain")


def test_a_new_export_of_the_run_leaves_what_is_somebody_s_own(tmp_path: Path) -> None:
    path = export(build(PLAIN, 1), ByteTokenizer(), tmp_path / "m", {"run_id": "aa", "steps": 1})
    (path / "notes.txt").write_text("mine")
    (path / "my results.json").write_text("mine")
    (path / "evaluation.json").write_text("of the weights before")
    (path / ".git").mkdir()
    (path / ".git" / "HEAD").write_text("ref")
    (path / "model-00002-of-00002.safetensors").write_text("of the export before")
    (tmp_path / "latest").symlink_to("m")
    assert export(build(PLAIN, 1), ByteTokenizer(), tmp_path / "latest", {"run_id": "aa", "steps": 2}) == path
    assert json.loads((path / "swarmentum.json").read_text())["steps"] == 2
    assert [(path / name).read_text() for name in ("notes.txt", ".git/HEAD")] == ["mine", "ref"]
    assert (path / "my results.json").read_text() == "mine"
    assert not any((path / name).exists() for name in ("model-00002-of-00002.safetensors", "evaluation.json"))
    assert not {"notes.txt", "my results.json", ".git", "model-00002-of-00002.safetensors"} & set(files_of(path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", "m"]
    assert (tmp_path / "latest").is_symlink()


def test_an_export_of_another_run_is_not_replaced(tmp_path: Path) -> None:
    path = export(build(PLAIN, 1), ByteTokenizer(), tmp_path / "step-000000500", {"run_id": "aa", "steps": 1})
    link = Invite(bytes(32), ("127.0.0.1:1",), Identity.generate().public_key, bytes(32), (), "tiny").link()
    for refused in (
        lambda: export(build(PLAIN, 1), ByteTokenizer(), path, {"run_id": "bb", "steps": 2}),
        lambda: join(link, PeerSettings(home=tmp_path / "home"), path),
        lambda: check_series(tmp_path, "bb"),
    ):
        with pytest.raises(OperatorError, match="is the export of another run"):
            refused()
    assert json.loads((path / "swarmentum.json").read_text())["steps"] == 1
    check_series(tmp_path, "aa")
    (tmp_path / "step-000001000").mkdir()
    check_series(tmp_path, "aa")
    (tmp_path / "step-000001000" / "notes.txt").touch()
    with pytest.raises(OperatorError, match="is in the way"):
        check_series(tmp_path, "aa")


def test_an_export_that_was_killed_costs_no_export_and_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(build(PLAIN, 1), ByteTokenizer(), tmp_path / "m", {"run_id": "aa", "steps": 1})
    (path / "notes.txt").write_text("mine")

    def torn(self: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:  # the disk fails between the two renames
        real = Path.rename
        patched.setattr(Path, "rename", lambda self, to: torn(self, to) if ".new-" in self.name else real(self, to))
        with pytest.raises(ExportError, match="Input/output error"):
            export(build(PLAIN, 1), ByteTokenizer(), path, {"run_id": "aa", "steps": 2})
    assert json.loads((path / "swarmentum.json").read_text())["steps"] == 1
    path.rename(tmp_path / ".m.old")  # killed there
    (tmp_path / ".m.new-4194305").mkdir()
    export(build(PLAIN, 1), ByteTokenizer(), path, {"run_id": "aa", "steps": 3})
    assert json.loads((path / "swarmentum.json").read_text())["steps"] == 3
    assert (path / "notes.txt").read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("mount", [False, True])
def test_an_export_fills_an_empty_folder_and_a_mount(
    tmp_path: Path, mount: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume of a container is a folder that is there, empty at first. Its system takes no rename of it."""
    path, real = tmp_path / "out", Path.rename
    (path / "lost+found").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("out")

    def rename(self: Path, to: Path) -> Path:
        if path in (self, to):
            raise OSError(errno.EBUSY, "Device or resource busy")
        return real(self, to)

    if mount:
        (path / ".new-4194305").mkdir()  # killed there
        monkeypatch.setattr(Path, "is_mount", lambda self: self == path)
        monkeypatch.setattr(Path, "rename", rename)
    check_folder(tmp_path / "latest", "aa")
    for steps in (1, 2):
        assert export(build(PLAIN, 1), ByteTokenizer(), tmp_path / "latest", {"run_id": "aa", "steps": steps}) == path
        assert json.loads((path / "swarmentum.json").read_text())["steps"] == steps
        assert not (path / "model-00002-of-00002.safetensors").exists()
        assert sorted({file.name for file in path.iterdir()} - set(files_of(path))) == [
            *["a.txt"][: steps - 1],
            "lost+found",
        ]
        (path / "a.txt").write_text("mine")
        (path / "model-00002-of-00002.safetensors").write_text("of the export before")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", "out"]
    with pytest.raises(ExportError, match="is the export of another run"):
        export(build(PLAIN, 1), ByteTokenizer(), path, {"run_id": "bb", "steps": 3})


def test_an_export_into_a_mount_that_was_killed_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self == path)

    def torn(self: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        real = Path.replace
        patched.setattr(
            Path, "replace", lambda self, to: torn(self, to) if to.suffix == ".safetensors" else real(self, to)
        )
        with pytest.raises(ExportError, match="Input/output error"):
            export(build(PLAIN, 1), ByteTokenizer(), path, {"run_id": "aa", "steps": 1})
    facts = json.loads((path / "swarmentum.json").read_text())
    assert "model.safetensors" in facts.pop("files"), "what the killed export moved is its own"
    assert facts == {"run_id": "aa"}
    with pytest.raises(ExportError, match="is the export of another run"):
        check_folder(path, "bb")
    export(build(PLAIN, 1), ByteTokenizer(), path, {"run_id": "aa", "steps": 2})
    assert json.loads((path / "swarmentum.json").read_text())["steps"] == 2


def test_a_folder_that_cannot_be_the_export_is_refused_before_the_peer_joins(tmp_path: Path) -> None:
    link = Invite(bytes(32), ("127.0.0.1:1",), Identity.generate().public_key, bytes(32), (), "tiny").link()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    (tmp_path / "file").touch()
    settings = PeerSettings(home=tmp_path / "home")
    with pytest.raises(ExportError, match="work exists and is not an export of this program"):
        join(link, settings, tmp_path / "work")
    with pytest.raises(ExportError, match="file is no folder: name another one, or move it away"):
        join(link, settings, tmp_path / "file" / "model")
    assert not settings.home.exists()
    check_folder(tmp_path / "new" / "folders" / "model")


def test_card_says_how_to_load() -> None:
    assert "AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)" in card_text(CARD)


def test_sample_is_decided_by_its_seed_and_may_be_longer_than_the_context() -> None:
    model = build(ModelSpec({**TINY, "max_position_embeddings": 16}), 1).train()
    before = torch.random.get_rng_state()
    one, again, other = (sample_text(model, ByteTokenizer(), "def ", 30, seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    assert one.startswith("def ")
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())
    assert sample_text(model, ByteTokenizer(), "", 1, seed=1).startswith("\n")


def test_a_sample_sees_no_more_than_the_training_did(tmp_path: Path) -> None:
    """A module's table of positions ended before the sample did, and the held-out loss beside it was never told."""
    spec = ModelSpec(factory="tests.unit.model.faulty:make", kwargs={"name": "Answering", "kind": "short"})
    config = RunConfig.model_validate({"data": {"context": 24}, "evaluation": {"every": 25, "sample_tokens": 60}})
    write = writer(config, ByteTokenizer())
    assert len(write(build(spec, 1)).encode()) >= 60
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    beginning = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert not len(beginning.encode("\n"))
    assert len(writer(config, beginning)(build(spec, 1)).split()) == 61


class Rotary(torch.nn.Module):
    """Buffers that are parts of one table, or one number seen many times, and a head that is tied."""

    def __init__(self, kind: str = "halves") -> None:
        super().__init__()
        table = torch.randn(2, 16, 8)
        self.table = torch.nn.Embedding(256, 8)
        self.head = torch.nn.Linear(8, 256, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("cos", table[0])
        self.register_buffer("sin", table[1] if kind == "halves" else torch.ones(1, 1).expand(16, 8))
        self.register_buffer("again", self.cos)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        seen = self.table(ids)
        return self.head(seen * self.cos[: ids.shape[1]] + seen * self.sin[: ids.shape[1]])


@pytest.mark.parametrize("kind", ["halves", "expanded"])
def test_buffers_that_share_memory_are_exported_and_come_back(kind: str, tmp_path: Path) -> None:
    """The run had ended when its export failed, and it could never be exported."""
    import safetensors.torch

    spec = ModelSpec(factory=f"{__name__}:Rotary", kwargs={"kind": kind})
    model, other = build(spec, 1), build(spec, 2)
    path = export(model, ByteTokenizer(), tmp_path / "m", {})
    held = safetensors.torch.load_file(path / "model.safetensors")
    assert sorted(held) == ["cos", "sin", "table.weight"]
    assert torch.equal(held["sin"], model.state_dict()["sin"])
    if kind == "halves":  # torch itself puts nothing into a buffer that is one number seen many times
        other.load_state_dict(held, strict=False)
        ids = torch.arange(9)[None]
        assert torch.equal(model(ids), other(ids))
    assert "load_state_dict(safetensors.torch.load_file" in (path / "README.md").read_text()


class Unwritable(torch.nn.Module):
    """Its state has a word beside the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)

    def get_extra_state(self) -> str:
        return "warm"

    def set_extra_state(self, state: str) -> None:
        assert state == "warm"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def test_a_state_that_no_file_can_hold_is_an_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"'_extra_state' in its state is a str.* `swarmentum export` with the invite"
    ):
        export(Unwritable(), ByteTokenizer(), tmp_path / "m", {})
    assert not list(tmp_path.iterdir())


WORTHLESS = {"factory": "tests.unit.model.faulty:make", "kwargs": {"name": "LookingAhead", "kind": "mean"}}
SOUND = {"factory": "tests.unit.model.faulty:make", "kwargs": {"name": "Sound"}}


def looked(model: dict[str, Any], *, known: bool) -> list[str]:
    """What a peer of a run of this model logs before it trains."""
    config = RunConfig(model=ModelConfig(**model))
    spec = ModelSpec(config.model.config, config.model.factory, config.model.kwargs)
    with capture_logs() as logs:
        first_look(spec, ByteTokenizer(), config, structlog.get_logger(), known=known)
    return [log["why"] for log in logs]


@pytest.mark.usefixtures("built_here_alone")
def test_the_first_peer_of_a_run_that_nobody_tried_refuses_a_worthless_model() -> None:
    with pytest.raises(ModelError, match="an earlier position sees a later token"):
        looked(WORTHLESS, known=False)
    assert looked(WORTHLESS, known=True) == []
    assert looked(SOUND, known=False) == []


@pytest.mark.usefixtures("built_here_alone")
def test_the_reference_of_a_run_is_what_its_peers_compute_and_another_one_is_told() -> None:
    facts = layout_of(RunConfig(model=ModelConfig(**SOUND)), allow_code=True)
    assert facts.reference["made_with"] == versions()
    assert looked({**SOUND, "reference": facts.reference}, known=True) == []
    other = {**facts.reference, "loss": facts.reference["loss"] * 1.01, "made_with": "torch 1.0, transformers 1.0"}
    [told] = looked({**SOUND, "reference": other}, known=True)
    assert "this machine computes another loss" in told
    assert "The run was made with torch 1.0, transformers 1.0, and here are torch" in told
    assert "0.001" in told
    [told] = looked({**SOUND, "reference": {**other, "made_with": versions()}}, known=True)
    assert "here are the same: take the run's code of the model" in told


def test_a_large_model_is_compared_by_its_small_copy() -> None:
    config = {"model_type": "llama", "vocab_size": 256, "hidden_size": 2048, "num_hidden_layers": 24}
    run = RunConfig(model=ModelConfig(config={**config, "num_attention_heads": 16}))
    facts = layout_of(run)
    assert facts.reference["config"]["num_hidden_layers"] == 2
    reference = ReferenceLoss.model_validate(facts.reference)
    spec = ModelSpec(run.model.config)
    assert other_loss(spec, reference, 256, run.data.context) == ""
    strange = reference.model_copy(update={"config": {"model_type": "of a later version"}})
    assert "cannot compute the run's reference loss" in other_loss(spec, strange, 256, run.data.context)


@pytest.mark.usefixtures("in_this_process")
def test_a_created_run_has_the_reference_and_a_run_without_one_keeps_its_bytes(tmp_path: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "small"\n')
    config = findings_of(file, anchor=False).config
    assert config.model.reference is not None
    assert config_from_json(config.canonical_json()) == config
    assert '"reference"' not in RunConfig().canonical_json()
    assert findings_of(file, anchor=False, layout=False).config.model.reference is None
