"""The process of a command: ``flashpoint`` and ``python train.py`` end here."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def end_with(command: Callable[[], object]) -> NoReturn:
    """Run a command, and end this process with its status as soon as what it began is done.

    Python would go on to free every object by itself, which takes seconds once PyTorch has compiled: the system
    takes the memory back at once. Threads, functions of ``atexit`` and what was printed are waited for.

    Args:
        command: may end with ``SystemExit``, whose code is a number or None.
    """
    status = 0
    try:
        command()
    except SystemExit as end:
        status = int(end.code or 0)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    if inductor := sys.modules.get("torch._inductor.async_compile"):
        # It waits a second for its workers, which end by themselves once this process has.
        atexit.unregister(inductor.shutdown_compile_workers)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
