"""From a path to checked tokens: text, token files, tokenizers, and what is refused."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from node.data import sources
from node.data.corpus import open_corpus
from node.data.samples import Samples
from node.data.sources import check_text, standard_library
from node.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from node.data.tokens import FileTokens, bytes_of, check_vocabulary, open_tokens
from protos.errors import DataError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"


def corpus_text(path: Path, tmp_path: Path) -> bytes:
    return open_corpus(path, tmp_path / "cache").tokens.tobytes()


def test_default_is_the_standard_library(tmp_path: Path) -> None:
    corpus = open_corpus(None, tmp_path, vocabulary=256)
    assert len(corpus.tokens) > 4 << 20
    assert b"def dataclass(" in corpus.tokens[:].tobytes()
    assert not list(tmp_path.iterdir()), "bytes need no cache"


def test_standard_library_is_sorted_and_bounded() -> None:
    some = list(standard_library(bytes_max=1 << 19))
    assert sum(len(document.data) for document in some) <= 1 << 19
    names = [document.path.as_posix() for document in some]
    assert names == sorted(names)
    assert not [name for name in names if "/test/" in name or "site-packages" in name]


def test_folder_is_read_in_order_without_what_is_no_text(tmp_path: Path) -> None:
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    for name, data in {
        "b/one.md": b"second",
        "a.txt": "first ä".encode(),
        "b.py": b"third",
        "picture.png": b"\x89PNG\0\0",
        "latin.txt": b"caf\xe9",
        ".hidden": b"no",
        ".git/config": b"no",
        "empty.txt": b"",
    }.items():
        (root / name).write_bytes(data)
    (root / "link.txt").symlink_to("/etc/passwd")
    with pytest.raises(
        DataError, match=r"1 not UTF-8 .*latin\.txt.*\n  1 binary .*picture\.png.*\n  1 link out of the folder"
    ):
        corpus_text(root, tmp_path)
    corpus = open_corpus(root, tmp_path / "cache", allow_left_out=True)
    assert bytes(corpus.tokens[:]).decode() == "first ä\nthird\nsecond\n"
    assert corpus.reading.counts() == {"not_utf8": 1, "binary": 1, "outside": 1, "empty": 1, "hidden": 2}


def test_named_file_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("no suffix needed ü")
    corpus = open_corpus(path, tmp_path / "cache")
    assert isinstance(corpus.tokens, FileTokens)
    assert corpus.tokenizer.decode(corpus.tokens[:].tolist()) == "no suffix needed ü"


@pytest.mark.parametrize("name", ["t.txt", "t", "t.txt.gz"])
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_packed_file_is_unpacked_whatever_its_name_says(
    pack: Callable[[bytes], bytes], name: str, tmp_path: Path
) -> None:
    """Its packed bytes would be 256 kinds of token, as good as any."""
    path = tmp_path / name
    path.write_bytes(pack(b"plain text"))
    assert corpus_text(path, tmp_path) == b"plain text\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"a\0b", "is binary"),
        (b"ab\xff", "byte 0xff at offset 2"),
        (b"abc\xc3", "byte 0xc3 at offset 3"),
        (POINTER, "pointer of Git LFS"),
    ],
)
def test_named_files_that_are_no_text(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"x.txt .*{words}"):
        open_corpus(path, tmp_path)


def test_offset_of_a_bad_byte_counts_characters_cut_by_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 4)
    path = tmp_path / "x.txt"
    path.write_bytes("aüüüüü€".encode())
    check_text(path)
    path.write_bytes("aüüüüü".encode() + b"\xe2\x82X")
    with pytest.raises(DataError, match="0xe2 at offset 11"):
        check_text(path)


def test_missing_and_empty_places(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        open_corpus(tmp_path / "nowhere", tmp_path)
    with pytest.raises(DataError, match="no UTF-8 text file below"):
        open_corpus(tmp_path, tmp_path)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files(dtype: str, tmp_path: Path) -> None:
    tokens = np.array([1, 2, 999, 4], dtype=dtype)
    np.save(tmp_path / "t.npy", tokens)
    tokens.tofile(tmp_path / "t.bin")
    for name in ("t.npy", "t.bin"):
        corpus = open_corpus(tmp_path / name, tmp_path, dtype=dtype, vocabulary=1000)
        assert isinstance(corpus.tokens, FileTokens)
        assert corpus.tokens[:].tolist() == [1, 2, 999, 4]
        with pytest.raises(
            DataError, match=rf"{name}: token 2, read as {dtype}, has id 999, and the vocabulary ends at 998"
        ):
            open_corpus(tmp_path / name, tmp_path, dtype=dtype, vocabulary=999)


def test_digest_is_of_the_ids_and_not_of_their_type(tmp_path: Path) -> None:
    for dtype in ("uint16", "uint32"):
        np.save(tmp_path / f"{dtype}.npy", np.array([1, 2], dtype=dtype))
    one, two = (open_corpus(tmp_path / f"{dtype}.npy", tmp_path).digest() for dtype in ("uint16", "uint32"))
    assert one == two


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.bin", b"abc", "3 bytes are no multiple of 2"),
        ("t.bin", b"", "it is empty"),
        ("t.bin", POINTER, "it is a pointer of Git LFS or git-annex; get the file with `git lfs pull`"),
        ("t.npy", b"no numpy", "not a token file"),
        ("t.npy", np.zeros((2, 2), np.uint16), r"holds uint16 \(2, 2\)"),
        ("t.npy", np.zeros(2, np.float32), "holds float32"),
        ("t.npy", np.zeros(0, np.uint16), "no tokens"),
    ],
)
def test_broken_token_files(name: str, content: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(DataError, match=words):
        open_corpus(path, tmp_path, vocabulary=256)


def test_unknown_token_type(tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(b"ab")
    with pytest.raises(DataError, match="'int8': expected one of uint8, uint16, uint32"):
        open_corpus(tmp_path / "t.bin", tmp_path, dtype="int8")


def test_vocabulary_larger_than_the_type_needs_no_scan() -> None:
    check_vocabulary(np.array([255], np.uint8), 256)
    with pytest.raises(DataError, match="token 0, read as uint8, has id 255"):
        check_vocabulary(np.array([255], np.uint8), 255)


def test_text_in_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.data.tokens.TEXT_BYTES_MAX", 10)
    with pytest.raises(DataError, match="join it into one file"):
        bytes_of([sources.Document(Path("a"), b"12345"), sources.Document(Path("b"), b"12345")])


HF_BYTES = ByteTokenizer().huggingface()


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_byte_tokenizers_agree_and_round_trip(text: str) -> None:
    ours = ByteTokenizer()
    ids = HF_BYTES.encode(text, add_special_tokens=True)
    assert ids == list(text.encode()) == ours.encode(text).tolist()
    assert HF_BYTES.decode(ids) == ours.decode(ids) == text


@pytest.fixture
def saved_tokenizer(tmp_path: Path) -> str:
    """A Hugging Face tokenizer on disk with merges, learnt from a line."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["the cat and the dog and the cat"] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_hugging_face_tokenizer_runs_once(
    saved_tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.data.tokens.PART_CHARS_MAX", 16)  # the cuts between parts must not lose a character
    text = "the cat and the dog\n" * 5 + "x" * 40
    (tmp_path / "text.txt").write_text(text)
    seen: list[tuple[int, str]] = []

    def opened() -> object:
        return open_corpus(
            tmp_path / "text.txt",
            tmp_path / "cache",
            tokenizer=saved_tokenizer,
            progress=lambda done, name: seen.append((done, name)),
        )

    corpus = opened()
    assert corpus.tokens.dtype == np.uint16
    assert len(corpus.tokens) < len(text)
    assert corpus.tokenizer.decode(corpus.tokens[:].tolist()) == text + "\n"
    assert seen[-1][0] == len(text) + 1
    calls = len(seen)
    again = opened()
    assert len(seen) == calls, "the second time comes from the cache"
    assert np.array_equal(again.tokens[:], corpus.tokens[:])
    [kept] = (tmp_path / "cache").iterdir()
    of_earlier = kept.rename(kept.with_name(kept.name.partition("-")[2]))
    opened()
    assert (len(seen), of_earlier.exists()) == (calls, False), "that of a version that named no place is taken over"
    (tmp_path / "cache" / "1.7.tmp").write_text("half of the tokens, and kill -9")
    with (tmp_path / "text.txt").open("a") as file:
        file.write("a log that grows\n")  # each start left the tokens of the whole text behind
    grown = opened()
    [last] = (tmp_path / "cache").iterdir()
    assert last.name != kept.name
    assert len(grown.tokens) > len(corpus.tokens)
    assert len(corpus.tokens[:]) == len(corpus.tokens), "who has the old file open reads on"


