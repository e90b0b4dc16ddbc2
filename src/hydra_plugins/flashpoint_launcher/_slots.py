"""Slots for the runs of a sweep: GPUs, or the CPU's cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashpoint.errors import UserError
from flashpoint.hardware import cores, cuda_device_names, is_named, visible_gpus

from ._sweep import Job


@dataclass(frozen=True)
class Slot:
    """Room for one run at a time."""

    settings: Mapping[str, str]
    """Settings of the run that the user has not given."""
    environment: Mapping[str, str]
    """The whole environment of the run's process."""
    gpu: str = ""
    """The GPU's name; empty of the CPU."""

    def takes(self, job: Job) -> bool:
        """Whether the run is to be on this device."""
        return job.gpu is None or is_named(self.gpu, job.gpu)


def slots_for(jobs: Sequence[Job], runs_per_gpu: int) -> list[Slot]:
    """Return ``runs_per_gpu`` slots on each GPU, the first of each before the second of any; without a GPU, on the
    CPU.

    Raises:
        UserError: a run wants a GPU that is not here.
    """
    slots = _slots(jobs, runs_per_gpu)
    here = {slot.gpu for slot in slots}
    for job in jobs:
        if not any(slot.takes(job) for slot in slots):
            found = ", ".join(sorted(here - {""})) or "no GPU"
            raise UserError(
                f"hardware.gpu={job.gpu}: here is {found}; leave that hardware out of the sweep, or send its runs to "
                "such a GPU with hydra/launcher=slurm"
            )
    return slots


def _slots(jobs: Sequence[Job], runs_per_gpu: int) -> list[Slot]:
    gpus = [] if all(job.get("train.device") == "cpu" for job in jobs) else _gpus_and_names()
    if not gpus:
        # Of a replay the tape says how many threads: bits depend on it.
        replays = any(job.get("replay") for job in jobs)
        settings = {} if replays else {"train.threads": str(max(1, cores() // runs_per_gpu))}
        return [Slot(settings, os.environ)] * runs_per_gpu
    share = str(max(1, cores() // (len(gpus) * runs_per_gpu)))
    return [
        # A run whose GPU is gone is to fail, not to take the CPU.
        Slot(
            {"train.device": "cuda"},
            {"TORCHINDUCTOR_COMPILE_THREADS": share, **os.environ, "CUDA_VISIBLE_DEVICES": number},
            name,
        )
        for _ in range(runs_per_gpu)
        for number, name in gpus
    ]


def _gpus_and_names() -> list[tuple[str, str]]:
    """Return what CUDA_VISIBLE_DEVICES is for each GPU that this process sees, and the GPU's name."""
    names = cuda_device_names()
    return list(zip(visible_gpus(len(names)), names, strict=False))
