"""A model's weights as a starting state: their exact bits, and what does not fit. ADR 5."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import normalizers
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from coordinator.commands.created import model_start
from node.__main__ import app
from node.archive import files
from node.archive.confirmed import first_difference, model_of, settings_difference, vocabulary_difference
from node.building import PIECES, folder_of
from node.commands.start_from import INDEX, WEIGHTS, check_alike, check_out, load_weights, start_from, write_out
from node.config import PeerSettings
from node.data.tokenizer import ByteTokenizer
from node.export.model_folder import export
from node.model.spec import ModelError, ModelSpec, build
from node.snapshot.pieces import check_start, load
from node.snapshot.store import SnapshotStore
from node.training.replica import BASE_PREFIX, Replica
from protos.errors import OperatorError
from protos.run_config import ModelConfig, RunConfig
from protos.start import fork_words
from protos.v1 import log_pb2

TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CONFIG = RunConfig(model=ModelConfig(config=TINY))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}


def test_the_state_has_the_bits_of_the_model_and_passes_the_door_of_every_peer(tmp_path: Path, model: Path) -> None:
    made = start_from(CONFIG, model, PeerSettings(home=tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / folder_of(made.start.run_id) / PIECES
    store = SnapshotStore(folder, 1 << 30)
    [manifest] = store.manifests()
    check_start(manifest, made.start, made.layout_digest)
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    replica = Replica(bytes(32), other, CONFIG.optimizer, CONFIG.optimizer.vote_size)
    load(store.file(manifest.root), replica.state)
    for name, tensor in weights(model).items():
        assert torch.equal(dict(other.named_parameters())[name], tensor)
    again = start_from(CONFIG, model, PeerSettings(home=tmp_path / "other"))
    assert again == made, "the same model is the same state on every machine"
    assert "begins with the model" in fork_words({"run": made.start.run_id.hex(), "model": True})


def test_a_model_in_several_files_and_in_half_precision(tmp_path: Path, model: Path) -> None:
    found = {name: tensor.bfloat16() for name, tensor in weights(model).items()}
    (model / WEIGHTS).unlink()
    names = sorted(found)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, some in parts.items():
        save_file({name: found[name] for name in some}, model / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (model / INDEX).write_text(json.dumps(index))
    assert start_from(CONFIG, model, PeerSettings(home=tmp_path / "home")).parameters > 0
    index["weight_map"][names[0]] = "../a.safetensors"
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(OperatorError, match="is not a file beside it"):
        start_from(CONFIG, model, PeerSettings(home=tmp_path / "home"))
    save_file(found, model / WEIGHTS)  # a new model over an old one in several files: transformers takes this file, too
    assert start_from(CONFIG, model, PeerSettings(home=tmp_path / "other")).parameters > 0


SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
ELSEWHERE = [
    {"model_type": "mixtral", **SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    {"model_type": "gpt_neox", **SMALL},
    {"model_type": "xlm-roberta", **SMALL, "is_decoder": True},
    {
        "model_type": "mamba2",
        "vocab_size": 256,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_heads": 8,
        "head_dim": 8,
    },
    {"model_type": "bart", "vocab_size": 256, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2},
    {"model_type": "deepseek_v3", **SMALL, "num_key_value_heads": 2, "n_routed_experts": 8, "first_k_dense_replace": 1},
    {
        "model_type": "llama4",
        "text_config": {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2},
    },
    {"model_type": "moshi", **SMALL, "num_key_value_heads": 2},
    {"model_type": "fuyu", "text_config": {**SMALL, "model_type": "persimmon"}},
]
"""Types whose files have other names, shapes or settings than the model: experts one by one, an earlier name of a head, a tied
table under its second name, infinity in config.json, a decoder's own settings, a buffer that is saved, the text's part of a
type of several parts, settings that a file says in another way, a type of several parts that is saved whole."""


def without_vocabulary(config: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in config.items() if key != "vocab_size"}
    return {key: without_vocabulary(value) if isinstance(value, dict) else value for key, value in plain.items()}


@pytest.mark.parametrize("config", ELSEWHERE, ids=lambda config: str(config["model_type"]))
def test_an_export_of_each_kind_of_type_begins_a_run_and_is_confirmed(tmp_path: Path, config: dict[str, Any]) -> None:
    made = build(ModelSpec(config), 3)
    folder = export(made, ByteTokenizer(), tmp_path / "model", {})
    run = RunConfig(model=ModelConfig(config=config))
    fresh = build(ModelSpec(config), 4)
    check_alike(ModelSpec(config), "bytes", folder)
    load_weights(fresh, folder)
    for name, parameter in made.named_parameters():
        assert torch.equal(dict(fresh.named_parameters())[name], parameter), name
    state = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    assert first_difference(state, folder, lambda: model_of(run, folder, state)) is None
    assert settings_difference(run.model, folder) is None
    wide = RunConfig(model=ModelConfig(config=without_vocabulary(config)))
    assert settings_difference(wide.model, folder) is None, (
        "other keys may follow from a vocabulary that the run leaves open"
    )
    assert vocabulary_difference(wide.model, folder, state) is None
    assert (
        first_difference({**state, "more": torch.ones(2)}, folder, lambda: model_of(run, folder, state)) == "lacks more"
    )
    name = sorted(state)[-1]
    state[name].view(-1)[0] += 1
    assert "differs from the replayed weights" in str(
        first_difference(state, folder, lambda: model_of(run, folder, state))
    )
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1 << 40}))
    assert model_of(wide, folder, state) is None, "a stranger's folder takes no memory"
    save_file({**weights(folder), "extra": torch.zeros(1)}, folder / WEIGHTS)
    with pytest.raises(ModelError, match=r"holds '.*', which run\.toml's model does not have"):
        load_weights(fresh, folder)


def test_weights_of_a_bare_model_begin_a_run(tmp_path: Path) -> None:
    """As those of GPT-2 on the hub: without the prefix of the model with a head, and with the masks of an earlier version."""
    config = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 1, "n_head": 2}
    made, fresh = (build(ModelSpec(config), seed) for seed in (3, 4))
    bare = {name.removeprefix("transformer."): tensor.detach() for name, tensor in made.named_parameters()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(bare, tmp_path / WEIGHTS)
    load_weights(fresh, tmp_path)
    for name, parameter in made.named_parameters():
        assert torch.equal(dict(fresh.named_parameters())[name], parameter), name
    for wrong in ({"h.1.ln_1.weight": torch.ones(32)}, {"wte.weight": torch.ones(256, 16)}):
        save_file({**bare, **wrong}, tmp_path / WEIGHTS)
        with pytest.raises(ModelError, match=r"holds '.*', which run\.toml's model does not have"):
            load_weights(fresh, tmp_path)


@pytest.mark.parametrize(
    ("kind", "more", "key", "here", "there"),
    [
        ("roberta", {"is_decoder": True, "pad_token_id": 1}, "pad_token_id", 1, 5),
        (
            "phi3",
            {
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
                "pad_token_id": 0,
            },
            "max_position_embeddings",
            256,
            512,
        ),
    ],
)
def test_settings_from_which_positions_are_computed_are_compared(
    tmp_path: Path, kind: str, more: dict[str, object], key: str, here: int, there: int
) -> None:
    """Most types have the same answers with another number of positions, or another id for padding; these have not."""
    own = {"model_type": kind, **SMALL, **more, key: here, "original_max_position_embeddings": 64}
    if kind != "phi3":
        del own["original_max_position_embeddings"]
    one, other = (build(ModelSpec({**own, key: value}), 3).eval() for value in (here, there))
    other.load_state_dict(one.state_dict())
    ids = torch.arange(1, 40)[None]
    assert not torch.allclose(one(ids).logits, other(ids).logits, atol=1e-4)
    (tmp_path / "config.json").write_text(json.dumps({**one.config.to_dict(), key: there}))
    with pytest.raises(ModelError, match=f"{key} = {here} here, and {there} there"):
        check_alike(ModelSpec(own), "bytes", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(one.config.to_dict()))
    check_alike(ModelSpec(own), "bytes", tmp_path)


def test_a_model_that_was_saved_compiled(tmp_path: Path, model: Path) -> None:
    """`torch.compile` puts `_orig_mod` into the names; the state is that of the model itself."""
    made = start_from(CONFIG, model, PeerSettings(home=tmp_path / "home"))
    found = weights(model)
    save_file({f"_orig_mod.{name}": tensor for name, tensor in found.items()}, model / WEIGHTS)
    assert start_from(CONFIG, model, PeerSettings(home=tmp_path / "other")).start == made.start
    twice = {"_orig_mod.model.norm.weight": found["model.norm.weight"] + 1}
    save_file({**found, **twice}, model / WEIGHTS)
    refused(tmp_path, model, "holds 'model.norm.weight' twice, with other numbers")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), "lacks 1 parameters of run.toml's model: model.norm.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "holds 'extra', which run.toml's model does not have"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
            r"has the shape \[3\], and run.toml's model \[64\]",
        ),
        (lambda w: w["model.norm.weight"].fill_(float("nan")), "contains NaN or infinity"),
        (lambda w: w.update({"model.norm.weight": torch.ones(64).char()}), "is torch.int8: take the weights of before"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, model: Path, change: object, words: str) -> None:
    found = weights(model)
    change(found)  # type: ignore[operator]
    save_file(found, model / WEIGHTS)
    with pytest.raises(OperatorError, match=words):
        start_from(CONFIG, model, PeerSettings(home=tmp_path / "home"))


def refused(tmp_path: Path, model: Path, words: str, config: RunConfig = CONFIG) -> None:
    """From the folder; the file of weights alone says nothing of how it computes."""
    with pytest.raises(OperatorError, match=words):
        start_from(config, model, PeerSettings(home=tmp_path / "home"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_attention_heads", 1, "num_attention_heads = 2 here, and 1 there"),
        ("rope_theta", 500000.0, r"rope_parameters\.rope_theta = 10000\.0 here, and 500000\.0 there"),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": 2.0},
            r"rope_parameters\.factor = None here, and 2\.0 there",
        ),
        ("hidden_act", "gelu", "hidden_act = 'silu' here, and 'gelu' there"),
        ("rms_norm_eps", 1e-5, "rms_norm_eps"),
        ("model_type", "mistral", "model_type = 'llama' here, and 'mistral' there"),
    ],
)
def test_the_same_weights_of_a_model_that_computes_otherwise(
    tmp_path: Path, model: Path, key: str, value: object, words: str
) -> None:
    """Names and shapes are equal, and the logits are those of nothing."""
    theirs = json.loads((model / "config.json").read_text())
    del theirs["rope_parameters"], theirs["num_key_value_heads"], theirs["head_dim"]
    own = {**TINY, "num_key_value_heads": 1}
    theirs["num_key_value_heads"] = 1
    if key == "num_attention_heads":
        own, theirs["num_key_value_heads"] = {**TINY, "head_dim": 32}, 2
        theirs["head_dim"] = 64
    (model / "config.json").write_text(json.dumps({**theirs, key: value}))
    with pytest.raises(OperatorError, match=f"config.json says that these weights belong to another model.*{words}"):
        check_alike(ModelSpec(own), "bytes", model)
    check_alike(ModelSpec(own), "bytes", model / WEIGHTS)


def test_what_changes_no_answer_is_no_other_model(tmp_path: Path, model: Path) -> None:
    other = {"attention_dropout": 0.1, "max_position_embeddings": 32, "use_cache": False, "pad_token_id": 3, "own": 1}
    theirs = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**theirs, **other}))
    ByteTokenizer().huggingface().save_pretrained(model)
    made = start_from(CONFIG, model, PeerSettings(home=tmp_path / "home"))
    (model / "config.json").unlink()
    assert made == start_from(CONFIG, model, PeerSettings(home=tmp_path / "other"))


def test_a_tokenizer_beside_the_weights_that_makes_other_tokens(tmp_path: Path, model: Path) -> None:
    tokenizer = ByteTokenizer().huggingface().backend_tokenizer
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(model / "tokenizer.json"))
    refused(tmp_path, model, "tokenizer.json makes other tokens than data.tokenizer = 'bytes'")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_beside_the_weights_is_not_left_out_in_silence(tmp_path: Path, model: Path, name: str) -> None:
    (model / name).write_text("{}")
    refused(tmp_path, model, f"{name}: an adapter belongs to this model")
    start_from(CONFIG, model / WEIGHTS, PeerSettings(home=tmp_path / "home"))


def test_a_head_of_its_own_is_not_tied_in_silence(tmp_path: Path, model: Path) -> None:
    found = weights(model)
    table = found["model.embed_tokens.weight"]
    save_file({**found, "lm_head.weight": table.clone()}, model / WEIGHTS)
    start_from(CONFIG, model, PeerSettings(home=tmp_path / "home"))
    save_file({**found, "lm_head.weight": table + 1}, model / WEIGHTS)
    refused(
        tmp_path,
        model,
        "'lm_head.weight' has other numbers than 'model.embed_tokens.weight'.*tie_word_embeddings = false",
    )


class Biased(torch.nn.Module):
    """A buffer that is saved, as the bias that chooses experts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 64)
        self.register_buffer("bias", torch.full((4,), 0.3))


