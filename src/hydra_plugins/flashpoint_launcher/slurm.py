"""``hydra/launcher=slurm``: Hydra's submitit launcher, with an array of jobs for each hardware of the sweep.

No postponed annotations here, as in ``gpus.py``.
"""

import copy
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from hydra.core.utils import JobReturn

from flashpoint.errors import UserError

from ._hardware import Hardware

if find_spec("hydra_plugins.hydra_submitit_launcher"):  # else Hydra would tell of it in every sweep
    from hydra_plugins.hydra_submitit_launcher import submitit_launcher

    class SlurmLauncher(submitit_launcher.SlurmLauncher):
        """One array asks for one kind of GPU: a sweep over several kinds is an array of each, side by side."""

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            """Submit all and wait for them.

            Raises:
                Exception: what the first failed job raised.
            """
            hardware = Hardware(self.hydra_context, self.config)
            arrays: dict[tuple[tuple[str, Any], ...], list[int]] = {}
            for number, overrides in enumerate(job_overrides):
                arrays.setdefault(_asked(hardware.of(overrides)), []).append(number)
            returns: dict[int, JobReturn] = {}
            errors: list[Exception] = []

            def wait_for(asked: tuple[tuple[str, Any], ...], numbers: list[int]) -> None:
                array = copy.copy(self)
                array.params = {**self.params, **dict(asked)}
                try:
                    found = array._submit([job_overrides[number] for number in numbers], initial_job_idx)
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
