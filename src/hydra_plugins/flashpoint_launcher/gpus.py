"""``hydra/launcher=gpus``: the runs of a sweep as processes, one on each GPU of this machine, the others in a queue.

Other launchers lack one of the three. Hydra's joblib launcher stops at the first failure and assigns no GPUs.
submitit's local executor starts every job at once. Neither goes on with the runs that are missing.

No postponed annotations here: Hydra imports plugins without registering them, and dataclasses could not resolve them.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from flashpoint.errors import UserError, escaped, notify
from flashpoint.lab.cli.arguments import quoted
from flashpoint.lab.cli.composition import CONFIG
from flashpoint.lab.training.interrupt import StopRequests
from flashpoint.runs.subfolders import check_name

from ._processes import run_all
from ._slots import slots_for
from ._sweep import Hardware, Job, Sweep, named, shared_overrides

_MOST_RUNS = 1000  # that share a GPU


@dataclass
class GpusLauncherConfig:
    """Settings of the launcher."""

    _target_: str = "hydra_plugins.flashpoint_launcher.gpus.GpusLauncher"
    sweep: str | None = None
    """Folder of the runs under ``runs_dir``; with the name of an earlier sweep the same command goes on with it."""
    runs_per_gpu: int = 1
    """Runs that share a GPU; without a GPU, the CPU's cores."""


ConfigStore.instance().store(group="hydra/launcher", name="gpus", node=GpusLauncherConfig, provider="flashpoint")


class GpusLauncher(Launcher):
    """Starts a process per run; one that fails is told and does not stop the others."""

    def __init__(self, sweep: str | None, runs_per_gpu: int) -> None:
        self._name, self._runs_per_gpu = sweep or os.environ.get("FLASHPOINT_SWEEP", "sweep"), runs_per_gpu
        self._runs_dir = Path("runs")
        self._own_files: tuple[str, ...] = ()
        self._hardware: Hardware | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Each run composes its own configuration; only where all are to be, and from what, is taken from here."""
        self._runs_dir = Path(config.runs_dir)
        self._own_files = _own_files(config.hydra)
        self._hardware = Hardware(hydra_context, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all; returns when the last has ended.

        Raises:
            UserError: a run failed, its log says why; or the sweep is refused, before its first run.
            SystemExit: a signal stopped it, with the signal's status.
        """
        from flashpoint.lab.cli.endings import tell_of_sweep
        from flashpoint.lab.progress_bar import progress_bar

        if not 1 <= self._runs_per_gpu <= _MOST_RUNS:
            raise UserError(f"hydra.launcher.runs_per_gpu={self._runs_per_gpu}: give 1 or more, {_MOST_RUNS} at most")
        check_name(self._name, "hydra.launcher.sweep")
        assert self._hardware is not None
        gpus = [self._hardware.of(overrides)["gpu"] for overrides in job_overrides]
        jobs, sweep = named(job_overrides, gpus), Sweep(self._runs_dir / self._name, self._own_files)
        slots = slots_for(jobs, self._runs_per_gpu)
        with (
            sweep.claimed(shared_overrides(job_overrides), jobs) as lock,
            progress_bar(len(jobs), "run", self._name) as bar,
            StopRequests() as stop,
        ):
            done = [job for job in jobs if sweep.is_done(job)]
            missing = [job for job in jobs if job not in done]
            failed, refused = list[str](), False
            for job in done:
                bar.write(escaped(f"done before: {sweep.run(job).path}"), file=sys.stdout)
            bar.update(len(done))
            for ending in run_all(missing, slots, sweep, lock, stop):
                if not ending.failed:
                    bar.write(escaped(ending.line), file=sys.stdout)
                elif stop.received:
                    bar.write(escaped(f"stopped: {ending.job.name}: {ending.line}"), file=sys.stderr)
                    continue
                else:
                    failed.append(ending.job.name)
                    refused |= ending.refused
                    bar.set_postfix_str(f"{len(failed)} failed")
                    word = "refused" if ending.refused else "failed"
                    bar.write(escaped(f"{word}: {ending.job.name}: {ending.line}"), file=sys.stderr)
                bar.update()
        goes_on = f"hydra.launcher.sweep={self._name} runs what is missing"
        if stop.received:
            notify(f"stopped; the same command with {goes_on}")
            sys.exit(128 + stop.received[0])
        tell_of_sweep(sweep.folder, [sweep.run(job).path for job in jobs])
        if failed:
            remedy = "correct the values that were refused, and then the" if refused else "the same"
            told = f"{len(failed)} of {len(jobs)} runs failed ({', '.join(sorted(failed))})"
            raise UserError(f"{told}; {remedy} command with {goes_on}")
        return [_completed(job) for job in jobs]


def _own_files(settings: DictConfig) -> tuple[str, ...]:
    """Return the arguments with which a run, too, finds the user's own YAML files.

    Args:
        settings: Hydra's.
    """
    given = [source.path for source in settings.runtime.config_sources if source.provider == "command-line"]
    arguments = [f"--config-dir={folder}" for folder in given]
    if settings.job.config_name != CONFIG:
        arguments.append(f"--config-name={settings.job.config_name}")
    if settings.searchpath:
        arguments.append(f"hydra.searchpath=[{','.join(map(quoted, settings.searchpath))}]")
    return tuple(arguments)


def _completed(job: Job) -> JobReturn:
    result = JobReturn()
    result.overrides, result.status = list(job.overrides), JobStatus.COMPLETED
    result.return_value = None
    return result