def test_a_buffer_that_was_trained_is_not_lost_in_silence(tmp_path: Path) -> None:
    place, saved = tmp_path / "m.safetensors", {"table.weight": torch.ones(256, 64)}
    save_file({**saved, "bias": torch.full((4,), 0.3).bfloat16()}, place)
    load_weights(Biased(), place)
    save_file({**saved, "bias": torch.full((4,), 0.4)}, place)
    with pytest.raises(OperatorError, match="the buffer 'bias' has other numbers than run"):
        load_weights(Biased(), place)


def test_the_newest_state_of_an_archive_without_the_state_of_its_base_optimizer(tmp_path: Path, model: Path) -> None:
    """A run's base optimizer begins anew, as with any other model."""
    archive, found = tmp_path / "archive", weights(model)
    for step, other in ((0, torch.zeros(64)), (40, found["model.norm.weight"])):
        (archive / files.segment_name(step)).mkdir(parents=True)
        state = {**found, "model.norm.weight": other, f"{BASE_PREFIX}momentum": torch.ones(3)}
        save_file(state, archive / files.segment_name(step) / files.STATE)
    genesis = log_pb2.Genesis(config_json=CONFIG.model_dump_json()).SerializeToString()
    (archive / files.GENESIS).write_bytes(genesis)
    made = start_from(CONFIG, archive, PeerSettings(home=tmp_path / "home"))
    refused(
        tmp_path,
        archive,
        "genesis says .*rms_norm_eps",
        RunConfig(model=ModelConfig(config={**TINY, "rms_norm_eps": 1e-5})),
    )
    assert made == start_from(CONFIG, model, PeerSettings(home=tmp_path / "other"))


