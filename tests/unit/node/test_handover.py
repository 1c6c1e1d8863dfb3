"""A program's own loop makes the same votes as the built-in one, bit for bit; a share that is late, given back or misused."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import nn

from node.building import assemble
from node.data.samples import Samples
from node.model.gradients import GradResult, loss
from node.optim.step import NonFiniteGradient
from node.training.maker import GradientMaker, Handover, NoVotes, Share, Unread
from node.training.own_loss import OwnBuffers, Unmoved, tell_buffers
from node.training.replica import Replica
from protos.assignment import Range
from protos.errors import OperatorError
from protos.optimizer_config import LocalStepsConfig, OptimizerConfig
from protos.run_config import RunConfig
from tests.system.tiny import TwoTokens

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = bytes(32)
RANGES = [Range(3, 8), Range(20, 23)]
LR = 2.0**-9


def text() -> Samples:
    return Samples(np.arange(4000) % 250, 16, seed=1)


def model() -> TwoTokens:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return TwoTokens(64)


def replica(maker: Callable[[TwoTokens], GradientMaker] | None, local_steps: int = 1) -> Replica:
    local = LocalStepsConfig(steps=local_steps)
    optimizer = OptimizerConfig() if local_steps == 1 else OptimizerConfig(recipe="diloco-demo", local=local)
    made = model()
    return Replica(RUN, made, optimizer, optimizer.vote_size, maker=None if maker is None else maker(made))


class Program(threading.Thread):
    """A program's thread: it does `work` with each share, until the training ends."""

    def __init__(self, handover: Handover, work: Callable[[Handover, Share], None]) -> None:
        super().__init__(daemon=True)
        self._handover, self._work = handover, work
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while (share := self._handover.take()) is not None:
                self._work(self._handover, share)
        except OperatorError as error:
            self.error = error


def own_loop(handover: Handover, share: Share) -> None:
    """Sums over micro-batches, divided at the end: the arithmetic of the built-in loop, written again."""
    total, tokens = 0.0, 0
    for rows in share.batches():
        summed = loss(handover.model, rows) * len(rows)
        summed.backward()
        total, tokens = total + summed.item(), tokens + rows[:, 1:].numel()
    for parameter in handover.model.parameters():
        assert parameter.grad is not None
        parameter.grad /= share.samples
    handover.contribute(torch.tensor(total / share.samples), None, tokens)


def never() -> bool:
    return False


def gradients(of: Replica, samples: Samples | None = None) -> GradResult:
    of.maker.begin(1, LR, never)
    return of.gradients(samples or text(), RANGES, 3, None, never)


def with_program(work: Callable[[Handover, Share], None], local_steps: int = 1) -> tuple[Replica, Handover, Program]:
    made = replica(Handover, local_steps)
    handover = made.maker
    assert isinstance(handover, Handover)
    program = Program(handover, work)
    program.start()
    return made, handover, program


@pytest.mark.parametrize("local_steps", [1, 2])
def test_the_same_arithmetic_in_a_program_makes_the_same_votes(local_steps: int) -> None:
    built_in = replica(None, local_steps)
    own, handover, program = with_program(own_loop, local_steps)
    one, other = gradients(built_in), gradients(own)
    assert (one.samples, one.tokens) == (other.samples, other.tokens) == (8, 8 * 16)
    assert one.loss_mean == pytest.approx(other.loss_mean, rel=1e-6)
    assert built_in.vote(1, LR) == own.vote(1, LR)
    handover.end()
    program.join(240)
    assert not program.is_alive()
    assert program.error is None


def test_contribute_returns_with_the_swarms_newest_model() -> None:
    """A program clears gradients, and saves or evaluates the model, after `contribute`. The training still took its votes from
    these gradients, in memory that nobody had any more, and moved the model meanwhile."""
    after: list[torch.Tensor] = []

    def clears(handover: Handover, share: Share) -> None:
        own_loop(handover, share)
        handover.model.zero_grad()
        after.append(next(handover.model.parameters()).detach().clone())

    built_in = replica(None)
    own, handover, program = with_program(clears)
    first = next(own.model.parameters())
    for step in (1, 2):
        for each in (built_in, own):
            gradients(each)
        assert len(after) == step - 1, "the program has the model while the training has it"
        assert built_in.vote(step, LR) == own.vote(step, LR)
        for each in (built_in, own):
            each.demo.settle(True)
        with torch.no_grad():
            for each in (built_in, own):
                next(each.model.parameters()).mul_(0.5)  # as an entry of the log
    handover.end()
    program.join(240)
    assert program.error is None
    assert [torch.equal(then, now) for then, now in zip(after, (2 * first, first), strict=True)] == [True, True]


