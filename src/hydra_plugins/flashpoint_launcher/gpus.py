"""``hydra/launcher=gpus``: the runs of a sweep as processes, one on each GPU of this machine, the others in a queue.

No postponed annotations here: Hydra imports plugins without registering them, and dataclasses could not resolve them.
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class GpusLauncherConfig:
    """Settings of the launcher."""

    _target_: str = "hydra_plugins.flashpoint_launcher.gpus.GpusLauncher"
    sweep: str | None = None
    """Folder of the runs under ``runs_dir``; with the name of an earlier sweep the same command goes on with it."""
    runs_per_gpu: int = 1
    """Runs that share a GPU."""


ConfigStore.instance().store(group="hydra/launcher", name="gpus", node=GpusLauncherConfig, provider="flashpoint")


@dataclass(frozen=True)
class Job:
    """One run of the sweep."""

    name: str
    overrides: tuple[str, ...]


class GpusLauncher(Launcher):
    """Starts a process per run; one that fails is told and does not stop the others."""

    def __init__(self, sweep: str | None, runs_per_gpu: int) -> None:
        self._sweep, self._runs_per_gpu = sweep or os.environ.get("FLASHPOINT_SWEEP", "sweep"), runs_per_gpu

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Nothing: each run composes its own configuration."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all; returns when the last has ended.

        Raises:
            UserError: a run failed; its log says why.
        """
        from flashpoint.errors import UserError
        from flashpoint.progress import progress_bar

        folder = Path(_value(job_overrides, "runs_dir") or "runs") / self._sweep
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [Job(*named) for named in _named(job_overrides)]
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        failed: list[str] = []
        devices = [device for device in _devices() for _ in range(self._runs_per_gpu)]
        with progress_bar(len(jobs), "run", self._sweep) as bar:

            def work(device: str | None) -> None:
                with contextlib.suppress(queue.Empty):
                    while True:
                        job = waiting.get_nowait()
                        line = _run(job, folder, device)
                        if line is None:
                            failed.append(job.name)
                        bar.update()
                        bar.write(line or f"failed: {folder / job.name}.log", file=sys.stdout if line else sys.stderr)
                        bar.set_postfix_str(f"{len(failed)} failed")

            threads = [threading.Thread(target=work, args=(device,)) for device in devices[: len(jobs)]]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:  # the runs have it too, and end cleanly
                with contextlib.suppress(queue.Empty):
                    while True:
                        waiting.get_nowait()
                for thread in threads:
                    thread.join()
                raise
        if failed:
            raise UserError(
                f"{len(failed)} of {len(jobs)} runs failed ({', '.join(sorted(failed))}): see their logs in {folder}; "
                f"the same command with hydra.launcher.sweep={self._sweep} runs what is missing"
            )
        return [_completed(job) for job in jobs]


def _run(job: Job, folder: Path, device: str | None) -> str | None:
    """The run's verdict, from an earlier attempt if there is one; None if it failed."""
    run = folder / job.name
    command = [sys.executable, sys.argv[0]]
    if (run / "outcome.json").is_file():
        return f"done before: {run}"
    if (run / "manifest.json").is_file():
        command += [f"resume={run}"]
    else:
        command += [*(o for o in job.overrides if not o.startswith(("runs_dir=", "run_name=")))]
        command += [f"runs_dir={folder}", f"run_name={job.name}"]
        if not any(o.startswith("tracking.group=") for o in job.overrides):
            command += [f"tracking.group={folder.name}"]
    environment = dict(os.environ)
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    with (folder / f"{job.name}.log").open("ab") as log:
        result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=log, check=False)
        log.write(result.stdout)
    lines = [line for line in result.stdout.decode().splitlines() if line.startswith("outcome=")]
    return lines[-1] if result.returncode == 0 and lines else None


def _named(job_overrides: Sequence[Sequence[str]]) -> list[tuple[str, tuple[str, ...]]]:
    """Each job's name, made of the overrides in which jobs differ, and its overrides."""
    shared = set(job_overrides[0]).intersection(*map(set, job_overrides))
    named = []
    for overrides in job_overrides:
        own = [override.lstrip("+") for override in overrides if override not in shared]
        name = "_".join(own).replace("attn=", "").replace("=", "-").replace("/", "-") or "run"
        named.append(("".join(c if c.isalnum() or c in "._-" else "-" for c in name), tuple(overrides)))
    return named


def _value(job_overrides: Sequence[Sequence[str]], key: str) -> str | None:
    values = [o.split("=", 1)[1] for overrides in job_overrides for o in overrides if o.startswith(f"{key}=")]
    return values[0] if values else None


def _devices() -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES is set to for each slot; one slot without a GPU."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device for device in chosen.split(",") if device] or [None]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())] or [None]


def _completed(job: Job) -> JobReturn:
    result = JobReturn()
    result.overrides, result.status = list(job.overrides), JobStatus.COMPLETED
    result.return_value = None
    return result
