"""Tokenisers: GPT-2's encoding, or a byte-level BPE trained on the corpus."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError

TRAINING_CHARACTERS = 32_000_000
_PIECE_CHARACTERS = 1 << 16
_PIECES = 64
"""That are encoded together: a library takes more than a hundred bytes of memory for a character."""
_BYTES = 256
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that a byte-level vocabulary spells as the character of their number, and the others as one from 256 on."""
_BEFORE_A_WORD = re.compile(r"[ \n](?=\S)")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids below 65,536. End-of-text written in a document is ordinary text."""

    vocab_size: int
    end_of_text: int
    encode_batch: Callable[[Sequence[str]], Sequence[Sequence[int] | NDArray[np.uint16]]]

    @property
    def of_bytes(self) -> bool:
        """Whether each byte is a token, so that encoding is a look into a table."""
        return self.end_of_text == _BYTES

    def encode_documents(self, documents: Iterable[str]) -> Iterator[NDArray[np.uint16]]:
        """Return the token ids [n] of each document, its end-of-text token last."""
        tokens: list[NDArray[np.uint16]] = []
        pieces = (piece for document in documents for piece in _pieces(document))
        while batch := list(itertools.islice(pieces, _PIECES)):
            for ids, (_, last) in zip(self.encode_batch([piece for piece, _ in batch]), batch, strict=True):
                tokens.append(np.asarray(ids, np.uint16))
                if last:
                    yield np.concatenate([*tokens, np.array([self.end_of_text], np.uint16)])
                    tokens.clear()


def gpt2_tokenizer() -> Tokenizer:
    """Return GPT-2's byte-pair encoding, 50,257 tokens.

    Raises:
        UserError: tiktoken has not cached its two files yet and cannot fetch them.
    """
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken passes on whatever its HTTP client raises
        raise UserError(
            "data.tokenizer=gpt2: tiktoken cannot fetch GPT-2's encoding "
            f"({type(error).__name__}); connect once, set TIKTOKEN_CACHE_DIR to a folder that holds it, "
            "or take data.tokenizer=bpe"
        ) from error
    return Tokenizer(
        encoding.n_vocab,
        encoding.eot_token,
        lambda batch: encoding.encode_ordinary_batch(list(batch), num_threads=1),
    )


def train_bpe(documents: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on the first 32 million characters of the documents and write it to ``path``.

    A corpus that is too small for ``vocab_size`` tokens gives fewer. The same documents give the same bytes.

    Raises:
        OSError: ``path`` cannot be written.
    """
    from tokenizers import Tokenizer as BPETokenizer
    from tokenizers import models, trainers
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.pre_tokenizers import ByteLevel

    bpe = BPETokenizer(models.BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bpe.decoder = ByteLevelDecoder()
    # End-of-text is the last id and no special token of the library, whose encoder would look for it in text.
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    # Of bytes alone there is nothing to learn.
    first = _first_characters(documents, TRAINING_CHARACTERS) if vocab_size - 1 > _BYTES else ()
    bpe.train_from_iterator((piece for document in first for piece, _ in _pieces(document)), trainer)
    with path.open("w", encoding="utf-8") as file:  # the library's own save hides why it failed
        file.write(bpe.to_str(pretty=True))
        file.flush()
        os.fsync(file.fileno())


def load_bpe(path: Path) -> Tokenizer:
    """Return the tokeniser that :func:`train_bpe` wrote."""
    from tokenizers import Tokenizer as BPETokenizer

    bpe = BPETokenizer.from_file(str(path))
    end_of_text = bpe.get_vocab_size()
    others = sorted({*range(_BYTES)} - {*_PRINTABLE})
    spelled = {**{byte: byte for byte in _PRINTABLE}, **{byte: _BYTES + n for n, byte in enumerate(others)}}
    of_byte = np.array([bpe.token_to_id(chr(spelled[byte])) for byte in range(_BYTES)], np.uint16)
    return Tokenizer(
        end_of_text + 1,
        end_of_text,
        (lambda batch: [of_byte[np.frombuffer(piece.encode(), np.uint8)] for piece in batch])
        if end_of_text == _BYTES
        else (lambda batch: [encoding.ids for encoding in bpe.encode_batch_fast(list(batch))]),
    )


def _first_characters(documents: Iterable[str], limit: int) -> Iterator[str]:
    for document in documents:
        yield document[:limit]
        limit -= len(document)
        if limit <= 0:
            return


def _pieces(document: str) -> Iterator[tuple[str, bool]]:
    """Yield a document in pieces whose tokens, end to end, are those of the whole; and of each whether it is the last.

    Both tokenisers take text apart into words first, and no token is of two of them. A word begins at the space or the
    line end before it.
    """
    start = 0
    while cut := _BEFORE_A_WORD.search(document, start + _PIECE_CHARACTERS):
        yield document[start : cut.start()], False
        start = cut.start()
    yield document[start:], True