def test_a_step_that_is_decided_while_the_program_evaluates_is_given_back_without_another_gradient() -> None:
    """`contribute` brought the next share, and the round that it is for begins after the evaluation, which may take hours."""
    decided, seen = threading.Event(), list[int]()

    def evaluates(handover: Handover, share: Share) -> None:
        seen.append(share.number)
        own_loop(handover, share)
        if share.number == 1:
            decided.set()

    made, handover, program = with_program(evaluates)
    for step, late in ((1, never), (2, decided.is_set), (3, never)):
        made.maker.begin(step, LR, late)
        assert made.gradients(text(), RANGES, 3, None, never).samples == (0 if step == 2 else 8)
    handover.end()
    program.join(240)
    assert (seen, program.error) == ([1, 3], None)


def test_a_share_names_its_samples_and_the_learning_rate() -> None:
    seen: list[Any] = []

    def look(handover: Handover, share: Share) -> None:
        seen.append((share.number, share.learning_rate, share.indices, share.samples, share.late))
        own_loop(handover, share)

    made, handover, _ = with_program(look)
    gradients(made)
    handover.end()
    assert seen == [(1, LR, (range(3, 8), range(20, 23)), 8, False)]


def skips(handover: Handover, share: Share) -> None:
    """The program's loop goes on without a gradient."""


def test_a_round_without_a_gradient_is_a_step_without_votes() -> None:
    made, handover, _ = with_program(skips)
    with pytest.raises(NoVotes, match="went on without a gradient"):
        gradients(made)
    handover.end()


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    def burst(handover: Handover, share: Share) -> None:
        loss(handover.model, next(share.batches(1))).backward()
        handover.contribute(float("nan"), None, 0)

    made, handover, _ = with_program(burst)
    with pytest.raises(NonFiniteGradient, match="the loss is nan"):
        gradients(made)
    handover.end()


def test_a_share_that_nobody_takes_is_withdrawn_when_the_step_is_decided() -> None:
    made = replica(Handover)
    made.maker.begin(1, LR, lambda: True)
    result = made.gradients(text(), RANGES, 3, None, never)
    assert result.samples == 0
    assert isinstance(made.maker, Handover)
    made.maker.end()
    assert made.maker.take() is None, "a withdrawn share is handed out"


def test_the_training_waits_for_a_program_that_still_computes() -> None:
    """Otherwise the next entry would move parameters that the program's backward pass needs."""
    began, go = threading.Event(), threading.Event()
    decided = False

    def slow(handover: Handover, share: Share) -> None:
        began.set()
        assert go.wait(240)
        assert share.late
        own_loop(handover, share)

    made, handover, program = with_program(slow)
    made.maker.begin(1, LR, lambda: decided)
    found: list[GradResult] = []
    training = threading.Thread(target=lambda: found.append(made.gradients(text(), RANGES, 3, None, never)))
    training.start()
    assert began.wait(240)
    decided = True
    training.join(0.3)
    assert training.is_alive(), "the training took the model away from the program"
    go.set()
    training.join(240)
    assert [result.samples for result in found] == [8]
    handover.end()
    program.join(240)
    assert program.error is None


def test_the_owners_rest_is_taken_after_the_program_and_not_beside_it() -> None:
    asked: list[float] = []

    def rests() -> bool:
        asked.append(time.monotonic())
        return False

    done: list[float] = []

    def timed(handover: Handover, share: Share) -> None:
        time.sleep(0.2)
        done.append(time.monotonic())
        own_loop(handover, share)

    made, handover, _ = with_program(timed)
    made.maker.begin(1, LR, never)
    made.gradients(text(), RANGES, 3, None, rests)
    handover.end()
    assert len(asked) == 1
    assert asked[0] >= done[0]


def moves(handover: Handover, share: Share) -> None:
    with torch.no_grad():
        next(handover.model.parameters()).mul_(2)
    own_loop(handover, share)


def changed(how: Callable[[nn.Module], object]) -> Callable[[Handover, Share], None]:
    """The model before its first share, so that nothing changes during one."""

    def work(handover: Handover, share: Share) -> None:
        how(handover.model)
        handover._before = Unmoved(handover.model, thoroughly=True)
        loss(handover.model, next(share.batches())).backward()
        handover.contribute(1.0, None, 0)

    return work


