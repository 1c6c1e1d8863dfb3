"""Building a model: the same bits from the same seed, and a clear word for each wrong value."""

import hashlib
import logging

import pytest
import torch
from torch import nn

from node.model.dry_run import check_keys
from node.model.spec import SMALL_LLAMA, ModelError, ModelSpec, build, build_meta, parameter_count, with_vocabulary

TINY = {**SMALL_LLAMA, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
# Of the default model and seed 1. It must not depend on the machine: other instruction sets, other thread counts.
DEFAULT_DIGEST = "63a6e750ba379d32"


class Plain(nn.Module):
    def __init__(self, ids: int = 256, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(ids, width)
        self.head = nn.Linear(width, ids)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(inputs))


def not_a_module() -> int:
    return 3


def needs_what_is_not_there() -> nn.Module:
    return nn.ReLU()


NUMBER = 3


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def test_default_is_the_documented_llama_with_the_same_bits_on_every_machine() -> None:
    model = build(ModelSpec(), 1, vocabulary=256, context=256)
    assert parameter_count(model) == 885_888
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert digest(model) == DEFAULT_DIGEST


def test_the_library_says_nothing_about_a_sound_model(caplog: pytest.LogCaptureFixture) -> None:
    """A GPT-2's own end of text is 50256, which is no id of a vocabulary of bytes. It warned of that twice at every start."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(caplog.handler)
    try:
        build(ModelSpec({"model_type": "gpt2", "vocab_size": 256, "n_layer": 1, "n_embd": 64, "n_head": 2}), 1)
    finally:
        logger.removeHandler(caplog.handler)
        assert logger.level == logging.WARNING
        logger.setLevel(level)
    assert caplog.records == []


def test_seed_decides_and_the_callers_random_state_stays() -> None:
    before = torch.random.get_rng_state()
    one, again, other = (digest(build(ModelSpec(TINY), seed)) for seed in (1, 1, 2))
    assert one == again != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_random_state_of_the_caller_does_not_matter() -> None:
    first = digest(build(ModelSpec(factory=f"{__name__}:Plain"), 1))
    torch.rand(7)
    assert digest(build(ModelSpec(factory=f"{__name__}:Plain"), 1)) == first


def test_a_blank_model_is_whole_once_its_parameters_are_loaded() -> None:
    before = torch.random.get_rng_state()
    drawn, blank = build(ModelSpec(), 1), build(ModelSpec(), 1, blank=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert any(parameter.isnan().all() for parameter in blank.parameters()), "nobody trains on it by mistake"
    blank.load_state_dict(dict(drawn.named_parameters()), strict=False)
    tokens = torch.arange(12)[None]
    assert torch.equal(blank(tokens).logits, drawn(tokens).logits)


class Rotated(torch.nn.Module):
    """A buffer that follows from draws: no snapshot has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(4, 4).normal_())
        self.register_buffer("turn", torch.randn(4, 4).sort().values)


class Permuted(Rotated):
    """What follows from this draw is not NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.randperm(64))


class Decomposed(Rotated):
    """What follows from a draw cannot be computed from NaN."""

    def __init__(self) -> None:
        super().__init__()
        try:
            self.register_buffer("turn", torch.linalg.svdvals(torch.randn(4, 4)))
        except RuntimeError as error:
            raise ModelError(str(error)) from error


@pytest.mark.parametrize("make", [Rotated, Permuted, Decomposed])
def test_a_model_with_more_than_parameters_to_draw_is_never_blank(
    monkeypatch: pytest.MonkeyPatch, make: type[torch.nn.Module]
) -> None:
    monkeypatch.setattr("node.model.spec._config_maker", lambda *_: make)
    drawn, asked = build(ModelSpec(), 1), build(ModelSpec(), 1, blank=True)
    assert digest(drawn) == digest(asked)
    assert torch.equal(drawn.get_buffer("turn"), asked.get_buffer("turn"))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_default_type_of_the_program_makes_no_other_model(kind: torch.dtype) -> None:
    """A factory's parameters, and its buffers, which nobody compares, had other numbers in a program that set one."""
    plain, config = ModelSpec(factory=f"{__name__}:Plain"), build(ModelSpec(TINY), 1)
    torch.set_default_dtype(kind)
    try:
        for make in (lambda: build(plain, 1), lambda: build_meta(plain)):
            with pytest.raises(ModelError, match=r"default type .*torch\.set_default_dtype\(torch\.float32\)"):
                make()
        assert digest(build(ModelSpec(TINY), 1)) == digest(config)
    finally:
        torch.set_default_dtype(torch.float32)


