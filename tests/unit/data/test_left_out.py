"""What readers of text leave out, or take in unasked: folders as people have them, for `data build` and `--data` alike."""

import gzip
import json
import os
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from typer.testing import CliRunner

from node import __main__ as command
from node.data import rows, sources, text_files
from node.data.build import build
from node.data.corpus import look_at, open_corpus, survey
from node.data.sources import Source, documents, files_of
from node.data.tally import LeftOutError, LeftOutReason, Repeats, Tally
from node.data.tokenizer import ByteTokenizer
from protos.errors import DataError

ROWS = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(3))
ROW_TEXTS = [f"row {number}" for number in range(3)]


def read(place: Path, split: str = "train") -> tuple[list[str], dict[str, int]]:
    """The texts, and the counts of what is left out."""
    tally = Tally()
    found = [document.text() for document in documents(Source(str(place), split=split), tally)]
    return found, tally.reading().counts()


def put(root: Path, files: dict[str, str | bytes]) -> Path:
    """A folder of these files."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def zstd(text: str) -> bytes:
    return zstandard.ZstdCompressor().compress(text.encode())


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", ROWS),
        ("A.JSONL", ROWS.replace("\n", "\r\n")),
        ("a.ndjson", "\ufeff" + ROWS + "\n\n"),
        ("a.jsonl.gz", gzip.compress(ROWS.encode(), mtime=0)),
        ("A.JSONL.GZ", gzip.compress(ROWS[:40].encode(), mtime=0) + gzip.compress(ROWS[40:].encode(), mtime=0)),
        ("a.jsonl.zst", zstd(ROWS)),
        ("a.jsonl.zst", zstd(ROWS[:40]) + zstd(ROWS[40:])),
        ("a.jsonl", gzip.compress(ROWS.encode(), mtime=0)),
        ("a.json", ROWS),
        ("a.json", json.dumps([json.loads(line) for line in ROWS.splitlines()], indent=1)),
        ("a.json.gz", gzip.compress(ROWS.encode(), mtime=0)),
        ("a.csv", "id,text\n1,row 0\n2,row 1\n3,row 2\n"),
        ("a.csv", '\ufefftext,id\r\nrow 0,1\r\nrow 1,2\r\n"row 2",3\r\n'),
        ("a.tsv", "id\ttext\n1\trow 0\n2\trow 1\n3\trow 2\n"),
        ("a.csv.tsv", "id\ttext\n1\trow 0\n2\trow 1\n3\trow 2\n"),
        ("a.csv.zst", zstd("text\nrow 0\nrow 1\nrow 2\n")),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 15 else "",
)
def test_rows_are_read_from_each_form(name: str, data: str | bytes, tmp_path: Path) -> None:
    put(tmp_path, {name: data})
    assert read(tmp_path / name) == (ROW_TEXTS, {})
    assert read(tmp_path) == (ROW_TEXTS, {})
    assert bytes(open_corpus(tmp_path / name, tmp_path / "cache").tokens[:]).decode() == "row 0\nrow 1\nrow 2\n"


@pytest.mark.parametrize("name", ["b.txt", "B.TXT.GZ", "b.txt.zst", "b.md", "b"])
def test_text_is_read_beside_rows(name: str, tmp_path: Path) -> None:
    pack = {".gz": lambda text: gzip.compress(text.encode()), ".zst": zstd}.get(Path(name).suffix.lower(), str.encode)
    put(tmp_path, {"a.jsonl": ROWS, name: pack("a book")})
    assert sorted(read(tmp_path)[0]) == ["a book", *ROW_TEXTS]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    put(tmp_path, {"a.txt": "\ufeffone", "b.jsonl": json.dumps({"text": "\ufefftwo"})})
    assert read(tmp_path)[0] == ["one", "two"]
    assert bytes(open_corpus(tmp_path / "a.txt", tmp_path).tokens[:]) == b"one"


def test_what_others_put_into_a_folder_is_counted_and_not_read(tmp_path: Path) -> None:
    others = (
        ".git/config", ".ipynb_checkpoints/a-checkpoint.txt", "__MACOSX/a.txt", "._a.txt", ".DS_Store", "Thumbs.db",
        "desktop.ini", "a.txt~", ".a.txt.swp", "#a.txt#", "a.bak", "__pycache__/x", "a.lock", ".cache/huggingface/a",
    )  # fmt: skip
    put(tmp_path, dict.fromkeys(others, "not text to train on"))
    put(tmp_path, {"a.txt": "text", "sub/b.txt": "more", "empty.txt": ""})
    found, counts = read(tmp_path)
    assert found == ["text", "more"]
    assert counts == {"empty": 1, "hidden": 5, "rubbish": 9}
    build(Source(str(tmp_path)), ByteTokenizer(), "bytes", tmp_path / "out")


def test_unfinished_downloads_and_pointers_are_no_text(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    put(
        tmp_path,
        {"a.txt": "text", "b.txt": pointer, "c.jsonl": pointer, "d.jsonl.incomplete": ROWS, "e.txt.part": "ha"},
    )
    (tmp_path / "f.txt").symlink_to(".git/annex/objects/aa/bb/KEY/KEY")
    found, counts = read(tmp_path)
    assert found == ["text"]
    assert counts == {"pointer": 3, "partial": 2}


def test_pipes_sockets_and_devices_are_never_opened(tmp_path: Path) -> None:
    put(tmp_path, {"a.txt": "text"})
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "link.txt").symlink_to("pipe.txt")
    (tmp_path / "null.jsonl").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as door:
        here = Path.cwd()
        os.chdir(tmp_path)
        door.bind("door")
        os.chdir(here)
        found, counts = read(tmp_path)
    assert found == ["text"]
    assert counts == {"special": 2, "link": 1, "outside": 1}
    with pytest.raises(DataError, match="is a pipe, socket or device"):
        read(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="is a pipe, socket or device"):
        open_corpus(tmp_path / "pipe.txt", tmp_path)


def test_links_are_read_once_and_never_out_of_the_folder(tmp_path: Path) -> None:
    root = put(tmp_path / "root", {"a.txt": "one", ".store/x": "two", "sub/c.txt": "three"})
    put(tmp_path, {"elsewhere/d.txt": "four"})
    for name, target in {
        "b.txt": ".store/x",
        "b2.txt": ".store/x",
        "again.txt": "a.txt",
        "loop": ".",
        "sub/up": "..",
        "gone.txt": "nowhere",
        "self.txt": "self.txt",
        "out.txt": "../elsewhere/d.txt",
        "outside": "../elsewhere",
    }.items():
        (root / name).symlink_to(target)
    found, counts = read(root)
    assert found == ["one", "two", "three"]
    assert counts == {"dangling": 2, "outside": 2, "hidden": 1, "link": 4}
    with pytest.raises(LeftOutError, match=r"links out of the folder.*elsewhere"):
        open_corpus(root, tmp_path)
    assert bytes(open_corpus(root, tmp_path, allow_left_out=True).tokens[:]) == b"one\ntwo\nthree\n"


@pytest.mark.parametrize("place", ["", "snapshots/abc", "snapshots"])
def test_the_hub_s_cache_is_read_once(place: str, tmp_path: Path) -> None:
    root = tmp_path / "hub" / "datasets--ada--books"
    put(root, {"blobs/1": ROWS, "blobs/2": "# About\n", "blobs/3": "{}", "refs/main": "abc", ".no_exist/abc/x": ""})
    for name, blob in {"data/train.jsonl": 1, "README.md": 2, "dataset_infos.json": 3}.items():
        path = root / "snapshots" / "abc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(root / "blobs" / str(blob), path.parent))
    put(root, {"snapshots/old/data/train.jsonl": '{"text": "old"}\n'})
    assert read(root / place)[0] == ROW_TEXTS
    if not place:
        assert read(tmp_path / "hub")[0] == ROW_TEXTS
        (root / "refs" / "main").write_text("another")
        with pytest.raises(DataError, match=r"has 2 revisions.*name one of .*snapshots, such as abc"):
            read(root)


def test_other_splits_are_not_trained_on_unasked(tmp_path: Path) -> None:
    root = put(
        tmp_path / "a",
        {
            "data/train-00000-of-00001.jsonl": ROWS,
            "data/test-00000-of-00001.jsonl": '{"text": "test"}',
            "data/validation-00000-of-00001.jsonl": '{"text": "valid"}',
            "README.md": "# Card",
            "LICENSE": "free",
            "a.py": "the script that loads it",
            "dataset_infos.json": "{}",
        },
    )
    assert read(root) == (ROW_TEXTS, {"about": 4, "split": 2})
    assert read(root, "test")[0] == ["test"]
    assert read(root, "validation")[0] == ["valid"]
    assert read(root, "all")[0] == ["test", *ROW_TEXTS, "valid"]
    assert read(root / "data" / "test-00000-of-00001.jsonl")[0] == ["test"], "a named file is asked for"
    plain = put(tmp_path / "wiki", {"wiki.train.raw": "train", "wiki.test.raw": "test", "wiki.valid.raw": "valid"})
    assert read(plain) == (["train"], {"split": 2})
    code = put(tmp_path / "code", {"train.py": "import x", "tests/test_it.py": "assert x", "test.txt": "words"})
    assert read(code) == (["words", "assert x", "import x"], {}), "code and books have no splits"
    alone = put(tmp_path / "alone", {"test.jsonl": ROWS})
    with pytest.raises(DataError, match=r"1 of another split.*test\.jsonl.*--split"):
        read(alone)
    saved = put(tmp_path / "saved", {"train/a.jsonl": ROWS, "test/a.jsonl": ROWS, "dataset_dict.json": "{}"})
    assert read(saved) == (ROW_TEXTS, {"about": 1, "split": 1})


def test_splits_of_packed_text_and_by_other_words_are_not_trained_on_either(tmp_path: Path) -> None:
    """The ending of a packer hid that of the text, and with it the split: train.txt.gz was read with test.txt.gz."""
    packed = {f"{name}.txt.gz": gzip.compress(name.encode()) for name in ("train", "test", "valid")}
    assert read(put(tmp_path / "packed", packed)) == (["train"], {"split": 2})
    folders = {f"{name}/a.txt.zst": zstd(name) for name in ("train", "test")}
    assert read(put(tmp_path / "folders", folders)) == (["train"], {"split": 1})
    words = ["heldout.txt", "held-out.txt", "my_hold_out.txt", "TestSet.txt", "devset.txt"]
    other = put(tmp_path / "other", {"train.txt": "train", **dict.fromkeys(words, "no")})
    assert read(other) == (["train"], {"split": len(words)})
    parallel = dict.fromkeys(["test.en", "dev.de", "news.val.src"], "no")
    mine = put(tmp_path / "parallel", {"train.en": "en", "train.de": "de", "news.train.src": "src", **parallel})
    assert read(mine) == (["src", "de", "en"], {"split": 3}), (
        "the endings of languages are many: a twin of train says it"
    )
    assert read(mine, "validation") == (["no", "no"], {"split": 4})
    put(mine, {"test2016_flickr.en": "no", "newscrawl2016.en": "news", "the.test.of.time.epub": "a book"})
    assert read(mine) == (["src", "news", "a book", "de", "en"], {"split": 4}), (
        "one twin says it of each name of its ending"
    )
    places = {
        "train/train.en": "en",
        "test/test.en": "no",
        "data/train/1.de": "de",
        "data/dev/1.de": "no",
        "data/dev/2.de": "no",
    }
    code = {"train/test_driver.c": "c", "train/train.c": "c", "val.py": "py", "testament.txt": "old", "dev/1.fr": "fr"}
    apart = put(tmp_path / "apart", {**places, **code})
    assert sorted(read(apart)[0]) == ["c", "c", "de", "en", "fr", "old", "py"]
    assert read(apart)[1] == {"split": 3}
    corpora = {
        "train/europarl.en": "en",
        "train/news/1.en": "news",
        "test/newstest.en": "no",
        "dev/old/2.en": "no",
        "dev/3.fr": "fr",
    }
    assert read(put(tmp_path / "corpora", corpora)) == (["fr", "en", "news"], {"split": 2}), (
        "folders say it of any name"
    )
    mixed = {"train.en": "en", "test/a.en": "no", "train/big.de": "de", "test.de": "no", "newstest2014.de": "no"}
    camel = {"trainData.jsonl": ROWS, "testData.jsonl": ROWS, "devtest/flores.en": "no"}
    assert read(put(tmp_path / "mixed", {**mixed, **camel})) == (["en", "de", *ROW_TEXTS], {"split": 5}), (
        "a file is a twin of a folder"
    )
    books = {"Night Train.epub": "night", "The Acid Test.epub": "acid", "Dev.fb2": "dev"}
    assert read(put(tmp_path / "books", books)) == (["dev", "night", "acid"], {}), "titles are no splits"
    beside = put(
        tmp_path / "beside",
        {"train/x.epub": "x", "The Acid Test.epub": "acid", "train/x.en": "en", "the-test.en": "no"},
    )
    assert read(beside) == (["acid", "en", "x"], {"split": 1}), "nor beside a folder"
    conll = put(tmp_path / "conll", {"eng.train": "train", "eng.testa": "dev", "eng.testb": "no"})
    assert read(conll) == (["train"], {"split": 2})
    assert read(conll, "validation")[0] == ["dev"]


def test_a_name_of_another_split_that_is_read_is_told(tmp_path: Path) -> None:
    """No file says train, so nobody knows whether dev/ is code's, or text that should not be trained on."""
    files = {"europarl.en": "en", "dev/newstest2013.en": "dev", "test/it.py": "py"}
    folder, tally = put(tmp_path / "text", files), Tally()
    assert [path.name for path in files_of(Source(str(folder)), tally)] == ["newstest2013.en", "europarl.en", "it.py"]
    assert any("files that are read" in line and "dev/newstest2013.en: 2;" in line for line in tally.reading().lines())
    other = Tally()
    files_of(Source(str(folder), split="all"), other)
    assert not other.reading().lines()
    beside = put(tmp_path / "beside", {"train.jsonl": ROWS, "README.md.gz": gzip.compress(b"# Card")})
    assert read(beside) == (ROW_TEXTS, {"about": 1})