def test_unknown_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"'\./no/such/folder'.*Give 'bytes'"):
        HuggingFaceTokenizer("./no/such/folder")


@pytest.mark.parametrize("suffix", ["txt", "npy", "bin"])
def test_a_file_that_gets_shorter_or_goes_away_meanwhile(suffix: str, tmp_path: Path) -> None:
    """Under a memory map this ends the process with SIGBUS."""
    path = tmp_path / f"data.{suffix}"
    values = np.random.default_rng(0).integers(65, 91, 4 * 65536 + 17).astype(np.uint8)
    np.save(path, values) if suffix == "npy" else values.tofile(path)
    tokens = open_corpus(path, tmp_path, dtype="uint8").tokens
    assert isinstance(tokens, FileTokens)
    samples, whole = Samples(tokens, 33, seed=1), Samples(values, 33, seed=1)
    expected = whole.batch(5, 90)
    assert np.array_equal(samples.batch(5, 90), expected)
    assert np.array_equal(samples.validation(), whole.validation())
    path.rename(tmp_path / "elsewhere")
    assert np.array_equal(samples.batch(5, 90), expected), "an open file stays"
    os.truncate(tmp_path / "elsewhere", 200)
    with pytest.raises(
        DataError, match=r"data\.\w+ has become shorter since this peer began: byte \d+ is gone, \d+ were"
    ):
        samples.batch(5, 90)


