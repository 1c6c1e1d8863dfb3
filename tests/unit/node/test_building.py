"""What a run asks of a program with its own model and loop, and which models it refuses."""

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from node.building import Own, own_start
from node.model.spec import ModelError, ModelSpec
from node.optim.layout import Layout
from node.training.maker import Handover, ParametersMovedError
from protos.errors import OperatorError
from protos.identity import Identity
from protos.log import Entry, lr_to_bits, seal_entry
from protos.run_config import RunConfig
from tests.system.tiny import TwoTokens

FACTORY = "tests.system.tiny:model"
RUN = bytes(32)


def config(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"model": {"factory": FACTORY}, "admission": {"mode": "invite"}, **sections})


def own(model: nn.Module | None = None, *, reads: bool = True) -> Own:
    return Own(Handover(TwoTokens(64) if model is None else model), reads)


def test_a_programs_model_needs_no_code_of_the_run() -> None:
    assert own().asks(config()).model.factory is None


def test_a_run_that_checks_votes_refuses_data_of_a_programs_own() -> None:
    checked = config(trust={"enabled": True}, clock={"min_peers": 3, "batch_samples": 64})
    assert own().asks(checked).trust.enabled
    with pytest.raises(OperatorError, match=r"own_data=True: it would be excluded"):
        own(reads=False).asks(checked)


