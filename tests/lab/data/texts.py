"""The small text that the tests of the data prepare, and what they read from the result."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from flashpoint.errors import UserError
from flashpoint.lab.config import DataConfig
from flashpoint.lab.data.prepare import prepare
from flashpoint.lab.data.tokens import TokenDataset

DOCUMENTS = [
    f"document {n}: " + "the second layer explodes, " * (n % 7 + 1) + "naïve Ω <|endoftext|>" for n in range(300)
]


def write_jsonl(folder: Path) -> Path:
    """Three files of 100 documents, so that there are three shards."""
    folder.mkdir()
    for part in range(3):
        lines = [json.dumps({"text": text}) for text in DOCUMENTS[100 * part : 100 * part + 100]]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def config(path: Path, root: Path, **changes: object) -> DataConfig:
    settings = {
        "source": "text",
        "path": str(path),
        "root": str(root),
        "vocab_size": 300,
        "val_fraction": 0.1,
    }
    return DataConfig(**{**settings, "workers": 1, **changes})  # type: ignore[arg-type]


def decoded(prepared: TokenDataset) -> list[str]:
    """The documents in both files, by the library that made the tokenizer."""
    bpe = tokenizers.Tokenizer.from_file(str(prepared.path / "tokenizer.json"))
    tokens, end_of_text = np.concatenate([prepared.train, prepared.val]), bpe.get_vocab_size()
    pieces = np.split(tokens, np.flatnonzero(tokens == end_of_text) + 1)
    return [bpe.decode(piece[piece != end_of_text].tolist()) for piece in pieces][:-1]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_refused(settings: DataConfig, *fragments: str) -> None:
    with pytest.raises(UserError) as caught:
        prepare(settings)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)
