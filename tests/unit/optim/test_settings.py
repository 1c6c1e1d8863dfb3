"""What users of the field stumble over: defaults, names of tables, stacks of matrices, dtypes, schedulers, own bases."""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from node.optim import base as bases
from node.optim.backends.choose import BACKEND_VARIABLE
from node.optim.base import BY_CHUNKS, TABLES, Base, BaseConfig, is_named_table, is_table
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.exact.orthogonal import SMALLEST, orthogonalised
from node.optim.layout import Layout, kinds_of
from node.optim.second_moment import SecondMoment
from node.optim.torch_optimizer import DeMoOptimizer
from node.training.optimizers import demo_config
from protos.errors import Refusal
from protos.optimizer_config import OptimizerConfig
from protos.run_config import RunConfig

pytestmark = pytest.mark.filterwarnings("ignore:parameters do not tell:UserWarning")

LR = float(np.float32(0.01))
CPU = torch.device("cpu")


class Tiny(nn.Module):
    """A table with a name that says nothing, a stack of experts, a convolution, a norm and a head as transformers tell it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(70, 64)
        self.experts = nn.Parameter(torch.randn(3, 64, 32))
        self.mix = nn.Conv1d(64, 64, 3)
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(64, 70)
        self.map = nn.Linear(64, 64)

    def get_output_embeddings(self) -> nn.Module:
        return self.out


def with_gradients(model: nn.Module, seed: int = 1) -> nn.Module:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(100 * seed + index), dtype=torch.float32
        )
    return model


def test_the_defaults_are_those_of_a_run() -> None:
    optimizer = DeMoOptimizer(Tiny(), lr=1e-3)
    assert optimizer._demos[0].config == demo_config(OptimizerConfig(), 128, bytes(8))
    sized = DeMoOptimizer(Tiny(), lr=1e-3, magnitudes=True, base=BaseConfig("sgd"))
    assert sized._demos[0].config.beta2 == 0


def test_overlap_with_sizes_is_refused() -> None:
    settings = {"overlap": True, "magnitudes": True, "beta2": 0.0, "base": {"name": "sgd"}}
    with pytest.raises(Refusal, match="`overlap` looks ahead"):
        RunConfig(optimizer=OptimizerConfig.model_validate(settings)).check_new()
    RunConfig(optimizer=OptimizerConfig(overlap=True)).check_new()
    demo = DeMo(with_gradients(Tiny()), DeMoConfig(magnitudes=True, base=BaseConfig("sgd")))
    demo.propose(LR)
    with pytest.raises(ValueError, match="no look-ahead"), demo.ahead(LR):
        pass


@pytest.mark.parametrize("method", [{"base": BaseConfig("muon")}, {"decay": "matrices", "weight_decay": 0.1}])
def test_what_needs_names_refuses_parameters_without(method: dict[str, Any]) -> None:
    model = Tiny()
    with pytest.raises(ValueError, match=r"give the module, DeMoOptimizer\(model, \.\.\.\)"):
        DeMoOptimizer(model.parameters(), lr=LR, **method)
    DeMoOptimizer(nn.Sequential(nn.Linear(64, 64)).named_parameters(), lr=LR, **method)
    DeMoOptimizer(model, lr=LR, **method)


def test_muon_without_the_module_warns_of_what_names_do_not_tell() -> None:
    with pytest.warns(UserWarning, match=r"takes experts, mix\.weight for stacks.*give the module") as told:
        DeMoOptimizer(Tiny().named_parameters(), lr=LR, base=BaseConfig("muon"))
    assert [warning.filename for warning in told] == [__file__]
    named = [("emb.weight", nn.Parameter(torch.randn(3, 64, 64))), ("map.weight", nn.Parameter(torch.randn(64, 64)))]
    DeMoOptimizer(named, lr=LR, base=BaseConfig("muon"))
    DeMoOptimizer(Tiny().named_parameters(), lr=LR, decay="matrices")


def test_muon_warns_of_tables_and_convolutions_that_a_parametrization_hides() -> None:
    """A table under weight_norm was made orthogonal in silence. The digests of layouts hold the kinds, so none is given."""
    model = Tiny()
    nn.utils.parametrizations.weight_norm(model.words)
    nn.utils.parametrizations.spectral_norm(model.mix)
    nn.utils.parametrizations.spectral_norm(model.map)
    left = r"treats words\.parametrizations\.weight\.original1, mix\.parametrizations\.weight\.original as matrices"
    with pytest.warns(UserWarning, match=left) as told:
        DeMoOptimizer(model, lr=LR)
    assert [warning.filename for warning in told] == [__file__]
    nn.utils.parametrize.remove_parametrizations(model.mix, "weight")
    DeMoOptimizer(model, lr=LR, base=replace(BY_CHUNKS, muon_except=(*TABLES, "words.*.*.*")))
    DeMoOptimizer(model, lr=LR, base="sign")


@pytest.mark.filterwarnings("default")
def test_parameters_without_their_module_warn_that_their_base_is_another_one(recwarn: pytest.WarningsRecorder) -> None:
    for settings in ({"base": "sign"}, {"base": "sgd", "magnitudes": True}, {"method": "paper"}):
        DeMoOptimizer(nn.Linear(64, 64).parameters(), lr=LR, **settings)
    DeMoOptimizer(Tiny(), lr=LR)
    assert not recwarn.list
    for given in (Tiny().parameters(), Tiny().named_parameters(), [{"params": Tiny().parameters()}]):
        with pytest.warns(UserWarning, match=r"their base is 'sign', not Muon by chunks.*Give the module") as told:
            optimizer = DeMoOptimizer(given, lr=LR)
        assert [warning.filename for warning in told] == [__file__]
        assert optimizer.param_groups[0]["method"] == "dct, sign"


def test_modules_tell_tables_and_convolutions() -> None:
    kinds = kinds_of(Tiny())
    assert {name for name, kind in kinds.items() if kind == "table"} == {"words.weight", "out.weight", "out.bias"}
    assert {name for name, kind in kinds.items() if kind == "convolution"} == {"mix.weight"}
    layout = Layout.of(Tiny())
    assert layout.kinds == kinds
    assert layout.digest() != Layout.of(Tiny().named_parameters()).digest(), "what is a table is part of the contract"
    tied = Tiny()
    tied.out.weight = tied.words.weight
    assert kinds_of(tied)["words.weight"] == "table"
    assert kinds_of(Tiny().named_parameters()) == {}


@pytest.mark.parametrize(
    "name",
    ["transformer.wte.weight", "wpe.weight", "model.embed_tokens.weight", "lm_head.weight", "word_embeddings.weight",
     "bert.embeddings.position_embeddings.weight", "gpt_neox.embed_in.weight", "embed_out.weight", "lm_head.bias",
     "tok_embeddings.weight", "output.weight", "shared.weight", "token_emb.emb.weight", "to_logits.weight", "head.weight",
     "emb.weight", "transformer.ff_out.weight", "pos_emb", "pos_embed", "tok_emb.weight", "token_embedding_table.weight",
     "embed.W_embed", "unembed.weight", "model.layers.61.embed_tokens.weight", "decoder.embed_positions.weight",
     "_orig_mod.output.weight", "lm_head._checkpoint_wrapped_module.weight", "embedding.weight", "module.output.weight"],
)  # fmt: skip
def test_names_of_common_models_are_tables(name: str) -> None:
    place = Layout.of_shapes([(name, (64, 64))]).places[0]
    assert is_table(BaseConfig("muon"), place)
    assert tuple(OptimizerConfig().base.tables) == TABLES


@pytest.mark.parametrize(
    "name",
    ["transformer.blocks.3.ff_out.weight", "bert.encoder.layer.3.attention.output.dense.weight", "layer.3.output.dense.weight",
     "layer.3.output.weight", "blocks.0.attn.head.weight", "layers.1.shared.weight", "patch_embed.proj.weight",
     "time_embed.0.weight", "mlp.embed_dim_proj.weight", "emb_proj.weight", "model.layers.0.self_attn.q_proj.weight",
     "head.attn.weight", "weight", "wte_proj.weight"],
)  # fmt: skip
def test_names_of_maps_are_none(name: str) -> None:
    place = Layout.of_shapes([(name, (64, 64))]).places[0]
    assert not is_table(BaseConfig("muon"), place)


def test_what_a_module_says_counts_more_than_a_name() -> None:
    convolution, table = (
        Layout.of_shapes([(name, (64, 64))], {name: kind}).places[0]
        for name, kind in (("patch_embed.weight", "convolution"), ("map.weight", "table"))
    )
    assert not is_table(BaseConfig("muon"), convolution)
    assert is_table(BaseConfig("muon"), table)


def test_a_name_of_ones_own_matches_whole_components() -> None:
    own = ("output.dense", "words*")
    assert is_named_table("layer.3.output.dense.weight", own)
    assert is_named_table("words_a.weight", own)
    assert not is_named_table("layer.3.my_output.dense.weight", own)
    assert not is_named_table("dense.weight", own)
    assert not is_named_table("words.0.weight", own)
    assert not is_named_table("words.weight", (".",))


def directed(model: nn.Module, config: DeMoConfig) -> dict[str, Tensor]:
    """What a step of lr 1 takes off each parameter."""
    demo = DeMo(with_gradients(model), config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    votes = demo.propose(1.0)
    demo.apply([(votes.size, votes.payload)], 1.0)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def test_muon_makes_each_expert_orthogonal_and_no_table() -> None:
    model = Tiny()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    moved = directed(model, DeMoConfig(base=BaseConfig("muon"), group_size=8))
    for table in ("words.weight", "out.weight", "norm.weight"):
        assert set(moved[table].abs().unique().tolist()) <= {0.0, 1.0}, table
    for expert in moved["experts"]:
        singular = torch.linalg.svdvals(expert.double() / 8)
        assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3
    flat = torch.linalg.svdvals(moved["mix.weight"].reshape(64, -1).double() / 192**0.5)
    assert 0.5 < float(flat.min()) <= float(flat.max()) < 1.3, "a convolution is one matrix"


def test_a_stack_is_as_many_matrices() -> None:
    layout = Layout.of_shapes([("experts", (3, 64, 32))])
    base = Base(BaseConfig("muon"), layout, CPU)
    stack = torch.randn(3, 64, 32)
    stack[1] = 0.0
    found = base.finish(layout.places[0], stack.clone().view(3, -1)).view(3, 64, 32)
    assert torch.equal(found, torch.stack([orthogonalised(part) for part in stack]))
    assert not found[1].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_the_state_is_fp32_whatever_the_default_dtype(name: str, dtype: torch.dtype) -> None:
    config = DeMoConfig(beta=0.9, beta2=0.9, base=BaseConfig(name, momentum=0.9, beta1=0.5))
    digests = []
    before = torch.get_default_dtype()
    for chosen in (torch.float32, dtype):
        torch.manual_seed(0)
        model = Tiny()
        try:
            torch.set_default_dtype(chosen)
            demo = DeMo(model, config)
            for step in range(3):
                with_gradients(model, step)
                votes = demo.propose(LR)
                demo.settle(True)
                demo.apply([(votes.size, votes.payload)], LR)
        finally:
            torch.set_default_dtype(before)
        assert {tensor.dtype for tensor in demo.replicated} == {torch.float32}
        digests.append(state_digest(demo.replicated))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("config", [BaseConfig("sgd", momentum=0.9, nesterov=True), BaseConfig("adamw", beta1=0.5)])
def test_state_that_becomes_subnormal_is_zero(config: BaseConfig) -> None:
    layout = Layout.of_shapes([("a", (64, 64))])
    base = Base(config, layout, CPU)
    for name in config.state_names:
        base.state[name].fill_(SMALLEST * 1.05)
    base.direct(torch.zeros(1, 64, 64))
    assert not any(bool(base.state[name].any()) for name in config.state_names)


def test_processes_that_flush_small_numbers_to_zero_stay_equal() -> None:
    """The review's case: state at 2e-38 and 20 empty entries gave two digests."""
    digests = []
    for flush in (False, True):
        demo = DeMo(Tiny(), DeMoConfig(base=BaseConfig("adamw", beta1=0.9, beta2=0.95)))
        for parameter in demo.parameters:
            parameter.data.fill_(0.5)
        for name in ("momentum", "square"):
            demo.base_state[name].fill_(2e-38)
        supported = torch.set_flush_denormal(flush)
        try:
            for _ in range(20):
                demo.apply([], LR)
        finally:
            torch.set_flush_denormal(False)
        if not supported and flush:
            pytest.skip("this processor cannot flush")
        digests.append(state_digest(demo.replicated))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_late_tensor_s_second_moment_starts_as_all_did(compiled: bool) -> None:
    second = SecondMoment([torch.zeros(64), torch.zeros(64)], 0.99, compiled=compiled)
    for _ in range(50):
        second.divide([torch.ones(64), None])
    late = torch.ones(64)
    second.divide([torch.ones(64), late])
    torch.testing.assert_close(late, torch.ones(64), rtol=1e-4, atol=0)
    assert second.counts == [51, 1]
    older = SecondMoment([torch.zeros(64), torch.zeros(64)], 0.99)
    older.load_state_dict({"count": 7, "squares": second.squares})
    assert older.counts == [7, 7]


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_late_tensors_of_cores_and_of_the_pool_enter_the_momentum_at_their_size(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    shapes = {"core": (64, 64), "late core": (64, 64), "pool": (100,), "late pool": (100,)}
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    demo = DeMo(named, DeMoConfig(beta=0.0, beta2=0.99))
    for step in range(20):
        for name, parameter in named:
            parameter.grad = torch.ones_like(parameter) if step == 19 or "late" not in name else None
        demo.propose(1.0)
        demo.settle(False)
    whole = demo._transform.inverse(demo.momentum.clone())
    found = [torch.empty(shape) for shape in shapes.values()]
    demo.layout.scatter(whole, found)
    for name, tensor in zip(shapes, found, strict=True):
        torch.testing.assert_close(tensor, torch.ones_like(tensor), rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.long
def test_without_a_compiler_the_step_is_torch() -> None:
    program = (
        "import torch; from node.optim.demo import DeMo, DeMoConfig\n"
        "p = torch.nn.Parameter(torch.zeros(70, 70)); demo = DeMo([('p', p)], DeMoConfig(beta2=0.9))\n"
        "p.grad = torch.ones(70, 70); votes = demo.propose(0.5); demo.settle(True)\n"
        "demo.apply([(votes.size, votes.payload)], 0.5); print(demo.backend)"
    )
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, timeout=270, check=False, env=environment)
    assert (done.stdout.strip(), done.returncode) == ("torch", 0), done.stderr[-2000:]
    wanted = {**environment, BACKEND_VARIABLE: "numba"}
    done = subprocess.run(run, capture_output=True, text=True, timeout=270, check=False, env=wanted)
    assert "without NUMBA_DISABLE_JIT" in done.stderr


METHODS = {
    "default": DeMoConfig(),
    "adamw": DeMoConfig(base=BaseConfig("adamw")),
    "top-k": DeMoConfig(selection="topk"),
}


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("name", METHODS)
def test_weight_decay_leaves_out_vectors_and_tables(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    found = {}
    for decay, rate in (("all", 0.0), ("all", 0.5), ("matrices", 0.5)):
        torch.manual_seed(0)
        model = with_gradients(Tiny())
        config = DeMoConfig(**{**vars(METHODS[name]), "decay": decay, "weight_decay": rate})
        demo = DeMo(model, config)
        votes = demo.propose(LR)
        demo.apply([(votes.size, votes.payload)], LR)
        found[decay, rate] = {key: p.detach() for key, p in model.named_parameters()}
    for key in found["matrices", 0.5]:
        reached = key in {"experts", "mix.weight", "map.weight"}
        assert torch.equal(found["matrices", 0.5][key], found["all", 0.5 if reached else 0.0][key]), key


def test_one_cycle_and_other_schedulers_work() -> None:
    model = nn.Linear(64, 64)
    optimizer = DeMoOptimizer(model.parameters(), lr=1e-2, beta=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
    betas = []
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        betas.append(optimizer._demos[0].config.beta)
        scheduler.step()
    assert betas[0] == pytest.approx(0.95)
    assert min(betas) == pytest.approx(0.85, abs=0.01), "it cycles the momentum's decay too"


def test_a_group_s_beta_and_older_saved_states_are_understood() -> None:
    model = nn.Linear(64, 64)
    optimizer = DeMoOptimizer([{"params": [model.weight], "beta": 0.5}, {"params": [model.bias]}], lr=LR)
    assert [demo.config.beta for demo in optimizer._demos] == [0.5, 0.95]
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["beta"] = group.pop("momentum")
    optimizer.load_state_dict(saved)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.95]


def lion(aggregate: Tensor, state: Any, count: int) -> Tensor:
    update = state["momentum"].mul(0.9).add_(aggregate.mul(0.1)).sign_()
    state["momentum"].mul_(0.99).add_(aggregate.mul(0.01))
    return update


def test_a_base_of_one_s_own_learns_keeps_state_and_stays_equal() -> None:
    config = DeMoConfig(base=bases.given("lion", lion, ("momentum",)))
    digests = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Tiny()
        demo = DeMo(model, config)
        for step in range(3):
            with_gradients(model, step)
            votes = demo.propose(LR)
            demo.settle(True)
            demo.apply([(votes.size, votes.payload)], LR)
        assert set(demo.base_state) == {"momentum", "count"}
        assert demo.base_state["momentum"].any()
        digests.append(state_digest(demo.replicated))
    assert digests[0] == digests[1]


def test_a_bad_base_of_one_s_own_is_refused() -> None:
    with pytest.raises(ValueError, match="none of sign, sgd"):
        bases.given("sgd", lion)
    with pytest.raises(ValueError, match="taken"):
        bases.given("lion", lion, ("count",))
    with pytest.raises(ValueError, match=r"base\.given"):
        BaseConfig("lion")
    demo = DeMo(Tiny(), DeMoConfig(base=bases.given("half", lambda aggregate, state, count: aggregate.half())))
    with pytest.raises(ValueError, match=r"'half' gave torch\.float16"):
        demo.apply([], LR)
