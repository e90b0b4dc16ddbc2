"""Reproduce, replay and localise the BF16 FlashAttention loss explosion in GPT-2 training.

For a model of your own: :func:`attention`, with the signature of ``scaled_dot_product_attention``; :func:`watch`, which
records a training loop; :func:`stabilize` and :func:`center_keys`, which stand in front of the attention it has.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashpoint.drop_in import attention as attention
    from flashpoint.stabilizing import center_keys as center_keys
    from flashpoint.stabilizing import stabilize as stabilize
    from flashpoint.watching.loop import watch as watch

__version__ = "0.1.0"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
"""PyTorch's OpenMP reads it when it is loaded: how long a thread that waits for another keeps its core. Steps of the
laptop preset a second on two cores, alone and with a second run beside it. They were 20 and 11 with 1,000, 24 and 4
with 10,000, 25 and less than 1 with 100,000. Alone they were 14 with a thread that sleeps at once."""

_PUBLIC = {
    "attention": "flashpoint.drop_in",
    "center_keys": "flashpoint.stabilizing",
    "stabilize": "flashpoint.stabilizing",
    "watch": "flashpoint.watching.loop",
}


def __getattr__(name: str) -> Any:
    """Import PyTorch only for who asks for a function that needs it."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'flashpoint' has no attribute {name!r}")
