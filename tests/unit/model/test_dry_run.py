"""A dry run: each fault of a model that would spoil a run is named, and sound models pass."""

import random
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from node.data.tokenizer import ByteTokenizer
from node.export.card import CARD
from node.export.model_folder import export
from node.model import other_process
from node.model.dry_run import _candidates, dry_run, idle_keys, reference_loss
from node.model.spec import SMALL_LLAMA, ModelError, ModelSpec, build_meta, configuration, parameter_count
from tests.unit.model import faulty

HERE = "tests.unit.model.faulty"
SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def test_a_key_that_a_type_s_code_asks_for_is_known_though_no_field_declares_it() -> None:
    """head_dim of published Qwen3-MoE configurations was refused, and it changes the model."""
    types = {"model_type": "qwen3_moe", "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    own = {**SMALL, **types, "moe_intermediate_size": 32}
    assert not idle_keys({**own, "head_dim": 64})
    plain, wide = (parameter_count(build_meta(ModelSpec(config))) for config in (own, {**own, "head_dim": 64}))
    assert wide > plain
    assert not idle_keys({"model_type": "recurrent_gemma", "layers_block_type": ["recurrent", "attention"]}), (
        "a field's name"
    )
    for key, kind in (("head_dim", "gpt2"), ("head_dims", "qwen3_moe")):
        assert "transformers knows no such key" in idle_keys({"model_type": kind, key: 64})[0]


def code(name: str, kind: str = "", **more: Any) -> ModelSpec:
    return ModelSpec(factory=f"{HERE}:make", kwargs={"name": name, "kind": kind, **more})


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("LookingAhead", "mean", "an earlier position sees a later token"),
        ("LookingAhead", "next", "an earlier position sees a later token"),
        ("LookingAhead", "training", "an earlier position sees a later token"),
        ("LookingAhead", "scale", "an earlier position sees a later token"),
        (
            "Remembering",
            "tracking",
            "BatchNorm1d 'norm' changes its buffer 'running_mean', 'running_var'.* in training.*use LayerNorm",
        ),
        ("Remembering", "batch", "depend on the other samples of its batch|sees a later token"),
        ("Remembering", "counter", "Remembering '' changes its buffer 'count'"),
        ("Remembering", "attribute", "depend on the batches before|what it kept before"),
        ("Remembering", "own parameter", "Linear 'mid' changes its parameter 'weight' in a forward pass"),
        ("Drawing", "always", "draws random numbers in eval mode"),
        ("Drawing", "python", "draws random numbers in eval mode"),
        ("Drawing", "clock", "looks at a clock or a counter"),
        ("Drawing", "calls", "looks at a clock or a counter"),
        *(
            ("Noisy", kind, "depend on the other samples of its batch")
            for kind in ("and of its batch", "another sample")
        ),
        ("Capacity", "", "depend on the other samples of its batch"),
        ("Cut", "detached", "depend on no trained parameter"),
        ("Cut", "unused", r"2 of 7 parameters get no gradient.*spare.weight"),
        ("Cut", "nan", "the loss is nan before any training"),
        ("Cut", "zero", "every gradient is 0"),
        (
            "Cut",
            "thawed",
            "a pass freezes or thaws spare.bias, spare.weight: set requires_grad where the model is made",
        ),
        ("Cut", "frozen", "a pass freezes or thaws spare.bias, spare.weight"),
        ("Cut", "sparse", "the gradient of table.weight is sparse.*with sparse=False"),
        ("Answering", "mask", "fails: AssertionError: needs a mask"),
        ("Answering", "tuple", "a loss of its own .part 1 of its answer."),
        ("Answering", "dict", "a loss of its own .aux_loss."),
        ("Shifting", "input", "a position does not see its own token.*the token after the next.*leave out the shift"),
        ("Shifting", "logits", "a position does not see its own token"),
        (
            "Twofold",
            "",
            r"begins with numbers of shape \[1, 32, 256\].*part 1 .* has the shape.*names them `logits`",
        ),
        ("Blockwise", "until short", "a sample of 64 tokens gets other logits after a pass of 32"),
        ("Blockwise", "always", "the logits of the first 32 of 64 tokens change with the tokens after them"),
        ("Answering", "short", "IndexError: index out of range.*lower data.context"),
    ],
)
def test_a_factory_with_a_fault_is_refused_by_name(name: str, kind: str, says: str) -> None:
    with pytest.raises(ModelError, match=f"(?s)model.factory = '{HERE}:make': .*({says})"):
        dry_run(code(name, kind), 256, 64)


