"""Processes that train branches side by side, and end with this one.

They import this module first, which is before PyTorch: what it reads at its import must be set by then.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from flashpoint.hardware import cores, visible_gpus
from flashpoint.lab.data.workers import follow_parent, worker_processes


def branch_processes(gpus: int) -> AbstractContextManager[ProcessPoolExecutor]:
    """Return processes that see one GPU each."""
    names = multiprocessing.get_context("spawn").SimpleQueue()
    for name in visible_gpus(gpus):
        names.put(name)
    return worker_processes(gpus, _start, names, max(1, cores() // gpus))


def _start(names: Any, threads: int) -> None:
    follow_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = names.get()
    # PyTorch reads it when it is imported, and would start a compile worker a core in each of these processes.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
