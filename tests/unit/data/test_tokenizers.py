"""What tokenizers do to text: control tokens, ids with holes, unknown tokens, dropped characters, truncation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from node.data.build import build
from node.data.corpus import Corpus, open_corpus
from node.data.shard_cache import Folder, Shards, manifest_of
from node.data.shards import ShardedSamples, parse, sha256_of
from node.data.sources import Source
from node.data.tally import LeftOutError
from node.data.tokenizer import HuggingFaceTokenizer, load_tokenizer, narrowed, sha256_of_tokenizer
from protos.errors import DataError, TokenizerError

CONTROL = ["<s>", "<|end|>", "[PAD]"]
TRAP = "before <s> and <|end|> and [PAD] <S> after"


def byte_level(place: int = 300) -> Tokenizer:
    """A byte-level BPE with a control token, and an ordinary added token with the id `place`."""
    table = {sign: at for at, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=table | {"<|end|>": 256, "<|tool|>": place}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<s>", special=True)])
    made.add_tokens([AddedToken("<|tool|>")])
    return made


def unigram() -> Tokenizer:
    """Its own words have the control tokens, as those of SentencePiece have, with the best score."""
    words = [("<unk>", 0.0), *((word, 0.0) for word in CONTROL), ("\u2581", -2.0)]
    words += [(sign, -3.0) for sign in "abcdefghijklmnopqrstuvwxyz<>|[]SPAD/"]
    made = Tokenizer(models.Unigram(words, unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(CONTROL)
    return made


def word_level() -> Tokenizer:
    words = ["[UNK]", *CONTROL, "before", "and", "after", "\n"]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([*CONTROL, "[UNK]"])
    return made


def with_bos() -> Tokenizer:
    made = byte_level()
    ids = [(name, made.token_to_id(name)) for name in ("<s>", "<|end|>")]
    made.post_processor = processors.TemplateProcessing("<s> $A <|end|>", None, ids)
    return made


def saved(made: Tokenizer, folder: Path, **names: str) -> str:
    """A tokenizer.json, or with names of control tokens a folder as transformers saves it."""
    if not names:
        made.save(str(folder / "tokenizer.json"))
        return str(folder / "tokenizer.json")
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


@pytest.mark.parametrize("make", [byte_level, unigram, word_level, with_bos])
@pytest.mark.parametrize("names", [{}, {"eos_token": "<|end|>", "bos_token": "<s>"}], ids=["json", "folder"])
def test_text_never_becomes_control_tokens(make: Any, names: dict[str, str], tmp_path: Path) -> None:
    found = HuggingFaceTokenizer(saved(make(), tmp_path, **names))
    control = set(found.control.values())
    assert len(control) >= 2
    for text in (TRAP, "<s>", "<s><s>", "<|end|>\n", "a<s"):
        assert not control & set(found.encode(text).tolist()), text
    if make is not word_level:
        assert found.decode(found.encode(TRAP).tolist()).replace(" ", "") == TRAP.replace(" ", "")
    (tmp_path / "a.txt").write_text(TRAP + "\n" + "and before after " * 900)
    source = saved(make(), tmp_path, **names)
    built = build(Source(str(tmp_path / "a.txt")), load_tokenizer(source), "it", tmp_path / "out", allow_left_out=True)
    dtype = manifest_of(tmp_path / "out")[1].dtype
    tokens = np.fromfile(tmp_path / "out" / "000000.bin", dtype=dtype)
    assert np.isin(tokens, list(control)).sum() == (1 if found.end is not None else 0), "only the end of the text"
    count = 3 if make is not byte_level and make is not with_bos else 2
    note = f"strings in the text that look like control tokens of the tokenizer: {count}; they were encoded as ordinary text"
    assert note in built.reading.notes
    corpus = open_corpus(tmp_path / "a.txt", tmp_path / "cache", tokenizer=source, allow_left_out=True)
    assert not np.isin(corpus.tokens[:], list(control)).any()
    assert note in corpus.reading.notes


@pytest.mark.parametrize(("place", "dtype"), [(300, "uint16"), (70_000, "uint32")])
def test_a_vocabulary_is_the_highest_id_and_one(place: int, dtype: str, tmp_path: Path) -> None:
    name, path = saved(byte_level(place), tmp_path), tmp_path / "a.txt"
    path.write_text("a line with a marker <|tool|> and more\n" * 200)
    found = load_tokenizer(name)
    assert found.vocabulary == place + 1
    build(Source(str(path)), found, name, tmp_path / "out")
    _, manifest = manifest_of(tmp_path / "out")
    assert (manifest.vocabulary, manifest.dtype) == (place + 1, dtype)
    samples = ShardedSamples(manifest, Folder(Shards(manifest, tmp_path / "out", found.vocabulary)), 16, 0)
    assert (samples.batch(0, samples.windows) == place).sum() > 100
    tokens = open_corpus(path, tmp_path / "cache", tokenizer=name).tokens
    assert (np.asarray(tokens[:]) == place).sum() == 200


def test_an_id_beyond_the_vocabulary_is_never_narrowed() -> None:
    ids = np.array([1, 70_000])
    with pytest.raises(TokenizerError, match="gave the id 70000, and its vocabulary ends at 299"):
        narrowed(ids, 300, np.dtype("<u2"))
    assert narrowed(ids, 70_001, np.dtype("<u4")).tolist() == [1, 70_000]


def test_truncation_and_padding_of_a_tokenizer_cut_and_add_nothing(tmp_path: Path) -> None:
    made = byte_level()
    plain = load_tokenizer(saved(made, tmp_path))
    made.enable_truncation(8)
    made.enable_padding(length=5000)
    name = saved(made, tmp_path)
    found, text = load_tokenizer(name), "a long line " * 50
    before = sha256_of_tokenizer(found)
    assert found.encode(text).tolist() == plain.encode(text).tolist()
    assert sha256_of_tokenizer(found) == before, "peers compare it before they encode, and a build names it afterwards"
    (tmp_path / "a.txt").write_text(text)
    build(Source(str(tmp_path / "a.txt")), found, name, tmp_path / "out")
    _, manifest = manifest_of(tmp_path / "out")
    assert manifest.tokens == len(text) + 1
    assert manifest.tokenizer_sha256 == sha256_of(load_tokenizer(name).fingerprint())


def losing() -> Tokenizer:
    """A BPE that has no unknown token, so what it does not know is gone; its normaliser makes text lower case."""
    made = Tokenizer(models.BPE(vocab={sign: at for at, sign in enumerate("abc \n")}, merges=[]))
    made.normalizer = normalizers.Lowercase()
    return made


def opened(made: Tokenizer, text: str, folder: Path, *, allowed: bool) -> Corpus:
    (folder / "a.txt").write_text(text)
    name = saved(made, folder)
    return open_corpus(folder / "a.txt", folder / "cache", tokenizer=name, allow_left_out=allowed)


def test_what_a_tokenizer_drops_or_changes_is_counted(tmp_path: Path) -> None:
    text = "abc \u00e9 A zz\n" * 5
    for time in ("first", "from the cache"):
        reading = opened(losing(), text, tmp_path, allowed=True).reading
        assert reading.counts() == {"dropped": 15}, time
        assert reading.share == pytest.approx(20 / len(text.encode()))
        assert "characters that the tokenizer's normaliser changed (lower case, accents): 5" in reading.notes
        with pytest.raises(LeftOutError, match=r"15 characters that the tokenizer dropped.*U\+00E9|U\+007A"):
            opened(losing(), text, tmp_path, allowed=False)
    fine = opened(losing(), "abc " * 500 + "z", tmp_path, allowed=False).reading
    assert fine.counts() == {"dropped": 1}


def test_unknown_tokens_are_counted(tmp_path: Path) -> None:
    for _ in range(2):
        reading = opened(word_level(), "before after words\nand here\n", tmp_path, allowed=True).reading
        assert reading.counts() == {"unknown_token": 2}
        assert any("line breaks and tabs that the tokenizer dropped" in note for note in reading.notes)
    with pytest.raises(LeftOutError, match="2 parts that the tokenizer turned into its unknown token"):
        opened(word_level(), "before after words\nand here\n", tmp_path, allowed=False)


def test_a_manifest_with_and_without_what_was_left_out(tmp_path: Path) -> None:
    """One of before is as it was, byte for byte: its hash is the name of a set."""
    old = (
        b'{\n "format": 1,\n "tokenizer": "bytes",\n "tokenizer_sha256": "'
        + b"0" * 64
        + b'",\n "vocabulary": 256,\n "dtype": '
        b'"uint8",\n "shards": [\n  {\n   "name": "000000.bin",\n   "tokens": 9,\n   "sha256": "'
        + b"1"
        * 64
        + b'"\n  }\n ],\n '
        b'"source": "a book"\n}\n'
    )
    assert parse(old, "it").encode() == old
    new = old.replace(b'"a book"\n', b'"a book",\n "left_out": {\n  "not_utf8": 3\n }\n')
    assert parse(new, "it").left_out == (("not_utf8", 3),)
    assert parse(new, "it").encode() == new


def replacing() -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.Replace("hello", "HOLA")
    return made


def swallowing() -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken("hello", lstrip=True, rstrip=True)])
    return made


def stripping() -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.Strip()
    return made


def with_prefix() -> Tokenizer:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (replacing, "'my hello world ' becomes 'my HOLA world '"),
        (swallowing, "'my hello world ' becomes 'myhelloworld '"),
        (stripping, "'ello world ' becomes 'ello world'"),
        (with_prefix, ""),
        (byte_level, ""),
    ],
)
def test_text_that_does_not_come_back_is_told(make: Any, told: str, tmp_path: Path) -> None:
    """No single character shows it."""
    for _ in range(2):
        notes = opened(make(), "my hello world ", tmp_path, allowed=False).reading.notes
        assert list(notes) == ([f"the tokenizer does not give all text back: {told}"] if told else [])


def test_a_tokenizer_that_draws_at_random_is_refused(tmp_path: Path) -> None:
    made = byte_level()
    made.model.dropout = 0.5
    with pytest.raises(TokenizerError, match=r"it has dropout 0\.5, so it encodes one text otherwise each time"):
        load_tokenizer(saved(made, tmp_path))


def test_a_text_that_the_tokenizer_cannot_encode_is_named(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(TokenizerError, match=r"cannot encode 'other': WordLevel error: .*; use a tokenizer that knows"):
        load_tokenizer(saved(made, tmp_path)).encode("other")


def test_ids_that_a_writer_cut_off_are_refused(tmp_path: Path) -> None:
    """As `arr[:] = ids` does in a memmap of uint16: 70,000 became 4,464, which is a token, too."""
    name = saved(byte_level(70_000), tmp_path)
    text = "a line with a marker <|tool|> and more\n" * 200
    ids = load_tokenizer(name).encode(text)
    np.save(tmp_path / "t.npy", ids.astype(np.uint16))
    with pytest.raises(DataError, match=r"are uint16, which has no room for .* ids .* up to 70000: .* uint32"):
        open_corpus(tmp_path / "t.npy", tmp_path, tokenizer=name)
    np.save(tmp_path / "t.npy", ids.astype(np.uint32))
    found = open_corpus(tmp_path / "t.npy", tmp_path, tokenizer=name)
    assert (found.tokenizer.decode(found.tokens[:].tolist()), found.reading.notes) == (text, ())


def test_control_tokens_beyond_a_type_are_in_no_text(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    made = byte_level(255)
    made.add_special_tokens([AddedToken(f"<|{number}|>", special=True) for number in range(0x10000)])
    name = saved(made, tmp_path / "control")
    assert load_tokenizer(name).vocabulary > 1 << 16
    np.save(tmp_path / "t.npy", load_tokenizer(name).encode("a line\n" * 90).astype(np.uint16))
    assert open_corpus(tmp_path / "t.npy", tmp_path, tokenizer=name).reading.notes == ()


def trained(text: str, folder: Path) -> str:
    made = byte_level(255)
    made.train_from_iterator(
        [text],
        trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    folder.mkdir()
    return saved(made, folder)


def test_tokens_of_another_tokenizer_are_told(tmp_path: Path) -> None:
    """Its ids are within the vocabulary, and the export would have a tokenizer that none of them came from."""
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    one, other = (trained(it, tmp_path / name) for it, name in ((text, "one"), (text.upper(), "other")))
    np.save(tmp_path / "t.npy", load_tokenizer(one).encode(text).astype(np.uint16))
    letters = {sign: at for at, sign in enumerate(sorted(set(text)))}  # as nanoGPT's Shakespeare by letters
    np.save(tmp_path / "letters.npy", np.array([letters[sign] for sign in text], dtype=np.uint16))
    for file, tokenizer, told in (("t", one, 0), ("t", other, 1), ("letters", "bytes", 1), ("letters", one, 1)):
        notes = open_corpus(tmp_path / f"{file}.npy", tmp_path, tokenizer=tokenizer).reading.notes
        assert len(notes) == told, (file, tokenizer, notes)
        assert all("these may be another tokenizer's tokens" in note for note in notes)
    np.save(tmp_path / "plain.npy", np.frombuffer(text.encode(), dtype=np.uint8))
    assert open_corpus(tmp_path / "plain.npy", tmp_path).reading.notes == ()
