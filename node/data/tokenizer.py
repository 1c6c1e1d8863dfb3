"""Text to token ids and back: bytes (the default), or any Hugging Face tokenizer.

Refuses: adding special tokens by itself; guessing a tokenizer from the data; code that comes with a tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from node.data.errors import TokenizerError

BYTES_VOCABULARY = 256


class Tokenizer(Protocol):
    """A tokenizer as the rest of the program knows it."""

    @property
    def vocabulary(self) -> int:
        """Ids are below it."""

    @property
    def end(self) -> int | None:
        """The id that ends a text; None if the tokenizer has none."""

    def encode(self, text: str) -> npt.NDArray[Any]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text; bytes that are not UTF-8 become U+FFFD."""

    def fingerprint(self) -> bytes:
        """Differs between tokenizers that encode differently."""

    def huggingface(self) -> Any:
        """The same tokenizer as a `PreTrainedTokenizerBase`, to be saved beside a model."""


class ByteTokenizer:
    """The UTF-8 bytes of the text: id = byte value."""

    vocabulary = BYTES_VOCABULARY
    end = None

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def fingerprint(self) -> bytes:
        return b"bytes"

    def huggingface(self) -> Any:
        """A byte-level BPE without merges, whose ids are the byte values."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        alphabet = {sign: byte for byte, sign in enumerate(_byte_signs())}
        backend = Backend(models.BPE(vocab=alphabet, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, clean_up_tokenization_spaces=False
        )


class HuggingFaceTokenizer:
    """A tokenizer of the `transformers` library, by name or folder."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            self._inner: Any
            if Path(name).is_file():
                self._inner = PreTrainedTokenizerFast(tokenizer_file=name)  # type: ignore[no-untyped-call]
                return
            # without the last word it asks whether it may run what the tokenizer brought, and hears a "y" on stdin
            self._inner = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # the library of a tokenizer.json raises plain exceptions
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise TokenizerError(
                f"data.tokenizer = {name!r}: transformers cannot load it: {why} Give 'bytes', a folder with a tokenizer, a "
                "tokenizer.json, or a name that this machine can download. A machine without a network needs a copy of "
                "~/.cache/huggingface from one that has the tokenizer"
            ) from error

    @property
    def vocabulary(self) -> int:
        return len(self._inner)

    @property
    def end(self) -> int | None:
        return self._inner.eos_token_id  # type: ignore[no-any-return]

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        return np.asarray(self._inner.encode(text, add_special_tokens=False, verbose=False), dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), clean_up_tokenization_spaces=False))

    def fingerprint(self) -> bytes:
        backend = getattr(self._inner, "backend_tokenizer", None)
        described = backend.to_str() if backend is not None else repr(sorted(self._inner.get_vocab().items()))
        return hashlib.sha256(described.encode()).digest()

    def huggingface(self) -> Any:
        return self._inner


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a tokenizer.json, or whatever `AutoTokenizer` knows by that name or finds in that folder."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def sha256_of_tokenizer(tokenizer: Tokenizer) -> str:
    """What `data.tokenizer_sha256` of a run names."""
    return hashlib.sha256(tokenizer.fingerprint()).hexdigest()


def run_tokenizer(name: str, sha256: str | None) -> Tokenizer:
    """The run's tokenizer. Raises TokenizerError for one that encodes differently than the run's (`sha256`, if it has one)."""
    found = load_tokenizer(name)
    if sha256 is not None and (here := sha256_of_tokenizer(found)) != sha256:
        raise TokenizerError(
            f"data.tokenizer = {name!r}: the one of this machine ({here[:16]}...) encodes differently than the run's "
            f"({sha256[:16]}...): copy the run's tokenizer to this machine, or ask the operator for the revision"
        )
    return found


def _byte_signs() -> list[str]:
    """The sign of byte-level tokenizers for each byte (GPT-2's table): the byte itself if it prints, else from U+0100 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(BYTES_VOCABULARY) if byte not in printed]
    return [chr(byte) if byte in printed else chr(0x100 + others.index(byte)) for byte in range(BYTES_VOCABULARY)]
