"""Prepared tokens on disk: memory-mapped uint16 with a sidecar that says what they are.

A folder holds ``train.bin`` and ``val.bin`` (little-endian uint16), ``tokenizer.json`` if one was trained, and
``meta.json``, the sidecar, which holds their sizes and SHA-256 digests, the request and the source's description.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from flashpoint.errors import UserError
from flashpoint.files import file_sha256
from flashpoint.schema import Kind, Step, read_json

FORMAT_VERSION = 1
SPLITS = ("train", "val")
SIDECAR = "meta.json"
TRAINED_TOKENIZER = "tokenizer.json"


class _File(Kind):
    tokens: Step
    largest: Step
    """Token id."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Files(Kind):
    train: _File
    val: _File


class _Tokenizer(Kind):
    name: str
    vocab_size: Annotated[int, Field(gt=0, le=2**16)]
    sha256: str | None = None
    """Of the file of a trained one."""


class _Version(Kind):
    format_version: int


class _Sidecar(_Version):
    """What ``meta.json`` holds."""

    fingerprint: str
    files: _Files
    tokenizer: _Tokenizer


@dataclass(frozen=True)
class TokenDataset:
    """Tokens whose bytes have been verified against the sidecar."""

    path: Path
    train: NDArray[np.uint16]
    """Token ids [n], a read-only memory map."""
    val: NDArray[np.uint16]
    """Token ids [n], a read-only memory map."""
    sidecar: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary; token ids are below it."""
        return int(self.sidecar["tokenizer"]["vocab_size"])

    @property
    def fingerprint(self) -> str:
        """:func:`fingerprint` of the two files."""
        return str(self.sidecar["fingerprint"])


def fingerprint(train_sha256: str, val_sha256: str) -> str:
    """Return SHA-256, hex, of the two files' SHA-256 digests (raw bytes, train first)."""
    return hashlib.sha256(bytes.fromhex(train_sha256) + bytes.fromhex(val_sha256)).hexdigest()


def open_tokens(path: Path) -> TokenDataset:
    """Open a prepared folder and verify every byte of it.

    Raises:
        UserError: a file is missing, cut short, changed, or of another version.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no folder of prepared tokens; give the folder that holds {SIDECAR}")
    sidecar = _read_sidecar(path)
    for split in SPLITS:
        _verify(path / f"{split}.bin", sidecar["files"][split], path)
    _verify_tokenizer(path, sidecar["tokenizer"].get("sha256"))
    if sidecar["fingerprint"] != fingerprint(*(sidecar["files"][split]["sha256"] for split in SPLITS)):
        raise UserError(f"{path / SIDECAR}: its fingerprint is not that of its files; {_remedy(path)}")
    if max(sidecar["files"][split]["largest"] for split in SPLITS) >= sidecar["tokenizer"]["vocab_size"]:
        raise UserError(f"{path / SIDECAR}: token ids beyond its vocabulary; {_remedy(path)}")
    train, val = (np.memmap(path / f"{split}.bin", "<u2", mode="r") for split in SPLITS)
    return TokenDataset(path, train, val, sidecar)


def _read_sidecar(path: Path) -> dict[str, Any]:
    version = read_json(path / SIDECAR, _Version, _remedy(path))["format_version"]
    if version != FORMAT_VERSION:
        raise UserError(f"{path / SIDECAR}: format {version}, this version reads {FORMAT_VERSION}; {_remedy(path)}")
    return read_json(path / SIDECAR, _Sidecar, _remedy(path))


def _verify(file: Path, record: dict[str, Any], path: Path) -> None:
    try:
        size, digest = file.stat().st_size, file_sha256(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {_remedy(path)}") from error
    if size != 2 * record["tokens"] or not size:
        raise UserError(
            f"{file}: {size:,} bytes, the sidecar says {2 * record['tokens']:,}: cut short or empty; {_remedy(path)}"
        )
    if digest != record["sha256"]:
        raise UserError(f"{file}: its bytes differ from the sidecar's SHA-256: damaged; {_remedy(path)}")


def _verify_tokenizer(path: Path, sha256: str | None) -> None:
    if sha256 is None:
        return  # GPT-2's encoding is not stored
    file = path / TRAINED_TOKENIZER
    try:
        digest = file_sha256(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {_remedy(path)}") from error
    if digest != sha256:
        raise UserError(f"{file}: its bytes differ from the sidecar's SHA-256: damaged; {_remedy(path)}")


def _remedy(path: Path) -> str:
    return f"delete {path} and run again to prepare it anew"
