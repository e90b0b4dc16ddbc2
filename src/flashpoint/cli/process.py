"""How the process of a command ends."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
from collections.abc import Iterator

_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


@contextlib.contextmanager
def quick_end() -> Iterator[None]:
    """End the process, after the block, as Python does, but for its last act: freeing every object one by one.

    With PyTorch that takes seconds, for memory that the system takes back at once. Threads and functions of ``atexit``
    are waited for; only those registered before the block are left out. Text and bytes of
    files that are still open are written; compressed files are to be closed.

    An error that leaves the block, and a profiler or debugger, take Python's own end.
    """
    if sys.getprofile() or sys.gettrace():
        yield
        return
    status = 0

    def leave() -> None:
        """Run last: functions of ``atexit`` run in the reverse order of their registration."""
        for file in [one for one in gc.get_objects() if type(one) in _FILES and one not in (sys.stdout, sys.stderr)]:
            with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
                file.flush()
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed from the start
                stream.flush()
        except (OSError, ValueError):  # Python's own end tells of it
            return
        os._exit(status)

    atexit.register(leave)
    try:
        yield
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        raise
    except BaseException:
        atexit.unregister(leave)
        raise
    finally:
        if inductor := sys.modules.get("torch._inductor.async_compile"):
            # It waits a second for its workers, which end by themselves once this process has.
            atexit.unregister(inductor.shutdown_compile_workers)