def test_code_that_comes_with_a_tokenizer_never_runs_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask on stdin, and run it after a "y" that was meant for something else."""
    mark = tmp_path / "ran"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass Evil: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(DataError, match="contains custom code"):
        open_corpus(None, tmp_path / "cache", tokenizer=str(tmp_path))
    assert not mark.exists()


@pytest.mark.parametrize(("written", "read"), [("<u4", "uint16"), ("<u2", "uint8")])
def test_tokens_of_another_width_are_refused(written: str, read: str, tmp_path: Path) -> None:
    """Every second one was 0, within the vocabulary, and a run trained on that."""
    tokens = np.arange(1000) % 250
    (tmp_path / "t.bin").write_bytes(tokens.astype(written).tobytes())
    with pytest.raises(DataError, match=rf"every second token, read as {read}, is 0, so the file has wider tokens"):
        open_corpus(tmp_path / "t.bin", tmp_path, dtype=read)
    assert len(open_corpus(tmp_path / "t.bin", tmp_path, dtype=str(np.dtype(written))).tokens) == 1000


@pytest.mark.parametrize(
    ("first", "version", "written"),
    [(20240520, 1, "<u2"), (20240520, 1, "<u4"), (20240801, 1, "<u4"), (20240801, 7, "<u4")],
)
def test_the_header_of_llm_c_is_no_token_and_its_file_tells_the_width(
    first: int, version: int, written: str, tmp_path: Path
) -> None:
    """A large vocabulary took 512 numbers of it for tokens, and those of 4 bytes for twice as many of 2. llm.c writes
    those with version 7, and forks write 4 bytes under GPT-2's number."""
    tokens, header = np.random.default_rng(0).integers(0, 60_000, 1000), np.zeros(256, dtype="<i4")
    header[:3] = first, version, len(tokens)
    (tmp_path / "t.bin").write_bytes(header.tobytes() + tokens.astype(written).tobytes())
    found = open_corpus(tmp_path / "t.bin", tmp_path, dtype="uint16", vocabulary=128_256).tokens
    assert found[0 : len(found)].tolist() == tokens.tolist()
    with (tmp_path / "t.bin").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match=r"its header names 1000 tokens, .* copy it again"):
        open_corpus(tmp_path / "t.bin", tmp_path, vocabulary=128_256)


