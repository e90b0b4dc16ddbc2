"""``hydra/launcher=slurm``: Hydra's submitit launcher, with an array of jobs for each hardware of the sweep.

No postponed annotations here, as in ``gpus.py``.
"""

import copy
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from flashpoint.errors import UserError, notify
from flashpoint.lab.cli.arguments import quoted
from flashpoint.runs.folder import RunFolder

from ._sweep import Hardware, Job, named, resuming

if find_spec("hydra_plugins.hydra_submitit_launcher"):  # else Hydra would tell of it in every sweep
    from hydra_plugins.hydra_submitit_launcher import submitit_launcher
    from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

    @dataclass
    class SlurmLauncherConfig(SlurmQueueConf):
        """Settings of the launcher: submitit's, and one more."""

        _target_: str = "hydra_plugins.flashpoint_launcher.slurm.SlurmLauncher"
        dry_run: bool = False
        """Print the scripts and submit none."""

    ConfigStore.instance().store(
        group="hydra/launcher", name="flashpoint_slurm", node=SlurmLauncherConfig, provider="flashpoint"
    )

    class SlurmLauncher(submitit_launcher.SlurmLauncher):
        """One array asks for one kind of GPU: a sweep over several kinds is an array of each, side by side."""

        def __init__(self, *, dry_run: bool = False, **params: Any) -> None:
            super().__init__(**params)
            self._dry_run = dry_run
            self._names: dict[tuple[str, ...], str] = {}

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            """Submit all and wait for them; or, in a dry run, print the script of each array.

            Raises:
                UserError: two runs are the same.
                Exception: what the first failed job raised.
            """
            began = os.environ["FLASHPOINT_SWEEP"].removeprefix("sweep_")
            jobs = named(job_overrides, [None] * len(job_overrides))
            self._names = {job.overrides: f"{began}_{job.name}" for job in jobs}
            hardware = Hardware(self.hydra_context, self.config)
            arrays: dict[tuple[tuple[str, Any], ...], list[int]] = {}
            for number, overrides in enumerate(job_overrides):
                arrays.setdefault(_asked(hardware.of(overrides)), []).append(number)
            if self._dry_run:
                for asked, numbers in arrays.items():
                    notify(f"not submitted: {'; '.join(' '.join(job_overrides[number]) for number in numbers)}")
                    print(self._asking(asked)._script(len(numbers)))
                return []
            returns: dict[int, JobReturn] = {}
            errors: list[Exception] = []

            def wait_for(asked: tuple[tuple[str, Any], ...], numbers: list[int]) -> None:
                try:
                    found = self._asking(asked)._submit([job_overrides[number] for number in numbers], initial_job_idx)
                except Exception as error:
                    errors.append(error)
                else:
                    returns.update(zip(numbers, found, strict=True))

            # Daemons: Ctrl-C ends the waiting, as it does for a single array.
            waiting = [threading.Thread(target=wait_for, args=array, daemon=True) for array in arrays.items()]
            for thread in waiting:
                thread.start()
            for thread in waiting:
                thread.join()
            if errors:
                raise errors[0]
            return [returns[number] for number in range(len(job_overrides))]

        def __call__(self, sweep_overrides: Sequence[str], *given: Any) -> JobReturn:
            """Run a job. One that SLURM has put back into its queue, and begins anew, goes on with its run."""
            from submitit import JobEnvironment

            overrides, job = list(sweep_overrides), Job("", tuple(sweep_overrides))
            if job.get("run_name") is None:
                name = f"{self._names[job.overrides]}_{JobEnvironment().job_id}"  # which it keeps in the queue
                run = RunFolder(Path(self.config.runs_dir, name))
                run.discard()  # of a job that was killed as it began
                begun = run.config.is_file()
                overrides = resuming(run, overrides) if begun else [*overrides, f"run_name={quoted(name)}"]
            result: JobReturn = super().__call__(overrides, *given)
            return result

        def _asking(self, hardware: tuple[tuple[str, Any], ...]) -> "SlurmLauncher":
            """Return a launcher whose jobs ask for this hardware."""
            array = copy.copy(self)
            array.params = {**self.params, **dict(hardware)}
            return array

        def _script(self, jobs: int) -> str:
            """Return what sbatch would get for an array of so many jobs, or for a single one."""
            from submitit import SlurmExecutor

            class Unsubmitted(SlurmExecutor):
                @classmethod
                def affinity(cls) -> int:
                    return 1  # a machine without SLURM will do

            given = {name: value for name, value in self.params.items() if value is not None}
            executor = Unsubmitted(given.pop("submitit_folder"), given.pop("max_num_timeout"))
            executor.update_parameters(**executor._convert_parameters(given))
            executor.parameters |= {"map_count": jobs} if jobs > 1 else {}
            return executor._make_submission_file_text(executor._submitit_command_str, "")

        def _submit(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            try:
                found: Sequence[JobReturn] = super().launch(job_overrides, initial_job_idx)
            except RuntimeError as error:
                if "srun" not in str(error):
                    raise
                told = "hydra/launcher=slurm: here is no srun; call this on a machine that submits jobs to the cluster"
                raise UserError(f"{told}, or take hydra/launcher=gpus for this machine") from error
            return found


def _asked(hardware: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the launcher's settings that a hardware gives; a GPU by name takes the place of a count of any."""
    asked = {name: hardware[name] for name in ("gres", "partition", "constraint") if hardware[name] is not None}
    return tuple({**asked, "gpus_per_node": None}.items() if "gres" in asked else asked.items())
