"""Prepared tokens on disk: memory-mapped uint16 with a sidecar that says what they are.

A folder holds ``train.bin`` and ``val.bin`` (little-endian uint16), ``tokenizer.json`` if one was trained, and
``meta.json``, the sidecar, which holds their sizes and SHA-256 digests, the request and the source's description.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from flashpoint.errors import UserError
from flashpoint.files import file_sha256
from flashpoint.runs import migrations
from flashpoint.schema import Kind, Step, read_record

FORMAT_VERSION = 1
SPLITS = ("train", "val")
SIDECAR = "meta.json"
TRAINED_TOKENIZER = "tokenizer.json"


class TokenFile(Kind):
    """A file of tokens."""

    tokens: Step
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    largest: Step
    """Token id."""


class TokenFiles(Kind):
    """The files of a folder of tokens."""

    train: TokenFile
    val: TokenFile


class TokenizerRecord(Kind):
    """The tokeniser of a folder of tokens."""

    name: str
    vocab_size: Annotated[int, Field(gt=0, le=2**16)]
    sha256: str | None
    """Of the file of a trained one."""


class _Version(Kind):
    format_version: int


class Sidecar(_Version):
    """What readers of tokens ask ``meta.json`` for."""

    fingerprint: str
    files: TokenFiles
    tokenizer: TokenizerRecord


@dataclass(frozen=True)
class TokenDataset:
    """Tokens whose bytes have been verified against the sidecar."""

    path: Path
    train: NDArray[np.uint16]
    """Token ids [n], a read-only memory map."""
    val: NDArray[np.uint16]
    """Token ids [n], a read-only memory map."""
    sidecar: Sidecar

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary; token ids are below it."""
        return self.sidecar.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """:func:`fingerprint` of the two files."""
        return self.sidecar.fingerprint

    def description(self) -> dict[str, Any]:
        """Return all that the sidecar says, as it stands, for a run's manifest."""
        values: dict[str, Any] = json.loads((self.path / SIDECAR).read_bytes())
        return values


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
        _verify(path / f"{split}.bin", getattr(sidecar.files, split), path)
    _verify_tokenizer(path, sidecar.tokenizer.sha256)
    files = (sidecar.files.train, sidecar.files.val)
    if sidecar.fingerprint != fingerprint(*(file.sha256 for file in files)):
        raise UserError(f"{path / SIDECAR}: its fingerprint is not that of its files; {_remedy(path)}")
    if max(file.largest for file in files) >= sidecar.tokenizer.vocab_size:
        raise UserError(f"{path / SIDECAR}: token ids beyond its vocabulary; {_remedy(path)}")
    train, val = (np.memmap(path / f"{split}.bin", "<u2", mode="r") for split in SPLITS)
    return TokenDataset(path, train, val, sidecar)


def _read_sidecar(path: Path) -> Sidecar:
    version = read_record(path / SIDECAR, _Version, remedy=_remedy(path)).format_version
    if version != FORMAT_VERSION:
        raise UserError(f"{path / SIDECAR}: format {version}, this version reads {FORMAT_VERSION}; {_remedy(path)}")
    return read_record(path / SIDECAR, Sidecar, migrations.sidecar, _remedy(path))


def _verify(file: Path, record: TokenFile, path: Path) -> None:
    try:
        size, digest = file.stat().st_size, file_sha256(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {_remedy(path)}") from error
    if size != 2 * record.tokens or not size:
        raise UserError(
            f"{file}: {size:,} bytes, the sidecar says {2 * record.tokens:,}: cut short or empty; {_remedy(path)}"
        )
    if digest != record.sha256:
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
