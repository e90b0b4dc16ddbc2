"""The preset that suits this machine, found without importing PyTorch."""

from __future__ import annotations

import ctypes

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


def cuda_devices() -> int:
    """Count the CUDA devices that the driver shows this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
