"""PyTorch's compile workers, started before its compiler asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_compile_workers() -> Callable[[], None]:
    """Start the processes in which PyTorch compiles the kernels of a model; return what waits until they are started.

    They take seconds until they are ready, and PyTorch's compiler, which starts them when it is called, meanwhile
    compiles in this process, one kernel after the other. What starts them is not public: a PyTorch that has another
    name for it starts them as before.
    """
    try:
        # Here and not in the thread: two threads that import modules of one cycle can see them half made.
        from torch._inductor.async_compile import maybe_warm_pool
    except ImportError:
        return lambda: None
    thread = threading.Thread(target=maybe_warm_pool, daemon=True)
    thread.start()
    return thread.join
