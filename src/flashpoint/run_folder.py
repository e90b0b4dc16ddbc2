"""The only place that knows file names inside a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    """A run on disk. Training writes it; everything after reads it."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, JSON."""
        return self.path / "config.json"

    @property
    def manifest(self) -> Path:
        """Environment, data and initial weights, JSON."""
        return self.path / "manifest.json"

    @property
    def tape(self) -> Path:
        """The batch order (:mod:`flashpoint.data.tape`)."""
        return self.path / "tape.bin"

    @property
    def chain(self) -> Path:
        """What every step computed (:mod:`flashpoint.training.chain`)."""
        return self.path / "chain.bin"

    @property
    def metrics(self) -> Path:
        """One JSON object per line, each with its ``step``; of a thinned run gzipped, with ``.gz`` at its end."""
        packed = self.packed_metrics
        return packed if packed.exists() else self.path / "metrics.jsonl"

    @property
    def packed_metrics(self) -> Path:
        """Where ``scripts/thin_run.py`` writes the metrics of a run that is kept as evidence."""
        return self.path / "metrics.jsonl.gz"

    @property
    def checkpoints(self) -> Path:
        """Folder of the flight recorder (:mod:`flashpoint.training.checkpoints`)."""
        return self.path / "checkpoints"

    @property
    def outcome(self) -> Path:
        """The verdict, JSON; absent while the run goes on or if it was killed."""
        return self.path / "outcome.json"

    @property
    def figure(self) -> Path:
        """Loss, gradient norm and W_Q norms over steps, PNG."""
        return self.path / "curves.png"

    @property
    def begun(self) -> bool:
        """Whether a step may have run: the tape is written before the first one, the metrics after it."""
        return any(record.is_file() and record.stat().st_size > 0 for record in (self.tape, self.metrics))

    @classmethod
    def create(cls, runs_dir: str | Path, name: str) -> RunFolder:
        """Make a new folder; an existing one is never written to, the name gets a number instead.

        Raises:
            UserError: the folder cannot be made.
        """
        for attempt in range(1, 1000):
            path = Path(runs_dir) / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                if not Path(runs_dir).is_dir():
                    raise UserError(f"runs_dir={runs_dir} is a file: choose another runs_dir") from None
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}; choose a writable runs_dir") from error
        raise UserError(f"runs_dir={runs_dir} holds 999 runs named {name}: choose another run_name")

    @classmethod
    def open(cls, run: str | Path, runs_dir: str | Path = "runs") -> RunFolder:
        """An existing run, by path or by its name under ``runs_dir``.

        Raises:
            UserError: no run is there.
        """
        for path in (Path(run), Path(runs_dir) / run):
            if (path / "config.json").is_file():
                return cls(path)
        raise UserError(f"{run}: no run there (no config.json); give a run's folder, e.g. {runs_dir}/NAME")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that writes the run, in the block; one that dies gives it up.

        Raises:
            UserError: another process writes the run, or the folder takes no lock.
        """
        with contextlib.ExitStack() as held:
            try:
                file = held.enter_context((self.path / ".lock").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.path}: another process runs it; wait until it ends, or stop it first") from None
            except OSError as error:
                raise UserError(f"{self.path}: {error.strerror}; choose a writable runs_dir that has locks") from error
            yield


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read what :func:`write_json` wrote.

    Raises:
        UserError: the file is missing or is no JSON.
    """
    try:
        value: dict[str, Any] = json.loads(path.read_text())
        return value
    except FileNotFoundError:
        raise UserError(f"{path}: missing; the run has not ended, resume={path.parent} goes on with it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: unreadable ({error}); restore the file or choose another run") from error