def other_tensors(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def freezes(model: nn.Module) -> None:
    model.embedding.requires_grad_(False)


def no_backward(handover: Handover, share: Share) -> None:
    handover.contribute(1.0, None, 0)


def too_many(handover: Handover, share: Share) -> None:
    loss(handover.model, next(share.batches(1))).backward()
    handover.contribute(1.0, 9, 0)


def twice(handover: Handover, share: Share) -> None:
    own_loop(handover, share)
    handover.contribute(1.0, None, 0)


def figure(**wrong: Any) -> Callable[[Handover, Share], None]:
    """A round with one figure that cannot be."""

    def work(handover: Handover, share: Share) -> None:
        loss(handover.model, next(share.batches(1))).backward()
        handover.contribute(**{"loss": 1.0, "samples": 1, "tokens": 16, **wrong})

    return work


def none_at_a_time(handover: Handover, share: Share) -> None:
    next(share.batches(0))


def not_read(handover: Handover, share: Share) -> None:
    next(share.batches())


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (moves, "changed the parameter 'embedding.weight' during a step.*without optimizer.step"),
        (
            changed(other_tensors),
            r"'embedding\.weight' is another tensor now\. Cast, freeze, tie.*load no weights with assign",
        ),
        (changed(lambda model: model.register_parameter("more", nn.Parameter(torch.ones(2)))), "'more' is new now"),
        (changed(freezes), r"'embedding\.weight' is torch\.float32 on cpu, frozen \(requires_grad=False\) now"),
        (no_backward, r"call loss\.backward\(\) before contribute"),
        (too_many, "samples=9: this share has 8"),
        (twice, "this peer has ended: no step is left to contribute to"),
        (figure(tokens=1.5), r"tokens=1\.5: expected a whole number"),
        (figure(tokens=1 << 64), "tokens=18446744073709551616: expected how many tokens"),
        (figure(samples=1.5), r"samples=1\.5: expected a whole number"),
        (figure(loss=torch.ones(2)), r"loss is a tensor of shape \(2,\): expected a number"),
        (figure(loss="low"), "loss is 'low': expected a number"),
        (none_at_a_time, "micro_batch=0: expected how many samples"),
        (not_read, "own_data=True, so the run's text is not read"),
    ],
)
def test_what_a_program_must_not_do_is_said_to_it(work: Callable[[Handover, Share], None], said: str) -> None:
    made, handover, program = with_program(work)

    def train() -> None:
        try:
            gradients(made, Unread() if work is not_read and isinstance(handover, Handover) else None)
        except (OperatorError, NoVotes):
            return

        if work is twice:  # the first time returns once the training hands out the next share, or is over
            handover.end()

    training = threading.Thread(target=train, daemon=True)
    training.start()
    program.join(240)
    handover.give_back(NoVotes("the test is over"))
    training.join(240)
    assert not training.is_alive()
    assert program.error is not None
    with pytest.raises(OperatorError, match=said):
        raise program.error


def test_a_second_thread_is_told_that_the_first_one_waits() -> None:
    """It took the share that the first one waited for, which then waited for ever."""
    handover = Handover(model())
    waits = threading.Event()
    handover._receive = waits.set  # type: ignore[method-assign]
    with handover._alone():
        second = Program(handover, own_loop)
        second.start()
        second.join(240)
    assert second.error is not None
    assert "belong to one thread" in str(second.error)
    assert not waits.is_set()
    handover.take()
    assert waits.is_set()


def test_a_contribution_outside_of_a_round_is_refused() -> None:
    with pytest.raises(OperatorError, match="call contribute once in each round"):
        Handover(model()).contribute(1.0, None, 0)


def test_ctrl_c_in_the_look_at_a_new_share_leaves_the_share_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken without the look: the swarm's own move before it was then the program's fault."""
    made = replica(Handover)
    handover = made.maker
    assert isinstance(handover, Handover)
    training = threading.Thread(target=gradients, args=(made,), daemon=True)
    looks = Unmoved

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("node.training.maker.Unmoved", interrupted)
    training.start()
    with pytest.raises(KeyboardInterrupt):
        handover.take()
    assert not handover.has_share
    monkeypatch.setattr("node.training.maker.Unmoved", looks)
    share = handover.take()
    assert share is not None
    handover.end()  # no share follows
    own_loop(handover, share)
    training.join(240)
    assert not training.is_alive()


def test_a_program_s_loss_checks_as_the_built_in_one_does() -> None:
    made = replica(lambda its: Handover(its, loss))
    plain = replica(None)
    for one in (made, plain):
        assert one.maker.checker is not None
        result = one.mean_gradient(text(), RANGES, 3, None, never, by=one.maker.checker)
        assert result.samples == 8
    for ours, theirs in zip(made.whole_gradients(), plain.whole_gradients(), strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
    without = replica(Handover)
    assert without.maker.checker is None


def broken(model: torch.nn.Module, samples: torch.Tensor) -> torch.Tensor:
    return samples.undefined  # type: ignore[no-any-return, attr-defined]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (broken, "failed: AttributeError: .*undefined"),
        (lambda its, rows: loss(its, rows).detach(), "no gradient: return it without detach"),
        (lambda its, rows: loss(its, rows).item(), "returned float; expected the mean"),
        (lambda its, rows: its(rows), r"returned a tensor of shape \(3, 17, 256\)"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_said_in_words(own: Any, said: str) -> None:
    made = replica(lambda its: Handover(its, own))
    with pytest.raises(OperatorError, match=said):
        made.mean_gradient(text(), RANGES, 3, None, never, by=made.maker.checker)


def in_place(its: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    for parameter in its.parameters():
        parameter.data.mul_(0.5)  # behind autograd's back, as some normalize their weights
    return loss(its, rows)


def exchanged(its: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    found = loss(its, rows)
    its.get_submodule("embedding").weight.data = torch.zeros(256, 64)
    return found


@pytest.mark.parametrize("own", [in_place, exchanged])
def test_a_loss_that_moves_parameters_is_named(own: Any) -> None:
    made = replica(lambda its: Handover(its, own))
    with pytest.raises(OperatorError, match=r"gave to join changed the parameter 'embedding.weight'"):
        made.mean_gradient(text(), RANGES, 3, None, never, by=made.maker.checker)


def test_a_program_that_moves_parameters_behind_autograd_is_told() -> None:
    def moves(handover: Handover, share: Share) -> None:
        for parameter in handover.model.parameters():
            parameter.data.mul_(0.5)
        own_loop(handover, share)

    made, handover, program = with_program(moves)
    with pytest.raises(OperatorError, match="the program changed the parameter"):
        gradients(made)
    handover.end()
    program.join(240)
    assert isinstance(program.error, OperatorError)


def test_buffers_that_a_program_s_passes_change_are_told_once() -> None:
    """Each peer had statistics and power iterations of its own in silence: equal parameters gave other answers."""
    its = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Linear(4, 4))
    handover = Handover(its)
    program = Program(handover, lambda the, _: the.contribute(its(torch.ones(8, 4)).sum().backward() or 1, 1, 1))
    program.start()
    handover.begin(7, LR, never)
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            handover.mean_gradient(text(), (Range(0, 8),), 3, None, never)
    handover.end()
    program.join(240)
    [told] = lines
    assert (told["step"], told["buffers"]) == (
        7,
        "_SpectralNorm '0.parametrizations.weight.0': '_u', '_v', "
        "BatchNorm1d '1': 'running_mean', 'running_var', 'num_batches_tracked'",
    )


def test_buffers_that_no_vote_carries_are_told_when_a_program_joins() -> None:
    """Without the run's code nobody can compare them: a program's own draw (`orthogonal`, a mask) was another model."""
    own = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)))
    run = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)))
    with structlog.testing.capture_logs() as lines:
        tell_buffers(own, own)
        tell_buffers(nn.Linear(4, 4), None)
        tell_buffers(own, run)
        tell_buffers(own, None)
    name = "0.parametrizations.weight.0.base"
    assert [(it["log_level"], it.get("buffer", it.get("buffers"))) for it in lines] == [
        ("warning", name),
        ("info", name),
    ]


def test_buffers_of_any_kind_end_no_program() -> None:
    """torch compares no 8-bit floats, no sparse tensors and none on meta: the first `contribute` ended with its error. Whole
    copies of quantized weights were held, too."""
    its = nn.Linear(4, 4)
    for name, buffer in {
        "scale": torch.ones(3).to(torch.float8_e4m3fn), "mask": torch.eye(3).to_sparse(), "left": torch.ones(2), "late": None,
        "weights": torch.ones(1).expand(1 << 42),
    }.items():  # fmt: skip
        its.register_buffer(name, buffer)
    before = OwnBuffers(its), OwnBuffers(its)
    with structlog.testing.capture_logs() as lines:
        before[0].tell(its, 1)
        assert not lines
        its.left, its.scale = torch.ones(2, device="meta"), 2 * torch.ones(3).to(torch.float8_e4m3fn).float()
        before[1].tell(its, 1)
    assert lines[0]["buffers"] == "Linear '': 'scale', 'left'"


def test_a_loss_leaves_the_modes_of_the_model_as_they_were() -> None:
    def evaluates(its: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        its.eval()
        return loss(its, rows)

    made = replica(lambda its: Handover(its, evaluates))
    made.mean_gradient(text(), RANGES, 3, None, never, by=made.maker.checker)
    assert all(module.training for module in made.model.modules())


def test_the_built_in_loop_refuses_a_model_that_programs_train() -> None:
    """Before it takes part: others would wait for it."""
    nothing: Any = None
    made = replica(None)
    made.model.own_loop = True  # type: ignore[assignment]
    with pytest.raises(OperatorError, match=r"own_loop = True: programs train it with swarmentum\.join"):
        assemble(
            nothing, RunConfig(), made, nothing, text(), nothing, nothing,
            patience_seconds=1.0, micro_batch=1, autocast=None,
        )  # fmt: skip
    own, handover, program = with_program(own_loop)
    own.model.own_loop = True  # type: ignore[assignment]
    assert gradients(own).samples == 8
    handover.end()
    program.join(240)
