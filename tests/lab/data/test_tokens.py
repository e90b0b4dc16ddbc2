"""Prepared tokens are opened only if every byte is what the sidecar says."""

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashpoint.errors import UserError
from flashpoint.lab.data.prepare import prepare
from flashpoint.lab.data.tokens import open_tokens
from tests.lab.data.texts import assert_refused, config, write_jsonl


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "text")


def test_the_fingerprint_is_the_documented_one(jsonl: Path, tmp_path: Path) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    digests = [hashlib.sha256((dataset.path / f"{split}.bin").read_bytes()).digest() for split in ("train", "val")]
    assert dataset.fingerprint == hashlib.sha256(b"".join(digests)).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "odd", "flipped"])
def test_a_damaged_token_file_is_refused_in_one_line(jsonl: Path, tmp_path: Path, split: str, damage: str) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    file = dataset.path / f"{split}.bin"
    good = file.read_bytes()
    file.unlink()
    changed = {
        "empty": b"",
        "short": good[:-2],
        "odd": good[:-1],
        "flipped": good[:100] + bytes([good[100] ^ 1]) + good[101:],
    }
    if damage != "missing":
        file.write_bytes(changed[damage])
    assert_refused(config(jsonl, tmp_path / "data"), f"{split}.bin", f"delete {dataset.path}")


@pytest.mark.parametrize("damage", ["missing", "{", "{}", "[1]", "\xff", "9" * 5000, "[" * 100_000])
def test_a_damaged_sidecar_is_refused_in_one_line(jsonl: Path, tmp_path: Path, damage: str) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    sidecar = dataset.path / "meta.json"
    sidecar.unlink()
    if damage != "missing":
        sidecar.write_bytes(damage.encode("latin-1"))
    assert_refused(config(jsonl, tmp_path / "data"), "meta.json", "delete")


def test_every_change_of_the_sidecar_that_matters_is_refused(jsonl: Path, tmp_path: Path) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    sidecar = json.loads((dataset.path / "meta.json").read_text())
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda it: it.update(fingerprint="0" * 64),
        lambda it: it.update(fingerprint=None),
        lambda it: it["tokenizer"].update(vocab_size=5),
        lambda it: it["tokenizer"].update(vocab_size="5"),
        lambda it: it["files"]["train"].update(tokens="5"),
        lambda it: it["files"]["val"].update(tokens=5),
        lambda it: it["files"]["val"].update(largest=None),
        lambda it: it["files"]["val"].update(sha256=5),
        lambda it: it["files"].pop("val"),
    ]
    for change in changes:
        changed = copy.deepcopy(sidecar)
        change(changed)
        (dataset.path / "meta.json").write_text(json.dumps(changed))
        assert_refused(config(jsonl, tmp_path / "data"), f"delete {dataset.path}")


def test_another_format_is_named_whatever_else_it_holds(jsonl: Path, tmp_path: Path) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    (dataset.path / "meta.json").write_text('{"format_version": 99}')
    assert_refused(config(jsonl, tmp_path / "data"), "meta.json", "format 99", "delete")


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_tokenizer_is_refused(jsonl: Path, tmp_path: Path, damage: str) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    file = dataset.path / "tokenizer.json"
    file.unlink() if damage == "missing" else file.write_text(file.read_text() + "\n")
    assert_refused(config(jsonl, tmp_path / "data"), "tokenizer.json", "delete")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none: no folder of prepared tokens"):
        open_tokens(tmp_path / "none")


def test_the_sidecar_describes_the_files(jsonl: Path, tmp_path: Path) -> None:
    dataset = prepare(config(jsonl, tmp_path / "data"))
    for split, tokens in (("train", dataset.train), ("val", dataset.val)):
        content = (dataset.path / f"{split}.bin").read_bytes()
        described = {"tokens": len(content) // 2, "sha256": hashlib.sha256(content).hexdigest()}
        little_endian = np.array([low + 256 * high for low, high in zip(content[::2], content[1::2], strict=True)])
        assert getattr(dataset.sidecar.files, split).model_dump() == {**described, "largest": int(little_endian.max())}
        assert np.array_equal(tokens, little_endian)
    texts = [json.loads(line)["text"] for path in sorted(jsonl.iterdir()) for line in path.read_text().splitlines()]
    assert dataset.description()["documents"] == len(texts)
    assert dataset.description()["characters"] == sum(map(len, texts))
    assert dataset.description()["bytes"] == sum(len(text.encode()) for text in texts)
    tokenizer = (dataset.path / "tokenizer.json").read_bytes()
    assert dataset.sidecar.tokenizer.sha256 == hashlib.sha256(tokenizer).hexdigest()
