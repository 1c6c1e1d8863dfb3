"""Mixtures: the same sample is the same text for everybody, in the parts that the weights say."""

from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from tokenizers.models import BPE

from node.admission.consent import request
from node.config import load_settings
from node.data.build import build
from node.data.samples import MixedSamples, Samples
from node.data.sources import Source
from node.data.tokenizer import ByteTokenizer
from node.text import open_text
from protos.assignment import BLOCK, Range, phases, quotas
from protos.errors import DataError, OperatorError
from protos.run_config import DataConfig, MixSource, RunConfig, WeightChange, config_from_json
from tests.unit.coordinator.test_checking import mistakes, places

CONTEXT, BATCH = 4, 16


def mixture(seed: int = 0) -> MixedSamples:
    """Two sources whose tokens tell which one they are of; the weights change at steps 100 and 300."""
    sources = [Samples(np.arange(5000) % 100 + 100 * n, CONTEXT, 0) for n in range(2)]
    return MixedSamples(sources, phases([(1, (3, 1)), (100, (1, 1)), (300, (0, 1))], BATCH), seed)


def source_of(samples: MixedSamples, index: int) -> int:
    [(source, _, _)] = samples._parts(index, index + 1)
    return source


def test_weights_are_parts_of_each_block() -> None:
    assert quotas((3, 1)) == (768, 256)
    assert quotas((1, 1, 1)) == (342, 341, 341)
    assert quotas((0.1, 0.2, 0.7)) == (102, 205, 717)
    assert quotas((0, 5)) == (0, BLOCK)
    with pytest.raises(ValueError, match="all weights are 0"):
        quotas((0, 0))
    with pytest.raises(ValueError, match="weight 1 of 5001 is less than one of 1024 samples"):
        quotas((5000, 1))


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 12_000), cuts=st.lists(st.integers(1, 900), min_size=1, max_size=5), seed=st.integers(0, 3))
def test_however_samples_are_cut_they_are_the_same(start: int, cuts: list[int], seed: int) -> None:
    samples, stop = mixture(seed), start + sum(cuts)
    whole = samples.batch(start, stop)
    parts, at = [], start
    for count in cuts:
        parts.append(mixture(seed).batch(at, at + count))
        at += count
    assert np.array_equal(whole, np.concatenate(parts))
    assert [source_of(samples, start + n) for n in range(min(len(whole), 50))] == [row[0] // 100 for row in whole[:50]]


def test_the_parts_follow_the_weights_and_no_sample_of_a_source_comes_twice() -> None:
    samples = mixture()
    first = samples.batch(0, BLOCK)
    assert (first[:, 0] < 100).sum() == 768
    assert len({tuple(row) for row in samples.batch(0, BATCH)}) > 2
    after = samples.batch(99 * BATCH, 99 * BATCH + BLOCK)
    assert (after[:, 0] < 100).sum() == BLOCK // 2
    assert (samples.batch(299 * BATCH, 320 * BATCH)[:, 0] >= 100).all()
    parts = list(samples._parts(0, 299 * BATCH))
    for source in (0, 1):
        own = [index for at, part, _ in parts if at == source for index in range(part.start, part.stop)]
        assert len(own) == len(set(own))
        assert own == sorted(own)
    assert not np.array_equal(mixture(1).batch(0, 64), mixture(2).batch(0, 64))


def test_an_index_means_this_forever() -> None:
    """A change of these figures changes what every running mixture trains on."""
    samples = mixture()
    assert [source_of(samples, index) for index in range(24)] == FROZEN
    assert samples.batch(1600, 1604)[:, 0].tolist() == FROZEN_TOKENS


def test_validation_has_something_of_each_source_that_the_end_trains_on() -> None:
    sources = [Samples(np.arange(20_000) % 100 + 100 * n, CONTEXT, 0) for n in range(2)]
    found = MixedSamples(sources, phases([(1, (3, 1))], BATCH), 0).validation(16)
    assert [(found[:, 0] // 100 == n).sum() for n in (0, 1)] == [12, 4]
    assert set(mixture().validation(8)[:, 0] // 100) == {1}


# ---- the run's settings ----------------------------------------------------------------------------------------------


def source(name: str, weight: float = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "source": "stdlib", "weight": weight, **more}


def test_the_genesis_has_the_mixture() -> None:
    change = WeightChange(step=10, weight=5)
    mix = (MixSource(**source("a")), MixSource(**source("b", changes=(change,))))
    config = RunConfig(data=DataConfig(mix=mix))
    assert config_from_json(config.canonical_json()) == config
    assert config.data.weights() == [(1, (1, 1)), (10, (1, 5))]


WRONG = """
[data]
context = 32
[[data.mix]]
name = "a"
source = "stdlib"
weight = 1
[[data.mix]]
name = "b"
source = "stdlib"
weight = -1
[[data.mix]]
name = "c"
source = "https://example.org/c"
weight = 1
[[data.mix]]
name = "d"
source = "stdlib"
weight = 1
changes = [{ step = 20, weight = 1 }, { step = 10, weight = 2 }]
"""


def test_each_mistake_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(WRONG)
    lines = mistakes(file)
    assert places(file, lines) == ["11", "14", "20"]
    assert "greater than or equal to 0" in lines[0]
    assert "give `sha256` too" in lines[1]
    assert "have to grow, and are [20, 10]" in lines[2]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([source("a"), source("a")], "need different names"),
        ([source("a", 5000), source("b")], "from step 1 on: weight 1 of 5001 is less than one of 1024 samples"),
        ([source("a", changes=[{"step": 7, "weight": 0}])], "from step 7 on: all weights are 0"),
    ],
)
def test_mixtures_that_cannot_be(tables: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataConfig.model_validate({"mix": tables})
    with pytest.raises(ValueError, match="not both"):
        DataConfig.model_validate({"mix": [source("a")], "source": "x.txt"})


# ---- on a peer's machine ---------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "low").write_text("abc" * 500)
    (folder / "high.txt").write_text("xyz" * 500)
    return folder


def run_of(folder: Path) -> RunConfig:
    mix = [source("low", 3, source=str(folder / "low")), source("high", 1, source=str(folder / "high.txt"))]
    return RunConfig(data=DataConfig.model_validate({"context": 8, "mix": mix}))


def opened(config: RunConfig, log: Any = None, **settings: Any) -> Any:
    text = open_text(config, load_settings(home=Path("home"), **settings), log, lambda size: None)
    assert text.samples is not None
    return text


def test_a_peer_reads_the_runs_sources_or_a_folder_of_its_own(texts: Path) -> None:
    config = run_of(texts)
    text = opened(config, allow_data=True)
    assert text.name == f"low: {texts}/low, high: {texts}/high.txt"
    batch = text.samples.batch(0, BLOCK)
    assert (batch[:, 0] < ord("x")).sum() == 768
    assert np.array_equal(opened(config, data=str(texts)).samples.batch(0, BLOCK), batch)
    assert text.samples.away([Range(0, 100)]) == ""
    (texts / "low").unlink()
    with pytest.raises(DataError, match="has no 'low'"):
        opened(config, data=str(texts))


def test_a_peer_that_comes_back_to_another_text_says_so(texts: Path) -> None:
    """It trained on whatever was there, and nobody heard of it."""
    config = run_of(texts)
    for text, told in (("abc" * 500, 0), ("abc" * 500, 0), ("abd" * 500, 1), ("abd" * 500, 0), ("abd" * 501, 1)):
        (texts / "low").write_text(text)
        with capture_logs() as lines:
            opened(config, structlog.get_logger(), allow_data=True)
        assert [line["data"] for line in lines] == [str(texts / "low")] * told
    for text, told in (("abc" * 500, 0), ("abc" * 500, 0), ("abd" * 500, 1)):  # token shards of this machine
        rmtree(texts / "set", ignore_errors=True)
        (texts / "low").write_text(text)
        build(Source(str(texts / "low")), ByteTokenizer(), "bytes", texts / "set", shard_tokens=1024)
        with capture_logs() as lines:
            opened(RunConfig(data=DataConfig(context=8)), structlog.get_logger(), data=str(texts / "set"))
        assert [line["data"] for line in lines] == [str(texts / "set")] * told


def test_the_same_text_for_a_run_with_another_tokenizer_is_no_other_text(texts: Path) -> None:
    letters = Tokenizer(BPE({"a": 0, "b": 1, "c": 2}, []))
    letters.save(str(texts / "letters.json"))
    for tokenizer in ("bytes", str(texts / "letters.json"), "bytes"):
        config = RunConfig(data=DataConfig(context=8, source=str(texts / "low"), tokenizer=tokenizer))
        with capture_logs() as lines:
            open_text(config, load_settings(home=Path("home")), structlog.get_logger(), lambda size: None)
        assert not [line for line in lines if "another one" in line["event"]]


def test_every_source_that_a_run_names_is_asked_about(texts: Path) -> None:
    config = run_of(texts)
    with pytest.raises(OperatorError, match="--allow-data"):
        request(config, load_settings(home=Path("home")), lambda path: True)
    asked = request(config, load_settings(home=Path("home"), allow_data=True), lambda path: True)
    assert len(asked.wants) == 2
    assert "a mixture of" in asked.data
    web = {"source": "https://example.org/x", "sha256": "0" * 64}
    config = RunConfig(data=DataConfig.model_validate({"mix": [source("a"), source("b", **web)]}))
    asked = request(config, load_settings(home=Path("home")), lambda path: True)
    assert asked.downloads
    assert "'https://example.org/x'" in asked.wants[0]


FROZEN = [0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]
FROZEN_TOKENS = [188, 196, 0, 8]