def test_text_that_is_there_twice_is_told(tmp_path: Path) -> None:
    """It counts twice, and the end that is held out may be one of the two."""
    text = "a line of a text\n" * 40
    root = put(tmp_path / "a", {"a.txt": text, "a.txt.gz": gzip.compress(text.encode()), "b.txt": text.upper()})
    told = "documents that were there before, such as packed and unpacked: 1 (33% of the text); they count again"
    tally = Tally()
    assert len(list(documents(Source(str(root)), tally))) == 3
    [note] = tally.reading().notes
    assert note.startswith(told)
    (root / "a.txt.gz").unlink()
    for name, number in (("c", 150), ("d", 150)):  # rows that are short may be equal
        put(root, {f"{name}.jsonl": "".join(json.dumps({"text": f"yes {row}"}) + "\n" for row in range(number))})
    tally = Tally()
    list(documents(Source(str(root)), tally))
    assert tally.reading().notes == ()


def test_a_text_of_more_documents_than_are_remembered_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy of a long text begins after all that fits."""
    monkeypatch.setattr("node.data.tally.REPEATED_KEPT", 64)
    texts = [f"{number} ".encode() * 256 for number in range(1000)]
    twice, once = Repeats(), Repeats()
    for text in (*texts, *texts):
        twice.saw(text)
        assert len(twice._seen) <= 64
    for text in texts:
        once.saw(text)
    assert "about" in twice.words()
    assert twice.count > 100, "1,000 as estimated: hashes differ from process to process"
    assert once.words() == ""


def bad(reason: LeftOutReason, line: str | bytes, words: str) -> tuple[LeftOutReason, bytes, str]:
    return reason, line if isinstance(line, bytes) else line.encode(), words


@pytest.mark.parametrize(
    ("reason", "line", "words"),
    [
        bad(LeftOutReason.BROKEN_ROW, r'{"text": "half \ud83d"}', r"'text' has half a character \(U\+D83D\) at 5"),
        bad(LeftOutReason.BROKEN_ROW, "{", "is no JSON"),
        bad(LeftOutReason.BROKEN_ROW, b'{"text": "\xff"}', "is no JSON"),
        bad(LeftOutReason.BROKEN_ROW, '{"text": "a", "text": "b"}', "'text' is there twice"),
        bad(LeftOutReason.BROKEN_ROW, "[" * 3000, "is no JSON"),
        bad(LeftOutReason.BROKEN_ROW, '{"n": ' + "1" * 5000 + ', "text": "a"}', "is no JSON"),
        bad(LeftOutReason.NO_COLUMN, '{"body": "x"}', "has no 'text'; it has body"),
        bad(LeftOutReason.NO_COLUMN, "[1]", "it has list"),
        bad(LeftOutReason.NO_COLUMN, "null", "it has NoneType"),
        bad(LeftOutReason.NOT_TEXT, '{"text": null}', "'text' is null, expected text"),
        bad(LeftOutReason.NOT_TEXT, '{"text": 7}', "'text' is int, expected text"),
        bad(LeftOutReason.NOT_TEXT, '{"text": ["a"]}', "'text' is list, expected text"),
        bad(LeftOutReason.TOO_LARGE, '{"text": "' + "x" * 10_000 + '"}', "has more than 0 MiB"),
        bad(LeftOutReason.EMPTY, '{"text": ""}', ""),
    ],
)
def test_a_bad_row_is_named_counted_and_skipped(
    reason: LeftOutReason, line: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LINE_BYTES_MAX", 9000 if reason is LeftOutReason.TOO_LARGE else 1 << 20)
    path = tmp_path / "a.jsonl"
    text = "a good row " * 90
    good = json.dumps({"text": text}).encode() + b"\n"
    path.write_bytes(good * 2 + line + b"\n" + good)
    assert read(path) == ([text] * 3, {reason.key: 1})
    if reason is LeftOutReason.EMPTY:
        build(Source(str(path)), ByteTokenizer(), "bytes", tmp_path / "out")
        return
    with pytest.raises(LeftOutError, match=rf"a\.jsonl, line 3.*{words}"):
        build(Source(str(path)), ByteTokenizer(), "bytes", tmp_path / "out")
    with pytest.raises(LeftOutError, match="--set allow=left_out"):
        open_corpus(path, tmp_path)
    path.write_bytes(good * 1500 + line + b"\n" + good)
    built = build(Source(str(path)), ByteTokenizer(), "bytes", tmp_path / "out")
    assert built.documents == 1501
    assert built.reading.counts() == {reason.key: 1}


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        (
            "b.jsonl.gz",
            gzip.compress(random.Random(0).randbytes(500).hex().encode() * 40, mtime=0)[:-40],
            LeftOutReason.DAMAGED,
        ),
        ("b.txt.gz", gzip.compress(b"words " * 400, mtime=0)[:-9], LeftOutReason.DAMAGED),
        ("b.txt.zst", zstd("words " * 400)[:-4], LeftOutReason.DAMAGED),
        ("b.jsonl.zst", zstd("words " * 400)[:-4], LeftOutReason.DAMAGED),
        ("b.txt.gz", b"plain words", LeftOutReason.DAMAGED),
        ("b.jsonl.gz", gzip.compress(ROWS.encode(), mtime=0) + b"garbage", LeftOutReason.DAMAGED),
        ("b.txt", b"caf\xe9", LeftOutReason.NOT_UTF8),
        ("b.txt", "words".encode("utf-16"), LeftOutReason.NOT_UTF8),
        ("b.jsonl", (ROWS * 99).encode("utf-16"), LeftOutReason.NOT_UTF8),  # its rows were read, but for some
        ("b.jsonl", (ROWS * 99).encode("utf-16-be"), LeftOutReason.NOT_UTF8),
        ("b.jsonl", ROWS.encode("utf-32-le"), LeftOutReason.NOT_UTF8),
        ("b.jsonl.gz", gzip.compress(ROWS.encode("utf-16-le")), LeftOutReason.NOT_UTF8),
        ("b.json", f"[{ROWS.splitlines()[0]}]".encode("utf-16-le"), LeftOutReason.NOT_UTF8),
        ("b.csv", "id,text\n1,x\n".encode("utf-16"), LeftOutReason.NOT_UTF8),
        ("b.txt", "words".encode("utf-16-le"), LeftOutReason.NOT_UTF8),
        ("b.jsonl.gz", gzip.compress(gzip.compress(ROWS.encode())), LeftOutReason.PACKED),
        ("b.txt.zst", zstandard.compress(gzip.compress(b"words", mtime=0)), LeftOutReason.PACKED),
        ("b.csv.gz", gzip.compress(zstd("id,text\n1,x\n")), LeftOutReason.PACKED),
        ("b.txt", b"words" * 9000 + b"\0", LeftOutReason.BINARY),
        ("b.zip", b"PK", LeftOutReason.PACKED),
        ("b.tar.gz", gzip.compress(b"a", mtime=0), LeftOutReason.PACKED),
        ("b.txt.xz", b"\xfd7zXZ", LeftOutReason.PACKED),
        ("b.csv", "id,body\n1,x\n", LeftOutReason.NO_COLUMN),
        ("b.csv", "text,text\nx,y\n", LeftOutReason.NO_COLUMN),
        ("b.csv", "id,text\n1,x,y\n", LeftOutReason.BROKEN_ROW),
        ("b.csv", 'id,text\n1,"never closed\n', LeftOutReason.BROKEN_ROW),
        ("b.csv", 'id,text\n1,"closed"twice\n2,good\n', LeftOutReason.BROKEN_ROW),
        ("b.json", '{"body": 1}\n{"body": 2}\n', LeftOutReason.NO_COLUMN),
        ("b.json", '[{"body": "x"}]', LeftOutReason.NO_COLUMN),
        ("b.json", '[{"text": "x"}', LeftOutReason.DAMAGED),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_asks(
    name: str, data: str | bytes, reason: LeftOutReason, tmp_path: Path
) -> None:
    root = put(tmp_path / "root", {"a.txt": "text", name: data})
    found, counts = read(root)
    assert "text" in found
    assert reason.key in counts
    for reader in (
        lambda: build(Source(str(root)), ByteTokenizer(), "bytes", tmp_path / "out"),
        lambda: open_corpus(root, tmp_path),
    ):
        with pytest.raises(LeftOutError, match=rf"{re.escape(reason.words(1))}.*{name}"):
            reader()
    assert not (tmp_path / "out").exists(), "the first look says it before anything is written"


def test_a_column_that_no_row_has_ends_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BAD_ROWS_MAX", 3)
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x"}\n' * 1000)
    tally = Tally()
    with pytest.raises(DataError, match="has no good row in its first 3 lines"):
        list(documents(Source(str(path)), tally))
    assert tally.reading().counts() == {"no_column": 3, "broken_row": 1}


def test_what_unpacks_to_very_much_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "UNPACKED_FREE_BYTES", 1 << 16)
    monkeypatch.setattr(sources, "DOCUMENT_BYTES_MAX", 1 << 20)
    put(
        tmp_path,
        {"a.txt": "text", "bomb.txt.gz": gzip.compress(b"x" * (1 << 22)), "bomb.jsonl.zst": zstd("y" * (1 << 22))},
    )
    put(tmp_path, {"large.txt": "z" * ((1 << 20) + 1)})
    found, counts = read(tmp_path)
    assert found == ["text"]
    assert counts == {"damaged": 2, "too_large": 1}


def test_a_folder_that_nobody_may_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = put(tmp_path / "root", {"a.txt": "text", "shut/b.txt": "b", "c.txt": "c"})
    (root / "shut").chmod(0)
    (root / "c.txt").chmod(0)
    if os.geteuid() == 0:
        for folder in (root, *list(root.parents)[:-2]):
            folder.chmod(folder.stat().st_mode | 0o055)
        os.seteuid(65534)
    try:
        found, counts = read(root)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        (root / "shut").chmod(0o755)
    assert found == ["text"]
    assert counts == {"unreadable": 2}


def test_every_face_shows_the_same_count(tmp_path: Path) -> None:
    root = put(
        tmp_path / "root",
        {"a.txt": "text " * 99, "b.txt": b"caf\xe9", "c.jsonl.gz": gzip.compress(ROWS.encode(), mtime=0)},
    )
    invoke: Callable[..., object] = CliRunner().invoke
    looked = json.loads(invoke(command.app, ["data", "survey", str(root), "--json"]).stdout)  # type: ignore[attr-defined]
    assert looked["read"] == {"files": 3, "documents": 4, "bytes": 510, "whole": True}
    assert looked["left_out"]["not_utf8"]["count"] == 1
    assert looked["left_out_share"] > 0.01
    args = ["data", "build", str(root), "--out", str(tmp_path / "out"), "--json"]
    assert isinstance(invoke(command.app, args).exception, LeftOutError)  # type: ignore[attr-defined]
    made = json.loads(invoke(command.app, [*args, "--allow-left-out"]).stdout.splitlines()[-1])  # type: ignore[attr-defined]
    assert made["left_out"] == looked["left_out"]
    manifest = tmp_path / "out" / "manifest.json"
    said = json.loads(manifest.read_text())
    assert said["left_out"] == {"not_utf8": 1}
    assert open_corpus(root, tmp_path, allow_left_out=True).reading == survey(Source(str(root))).inside
    for left_out, words in (
        ({"not_utf8": 1}, "1 not UTF-8"),
        ({"dangling": 2, "own": 1, "of_later": 3}, "2 links to nothing; 1 token shard; 3 of_later"),
    ):
        manifest.write_text(json.dumps({**said, "left_out": left_out}))
        assert look_at(Source(str(tmp_path / "out"))).lines()[1] == f"left out when the shards were built: {words}"


def test_a_set_beside_the_text_is_no_text(tmp_path: Path) -> None:
    put(tmp_path, {"a.txt": "text"})
    built = build(Source(str(tmp_path)), ByteTokenizer(), "bytes", tmp_path / "out")
    again = build(Source(str(tmp_path)), ByteTokenizer(), "bytes", tmp_path / "out2")
    assert (built.documents, again.documents) == (1, 1)


def test_one_small_file_beside_many_rows_asks_nobody(tmp_path: Path) -> None:
    """A file is one thing, and a file with rows is many."""
    put(tmp_path, {"a.jsonl": ROWS * 400, "notes.zip": "PK", "config.json": "{}", "gone.txt": ""})
    (tmp_path / "link.txt").symlink_to("nowhere")
    built = build(Source(str(tmp_path)), ByteTokenizer(), "bytes", tmp_path / "out")
    assert built.reading.counts() == {"packed": 1, "dangling": 1, "empty": 1, "about": 1, "own": 1}


def test_json_lines_with_a_first_line_longer_than_a_look(tmp_path: Path) -> None:
    put(tmp_path, {"a.json": json.dumps({"text": "x" * 200_000}) + "\n" + ROWS, "b.json": '\n{"text": "alone"}'})
    assert [len(text) for text in read(tmp_path)[0]] == [200_000, 5, 5, 5, 5]


def test_names_that_are_no_utf_8_are_shown(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_bytes(b"caf\xe9")
    (tmp_path / "a.txt").write_text("text")
    shown = CliRunner().invoke(command.app, ["data", "survey", str(tmp_path)])
    assert shown.exit_code == 0
    assert "caf?.txt has byte 0xe9 at offset 3" in shown.stdout


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.gz"])
def test_a_packed_file_that_was_cut_off_is_no_small_loss(name: str, tmp_path: Path) -> None:
    """A download that broke off: nobody knows how much is missing, and 0 bytes of it were counted."""
    draw = random.Random(0)
    rows_ = [json.dumps({"text": draw.randbytes(20).hex()}) for _ in range(20_000)]
    text = "\n".join(["text", *map(str, range(40000))] if "csv" in name else rows_)
    packed = zstd(text) if name.endswith("zst") else gzip.compress(text.encode(), mtime=0)
    put(tmp_path, {name: packed[: len(packed) // 2]})
    with pytest.raises(LeftOutError, match=r"damaged or cut off"):
        survey(Source(str(tmp_path)), ByteTokenizer()).check(allowed=False)
    texts, counts = read(tmp_path)
    assert counts == {"damaged": 1}
    assert len(texts) > 1000, "what is there can be had with --allow-left-out"


@pytest.mark.parametrize("name", ["none.bin", "none.npy"])
def test_a_survey_says_what_training_will_say_of_a_token_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="is not a token file"):
        look_at(Source(str(tmp_path / name)))
    (tmp_path / "odd.bin").write_bytes(bytes(3))  # one byte a token, perhaps: the run says so
    assert look_at(Source(str(tmp_path / "odd.bin"))).inside.size == 3


def test_a_quote_in_tab_separated_text_swallows_no_row(tmp_path: Path) -> None:
    """Such files are often written without quotes. A quoted text of several lines is still one."""
    table = b'id\ttext\n1\t"To be\n2\tor not to be"\n3\tc\n4\t"two\nlines"\n'
    texts, left = read(put(tmp_path, {"a.tsv": table}))
    assert texts == ["c", "two\nlines"]
    assert left == {"broken_row": 1}


@pytest.mark.parametrize("digest", ["", "-0123456789abcdef"])
def test_files_of_a_set_that_are_missing_or_of_an_earlier_set_are_told(digest: str, tmp_path: Path) -> None:
    """As `save_to_disk` leaves them, with fewer files than before."""
    files = {f"data-{number:05}-of-00003{digest}.jsonl": ROWS for number in (0, 2)}
    tally = Tally()
    assert len(list(documents(Source(str(put(tmp_path, files))), tally))) == 6
    assert tally.reading().notes == (f"of {tmp_path}/data-*-of-00003.jsonl 2 of 3 files are there",)
    put(tmp_path, {f"data-00000-of-00002{digest}.jsonl": ROWS})
    with pytest.raises(
        DataError, match=r"has data-\*-of-00002\.jsonl and data-\*-of-00003\.jsonl, so files of an earlier"
    ):
        read(tmp_path)