def test_factory_gets_its_arguments() -> None:
    model = build(ModelSpec(factory=f"{__name__}:Plain", kwargs={"width": 5}), 1, vocabulary=256)
    assert isinstance(model, Plain)
    assert model.table.weight.shape == (256, 5)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ModelSpec({"hidden_size": 64}), "model_type is missing"),
        (ModelSpec({"model_type": "lama"}), "'lama'.*near it: llama"),
        (ModelSpec({**TINY, "hidden_size": "wide"}), "hidden_size.*expected int"),
        (ModelSpec({**TINY, "hidden_act": "nope"}), "'llama': KeyError: 'nope'"),
        (ModelSpec({**TINY, "num_attention_heads": 0}), "refuses it for 'llama'"),
        (ModelSpec({**TINY, "attn_implementation": "stranger/kernel"}), "stranger/kernel.*expected one of eager"),
        (ModelSpec({"model_type": "t5"}), "no causal language model comes from 't5'"),
        (ModelSpec({**TINY, "vocab_size": 128}), "vocab_size = 128.*256 ids"),
        (ModelSpec({**TINY, "max_position_embeddings": 16}), "max_position_embeddings = 16.*32 tokens"),
        (ModelSpec(TINY, f"{__name__}:Plain"), "both `config` and `factory`"),
        (ModelSpec(TINY, kwargs={"a": 1}), "belong to a `factory`"),
        (ModelSpec(factory="Plain"), "expected 'module:function'"),
        (ModelSpec(factory="no_such_module:f"), "no module 'no_such_module'.*PYTHONPATH"),
        (ModelSpec(factory=f"{__name__}:nothing"), "has no 'nothing'"),
        (ModelSpec(factory=f"{__name__}:NUMBER"), "it is a int, expected a function"),
        (ModelSpec(factory=f"{__name__}:Plain", kwargs={"depth": 1}), "do not fit model.kwargs.*depth"),
        (ModelSpec(factory=f"{__name__}:not_a_module"), "it returned int, expected a torch.nn.Module"),
        (ModelSpec(factory=f"{__name__}:needs_what_is_not_there"), "no parameter that is trained"),
        (ModelSpec(factory=f"{__name__}:Plain", kwargs={"ids": 100}), "logits = 100.*256 ids"),
    ],
)
def test_wrong_values_are_named(spec: ModelSpec, words: str) -> None:
    with pytest.raises(ModelError, match=f"(?s){words}"):
        build(spec, 1, vocabulary=256, context=32)


class Odd(nn.Module):
    """A table of 256 logits, and a parameter that is out of the ordinary."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)
        whole = torch.zeros(8, 6)
        odd = {
            "transposed": lambda: nn.Parameter(whole.t()),
            "expanded": lambda: nn.Parameter(torch.zeros(6).expand(8, 6)),
            "complex": lambda: nn.Parameter(torch.zeros(8, dtype=torch.complex64)),
            "whole": lambda: nn.Parameter(torch.zeros(8, dtype=torch.int64), requires_grad=False),
            "overlapping": lambda: nn.Parameter(whole[2:5]),
            "same memory": lambda: nn.Parameter(whole[0:]),
            "beside": lambda: nn.Parameter(whole[4:]),
            "tied": lambda: nn.Parameter(whole[4:]),
        }[kind]()
        if kind in ("overlapping", "same memory", "beside"):
            self.first = nn.Parameter(whole[:4])
        self.odd = odd
        if kind == "tied":
            self.again = odd

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(ids)
        return out


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("transposed", r"'odd' of shape \(6, 8\) is not contiguous"),
        ("expanded", "'odd' .* is not contiguous"),
        ("complex", "'odd' is of complex64"),
        ("whole", "'odd' is of int64, expected real numbers"),
        ("overlapping", "'first' and 'odd' lie in the same memory"),
        ("same memory", "'first' and 'odd' lie in the same memory"),
    ],
)
def test_parameters_that_cannot_be_voted_on_are_named(kind: str, words: str) -> None:
    with pytest.raises(ModelError, match=f"parameters? {words}"):
        build(ModelSpec(factory=f"{__name__}:Odd", kwargs={"kind": kind}), 1)


@pytest.mark.parametrize("kind", ["beside", "tied"])
def test_parameters_in_one_tensor_that_do_not_overlap_and_tied_ones_are_fine(kind: str) -> None:
    build(ModelSpec(factory=f"{__name__}:Odd", kwargs={"kind": kind}), 1)


@pytest.mark.parametrize(
    ("config", "there"),
    [
        ({"model_type": "gpt2"}, {"model_type": "gpt2", "vocab_size": 300}),
        ({"model_type": "llama4"}, {"model_type": "llama4", "text_config": {"vocab_size": 300}}),
        ({"model_type": "llama4", "text_config": {"vocab_size": 512}}, None),
        ({"model_type": "gpt2", "vocab_size": 512}, None),
    ],
)
def test_the_tokenizer_s_vocabulary_goes_where_the_type_has_one(
    config: dict[str, object], there: dict[str, object] | None
) -> None:
    """A type of several parts has it in the text's part: elsewhere it was refused as a key that nobody had written."""
    found = with_vocabulary(config, 300)
    assert found == (there or config)
    check_keys(ModelSpec(found))
