"""What a sweep is on disk: its runs by name, and, hidden, their logs and the settings that all of them share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from flashpoint.errors import UserError
from flashpoint.files import write_json
from flashpoint.lab.cli.arguments import quoted
from flashpoint.lab.config import sets_hardware
from flashpoint.lab.training.admission import check_place
from flashpoint.runs import migrations
from flashpoint.runs.folder import RunFolder, runs_in, sweep_lock
from flashpoint.schema import Kind, read_record

_LONGEST_NAME = 120
_CODE = "probes.attention"
"""The key that may name code."""


class Hardware:
    """Reads the group ``hardware`` of each run, which may be an axis of the sweep."""

    def __init__(self, hydra_context: HydraContext, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config
        self._composed = lru_cache(self._compose)  # few kinds, many runs

    def of(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the values of :class:`flashpoint.lab.config.HardwareConfig` for a run with these overrides."""
        return self._composed(tuple(filter(sets_hardware, overrides)))

    def _compose(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        config = self._config
        if overrides:
            config = self._context.config_loader.load_sweep_config(config, list(overrides))
        values = OmegaConf.to_container(config.hardware, resolve=True)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str
    """Name of the run's folder: the overrides in which the sweep's runs differ."""
    overrides: tuple[str, ...]
    gpu: str | None = None
    """Words of the name of the GPU that it is to run on; None takes any."""

    def get(self, key: str) -> str | None:
        """Return the value of ``key`` among the overrides, None without one."""
        return next((o.split("=", 1)[1] for o in self.overrides if _key(o) == key), None)


def resuming(run: RunFolder, overrides: Sequence[str]) -> list[str]:
    """Return the command line that goes on with a run, with what of its overrides is a consent: to code and uploads."""
    kept = [one for one in overrides if _key(one).split(".")[0] in ("trust", "tracking") or _key(one) == _CODE]
    return [f"resume={quoted(run.path)}", *kept]


def shared_overrides(job_overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return the overrides that all runs have."""
    others = [set(overrides) for overrides in job_overrides]
    return [o for o in job_overrides[0] if all(o in other for other in others)]


def differing_overrides(job_overrides: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return, for each run, the overrides that not all runs have.

    Raises:
        UserError: two are the same, or several have one name.
    """
    shared = set(shared_overrides(job_overrides))
    names = Counter(o.split("=", 1)[1] for overrides in job_overrides for o in overrides if _key(o) == "run_name")
    for name, runs in names.items():
        if runs > 1 and "${" not in name:
            raise UserError(f"run_name={name}: {runs} runs of one sweep cannot have one name; leave it out")
    differing = [[o for o in overrides if o not in shared] for overrides in job_overrides]
    counts = Counter(map(tuple, differing))
    for overrides, whole in zip(differing, job_overrides, strict=True):
        if counts[tuple(overrides)] > 1:
            raise UserError(f"{' '.join(overrides or whole)}: more than once in this sweep; give each value once")
    return differing


def named(job_overrides: Sequence[Sequence[str]], gpus: Sequence[str | None]) -> list[Job]:
    """Return the runs under names that tell them apart, the same ones whenever the same command is given.

    Args:
        gpus: the one that each run wants.

    Raises:
        UserError: two runs are the same.
    """
    differing = differing_overrides(job_overrides)
    names = [_name(overrides) for overrides in differing]
    counts = Counter(names)
    jobs = []
    for name, overrides, whole, gpu in zip(names, differing, job_overrides, gpus, strict=True):
        if counts[name] > 1 or len(name) > _LONGEST_NAME:
            digest = hashlib.sha256(" ".join(overrides).encode()).hexdigest()
            jobs.append(Job(f"{name[:_LONGEST_NAME]}-{digest[:8]}", tuple(whole), gpu))
        else:
            jobs.append(Job(name, tuple(whole), gpu))
    return jobs


class _SweepFile(Kind):
    """What ``.sweep.json`` holds."""

    shared: tuple[str, ...]
    """The settings that all runs of the sweep have."""
    runs: dict[str, tuple[str, ...]]
    """Those of each run besides, by its name."""


@dataclass(frozen=True)
class Sweep:
    """The folder of a sweep."""

    folder: Path
    own_files: tuple[str, ...] = ()
    """Arguments with which a new run, too, finds the user's own YAML files."""

    @contextlib.contextmanager
    def claimed(self, shared: Sequence[str], jobs: Sequence[Job]) -> Iterator[int]:
        """Be the only launcher of the sweep, in the block. Its folder is made, or seen to be of the same settings.

        Args:
            shared: the settings that all of the jobs have.

        Yields the lock. Runs have it too: it is taken until the last of them has ended, also where their launcher was
        killed.

        Raises:
            UserError: another launcher is at work, the settings are others, or the folder cannot be written.
        """
        self._make()
        with sweep_lock(self.folder).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{self.folder}: another launcher, or a run of one that was killed, is at work on this sweep; wait "
                    "until it ends, or choose another hydra.launcher.sweep"
                ) from error
            except OSError as error:
                raise UserError(f"{file.name}: {error.strerror}; choose a runs_dir that has locks") from error
            self._settle(shared, jobs)
            yield file.fileno()

    def _make(self) -> None:
        """Make the folder and that of the logs; refuse a folder of something else."""
        check_place(str(self.folder.parent), "runs_dir")
        if (
            self.folder.exists()
            and not self._file.exists()
            and any(path != self._logs for path in self.folder.iterdir())
        ):
            raise UserError(f"hydra.launcher.sweep={self.folder.name}: {self.folder} is no sweep; choose another name")
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def _settle(self, shared: Sequence[str], jobs: Sequence[Job]) -> None:
        """Keep the settings of the runs, or see that those that are there were made with them."""
        settings = tuple(sorted(o for o in shared if _key(o) not in ("runs_dir", "run_name", "trust")))
        own = {job.name: tuple(sorted(set(job.overrides) - set(shared))) for job in jobs}
        remedy = "delete it, and the sweep takes the settings of this command"
        begun = bool(runs_in(self.folder))  # where all were refused, the settings are to be corrected
        before = _SweepFile(shared=settings, runs={})
        if begun:
            before = read_record(self._file, _SweepFile, migrations.sweep, remedy)
        runs = before.runs
        if before.shared != settings:
            raise self._another(self.folder, before.shared, settings)
        for name, overrides in own.items():  # a name lacks some characters of the settings that it is made of
            if runs.get(name, overrides) != overrides and (self.folder / name).exists():
                raise self._another(self.folder / name, runs[name], overrides)
        try:
            write_json(self._file, {"shared": settings, "runs": {**runs, **own}})
        except OSError as error:
            raise self._unwritable(error) from error

    @staticmethod
    def _another(folder: Path, before: Sequence[str], settings: Sequence[str]) -> UserError:
        then, now = (" ".join(sorted(set(one) - set(other))) for one, other in ((before, settings), (settings, before)))
        return UserError(
            f"{folder}: begun with other settings (then: {then or 'none'}; now: {now or 'none'}); "
            "give all runs the same, or choose another hydra.launcher.sweep"
        )

    def log(self, job: Job) -> Path:
        """Return what the run's process printed, of all attempts."""
        return self._logs / f"{job.name}.log"

    def run(self, job: Job) -> RunFolder:
        return RunFolder(self.folder / job.name)

    def is_done(self, job: Job) -> bool:
        """Whether the run has its verdict. One that was stopped goes on, and one whose verdict is damaged says so."""
        try:
            return self.run(job).read_outcome().interrupted is None
        except UserError:
            return False

    def arguments(self, job: Job, settings: Mapping[str, str]) -> list[str]:
        """Return the run's command line, which goes on with an earlier attempt.

        Args:
            settings: for a new run, where the sweep does not give them itself.
        """
        run = self.run(job)
        if run.config.is_file():
            return resuming(run, job.overrides)
        settings = {"tracking.group": quoted(self.folder.name), **settings}
        return [
            *self.own_files,
            *(o for o in job.overrides if _key(o) not in ("runs_dir", "run_name")),
            *(f"{key}={value}" for key, value in settings.items() if job.get(key) is None),
            f"runs_dir={quoted(self.folder)}",
            f"run_name={quoted(job.name)}",
        ]

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"{self.folder}: {error.strerror}; free space or choose another runs_dir")

    @property
    def _file(self) -> Path:
        return self.folder / ".sweep.json"

    @property
    def _logs(self) -> Path:
        return sweep_lock(self.folder).parent


def _key(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0]


def _name(overrides: Sequence[str]) -> str:
    name = "_".join(o.lstrip("+") for o in overrides).replace("attn=", "")
    return "".join(c if (c.isascii() and c.isalnum()) or c in "._+-" else "-" for c in name).lstrip(".-") or "run"
