"""What this machine has, and the preset that suits it, found without importing PyTorch."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

from flashpoint.errors import UserError


def default_experiment(device: str) -> str:
    """Return ``ignite`` with a CUDA device, ``laptop`` without, or where ``device``, which is ``train.device``, is
    ``cpu``."""
    return "ignite" if device != "cpu" and cuda_devices() else "laptop"


def refuse_unusable_gpu(device: str) -> None:
    """Refuse a machine whose GPU the preset was chosen for but PyTorch cannot use.

    Args:
        device: ``train.device``; ``cuda`` is refused elsewhere where there is none.

    Raises:
        UserError: with ``auto`` the run would take the CPU beside a GPU.
    """
    import torch

    if device == "auto" and cuda_devices() and not torch.cuda.is_available():
        raise UserError(
            f"the driver shows a GPU that PyTorch {torch.__version__} cannot use: install a build of it for this "
            "driver, or take the CPU with CUDA_VISIBLE_DEVICES= before the command"
        )


def refuse_without_gpu(device: str, precision: str) -> None:
    """Refuse what needs a GPU, where there is none for the run.

    Args:
        device, precision: those of ``train``.

    Raises:
        UserError: naming the key to change.
    """
    if precision == "tf32":
        raise UserError("train.precision=tf32: needs a CUDA device; use train.precision=fp32")
    if device == "cuda":
        raise UserError("train.device=cuda: no CUDA device is visible; use train.device=cpu or auto")


def cuda_devices() -> int:
    """Count the CUDA devices that the driver shows this process; 0 without a driver."""
    driver = _driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def gpu_memory() -> int | None:
    """Return the bytes of memory of this process's GPU; None without one."""
    driver, number = _driver(), int(os.environ.get("LOCAL_RANK", "0"))
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), number):
        return None
    return None if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) else size.value


def memory() -> int:
    """Return the bytes of memory that a process of this machine can have: those of the machine, or its limit."""
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [soft] if soft != resource.RLIM_INFINITY else []
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # no such version of control groups, or "max"
            continue
    return min(has, *limits) if limits else has


def cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver
