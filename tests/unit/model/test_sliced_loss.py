"""The loss of a large vocabulary by slices: the plain loss and its gradients, and never all logits at once."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from node.model import gradients as ours
from node.model.gradients import loss
from node.model.size import Effort, activation_bytes
from node.model.spec import ModelSpec, build

WORDS, BATCH, CONTEXT = 300, 3, 21
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
OTHERS = {"n_embd": 32, "n_layer": 2, "n_head": 2}
LAYERS = {"gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2}}


class Largest(TorchDispatchMode):
    """The most numbers that one tensor of a computation had."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        for it in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(it, Tensor):
                self.numbers = max(self.numbers, it.numel())
        return found


def model_of(kind: str, tied: bool = False) -> nn.Module:
    config = {"model_type": kind, "vocab_size": WORDS, "max_position_embeddings": 64, "tie_word_embeddings": tied}
    config |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    extra = {**SMALL, **OTHERS, **LAYERS.get(kind, {})}
    if kind == "opt":
        extra |= {
            "ffn_dim": 64,
            "word_embed_proj_dim": 16,
            "dropout": 0.0,
        }  # the trunk's hidden states are narrower than its layers
    return build(ModelSpec({**config, **extra}), seed=7).train()


def gradients(model: nn.Module, tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    found = loss(model, tokens) * 3
    found.backward()  # type: ignore[no-untyped-call]
    return float(found.detach()), {
        name: it.grad.clone() for name, it in model.named_parameters() if it.grad is not None
    }


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, WORDS, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ours, "SLICE_BYTES", 4 * WORDS * 16)  # 16 positions, so that the last slice is smaller
    return


@pytest.mark.parametrize("kind", sorted(ours.TYPES))
def test_each_type_has_the_plain_loss_and_gradients(kind: str, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    wanted, plain = gradients(model, tokens)
    monkeypatch.setattr(ours, "SLICE_BYTES", 4 * WORDS * 16)
    assert ours.parts_of(model, BATCH * CONTEXT) is not None
    found, own = gradients(model, tokens)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert own.keys() == plain.keys()
    for name, gradient in plain.items():
        assert torch.allclose(own[name], gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_no_tensor_has_all_logits(tied: bool, checkpointing: bool, tokens: Tensor, slices: None) -> None:
    model = Effort(activation_checkpointing=checkpointing).prepare(model_of("llama", tied))
    seen = Largest()
    with seen:
        gradients(model, tokens)
    assert seen.numbers == WORDS * 32  # the table and its gradient: more than a slice of 16 positions
    assert seen.numbers < WORDS * BATCH * CONTEXT


def test_without_gradients_no_table_of_gradients_is_made(tokens: Tensor, slices: None) -> None:
    model = model_of("llama")
    with torch.no_grad():
        found = loss(model, tokens)
    assert not found.requires_grad
    model.get_output_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
    _, own = gradients(model, tokens)
    assert "lm_head.weight" not in own
    assert "model.embed_tokens.weight" in own


def test_under_autocast_the_products_are_those_of_a_linear_layer(
    tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    with torch.autocast("cpu", torch.bfloat16):
        wanted, plain = gradients(model, tokens)
        monkeypatch.setattr(ours, "SLICE_BYTES", 4 * WORDS * 16)
        found, own = gradients(model, tokens)
    assert found == pytest.approx(wanted, rel=1e-3)
    for name, gradient in plain.items():
        assert gradient.dtype == own[name].dtype == torch.float32
        assert (own[name] - gradient).norm() < 0.02 * gradient.norm(), name


class Capped(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(super().forward(hidden))


def capped(model: nn.Module) -> None:
    model.lm_head = Capped(32, WORDS, bias=False)


def hooked(model: nn.Module) -> None:
    model.lm_head.register_forward_hook(lambda module, given, logits: logits / 4)


def patched(model: nn.Module) -> None:
    model.forward = model.forward


def test_models_of_other_kinds_keep_the_plain_loss(tokens: Tensor, slices: None) -> None:
    scaled = model_of("llama")
    scaled.config.model_type = "granite"
    compiled = model_of("llama")
    compiled.compile()
    assert ours.parts_of(scaled, 1000) is None
    assert ours.parts_of(compiled, 1000) is None
    assert ours.parts_of(nn.Linear(2, 2), 1000) is None
    for changed in (capped, hooked, patched):
        model = model_of("llama")
        changed(model)
        assert ours.parts_of(model, 1000) is None, "a factory may change what a class does with its hidden states"
    assert ours.parts_of(model_of("llama"), 16) is None  # one slice


def test_the_planner_counts_no_logits() -> None:
    sizes = {"vocab_size": 128_256, "max_position_embeddings": 1024, **SMALL, **OTHERS}
    plain, sliced = (activation_bytes(ModelSpec({"model_type": kind, **sizes}), 1024) for kind in ("granite", "llama"))
    assert plain is not None
    assert sliced is not None
    assert plain - sliced > 1024 * 128_256 * 4
    compiled = activation_bytes(ModelSpec({"model_type": "llama", **sizes}), 1024, compiled=True)
    assert compiled is not None
    assert compiled - sliced > 1024 * 128_256 * 4, "a compiled model makes all logits at once"
