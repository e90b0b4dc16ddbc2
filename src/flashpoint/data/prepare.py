"""Prepare a corpus once: tokenise its shards in parallel, join them, and put the result in place whole.

Everything is written into a folder beside the final one, which a rename makes visible only when complete.
Finished shards carry their SHA-256, so that an interrupted preparation goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashpoint.config import DataConfig
from flashpoint.data.corpus import Shard, source_identity, source_shards
from flashpoint.data.tokenizer import Tokenizer, gpt2_tokenizer, load_bpe, train_bpe
from flashpoint.data.tokens import (
    FORMAT_VERSION,
    SIDECAR,
    SPLITS,
    TokenDataset,
    file_sha256,
    fingerprint,
    open_tokens,
)
from flashpoint.errors import UserError
from flashpoint.progress import progress_bar
from flashpoint.run_folder import write_json

_TRAINED = "tokenizer.json"


def prepare(config: DataConfig) -> TokenDataset:
    """The tokens of ``config``: opened and verified if prepared before, else prepared.

    Raises:
        UserError: the source cannot be read, the folder cannot be written, or prepared files are damaged.
    """
    request = _request(config)
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:12]
    final = Path(config.root) / f"{config.source}-{config.tokenizer}-{key}"
    if final.exists():
        return open_tokens(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / f".{final.name}.lock"):
            if not final.exists():  # another process may have prepared it while this one waited
                _prepare(config, request, final)
    except OSError as error:
        raise UserError(
            f"{error.filename or final}: {error.strerror or error}; free space or choose another data.root"
        ) from error
    return open_tokens(final)


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
    shards = source_shards(config)
    tokenizer_file = partial / _TRAINED if config.tokenizer == "bpe" else None
    if tokenizer_file and not tokenizer_file.is_file():
        draft = partial / f"{_TRAINED}.draft"
        train_bpe((text for shard in shards for text in shard.documents()), config.vocab_size, draft)
        draft.replace(tokenizer_file)
    tokenizer = _load(tokenizer_file)
    jobs = [_Job(shard, partial / f"shard-{number:06}.bin", tokenizer_file) for number, shard in enumerate(shards)]
    records = list(_tokenize(jobs, config.workers or len(os.sched_getaffinity(0)), tokenizer, final.name))
    files = _join([job.path for job in jobs], sum(record["tokens"] for record in records), config, partial)
    for leftover in partial.glob("shard-*"):
        leftover.unlink()
    sidecar = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint(*(files[split]["sha256"] for split in SPLITS)),
        "source": config.source,
        "documents": sum(record["documents"] for record in records),
        "characters": sum(record["characters"] for record in records),
        "tokenizer": {
            "name": config.tokenizer,
            "vocab_size": tokenizer.vocab_size,
            "sha256": file_sha256(tokenizer_file) if tokenizer_file else None,
        },
        "dtype": "uint16, little-endian",
        "files": files,
        "request": request,
    }
    write_json(partial / SIDECAR, sidecar)
    partial.replace(final)


def _load(trained: Path | None) -> Tokenizer:
    return load_bpe(trained) if trained else gpt2_tokenizer()


@dataclass(frozen=True)
class _Job:
    """One shard to tokenise into ``path``."""

    shard: Shard
    path: Path
    tokenizer_file: Path | None

    @property
    def record_path(self) -> Path:
        return self.path.with_suffix(".json")

    def finished(self) -> dict[str, Any] | None:
        """The record of an earlier, complete attempt at the same shard."""
        try:
            record: dict[str, Any] = json.loads(self.record_path.read_text())
            valid = record["shard"] == repr(self.shard) and record["sha256"] == file_sha256(self.path)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if valid else None

    def run(self, tokenizer: Tokenizer) -> dict[str, Any]:
        tokens, documents, characters = 0, 0, 0

        def counted() -> Iterator[str]:
            nonlocal documents, characters
            for text in self.shard.documents():
                documents, characters = documents + 1, characters + len(text)
                yield text

        with self.path.open("wb") as file:
            for ids in tokenizer.encode_documents(counted()):
                tokens += len(ids)
                file.write(ids.astype("<u2").tobytes())
        record = {
            "shard": repr(self.shard),
            "sha256": file_sha256(self.path),
            "tokens": tokens,
            "documents": documents,
            "characters": characters,
        }
        write_json(self.record_path, record)
        return record


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer_file: Path | None) -> None:
    global _worker_tokenizer  # noqa: PLW0603 - a tokeniser cannot be pickled: each process loads its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = _load(tokenizer_file)


def _run_in_worker(job: _Job) -> dict[str, Any]:
    assert _worker_tokenizer is not None
    return job.run(_worker_tokenizer)


def _tokenize(jobs: list[_Job], workers: int, tokenizer: Tokenizer, name: str) -> Iterator[dict[str, Any]]:
    """Records of all jobs, in order."""
    records = [job.finished() for job in jobs]
    missing = [job for job, record in zip(jobs, records, strict=True) if record is None]
    with contextlib.ExitStack() as stack:
        if min(workers, len(missing)) > 1:
            # spawn: a forked copy of tokenizers' or Arrow's threads can deadlock.
            pool = multiprocessing.get_context("spawn").Pool(
                min(workers, len(missing)), _start_worker, (missing[0].tokenizer_file,)
            )
            done: Iterator[dict[str, Any]] = stack.enter_context(pool).imap(_run_in_worker, missing)
        else:
            done = (job.run(tokenizer) for job in missing)
        bar = stack.enter_context(progress_bar(len(jobs), "shard", f"tokenising {name}"))
        for record in records:
            yield record if record is not None else next(done)
            bar.update()


def _join(shards: list[Path], total: int, config: DataConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """Write ``train.bin`` and ``val.bin``, the tail of the stream; tokens, digest and largest id of each."""
    val = round(total * config.val_fraction)
    if not 0 < val < total:
        raise UserError(
            f"data={config.source}: {total:,} tokens are too few to keep {config.val_fraction:.2%} of them for "
            "validation; give more text or a larger data.val_fraction"
        )
    left = {"train": total - val, "val": val}
    files: dict[str, dict[str, Any]] = {}
    stream = _Stream(shards)
    for split in SPLITS:
        digest, largest = hashlib.sha256(), 0
        with (folder / f"{split}.bin").open("wb") as file:
            for tokens in stream.take(left[split]):
                digest.update(tokens.tobytes())
                largest = max(largest, int(tokens.max()))
                file.write(tokens.tobytes())
            file.flush()
            os.fsync(file.fileno())
        files[split] = {"tokens": left[split], "sha256": digest.hexdigest(), "largest": largest}
    return files


class _Stream:
    """The shards' tokens end to end, in pieces."""

    def __init__(self, shards: list[Path]) -> None:
        self._pieces = (np.fromfile(path, "<u2") for path in shards)
        self._rest = np.empty(0, "<u2")

    def take(self, count: int) -> Iterator[np.ndarray]:
        while count:
            if not len(self._rest):
                self._rest = next(self._pieces)
            piece, self._rest = self._rest[:count], self._rest[count:]
            count -= len(piece)
            if len(piece):
                yield piece


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock, which a process that dies releases. The file stays: a waiting process has it open."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