def test_the_first_state_is_the_runs_or_an_agreed_one() -> None:
    spec, run = ModelSpec(factory=FACTORY), config()
    start = own_start(spec, run, 256, begun=False, allow_code=True)
    assert start is not None
    model = TwoTokens(64)
    replica = own(model).replica(start, run, 128, RUN, bytes(32), Layout.of(start).digest())
    assert replica.knows_start
    for mine, theirs in zip(model.parameters(), start.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert own_start(spec, run, 256, begun=True, allow_code=False) is None
    assert not own().replica(None, run, 128, RUN, bytes(32), b"").knows_start
    with pytest.raises(
        OperatorError, match=r"no agreed state yet, and its first one comes from the code 'tests\.system"
    ):
        own_start(spec, run, 256, begun=False, allow_code=False)


def test_a_program_that_moves_the_model_between_two_steps_is_told() -> None:
    """By `.data`, as some averages of weights do it, or by load_state_dict: a peer alone went on with it, and others were told
    that a memory or a disk had erred."""
    coordinator, head = Identity.from_seed(b"c" * 32), RUN
    start = own_start(ModelSpec(factory=FACTORY), config(), 256, begun=False, allow_code=True)
    model = TwoTokens(64)
    replica = own(model).replica(start, config(), 128, RUN, bytes(32), b"")
    for step in range(1, 7):
        signed = seal_entry(coordinator, RUN, Entry(step, head, (), lr_to_bits(1e-2), b"", (), 0))
        replica.digest()  # as each peer reports it
        weight, was = next(model.parameters()), next(model.parameters()).detach().clone()
        weight.data.add_(1.0)
        if step == 6:
            with pytest.raises(
                OperatorError, match=r"changed the model's parameters after step 5.*with a copy of the model"
            ):
                replica.apply(signed, [])
            return
        weight.data.copy_(was)  # what was put back is no harm
        replica.apply(signed, [])
        head = signed.hash


def test_a_model_that_was_cast_before_its_first_share_is_named() -> None:
    """The peer's thread ended at an assertion: the replicated state is fp32."""
    model = TwoTokens(64)
    replica = own(model).replica(TwoTokens(64), config(), 128, RUN, bytes(32), b"")
    model.half()
    with pytest.raises(
        OperatorError, match=r"'embedding\.weight' is torch\.float16 on cpu, trained now\. Cast, freeze"
    ):
        replica.digest()


def test_a_model_that_was_frozen_before_its_first_share_is_named_as_one_that_moved() -> None:
    """The optimizer inside of the peer refused the next step with words of its own, and the momentum was not saved."""
    model = TwoTokens(64)
    replica = own(model).replica(TwoTokens(64), config(), 128, RUN, bytes(32), b"")
    replica.digest()
    model.embedding.requires_grad_(False)
    signed = seal_entry(Identity.from_seed(b"c" * 32), RUN, Entry(1, RUN, (), lr_to_bits(1e-2), b"", (), 0))
    with pytest.raises(ParametersMovedError, match=r"'embedding\.weight' is .* frozen \(requires_grad=False\) now"):
        replica.apply(signed, [])


def frozen(*names: str) -> TwoTokens:
    model = TwoTokens(64)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def test_a_frozen_parameter_that_the_program_writes_after_join_is_named() -> None:
    """No digest covers it: a base that was loaded after join, or a teacher's average, made gradients of another model."""
    model = frozen("head.bias")
    replica = own(model).replica(frozen("head.bias"), config(), 128, RUN, bytes(32), b"")
    manifest, data = replica.packed()
    replica.load(manifest, data)
    replica.digest()
    before = {name: it.clone() for name, it in model.state_dict().items()}
    for state in ({name: it + 1 for name, it in before.items()}, before):  # to look at averaged weights, and back
        model.load_state_dict(state)
    replica.digest()
    signed = seal_entry(Identity.from_seed(b"c" * 32), RUN, Entry(1, RUN, (), lr_to_bits(1e-2), b"", (), 0))
    replica.apply(signed, [])
    model.load_state_dict({"head.bias": torch.ones_like(model.head.bias)}, strict=False)
    signed = seal_entry(Identity.from_seed(b"c" * 32), RUN, Entry(2, signed.hash, (), lr_to_bits(1e-2), b"", (), 0))
    with pytest.raises(ParametersMovedError, match=r"'head\.bias' has other numbers now"):
        replica.apply(signed, [])


@pytest.mark.parametrize(
    ("mine", "start", "said"),
    [
        (
            frozen("head.bias"),
            frozen(),
            r"head\.bias is frozen \(requires_grad=False\), and the run trains it: call head\.",
        ),
        (frozen("head.bias"), None, r"head\.bias is frozen \(requires_grad=False\), and the run perhaps trains it"),
        (frozen(), frozen("head.bias"), r"the run has head\.bias frozen: call head\.bias\.requires_grad_\(False\)"),
    ],
)
def test_a_parameter_that_is_frozen_on_one_side_alone_is_named(
    mine: nn.Module, start: nn.Module | None, said: str
) -> None:
    """The first parameter behind it was named, which is the same on both sides."""
    layout = Layout.of(TwoTokens(64) if start is None else start).digest()
    with pytest.raises(ModelError, match=said):
        own(mine).replica(start, config(), 128, RUN, bytes(32), layout)


def beside(*shape: int) -> TwoTokens:
    model = TwoTokens(64)
    model.register_parameter("kept", nn.Parameter(torch.ones(shape), requires_grad=False))
    return model


@pytest.mark.parametrize(
    ("mine", "start", "said"),
    [
        (beside(), TwoTokens(64), r"kept is \(\), and not there in the run's: a run's state has its frozen"),
        (TwoTokens(64), beside(2), r"kept is not there, and \(2,\) in the run's"),
        (beside(2), beside(1), r"kept is \(2,\), and \(1,\) in the run's"),
    ],
)
@pytest.mark.parametrize("blank", [False, True])
def test_frozen_parameters_are_the_run_s(mine: nn.Module, start: nn.Module, said: str, blank: bool) -> None:
    """A frozen teacher ended the peer with a bare KeyError, and later with the advice to withdraw the run's snapshots."""
    with pytest.raises(ModelError, match=said):
        own(mine).replica(start, config(), 128, RUN, bytes(32), b"", blank=blank)


def with_buffer(name: str, value: float) -> TwoTokens:
    model = TwoTokens(64)
    model.register_buffer(name, torch.full((2,), value), persistent=False)
    return model


@pytest.mark.parametrize(
    ("buffer", "mine", "told"), [("angles", 0.5, True), ("angles", 1.0, False), ("running_mean", 0.5, False)]
)
def test_a_program_s_buffer_with_other_numbers_than_the_run_s_is_told(buffer: str, mine: float, told: bool) -> None:
    """Angles of positions, or a random projection: the layout knows parameters alone."""
    start, model = with_buffer(buffer, 1.0), with_buffer(buffer, mine)
    with capture_logs() as lines:
        own(model).replica(start, config(), 128, RUN, bytes(32), b"")
    assert [line["buffer"] for line in lines] == ([buffer] if told else [])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (TwoTokens(32), r"embedding\.weight \(256, 32\) table stands where the run has embedding\.weight \(256, 64\)"),
        (nn.Sequential(nn.Embedding(256, 64)), r"0\.weight \(256, 64\) table stands where the run has"),
        (TwoTokens(64).double(), r"'embedding\.weight' is torch\.float64 on cpu; expected torch\.float32"),
        (nn.ModuleList([TwoTokens(64), nn.Linear(2, 2)]), r"0\.embedding\.weight"),
        (torch.compile(TwoTokens(64), backend="eager"), r"_orig_mod\.embedding.*give the model inside of its wrapper"),
        (TwoTokens(64).to("meta"), r"'embedding\.weight' is torch\.float32 on meta; expected"),
    ],
)
def test_another_layout_is_refused_with_the_first_difference(model: nn.Module, said: str) -> None:
    start = TwoTokens(64)
    with pytest.raises(ModelError, match=said):
        own(model).replica(start, config(), 128, RUN, bytes(32), Layout.of(start).digest())