@pytest.mark.parametrize(
    ("first", "version"), [(20240520, 2), (20240801, 8), (20240522, 1), (20240326, 3), (20250601, 1)]
)
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_an_unknown_header_of_llm_c_is_refused(first: int, version: int, dtype: str, tmp_path: Path) -> None:
    """The header was 512 tokens, and the weights of a model the others."""
    header = np.zeros(256, dtype="<i4")
    header[:4] = first, version, 1000, 50_257
    (tmp_path / "t.bin").write_bytes(header.tobytes() + np.random.default_rng(0).bytes(4000))
    with pytest.raises(
        DataError, match=rf"a header of llm.c with the number {first} and version {version}, .* numpy.save"
    ):
        open_corpus(tmp_path / "t.bin", tmp_path, dtype=dtype, vocabulary=1 << 16)


def test_a_header_of_llm_c_that_others_wrote_on_or_that_broke_off(tmp_path: Path) -> None:
    """A fork's own numbers after the usual ones, and a copy that ends within the header, were 512 tokens or fewer."""
    path, header = tmp_path / "t.bin", np.zeros(256, dtype="<i4")
    header[:3], header[200] = (20240520, 1, 1000), 7
    path.write_bytes(header.tobytes() + np.arange(1000, dtype="<u2").tobytes())
    assert len(open_corpus(path, tmp_path, dtype="uint16", vocabulary=1 << 16).tokens) == 1000
    path.write_bytes(header.tobytes()[:600])
    with pytest.raises(DataError, match=r"its header names 1000 tokens, .* and it has 600: copy it again"):
        open_corpus(path, tmp_path, dtype="uint16")
    path.write_bytes(np.array([5, 309], dtype="<u2").tobytes())  # two tokens, and no header
    assert len(open_corpus(path, tmp_path, dtype="uint16", vocabulary=1 << 16).tokens) == 2


