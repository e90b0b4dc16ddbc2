"""Which preset suits this machine, known without importing PyTorch."""

from __future__ import annotations

import ctypes


def default_experiment() -> str:
    """``ignite`` with a CUDA device, ``laptop`` without."""
    return "ignite" if _cuda_devices() else "laptop"


def _cuda_devices() -> int:
    """CUDA devices the driver shows this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
