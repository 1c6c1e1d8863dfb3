"""`swarmentum data build`: shards that a run can name, from each kind of text."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from node import __main__ as command
from node.data.build import Source, build, shuffled, texts
from node.data.shard_cache import Folder, Shards, manifest_of
from node.data.shards import ShardedSamples, sha256_of
from node.data.tokenizer import ByteTokenizer, load_tokenizer, run_tokenizer, sha256_of_tokenizer
from protos.errors import DataError, TokenizerError
from protos.run_config import RunConfig

TEXTS = [f"document {number}: {'word ' * number}" for number in range(40)]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS)))
    return path


def test_the_command_s_shards_are_what_a_run_names(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    done = CliRunner().invoke(
        command.app, ["data", "build", str(lines), "--out", str(out), "--shard-tokens", "1024", "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    encoded, manifest = manifest_of(out)
    assert told["sha256"] == sha256_of(encoded)
    assert (told["documents"], told["shards"]) == (40, len(manifest.shards))
    assert told["tokens"] == manifest.tokens == sum(len(text) + 1 for text in TEXTS)
    assert [shard.tokens for shard in manifest.shards[:-1]] == [1024] * (len(manifest.shards) - 1)
    assert 1024 <= manifest.shards[-1].tokens < 2048
    text = "".join((out / shard.name).read_text() for shard in manifest.shards)
    assert sorted(text.splitlines()) == sorted(TEXTS), "a document is lost or cut"
    assert text.splitlines() != TEXTS, "the documents are not shuffled"
    samples = ShardedSamples(manifest, Folder(Shards(manifest, out, 256)), 16, 0)
    assert samples.batch(0, samples.windows).max() < 128
    RunConfig.model_validate({"data": {"source": "https://example.org/set", "sha256": told["sha256"]}})

    again = CliRunner().invoke(command.app, ["data", "build", str(lines), "--out", str(out)])
    assert isinstance(again.exception, DataError)
    assert "has something in it already" in str(again.exception)


@pytest.mark.parametrize("name", [b"t\x80xt", b"/".join([b"long" * 60] * 5)])
def test_text_in_a_folder_whose_name_no_manifest_can_say_makes_a_set_too(name: bytes, tmp_path: Path) -> None:
    """The build ended after its last shard, or the set could not be read."""
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir(parents=True)
    (folder / "some.txt").write_text("".join(TEXTS))
    built = build(Source(str(folder)), ByteTokenizer(), "bytes", tmp_path / "set", shard_tokens=1024)
    encoded, manifest = manifest_of(tmp_path / "set")
    assert built.sha256 == sha256_of(encoded)
    assert manifest.source == os.fsdecode(bytes(folder))[:1000].replace("\udc80", "?")


def test_the_same_text_and_seed_make_the_same_set(lines: Path, tmp_path: Path) -> None:
    made = [
        build(
            Source(str(lines)), ByteTokenizer(), "bytes", tmp_path / str(number), shard_tokens=1024, seed=number // 2
        ).sha256
        for number in range(3)
    ]
    assert made[0] == made[1] != made[2]


def test_documents_are_drawn_from_those_that_wait() -> None:
    documents = [np.full(10, number) for number in range(100)]
    order = [int(document[0]) for document in shuffled(documents, 0, 200)]
    assert sorted(order) == list(range(100))
    assert order != sorted(order)
    assert all(number <= place + 20 for place, number in enumerate(order)), (
        "more documents waited than there was room for"
    )


def test_parquet_and_a_dataset_of_the_library(tmp_path: Path, lines: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra swarmentum[data] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "dataset"
    folder.mkdir()
    parquet.write_table(arrow.table({"text": TEXTS, "id": range(40)}), folder / "train.parquet")
    assert list(texts(Source(str(folder)))) == TEXTS
    assert list(texts(Source(str(folder / "train.parquet")))) == TEXTS
    with pytest.raises(DataError, match="has no column 'body'; it has text, id"):
        list(texts(Source(str(folder), column="body")))
    with pytest.raises(DataError, match="row 1: 'id' is int, expected text"):
        list(texts(Source(str(folder), column="id")))
    (folder / "torn.parquet").write_bytes((folder / "train.parquet").read_bytes()[:200])
    with pytest.raises(DataError, match=r"torn\.parquet cannot be read"):
        list(texts(Source(str(folder))))


def test_bad_rows_of_parquet_are_skipped_and_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra swarmentum[data] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    halves = arrow.py_buffer(np.array([0, 2, 4], dtype="<i4").tobytes()), arrow.py_buffer(b"\xff\xfeok")
    values = [*TEXTS, None, "", *TEXTS]
    parquet.write_table(arrow.table({"text": values}), tmp_path / "a.PARQUET")
    parquet.write_table(arrow.table({"text": arrow.StringArray.from_buffers(2, *halves)}), tmp_path / "b.parquet")
    parquet.write_table(arrow.table({"text": arrow.array(["x", "y", "x"]).dictionary_encode()}), tmp_path / "c.parquet")
    assert list(texts(Source(str(tmp_path)), allow_left_out=True)) == [*TEXTS, *TEXTS, "ok", "x", "y", "x"]
    with pytest.raises(DataError, match=r"b\.parquet, row 1 is no UTF-8.*\n.*a\.PARQUET, row 41: 'text' is null"):
        list(texts(Source(str(tmp_path))))


def test_a_dataset_that_the_datasets_library_opens(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="the extra swarmentum[data] is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    lines.rename(folder / "train.jsonl")
    assert list(texts(Source(f"hf://{folder}"))) == TEXTS
    with pytest.raises(DataError, match="cannot be read"):
        list(texts(Source(f"hf://{folder}", split="nowhere")))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"text": 1}', "line 2: 'text' is int, expected text"),
        ('{"body": "x"}', "line 2 has no 'text'; it has body"),
        ("[1]", "line 2 has no 'text'; it has list"),
        ("{", "line 2 is no JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(DataError, match=why):
        build(Source(str(path)), ByteTokenizer(), "bytes", tmp_path / "out")


def test_no_text_and_no_such_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="has no text"):
        build(Source(str(tmp_path / "empty.jsonl")), ByteTokenizer(), "bytes", tmp_path / "out")
    with pytest.raises(DataError, match="does not exist; name a text file"):
        build(Source(str(tmp_path / "nowhere")), ByteTokenizer(), "bytes", tmp_path / "out")


def test_a_run_on_the_web_names_its_hash() -> None:
    for data, why in (
        ({"source": "https://example.org/set"}, "give `sha256` too"),
        ({"mirrors": ["https://example.org/set"]}, "this `source` is none"),
        ({"source": "https://example.org/set", "sha256": "x"}, "pattern"),
        ({"source": "https://a/b", "sha256": "0" * 64, "mirrors": ["file:///etc"]}, "pattern"),
    ):
        with pytest.raises(ValueError, match=why):
            RunConfig.model_validate({"data": data})


@pytest.mark.parametrize("indexed", [False, True], ids=["stream, as datasets saves it", "file with an index"])
def test_a_dataset_that_was_saved_to_a_folder_is_read(tmp_path: Path, indexed: bool) -> None:
    pa = pytest.importorskip("pyarrow")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    table = pa.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    made = pa.ipc.new_file if indexed else pa.ipc.new_stream
    with (folder / "data-00000-of-00001.arrow").open("wb") as file, made(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    assert list(texts(Source(str(folder)))) == TEXTS
    with pytest.raises(DataError, match="has no column 'words'; it has id, text"):
        list(texts(Source(str(folder), "words")))
    with pytest.raises(DataError, match="'id' is int, expected text"):
        list(texts(Source(str(folder), "id")))
    (folder / "data-00000-of-00001.arrow").write_bytes(b"ARROW1" + bytes(10))
    with pytest.raises(DataError, match="cannot be read"):
        list(texts(Source(str(folder))))


def test_a_tokenizer_is_a_file_whose_hash_a_run_can_name(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    for words in ({"a": 0, "b": 1, "[UNK]": 2}, {"b": 0, "a": 1, "[UNK]": 2}):
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(str(file))
        found = load_tokenizer(str(file))
        assert found.encode("a b c").tolist() == [words["a"], words["b"], 2]
        assert (found.vocabulary, found.end) == (3, None)
    done = CliRunner().invoke(command.app, ["data", "tokenizer", str(file), "--json"])
    told = json.loads(done.stdout)
    assert told == {"tokenizer": str(file), "sha256": sha256_of_tokenizer(found), "vocabulary": 3, "end": None}
    assert run_tokenizer(str(file), told["sha256"]).vocabulary == 3
    assert run_tokenizer("bytes", None).vocabulary == 256
    with pytest.raises(TokenizerError, match="encodes differently than the run's"):
        run_tokenizer("bytes", told["sha256"])
    file.write_text("{}")
    with pytest.raises(TokenizerError, match="transformers cannot load it"):
        load_tokenizer(str(file))
    shown = CliRunner().invoke(command.app, ["data", "tokenizer", "bytes"]).stdout
    assert f'tokenizer_sha256 = "{sha256_of_tokenizer(ByteTokenizer())}"' in shown
