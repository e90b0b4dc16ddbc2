"""The devices of this machine, and the preset that suits them; the preset is found without importing PyTorch."""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from flashpoint.errors import UserError

if TYPE_CHECKING:
    import torch


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


def refuse_another_gpu(wanted: str | None) -> None:
    """Refuse a machine whose GPU is not the one that a run is to compute on.

    Args:
        wanted: words of its name, in any case; None is any device.

    Raises:
        UserError: it has another name, or there is none.
    """
    if wanted is None:
        return
    import torch

    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
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


def cuda_devices() -> int:
    """Count the CUDA devices that the driver shows this process; 0 without a driver."""
    return len(cuda_device_names())


def cuda_device_names() -> list[str]:
    """Return the names of the CUDA devices that the driver shows this process, in its order."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
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