def test_a_token_file_whose_disk_goes_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.arange(1000, dtype="<u2").tofile(tmp_path / "t.bin")
    tokens = open_corpus(tmp_path / "t.bin", tmp_path, vocabulary=1 << 16).tokens

    def stale(_: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fstat", stale)
        with pytest.raises(DataError, match=r"t\.bin cannot be read any more: Stale file handle"):
            tokens[0:9]


def test_a_raw_file_that_is_another_kind_is_refused_by_its_first_bytes(tmp_path: Path) -> None:
    """With uint8 or a vocabulary of 65,536 every byte of it was a token."""
    tokens, path = np.random.default_rng(0).integers(0, 250, 1000).astype(np.uint8), tmp_path / "t.bin"
    with path.open("wb") as file:
        np.save(file, tokens)
    with pytest.raises(DataError, match=r"it is a NumPy array: rename it to \.npy"):
        open_corpus(path, tmp_path, dtype="uint8")
    torch.save(torch.from_numpy(tokens), path)
    with pytest.raises(DataError, match=r"a zip archive, such as one of torch\.save"):
        open_corpus(path, tmp_path, dtype="uint8")
    path.write_bytes(pickle.dumps(tokens.tolist()))
    with pytest.raises(DataError, match="it is a pickle"):
        open_corpus(path, tmp_path, dtype="uint8")
    for pack, what in (
        (gzip.compress, "gzip"),
        (zstandard.compress, "zstd"),
        (lzma.compress, "xz"),
        (bz2.compress, "bzip2"),
    ):
        path.write_bytes(pack(tokens.tobytes()))
        with pytest.raises(DataError, match=f"it is packed with {what}: unpack it"):
            open_corpus(path, tmp_path, dtype="uint8")


@pytest.mark.parametrize("suffix", ["txt", "npy", "bin"])
def test_a_file_that_is_written_to_meanwhile(suffix: str, tmp_path: Path) -> None:
    """The script that made the tokens ran again while a peer trained on them: the peer went on with a mixture of both."""
    path, values = tmp_path / f"data.{suffix}", np.random.default_rng(0).integers(65, 91, 65536).astype(np.uint8)
    np.save(path, values) if suffix == "npy" else values.tofile(path)
    tokens = open_corpus(path, tmp_path, dtype="uint8").tokens
    samples, whole = Samples(tokens, 33, seed=1), Samples(values, 33, seed=1)
    with path.open("ab") as file:
        file.write(b"more")
    os.utime(path, ns=(1, 1))
    assert np.array_equal(samples.batch(5, 90), whole.batch(5, 90)), "what comes after the tokens is nothing to them"
    with path.open("r+b") as file:
        file.seek(-len(values), os.SEEK_END)
        file.write(values[::-1].tobytes())
    for read in (lambda: samples.batch(5, 90), samples.validation, lambda: tokens[3:9]):
        with pytest.raises(
            DataError, match=rf"data\.{suffix} has been written to since this peer began, and has other"
        ):
            read()


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_what_an_error_says_converts_text_of_another_encoding(encoding: str, tmp_path: Path) -> None:
    """`iconv -t utf-8` took it for UTF-8, and refused it."""
    path, text = tmp_path / "t.txt", "déjà vu\n" * 200
    path.write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=r"t\.txt is UTF-[0-9LBE]+; convert it with `iconv -f ") as found:
        open_corpus(path, tmp_path)
    command = str(found.value).split("`")[1]
    done = subprocess.run([*command.split(), str(path)], capture_output=True, check=True)
    assert done.stdout.decode().removeprefix("\ufeff") == text


def test_zeros_are_no_text_of_another_encoding(tmp_path: Path) -> None:
    """A disk that lost a file's blocks, and the first bytes of a film, were called UTF-32."""
    for start in (bytes(32), b"\0\0\0\x18ftypmp42"):
        (tmp_path / "t.txt").write_bytes(start * 9)
        with pytest.raises(DataError, match=r"t\.txt is binary"):
            open_corpus(tmp_path / "t.txt", tmp_path)


def test_text_that_is_named_as_tokens_is_refused(tmp_path: Path) -> None:
    """Two letters were one id of a vocabulary of 50,257."""
    (tmp_path / "t.bin").write_text("the quick brown fox, déjà vu\n" * 10, encoding="utf-8")
    with pytest.raises(DataError, match=r"it is UTF-8 text, not tokens of uint16: rename it to \.txt"):
        open_corpus(tmp_path / "t.bin", tmp_path, dtype="uint16", vocabulary=50_257)
    assert len(open_corpus(tmp_path / "t.bin", tmp_path, dtype="uint8").tokens) == 31 * 10