@pytest.mark.usefixtures("built_here_alone")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("Sound", ""), ("Drawing", "dropout"), ("Cut", ""), ("Answering", "none"), ("Experts", "")),
        ("Twofold", "logits first"),
        *(("Noisy", kind) for kind in ("depth", "depth by rand", "mask", "bernoulli", "noise", "distribution")),
        *(("Noisy", kind) for kind in ("gumbel", "slopes", "rarer")),
    ],
)
def test_a_sound_factory_passes(name: str, kind: str) -> None:
    state, numbers = torch.random.get_rng_state(), random.getstate()
    done = dry_run(code(name, kind), 256, 20)
    assert (done.untried, done.notes) == ("", ())
    assert torch.equal(state, torch.random.get_rng_state())
    assert numbers == random.getstate()
    assert done.spec is not None
    assert reference_loss(done.spec, 256, 20) == done.loss


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("in_bf16", "parameter 'head.weight' is bfloat16, and a run's weights are fp32"),
        ("lazy", "parameter 'mid.weight' has no shape before the first pass"),
        ("in_inference_mode", "parameter 'table.weight' was made under torch.inference_mode, and cannot be trained"),
        ("of_probabilities", "it answers with probabilities .* leave its softmax out"),
        ("tied_in_a_pass", "its first pass adds, ties or removes the parameter 'head.weight'"),
        ("of_python", "'mid.weight' has other numbers in each build from the same seed"),
    ],
)
def test_builds_that_a_run_cannot_use(factory: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        dry_run(ModelSpec(factory=f"{HERE}:{factory}"), 256, 20)


@pytest.mark.parametrize("kind", ["set", "hash", "threads", "environment"])
def test_a_factory_that_another_process_builds_otherwise_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds in one process are the same: they have one order of a set, and one environment."""
    monkeypatch.setenv("WHERE_A_PEER_STANDS", "here alone")
    with pytest.raises(ModelError, match=r"make': 'found_\w+' has other numbers in another process: .*PYTHONHASHSEED"):
        dry_run(code("ByName", kind), 256, 20)


@pytest.mark.parametrize("kinds", ["rounding", "sorted mask prints download"])
def test_a_factory_that_looks_like_them_passes(kinds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose numbers other threads round otherwise, as those of `orthogonal_`, one that prints at its end, and one that
    needs the way to the network. The first other process has another hash seed and other threads."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr(other_process, "PROCESSES", 1)
    assert dry_run(code("ByName", kinds), 256, 20).notes == ()


def test_code_that_no_other_process_can_import_says_that_it_was_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("in_a_notebook")
    module.make = faulty.Sound  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "in_a_notebook", module)
    [note] = dry_run(ModelSpec(factory="in_a_notebook:make"), 256, 20).notes
    assert re.search("it was not built in another process.*no module 'in_a_notebook' can be imported", note)


def test_statistics_of_a_program_s_training_are_told_and_an_export_says_that_they_are_of_none(tmp_path: Path) -> None:
    """Each peer has its own, and who exported a ResNet got a model whose held-out loss was ten times that of the program."""
    unchecked, told = dry_run(code("Pictures", "batch"), 256, 20).notes
    assert ("loops of their own" in unchecked, "BatchNorm2d 'norm' keeps statistics of its batches" in told) == (
        True,
        True,
    )
    assert len(dry_run(code("Pictures", "alone"), 256, 20).notes) == 1
    assert "'kernel' keeps statistics" in str(dry_run(code("Pictures", "spectral"), 256, 20).notes)
    card = export(faulty.Pictures("batch"), ByteTokenizer(), tmp_path / "m", {}) / CARD
    assert (
        "| untrained | the statistics of BatchNorm2d 'norm': pass batches in training mode first |" in card.read_text()
    )
    own = faulty.Pictures("batch").train()  # of a program that has trained it, and is the peer that exports
    own.norm(own.kernel(torch.ones(2, 3, 8, 8)))
    assert "untrained" not in (export(own, ByteTokenizer(), tmp_path / "own", {}) / CARD).read_text()


@pytest.mark.usefixtures("built_here_alone")
def test_a_factory_that_needs_numbers_is_run() -> None:
    assert dry_run(ModelSpec(factory=f"{HERE}:of_numbers"), 256, 20).untried == ""


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "rembert"])
def test_types_that_see_later_tokens_are_refused_unless_they_are_decoders(kind: str) -> None:
    config = {**SMALL, "model_type": kind, "max_position_embeddings": 66}
    with pytest.raises(ModelError, match=r"an earlier position sees a later token.*set is_decoder = true"):
        dry_run(ModelSpec(config), 256, 32)
    assert dry_run(ModelSpec({**config, "is_decoder": True}), 256, 32).untried == ""


def test_a_large_model_is_run_as_a_small_copy() -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 80, "num_attention_heads": 64}
    done = dry_run(ModelSpec({**config, "num_key_value_heads": 8, "vocab_size": 50000}), 50000, 1024)
    assert done.untried == ""
    assert (done.spec.config["num_hidden_layers"], done.spec.config["hidden_size"]) == (2, 128)
    assert dry_run(ModelSpec({"model_type": "phi3"}), 256, 32).notes == (), "its padding, 32000, is 0 in the copy alone"


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("deepseek_v3", "DeepseekV3MoE"),
        ("jamba", "JambaAttention"),
        ("gpt_neo", "GPTNeoSelfAttention"),
        ("zamba", "Zamba"),
    ],
)
def test_a_small_copy_has_every_kind_of_layer(kind: str, part: str) -> None:
    """The experts of a DeepSeek-V3 begin behind three layers, so that nobody had run them; of a GPT-Neo no copy was built."""
    copy, lost = next(_candidates({"model_type": kind}, configuration({"model_type": kind}), 256))
    model = build_meta(ModelSpec(copy))
    assert (parameter_count(model) < 30_000_000, lost) == (True, [])
    assert any(type(it).__name__.startswith(part) for it in model.modules())


def test_a_sample_that_is_longer_than_the_positions_is_refused() -> None:
    """A RoBERTa counts positions from 2, so that 64 of them are enough for 62 tokens."""
    config = {**SMALL, "model_type": "roberta", "is_decoder": True, "max_position_embeddings": 64}
    with pytest.raises(ModelError, match=r"a pass of 64 tokens fails: .*raise max_position_embeddings"):
        dry_run(ModelSpec(config), 256, 64)


@pytest.mark.parametrize(
    ("kind", "keys", "says"),
    [
        ("llama", {"n_layers": 12}, "model.config.n_layers = 12: .*no such key of 'llama'; near it: num_hidden_layers"),
        ("llama", {"hiden_size": 64}, "model.config.hiden_size = 64: .*near it: .*hidden_size"),
        ("gpt2", {"num_key_value_heads": 2}, "model.config.num_key_value_heads"),
        ("llama", {"dtype": "bfloat16"}, "model.config.dtype = 'bfloat16': a run's weights are fp32: remove it"),
        ("llama", {"torch_dtype": "float16"}, "model.config.torch_dtype = 'float16': a run's weights are fp32"),
        ("llama", {"quantization_config": {"bits": 4}}, "model.config.quantization_config"),
        ("llama", {"label_smoothing": 0.1}, "label_smoothing = 0.1: .*without smoothing"),
        ("llama", {"loss_type": "ForMaskedLM"}, "loss_type = 'ForMaskedLM': the training here has the next-token loss"),
        ("llama", {"gradient_checkpointing": True}, "--set activation_checkpointing=true"),
        ("llama", {"num_labels": 5}, "num_labels = 5: it belongs to a classifier"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "a run trains LlamaForCausalLM"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits = True"),
        ("mixtral", {"router_aux_loss_coef": 0}, "^[^\n]*expected float, got int[^\n]*$"),
        ("mixtral", {"router_aux_loss_coef": 0.02}, "router_aux_loss_coef = 0.02: .*leaves this term out"),
        ("deepseek_v3", {"num_nextn_predict_layers": 2}, "trains no layers that predict further tokens"),
        ("gemma3", {"text_config": {"hidden_sizes": 8}}, "model.config.text_config.hidden_sizes = 8"),
    ],
)
def test_keys_that_ask_for_what_is_not_done_are_refused(kind: str, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        dry_run(ModelSpec({"model_type": kind, **keys}), 256, 32)


def test_all_keys_are_named_at_once_and_defaults_ask_for_nothing() -> None:
    sound = {
        "dtype": "float32",
        "use_cache": True,
        "attention_dropout": 0.1,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001,
    }
    with pytest.raises(ModelError) as told:
        dry_run(ModelSpec({**SMALL, "model_type": "mixtral", **sound, "n_head": 2, "num_labels": 3}), 256, 32)
    assert [line.split(" =")[0] for line in str(told.value).splitlines()] == [
        "model.config.n_head",
        "model.config.num_labels",
    ]
    mixture = {**SMALL, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, **sound}
    assert (
        dry_run(
            ModelSpec({**mixture, "router_aux_loss_coef": 0.0, "architectures": ["MixtralForCausalLM"]}), 256, 32
        ).untried
        == ""
    )


def test_sparse_attention_that_only_long_samples_have_is_refused() -> None:
    """BigBird's blocks see later tokens, and the first text that is short turns them off for good."""
    config = {**SMALL, "model_type": "big_bird", "is_decoder": True, "block_size": 8, "num_random_blocks": 1}
    with pytest.raises(ModelError, match="a sample of 128 tokens gets other logits after a pass of 32"):
        dry_run(ModelSpec(config), 256, 128)
    assert dry_run(ModelSpec({**config, "attention_type": "original_full"}), 256, 128).untried == ""


def test_the_small_llama_is_sound_and_its_loss_is_the_same_twice() -> None:
    done = dry_run(ModelSpec(), 256, 128)
    assert (done.untried, done.notes) == ("", ())
    assert done.spec == ModelSpec(dict(SMALL_LLAMA))
    assert done.loss == dry_run(ModelSpec(), 256, 128).loss
