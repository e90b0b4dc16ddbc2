"""What this machine has, and the preset that suits it; both are found without importing PyTorch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flashpoint.errors import UserError

if TYPE_CHECKING:
    import torch


def default_experiment(device: str) -> str:
    """Return ``demo_gpu`` with a CUDA device, ``demo_cpu`` without, or where ``device``, which is ``train.device``, is
    ``cpu``."""
    return "demo_gpu" if device != "cpu" and cuda_devices() else "demo_cpu"


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


def refuse_another_gpu(wanted: str | None) -> None:
    """Refuse a machine whose GPU is not the one that a run is to compute on.

    Args:
        wanted: words of its name, in any case; None is any device.

    Raises:
        UserError: it has another name, or there is none.
    """
    if wanted is None:
        return
    names, number = cuda_device_names(), _number()
    here = names[number] if number < len(names) else "no GPU"
    if not is_named(here, wanted):
        raise UserError(
            f"hardware.gpu={wanted}: here is {here}; leave hardware out, or send the run to such a GPU with "
            "hydra/launcher=slurm"
        )


def is_named(gpu: str, wanted: str) -> bool:
    """Whether all words of ``wanted`` are in a GPU's name, in any case: ``A100`` is in ``NVIDIA A100-SXM4-80GB``."""
    return set(_words(wanted)) <= set(_words(gpu))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


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
    return len(cuda_device_names())


def visible_gpus(count: int) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES is for each of the first ``count`` GPUs that this process sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if given is None else map(str.strip, given.split(","))
    return list(names)[:count]


def cuda_device_names() -> list[str]:
    """Return the names of the CUDA devices that the driver shows this process, in its order."""
    driver, count = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_device_name(driver, number) for number in range(count.value)]


def _device_name(driver: ctypes.CDLL, number: int) -> str:
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
    if driver.cuDeviceGet(ctypes.byref(device), number) or driver.cuDeviceGetName(name, len(name), device):
        return ""
    return name.value.decode()


@lru_cache(maxsize=8)
def chip_of(device: torch.device) -> str | None:
    """Return what kernels are compiled for: ``sm_90`` for compute capability 9.0, ``gfx942`` for an AMD MI300, None for
    a CPU."""
    import torch

    if device.type != "cuda":
        return None
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def capability(chip: str | None) -> int:
    """Return an NVIDIA chip's compute capability, 90 for 9.0; 0 for any other chip, and for a CPU."""
    return int(chip.removeprefix("sm_")) if chip and chip.startswith("sm_") else 0


def gpu_memory() -> int | None:
    """Return the bytes of memory of this process's GPU; None without one."""
    driver, number = _driver(), _number()
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
            limits.append(int(Path(file).read_text(encoding="utf-8")))
        except (OSError, ValueError):  # no such version of control groups, or "max"
            continue
    return min(has, *limits) if limits else has


def is_of_full_memory(error: Exception) -> bool:
    """Whether an allocation failed. A CPU's, and the first of a GPU that others fill, have no class of their own."""
    import torch

    words = ("can't allocate memory", "CUDA error: out of memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(told in str(error) for told in words)


def cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _number() -> int:
    """Return which of the devices is this process's."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def hardware_name(device: torch.device) -> str:
    """Name the GPU, or the CPU with the number of threads that PyTorch takes."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