@pytest.mark.parametrize("name", ["rows.txt", "nested.json", "list.json"])
def test_json_that_is_read_as_plain_text_is_told(name: str, tmp_path: Path) -> None:
    row, file = {"text": "a tale"}, tmp_path / name
    file.write_text(
        {"rows.txt": f"{json.dumps(row)}\n" * 2, "nested.json": json.dumps({"data": [row]})}.get(name, '["a"]')
    )
    (tmp_path / "tale.txt").write_text("[1] Once upon a time")
    for place in (file, tmp_path):  # read as it is, and by the walker
        reading = open_corpus(place, tmp_path / "cache").reading
        assert reading is not None
        assert [note[:44] for note in reading.notes] == ["files of JSON without rows that are read: 1;"], place
    plain = open_corpus(tmp_path / "tale.txt", tmp_path / "cache").reading
    assert plain is not None
    assert not plain.notes
    pages = {
        "a.html": "<!DOCTYPE html>\n<p>tags</p>",
        "b.xml": "\ufeff<?xml?><a/>",
        "c.rtf": "{\\rtf1 words}",
        "d": "<3 you",
    }
    (tmp_path / "pages").mkdir()
    for page, words in pages.items():
        (tmp_path / "pages" / page).write_text(words)
    told = open_corpus(tmp_path / "pages", tmp_path / "cache").reading
    assert [note[:49] for note in told.notes] == ["files of HTML, XML, RTF, PDF or PostScript: 3; th"]
    assert open_corpus(tmp_path / "pages" / "b.xml", tmp_path / "cache").reading.notes[0].startswith("files of HTML,")


def test_wide_tokens_of_a_large_vocabulary_are_refused_too(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 100_000, 1000)
    (tmp_path / "t.bin").write_bytes(tokens.astype("<u4").tobytes())
    with pytest.raises(DataError, match=r"every second token, read as uint16, is at most 1"):
        open_corpus(tmp_path / "t.bin", tmp_path, dtype="uint16", vocabulary=128_256)
    assert len(open_corpus(tmp_path / "t.bin", tmp_path, dtype="uint32", vocabulary=128_256).tokens) == 1000
    (tmp_path / "pairs.bin").write_bytes((tokens % 60_000 + 2).astype("<u2").tobytes())
    assert len(open_corpus(tmp_path / "pairs.bin", tmp_path, dtype="uint16", vocabulary=128_256).tokens) == 1000


@pytest.mark.parametrize(("written", "read"), [(">u2", "uint8"), (">u4", "uint16"), (">u2", "uint16")])
def test_tokens_in_the_byte_order_of_another_machine_are_refused(written: str, read: str, tmp_path: Path) -> None:
    """No id is beyond a vocabulary of all 65,536: common words have low ones, so their high bytes say little."""
    ids = (np.random.default_rng(0).random(9000) ** 4 * 65_536).astype(np.int64)
    ids, vocabulary = (ids % 255 + 1, 256) if read == "uint8" else (ids, 65_536)
    (tmp_path / "t.bin").write_bytes(ids.astype(written).tobytes())
    with pytest.raises(DataError, match=r"in the order of a big-endian machine.*write it again with tokens\.astype"):
        open_corpus(tmp_path / "t.bin", tmp_path, dtype=read, vocabulary=vocabulary)
    little = written.replace(">", "<")
    (tmp_path / "t.bin").write_bytes(ids.astype(little).tobytes())
    right = {"<u2": "uint16", "<u4": "uint32"}[little]
    assert (
        open_corpus(tmp_path / "t.bin", tmp_path, dtype=right, vocabulary=vocabulary).tokens[:9000].tolist()
        == ids.tolist()
    )


def test_ids_with_room_between_them_are_no_tokens_of_another_machine(tmp_path: Path) -> None:
    """Of multiples of 16 the low byte says less than the high one; in the other order some would be beyond the vocabulary."""
    ids = 16 * np.random.default_rng(0).integers(3000, size=9000)
    (tmp_path / "t.bin").write_bytes(ids.astype("<u2").tobytes())
    assert len(open_corpus(tmp_path / "t.bin", tmp_path, dtype="uint16", vocabulary=48_000).tokens) == 9000


def test_an_array_file_with_more_after_it_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16))
    (tmp_path / "t.npy").write_bytes((tmp_path / "t.npy").read_bytes() * 2)
    with pytest.raises(DataError, match=r"has 2128 bytes after its 1000 tokens: two files were joined"):
        open_tokens(tmp_path / "t.npy")
