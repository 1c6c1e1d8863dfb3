"""Signed held-out losses: the door, the median, and whether equal states gave equal figures."""

from dataclasses import replace

import pytest

from protos.envelope import Kind, seal
from protos.errors import Refusal
from protos.evaluation import Evaluation, figure, figures, is_due, open_evaluation, seal_evaluation
from protos.run_config import ClockConfig, EvaluationConfig, RunConfig
from protos.v1 import log_pb2
from tests.unit.web.logs import PEERS

RUN, SET, OTHER = bytes(32), bytes([1]) * 32, bytes([2]) * 32


def made(loss: float, device: str = "cpu", by: int = 0, name: bytes = SET, step: int = 10) -> Evaluation:
    return Evaluation(PEERS[by].public_key, step, loss, 512, name, device)


def test_its_author_signs_it_for_one_run() -> None:
    data = seal_evaluation(PEERS[0], RUN, made(2.5))
    assert open_evaluation(data, run_id=RUN) == made(2.5)
    with pytest.raises(Refusal):
        open_evaluation(data, run_id=OTHER)
    with pytest.raises(Refusal):
        open_evaluation(data[:-1] + bytes([data[-1] ^ 1]), run_id=RUN)


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": float("nan")},
        {"loss": -1.0},
        {"loss": 1e9},
        {"step": 0},
        {"tokens": 0},
        {"device": "<b>"},
        {"set_sha256": b"x"},
        {"sample": "é" * 513},
    ],
)
def test_what_is_no_figure_is_refused(wrong: dict[str, object]) -> None:
    body = log_pb2.Evaluation(**{"step": 1, "loss": 1.0, "tokens": 1, "set_sha256": SET, "device": "cpu", **wrong})  # type: ignore[arg-type]
    data = seal(PEERS[0], Kind.KIND_EVALUATION, RUN, body).SerializeToString()
    with pytest.raises(Refusal):
        open_evaluation(data, run_id=RUN)


def test_figures_of_one_kind_of_device_have_to_agree() -> None:
    good = figure([made(2.5), made(2.5004, by=1), made(2.52, "cuda", by=2)])
    assert (good.loss, good.count, good.agrees) == (2.5004, 3, True)
    bad = figure([made(2.5), made(2.502, by=1)])
    assert not bad.agrees
    assert "figures of one kind of device differ by 0.0020: a peer is wrong, or lies" in str(bad)


def test_figures_of_another_text_do_not_count() -> None:
    found = figure([made(2.5), made(2.5, by=1), made(9.9, by=2, name=OTHER)])
    assert (found.loss, found.count, found.others, found.agrees) == (2.5, 2, 1, True)


def test_an_author_counts_once_and_damaged_ones_are_left_out() -> None:
    data = [seal_evaluation(PEERS[0], RUN, made(loss)) for loss in (2.5, 7.0)]
    assert [it.loss for it in figures([*data, b"?"], RUN)] == [2.5]


def test_which_states_are_due() -> None:
    config = RunConfig(clock=ClockConfig(snapshot_every=5), evaluation=EvaluationConfig(every=10))
    assert [step for step in range(24) if is_due(config, step, 23)] == [10, 20, 23]
    assert not is_due(replace_every(config), 10, 23)
    with pytest.raises(ValueError, match=r"no multiple of clock\.snapshot_every"):
        RunConfig(clock=ClockConfig(snapshot_every=7), evaluation=EvaluationConfig(every=10))


def replace_every(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"evaluation": EvaluationConfig()})


def test_a_figure_is_a_value() -> None:
    assert replace(figure([made(1.0)]), count=2).values()["peers"] == 2