def test_what_is_no_model_and_no_start(tmp_path: Path, model: Path) -> None:
    with pytest.raises(OperatorError, match="neither a safetensors file nor a folder"):
        start_from(CONFIG, tmp_path, PeerSettings(home=tmp_path / "home"))
    (tmp_path / "bad.safetensors").write_bytes(b"?" * 64)
    with pytest.raises(OperatorError, match="is no safetensors file"):
        start_from(CONFIG, tmp_path / "bad.safetensors", PeerSettings(home=tmp_path / "home"))
    with pytest.raises(OperatorError, match="swarmentum start-from RUN_TOML MODEL"):
        model_start(tmp_path / "none.json", b"")
    (tmp_path / "start.json").write_text('{"model": "zz"}')
    with pytest.raises(OperatorError, match=r"is no start\.json"):
        model_start(tmp_path / "start.json", b"")
    made = start_from(CONFIG, model, PeerSettings(home=tmp_path / "home"))
    endless = json.dumps({**made.values(), "parameters": 1e308}).replace("1e+308", "1e999")
    for text in ("[" * 60_000, endless):  # a RecursionError and an OverflowError reached the operator
        (tmp_path / "start.json").write_text(text)
        with pytest.raises(OperatorError, match=r"is no start\.json"):
            model_start(tmp_path / "start.json", b"")
    (tmp_path / "start.json").write_text(json.dumps(made.values()))
    assert model_start(tmp_path / "start.json", made.layout_digest).start == made.start
    with pytest.raises(OperatorError, match="another parameter layout"):
        model_start(tmp_path / "start.json", bytes(32))


def test_start_json_replaces_nothing_but_a_start_json(tmp_path: Path, model: Path) -> None:
    """`--out` of another file, such as run.toml itself, was overwritten in silence."""
    (tmp_path / "run.toml").write_text('name = "x"\n')
    (tmp_path / "other.json").write_text('{"model": "zz"}')
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("run.toml", "other.json", "link", "model"):
        with pytest.raises(
            OperatorError, match=f"{name} exists and is no start.json of this command; name another file"
        ):
            check_out(tmp_path / name)
    with pytest.raises(OperatorError, match="none is no folder"):
        check_out(tmp_path / "none" / "start.json")
    (tmp_path / "start.json").touch()
    made = start_from(CONFIG, model, PeerSettings(home=tmp_path / "home"))
    for _ in range(2):
        check_out(tmp_path / "start.json")
        write_out(tmp_path / "start.json", made.values())
    assert model_start(tmp_path / "start.json", made.layout_digest).start == made.start
    words = ["start-from", str(tmp_path / "run.toml"), str(model), "--out", str(tmp_path / "run.toml")]
    with pytest.raises(OperatorError, match=r"run.toml exists and is no start\.json"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert (tmp_path / "run.toml").read_text() == 'name = "x"\n'
