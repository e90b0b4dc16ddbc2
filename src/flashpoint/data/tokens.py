"""Prepared tokens on disk: memory-mapped uint16 with a sidecar that says what they are.

A folder holds ``train.bin`` and ``val.bin`` (little-endian uint16), ``tokenizer.json`` if one was trained, and
``meta.json``, the sidecar.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError

FORMAT_VERSION = 1
SPLITS = ("train", "val")
SIDECAR = "meta.json"


@dataclass(frozen=True)
class TokenDataset:
    """Tokens whose bytes have been verified against the sidecar."""

    path: Path
    train: NDArray[np.uint16]
    """[n] memory map, read-only."""
    val: NDArray[np.uint16]
    """[n] memory map, read-only."""
    sidecar: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self.sidecar["tokenizer"]["vocab_size"])

    @property
    def fingerprint(self) -> str:
        """:func:`fingerprint` of the two files."""
        return str(self.sidecar["fingerprint"])


def fingerprint(train_sha256: str, val_sha256: str) -> str:
    """SHA-256, hex, of the two files' SHA-256 digests (raw bytes, train first)."""
    return hashlib.sha256(bytes.fromhex(train_sha256) + bytes.fromhex(val_sha256)).hexdigest()


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_tokens(path: Path) -> TokenDataset:
    """Open a prepared folder and verify every byte of it.

    Raises:
        UserError: a file is missing, cut short, changed, or of another version.
    """
    sidecar = _read_sidecar(path)
    for split in SPLITS:
        _verify(path / f"{split}.bin", sidecar["files"][split], path)
    if sidecar["fingerprint"] != fingerprint(*(sidecar["files"][split]["sha256"] for split in SPLITS)):
        raise UserError(f"{path / SIDECAR}: its fingerprint is not that of its files; {_remedy(path)}")
    if max(sidecar["files"][split]["largest"] for split in SPLITS) >= sidecar["tokenizer"]["vocab_size"]:
        raise UserError(f"{path / SIDECAR}: token ids beyond its vocabulary; {_remedy(path)}")
    train, val = (np.memmap(path / f"{split}.bin", "<u2", mode="r") for split in SPLITS)
    return TokenDataset(path, train, val, sidecar)


def _read_sidecar(path: Path) -> dict[str, Any]:
    try:
        sidecar: dict[str, Any] = json.loads((path / SIDECAR).read_text())
        version = sidecar["format_version"]
        _ = sidecar["tokenizer"]["vocab_size"], sidecar["fingerprint"]
        _ = [sidecar["files"][split][field] for split in SPLITS for field in ("tokens", "sha256", "largest")]
    except OSError as error:
        raise UserError(f"{path / SIDECAR}: {error.strerror}; {_remedy(path)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / SIDECAR}: damaged ({type(error).__name__}: {error}); {_remedy(path)}") from error
    if version != FORMAT_VERSION:
        raise UserError(f"{path / SIDECAR}: format {version}, this version reads {FORMAT_VERSION}; {_remedy(path)}")
    return sidecar


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


def _remedy(path: Path) -> str:
    return f"delete {path} and run again to prepare it anew"
