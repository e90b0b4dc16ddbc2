"""Whether this machine can do a run, judged before PyTorch is imported and before anything is written."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError, notify
from flashpoint.files import refuse_unexpanded
from flashpoint.hardware import cores, cuda_devices, gpu_memory, memory, refuse_without_gpu
from flashpoint.lab.config import Config
from flashpoint.lab.training.run_size import RunSize, Sizes, capacity, total
from flashpoint.runs.subfolders import check_name

_THREADS_PER_CORE = 4
_LOWERED: dict[str, tuple[str, float | None]] = {
    "train.log_interval": ("log_interval", 1),
    "probes.sequences": ("sequences", 1),
    "checkpoints.budget_gib": ("budget_gib", None),
    "train.micro_batch_size": ("micro_batch_size", 1),
    "train.batch_size": ("batch_size", 1),
    "model.context": ("context", 1),
    "model.vocab_size": ("vocab_size", 257),
    "model.n_layer": ("n_layer", 1),
    "model.d_model": ("d_model", 16),
    "train.steps": ("steps", 1),
}
"""Keys to lower, those first that change a run least, with their least values; None is :attr:`least_budget_gib`."""
_SMALLER = "lower model.d_model and model.n_layer"


def admit(config: Config) -> None:
    """Judge a run before any work. One that goes on, or repeats another, keeps its name and its threads.

    Raises:
        UserError: names, places, devices, threads, memory or disk do not allow it, with the key to change.
    """
    if config.resume is None:
        if config.run_name is not None:
            _check_new_run(config.runs_dir, config.run_name)
        check_place(config.runs_dir, "runs_dir")
    check_place(config.data.root, "data.root", writable=False)  # prepared data are only read
    if config.train.device == "cpu" or not cuda_devices():
        refuse_without_gpu(config.train.device, config.train.precision)
    _check_text(config)
    _check_probes(config)
    _check_threads(config)
    _check_sizes(config)


def check_place(folder: str, key: str, *, writable: bool = True) -> None:
    """Refuse what is no folder and cannot become one.

    Raises:
        UserError: with ``key``, which names the folder.
    """
    refuse_unexpanded(folder, f"{key}={folder}")
    there = _there(folder)
    if not there.is_dir():
        raise UserError(f"{key}={folder}: {there} is no folder; choose another {key}")
    if writable and not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key}={folder}: {there} cannot be written; choose another {key}")


def _there(folder: str) -> Path:
    """Return the folder, or what there is of the way to it."""
    return next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if os.path.lexists(path))


def _check_new_run(runs_dir: str, name: str) -> None:
    check_name(name, "run_name")
    if os.path.lexists(path := Path(runs_dir, name)):
        raise UserError(f"run_name={name}: {path} exists; choose another name, or go on with it by resume={name}")


def _check_text(config: Config) -> None:
    """Refuse text that cannot be read. A run that is repeated or goes on needs none: its tokens are prepared."""
    if config.data.source == "text" and config.replay is None and config.resume is None:
        from flashpoint.lab.data.corpus import source_identity

        source_identity(config.data)


def _check_probes(config: Config) -> None:
    """Refuse files of probes that are not there, and a run to measure against that is none."""
    for word in config.probes.attention:
        file = word.rpartition(":")[0]
        if file and not Path(file).is_file():
            raise UserError(f"probes.attention={word}: {file} is no file; give FILE.py:CLASS of one that is there")
    if config.probes.weights_against is not None and config.resume is None:
        from flashpoint.runs.folder import RunFolder

        RunFolder.open(config.probes.weights_against, config.runs_dir)


def _check_threads(config: Config) -> None:
    """Refuse more threads and processes than cores can serve. A run that is repeated keeps them: bits depend on it."""
    most = _THREADS_PER_CORE * cores()
    for key, count in (("train.threads", config.train.threads), ("data.workers", config.data.workers)):
        if count is not None and count > most:
            told = f"{key}={count}: this machine has {cores()} cores"
            if config.replay is None and config.resume is None:
                raise UserError(f"{told}; give {most} or less")
            notify(f"{told}; as recorded, and slow")


def _check_sizes(config: Config) -> None:
    on_gpu = gpu_memory() if config.train.device != "cpu" else None
    device = "cuda" if on_gpu is not None else "cpu"
    needed = RunSize.of_config(config, device, int(os.environ.get("WORLD_SIZE", "1")))
    if on_gpu is not None:
        _compare(needed, lambda size: size.memory("cuda"), on_gpu, "GPU memory, the GPU")
        _compare(needed, RunSize.host_memory, memory(), "memory, this machine")
    else:
        _compare(needed, lambda size: size.memory("cpu"), memory(), "memory, this machine")
    if needed.interval:
        capacity(config.checkpoints, needed.state_bytes)
    if config.resume is None:  # which has a part of its files already
        of_disk = f"disk, runs_dir={config.runs_dir}"
        free = shutil.disk_usage(_there(config.runs_dir)).free
        _compare(needed, RunSize.disk, free, of_disk, "free space or choose another runs_dir")


def _compare(
    needed: RunSize, sizes_of: Callable[[RunSize], Sizes], has: int, of_what: str, otherwise: str = _SMALLER
) -> None:
    """Refuse what is too large, with its largest part and the key to lower, or what to do where one is too few."""
    sizes = sizes_of(needed)
    if total(sizes) <= has:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    remedy = _remedy(needed, lambda changed: total(sizes_of(changed)) <= has)
    raise UserError(
        f"the run needs at least {_size(total(sizes))} of {of_what} has {_size(has)}; {_size(sizes[largest])} are for "
        f"{largest}: {remedy or otherwise}"
    )


def _remedy(needed: RunSize, fits: Callable[[RunSize], bool]) -> str:
    """Return the first key by which alone the run fits, with the largest value that does; nothing without one."""
    if needed.weights_interval and fits(replace(needed, weights_interval=needed.steps + 1)):
        return f"raise checkpoints.weights_interval={needed.weights_interval}, or set it to 0"
    least_budget = needed.least_budget_gib
    if not fits(replace(needed, budget_gib=least_budget)) and fits(replace(needed, interval=0)):
        return "give checkpoints.interval=0 for none"
    for key, (name, fixed) in _LOWERED.items():
        least = least_budget if fixed is None else fixed
        if getattr(needed, name) > least and fits(_with(needed, name, least)):
            low, high = math.ceil(least), math.ceil(getattr(needed, name))
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(_with(needed, name, middle)) else (low, middle)
            return f"lower {key}={getattr(needed, name):,} to {low:,} or less"
    return ""


def _with(needed: RunSize, name: str, value: Any) -> RunSize:
    changed = replace(needed, **{name: value})
    return replace(changed, micro_batch_size=min(changed.micro_batch_size, changed.batch_size))


def _size(count: int) -> str:
    """Return bytes in GiB, with three digits; few of them as they are."""
    gib = count / 2**30
    if gib < 0.001:
        return f"{count:,} bytes"
    return f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.3g} GiB"
